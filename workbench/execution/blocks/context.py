"""The state that all blocks of a rank share during a step: step, micro-batch, loss denominators and random seeds.

A block seeds its random numbers by (seed, step, micro-batch of the global batch, block). Therefore an experiment draws
the same dropout masks under every plan with the same micro-batch size, in a recomputation and after a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from workbench.execution.blocks.cuda_graphs import CudaGraphs
from workbench.execution.blocks.labelled_head import LabelCounts
from workbench.execution.blocks.step_scalars import StepScalars

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """Return a 63-bit hash of integers: SplitMix64's finaliser (Steele et al., 2014), folded over the values."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@dataclass
class StepContext:
    """Mutable state of one rank: the trainer sets it before each step, the pipeline before each micro-batch."""

    seed: int
    device: torch.device
    tensor_rank: int = 0
    """Rank of this device on the tensor-parallel axis."""
    step: int = 0
    first_microbatch: int = 0
    """Index of this replica's micro-batch 0 in the global batch."""
    microbatch: int = 0
    loss_denominators: list[torch.Tensor] = field(default_factory=list)
    """One scalar per mean loss: labels of the global batch / (micro-batches × replicas). Where a logged scalar reads
    one, a vector with that number over the labels of each micro-batch."""
    label_counts: LabelCounts = field(default_factory=dict)
    """Number of labels in each micro-batch, for the mean losses whose blocks select rows by labels."""
    action_log: Callable[[str, int, int], AbstractContextManager[None]] | None = None
    """Factory of a context that logs one action (`workbench.execution.step_timeline`); None in most steps."""
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    """Factory of the context in which blocks run forward."""
    scalars: StepScalars | None = None
    """Scalars that this rank's blocks log in a step; None where nothing is logged, as in evaluations."""
    cuda_graphs: CudaGraphs | None = None
    """CUDA graphs of this rank's blocks, or None if its blocks are launched kernel by kernel."""

    def action(self, action_type: str, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        """Return a context manager for one forward (`F`) or backward (`B`) of a stage."""
        return nullcontext() if self.action_log is None else self.action_log(action_type, stage, micro_batch)

    def num_labels(self, loss: int) -> int | None:
        """Return the number of labels of mean loss `loss` in this micro-batch, or None if the host has not counted."""
        return self.label_counts[loss][self.microbatch] if loss in self.label_counts else None

    def denominator(self, loss: int) -> torch.Tensor:
        """Return what this micro-batch's mean loss `loss` is divided by."""
        value = self.loss_denominators[loss]
        return value[self.microbatch] if value.ndim else value

    def block_seed(self, block: int) -> int:
        return mix(self.seed, self.step, self.first_microbatch + self.microbatch, block)

    def device_seed(self, seed: int) -> int:
        """Derive this tensor-parallel device's own seed from one that all devices of the axis share."""
        return mix(seed, self.tensor_rank)
