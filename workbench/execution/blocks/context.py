"""What every block of a step shares: which step, which micro-batch, which normalisers; and its random seeds.

A block draws its dropout from a generator seeded by (seed, step, micro-batch of the global batch, block), so that
the same experiment draws the same masks under every plan of the same micro-batch size, in a recomputation, and
after a restart.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from workbench.execution.blocks.labelled_head import LabelCounts
from workbench.execution.blocks.split_backward import Deferral

if TYPE_CHECKING:
    from workbench.execution.blocks.cuda_graphs import CudaGraphs
    from workbench.execution.step_timeline import ActionLog

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """A 63-bit hash of integers (SplitMix64's finaliser, Steele et al. 2014, folded over the values)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@dataclass
class StepContext:
    """Mutable: the trainer sets it before each step, the pipeline before each micro-batch."""

    seed: int
    device: torch.device
    tensor_rank: int = 0
    """This device's place on the tensor-parallel axis."""
    step: int = 0
    first_microbatch: int = 0
    """Index in the global batch of this replica's micro-batch 0."""
    microbatch: int = 0
    counts: list[torch.Tensor] = field(default_factory=list)
    """One scalar per mean loss: labels of the global batch / (micro-batches × replicas)."""
    labelled: LabelCounts = field(default_factory=dict)
    """Labels of each micro-batch, of those mean losses whose rows are selected by them."""
    deferral: Deferral = field(default_factory=Deferral)
    """Weight gradients left for later by a zero-bubble schedule's backwards."""
    actions: ActionLog | None = None
    """Where the actions of this step are recorded, if they are."""
    cuda_graphs: CudaGraphs | None = None
    """The graphs of this rank's blocks, if it records them."""

    def action(self, kind: str, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        """Runs one forward (`F`) or backward (`B`, or `I` and `W` where it is split) of a stage."""
        if self.actions is None:
            return nullcontext()
        return self.actions.action(kind, stage, micro_batch)

    def labels(self, count: int) -> int | None:
        """How many labels of mean loss `count` this micro-batch has, if the host has counted them."""
        return self.labelled[count][self.microbatch] if count in self.labelled else None

    def block_seed(self, block: int) -> int:
        return mix(self.seed, self.step, self.first_microbatch + self.microbatch, block)

    def own_seed(self, seed: int) -> int:
        """What this device of the tensor-parallel axis makes of a seed that all of them have."""
        return mix(seed, self.tensor_rank)

    def seed_generator(self, seed: int) -> None:
        """Seed the default generator of this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
