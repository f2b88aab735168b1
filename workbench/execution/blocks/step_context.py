"""The state that all blocks of a rank share during a step: micro-batch, denominators, seeds, logged scalars, times.

A block seeds its random numbers by (seed, step, micro-batch of the global batch, block). Therefore an experiment draws
the same dropout masks under every plan with the same micro-batch size, in a recomputation and after a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from workbench.capture import Graph
from workbench.capture.graph import LabelCount
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.record.columns import WEIGHTED, WEIGHTS
from workbench.record.events import ActionRow
from workbench.record.rundir import RunDir, log_event

if TYPE_CHECKING:
    from workbench.execution.blocks.cuda_graphs import CudaGraphs

LabelCounts = Mapping[int, Sequence[int]]
"""Index into `Graph.label_counts` -> number of labels in each micro-batch of a replica."""
Values = tuple[torch.Tensor, ...]
_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """Return a 63-bit hash of integers: SplitMix64's finaliser (Steele et al., 2014), folded over the values."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1  # seeds of torch are signed


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
    """Factory of a context that logs one action (`ActionLog.action`); None in most steps."""
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    """Factory of the context in which blocks run forward."""
    scalars: StepScalars | None = None
    """Scalars that this rank's blocks log in a step; None where nothing is logged, as in evaluations."""
    cuda_graphs: CudaGraphs | None = None
    """CUDA graphs of this rank's blocks, or None if its blocks are launched kernel by kernel."""

    def action(self, action_type: str, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        """Return a context manager for one forward (`F`) or backward (`B`) of a stage."""
        return nullcontext() if self.action_log is None else self.action_log(action_type, stage, micro_batch)

    def block_seed(self, block: int) -> int:
        return mix(self.seed, self.step, self.first_microbatch + self.microbatch, block)

    def device_seed(self, seed: int) -> int:
        """Derive this tensor-parallel device's own seed from one that all devices of the axis share."""
        return mix(seed, self.tensor_rank)


# The scalars that a model logs in a step, from the values of each micro-batch to one figure each.
#
# A block's forward writes a value to its place in a table, by micro-batch: a second forward (a loss over all samples, a
# search for the first non-finite value) writes the same place again, and a recomputation in the backward none.


class StepScalars:
    """The logged scalars of one rank, under the rules of `workbench.log_scalar`."""

    def __init__(self, graph: Graph, num_microbatches: int, replicas: int, tensor: int, device: torch.device) -> None:
        """`graph` is the model's; the step has `num_microbatches` on each replica of `tensor` devices a stage."""
        self._calls, self._replicas, self._tensor = graph.scalars, replicas, tensor
        self._rows = {call.value: row for row, call in enumerate(self._calls)}
        self._table = self._values = torch.zeros(len(self._calls), num_microbatches, device=device)
        self._own = torch.zeros(len(self._calls), dtype=torch.bool)
        """True for the calls that this rank's blocks make."""
        self._weights: list[torch.Tensor] = []
        """Labels of each micro-batch over their mean number, for each mean loss."""
        whole = set(graph.blocks[-1].sends) if graph.gathered else set()
        self._reduce = ["mean" if call.value in whole else call.reduce for call in self._calls]  # of the whole batch
        self._reduce = ["sum" if how in (WEIGHTED, WEIGHTS) else how for how in self._reduce]
        names = list(dict.fromkeys(call.name for call in self._calls))
        self._weighted = list(dict.fromkeys(call.name for call in self._calls if call.reduce == WEIGHTS))
        largest = {call.name for call, how in zip(self._calls, self._reduce, strict=True) if how in ("max", "min")}
        self.names = (*(n for n in names if n not in largest), *(n for n in names if n in largest))
        """Names of the figures, those that are the largest or smallest value last."""
        self.num_sums = len(names) - len(largest)
        """Number of figures that are sums over the ranks, or quotients of two."""

    def divide(self, num_microbatches: int) -> None:
        """Prepare a step that has so many micro-batches on each replica, at most those of the plan."""
        self._values = self._table[:, :num_microbatches]

    def collect(self, microbatch: int, sent: Mapping[str, torch.Tensor]) -> None:
        """Keep what a block sends and logs for a micro-batch."""
        for name in sent.keys() & self._rows.keys():
            row = self._rows[name]
            self._own[row] = True
            self._values[row, microbatch].copy_(sent[name].detach())

    def weigh(
        self,
        denominators: list[torch.Tensor],
        counts: Sequence[LabelCount],
        labels: Sequence[torch.Tensor],
        gathers: bool,
    ) -> None:
        """Note how micro-batches are weighted, and put ratios in place of the denominators of losses that scalars read.

        `denominators` are those of the mean losses, whose labels in each micro-batch are `labels`. A plan that
        `gathers` computes its losses over all samples of a step.
        """
        self._weights = []
        for index, (count, own) in enumerate(zip(counts, labels, strict=True)):
            here = torch.stack([count.divisor(each) for each in own.float()])
            self._weights.append(torch.ones_like(here) if gathers else here / denominators[index])
            if count.is_ratio:
                denominators[index] = torch.ones_like(here) if gathers else denominators[index] / here

    def shares(self, is_last_replica: bool) -> list[torch.Tensor]:
        """Return this rank's share of each figure that is a sum over the ranks, and of the weights of such sums."""
        parts = {(name, False): list[torch.Tensor]() for name in self.names[: self.num_sums]}
        calls = {name: sum(call.name == name for call in self._calls) for name, _ in parts}
        parts |= {(name, True): list[torch.Tensor]() for name in self._weighted}
        microbatches = self._values.shape[1] * self._replicas
        for row, (call, how) in enumerate(zip(self._calls, self._reduce, strict=True)):
            if call.name not in calls or not self._own[row]:
                continue
            values = self._values[row]
            if how == "mean":
                weight = None if call.count is None else self._weights[call.count]
                # The mean over no label is not a number, and does not count.
                weighted = values if weight is None else torch.where(weight == 0, 0.0, values * weight)
                part = weighted.sum() / (microbatches * calls[call.name])
            elif how == "sum":
                part = values.sum()
            else:
                is_last = is_last_replica and call is next(c for c in reversed(self._calls) if c.name == call.name)
                part = values[-1] if is_last else torch.zeros_like(values[-1])
            parts[call.name, call.reduce == WEIGHTS].append(part / self._tensor)
        zero = torch.zeros((), device=self._values.device)
        return [sum(found, start=zero) for found in parts.values()]

    def divided(self, scalars: torch.Tensor, groups: int) -> torch.Tensor:
        """Return the scalars of a step, before `groups` others, with quotients in place of sums and their weights."""
        if not self._weighted:
            return scalars
        end = len(scalars) - groups
        first = end - len(self._weighted) - self.num_sums
        values = list(scalars.unbind())
        for weight, name in zip(values[first + self.num_sums : end], self._weighted, strict=True):
            values[first + self.names.index(name)] /= weight
        return torch.stack(values[: first + self.num_sums] + values[end:])

    def extremes(self) -> torch.Tensor:
        """Return the largest or smallest value over all ranks of each of the other figures; a collective."""
        figures, signs = [], []
        for name in self.names[self.num_sums :]:
            rows = [row for row, call in enumerate(self._calls) if call.name == name]
            sign = -1.0 if self._calls[rows[0]].reduce == "min" else 1.0
            own = [(sign * self._values[row]).max() for row in rows if self._own[row]]
            least = torch.full((), -torch.inf, device=self._values.device)
            figures.append(torch.stack([least, *own]).max())
            signs.append(sign)
        found = torch.stack(figures)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found * torch.tensor(signs, device=found.device)


# Times on the device's own clock, and the timeline of a step: when each of its actions ran.
#
# One step in `STEPS_BETWEEN_RECORDS` is recorded, and written as one event per pipeline rank. A recorded step waits for
# its device at both ends, so that the clocks of host and device can be related; other steps pay only a comparison.

STEPS_BETWEEN_RECORDS = 200
FIRST_RECORDED = 5
"""Steps before the first recorded one, so that compilation is over and caches are warm."""


@dataclass(frozen=True)
class Timestamp:
    """A moment on the device's clock, or on the host's for a CPU."""

    event: torch.cuda.Event | None
    host_s: float

    @staticmethod
    def now(device: torch.device) -> Timestamp:
        """Mark the moment at which the device has finished everything that was launched so far."""
        event = None
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Timestamp(event, time.perf_counter())

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: Timestamp) -> float:
        """Return the seconds between two moments that have both passed."""
        if self.event is not None and earlier.event is not None:
            return float(earlier.event.elapsed_time(self.event)) / 1e3
        return self.host_s - earlier.host_s


class ActionLog:
    """Collects the actions of one step on this rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._actions: list[tuple[str, int, int, Timestamp, Timestamp]] = []
        self._synchronize()
        self.origin_s = time.time()
        """Unix time from which the times of the rows count."""
        self._origin = Timestamp.now(device)

    @contextmanager
    def action(self, action_type: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Record the time that the body takes on the device."""
        start = Timestamp.now(self._device)
        yield
        self._actions.append((action_type, stage, micro_batch, start, Timestamp.now(self._device)))

    def rows(self) -> list[ActionRow]:
        """Return (action type, stage, micro-batch, start, end) of each action, in ms from the origin.

        Waits for the device.
        """
        self._synchronize()
        rows: list[ActionRow] = []
        for action_type, stage, micro_batch, *moments in self._actions:
            start, end = (round(1e3 * moment.seconds_since(self._origin), 4) for moment in moments)
            rows.append((action_type, stage, micro_batch, start, end))
        return rows

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def record_actions(
    context: StepContext, coordinate: MeshCoordinate, run_dir: RunDir, step: int, first_step: int
) -> Iterator[None]:
    """Record the actions of step `step` (0-based) if it is one that is recorded, on the first replica of each stage.

    `first_step` is the step with which this process began.
    """
    if (step - first_step) % STEPS_BETWEEN_RECORDS != FIRST_RECORDED or coordinate.rank_in_stage:
        yield
        return
    log = ActionLog(context.device)
    context.action_log = log.action
    try:
        yield
    finally:
        context.action_log = None
    log_event(run_dir.events, "actions", rank=coordinate.rank, step=step + 1, origin_s=log.origin_s, actions=log.rows())
