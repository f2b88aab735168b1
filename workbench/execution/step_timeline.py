"""Times on the device's own clock, and the timeline of a step: when each of its actions ran.

One step in `STEPS_BETWEEN_RECORDS` is recorded, and written as one event per pipeline rank. A recorded step waits for
its device at both ends, so that the clocks of host and device can be related; other steps pay only a comparison.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from workbench.events import ActionRow
from workbench.execution.blocks.context import StepContext
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.rundir import RunDir, log_event

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
        return [
            (action_type, stage, micro_batch, self._ms(start), self._ms(end))
            for action_type, stage, micro_batch, start, end in self._actions
        ]

    def _ms(self, moment: Timestamp) -> float:
        return round(1e3 * moment.seconds_since(self._origin), 4)

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
    first_replica = coordinate.pipeline_rank * coordinate.data * coordinate.tensor
    if (step - first_step) % STEPS_BETWEEN_RECORDS != FIRST_RECORDED or coordinate.rank != first_replica:
        yield
        return
    log = ActionLog(context.device)
    context.action_log = log.action
    try:
        yield
    finally:
        context.action_log = None
    log_event(run_dir.events, "actions", rank=coordinate.rank, step=step + 1, origin_s=log.origin_s, actions=log.rows())
