"""When each action of a step really ran: one step every `EVERY`, written as one event a pipeline rank.

A recorded step waits for its device at both ends, so that the clocks of host and device meet; other steps pay
nothing but a comparison.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from workbench.execution.blocks.context import StepContext
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.rundir import RunDir, append_event

EVERY = 200
"""Steps from one recorded step to the next."""
SETTLED = 5
"""The first to be recorded: compilation and caches are behind it."""


@dataclass(frozen=True)
class Recorded:
    """One action with its start and end as marks of the device's clock (events on a GPU, seconds on a CPU)."""

    kind: str
    stage: int
    micro_batch: int
    start: torch.cuda.Event | float
    end: torch.cuda.Event | float


class ActionLog:
    """Collects the actions of one step of this rank."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._actions: list[Recorded] = []
        self._synchronize()
        self.origin_s = time.time()
        self._origin = self._mark()

    @contextmanager
    def action(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        start = self._mark()
        yield
        self._actions.append(Recorded(kind, stage, micro_batch, start, self._mark()))

    def rows(self) -> list[tuple[str, int, int, float, float]]:
        """(kind, stage, micro-batch, start, end) of each action, in ms from the log's start; waits for the device."""
        self._synchronize()
        return [
            (action.kind, action.stage, action.micro_batch, self._ms(action.start), self._ms(action.end))
            for action in self._actions
        ]

    def _mark(self) -> torch.cuda.Event | float:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, mark: torch.cuda.Event | float) -> float:
        if isinstance(mark, float):
            assert isinstance(self._origin, float)
            return round(1e3 * (mark - self._origin), 4)
        assert isinstance(self._origin, torch.cuda.Event)
        return round(float(self._origin.elapsed_time(mark)), 4)

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


@contextmanager
def recorded(
    context: StepContext, coordinate: MeshCoordinate, run_dir: RunDir, step: int, first: int
) -> Iterator[None]:
    """Record step `step` (0-based, of a run that began at `first`) if its turn has come, on the first replica."""
    if (step - first) % EVERY != SETTLED or coordinate.rank != _first_of_stage(coordinate):
        yield
        return
    context.actions = ActionLog(context.device)
    try:
        yield
        log = context.actions
    finally:
        context.actions = None
    append_event(
        run_dir.events, "actions", rank=coordinate.rank, step=step + 1, origin_s=log.origin_s, actions=log.rows()
    )


def _first_of_stage(coordinate: MeshCoordinate) -> int:
    return coordinate.pipeline_rank * coordinate.data * coordinate.tensor
