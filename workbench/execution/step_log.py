"""`StepLog`: reads the scalars of finished steps from the device, and writes them as events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.columns import FinishedStep, logged_columns, shared_columns
from workbench.errors import NonFiniteLoss
from workbench.execution.spikes import Spikes
from workbench.execution.step_timeline import Timestamp
from workbench.execution.trainer import StepResult
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.rundir import log_event


def peak_flops(plan: Plan) -> float | None:
    """Return the peak FLOP/s of all devices of a plan, or None on CPUs."""
    device = plan.cluster.device
    return device.peak(plan.precision) * plan.world if device.type == "cuda" else None


def flops_of(plan: Plan, samples: int) -> float:
    """Return the model's FLOPs of so many samples, exactly those of `flops_per_step` for whole steps."""
    return samples * plan.flops_per_step / plan.global_batch


@dataclass(frozen=True)
class _PendingStep:
    """A launched step whose scalars are being copied to the host."""

    step: int
    learning_rate: float
    scalars: torch.Tensor
    arrived: Timestamp | None
    ended: Timestamp


class StepLog:
    """Logs each step after the next one was launched, so that reading its scalars does not idle the device.

    `events` is the file to log to, or None on ranks that only follow the stop flag. `seconds` is the training time
    so far. `names` are those of the scalars that the model logs.
    """

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        device: torch.device,
        events: Path | None,
        seconds: float,
        names: Sequence[str] = (),
        spikes: Spikes | None = None,
    ) -> None:
        """`names` are those of the scalars that the model logs; `spikes` is the rule for loss spikes."""
        self._experiment, self._plan, self._device, self._events = experiment, plan, device, events
        self._names, self._spikes = tuple(names), spikes
        self._scalars, self._figures = dict[str, float](), dict[str, float]()
        self.evaluated: Mapping[str, float] = {}
        """Held-out loss and metrics of the last evaluation, equal on all ranks."""
        self.seconds = seconds
        self._pending: _PendingStep | None = None
        self._previous_end = Timestamp.now(device)

    def add(self, step: int, result: StepResult, arrived: Timestamp | None = None) -> bool:
        """Start to copy the scalars of a step that was launched, and log the step before it.

        `arrived` is the moment at which the step's batch was there. Returns True if, in that earlier step, a rank asked
        to stop.
        """
        stop = self.flush()
        scalars = result.scalars
        if result.spiked is not None:
            scalars = torch.cat([scalars, result.spiked.to(scalars.dtype)[None]])
        if self._device.type == "cuda":
            on_device = scalars
            scalars = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            scalars.copy_(on_device, non_blocking=True)
        self._pending = _PendingStep(step, result.learning_rate, scalars, arrived, Timestamp.now(self._device))
        return stop

    def add_scalars(self, scalars: Mapping[str, float]) -> None:
        """Add what callbacks log to the row of the pending step, which is then written in any case."""
        self._scalars |= scalars

    @property
    def latest(self) -> dict[str, float]:
        """The figures of the pending step, or of the last one, that are equal on all ranks; waits for the step."""
        if self._pending is not None:
            self._read(self._pending)
        return self._figures

    def _read(self, pending: _PendingStep) -> list[float]:
        """Wait for a step and keep its figures; return its other scalars, from the number of ranks that stop on."""
        pending.ended.wait()
        loss, squared_norm, *others = pending.scalars.tolist()
        if self._spikes is not None:  # the last scalar says whether it is one
            others = [others[0], others[-1], *others[1:-1]]
        split = len(others) - len(self._names)
        own = dict(zip(self._names, others[split:], strict=True))
        rate = pending.learning_rate
        self._figures = {"loss": loss, "grad_norm": squared_norm**0.5, "learning_rate": rate, **own}
        return others[:split]

    def flush(self) -> bool:
        """Wait for the pending step, if there is one, and log it. Returns True if a rank asked in it to stop.

        Raises `NonFiniteLoss` on every rank if the experiment says so and the loss or the gradient norm is NaN or
        infinite: the update with such a gradient has already destroyed the weights. With a rule for spikes, raises what
        `Spikes.report` raises.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        stops, *shares = self._read(pending)
        spiked = self._spikes is not None and bool(shares.pop(0))
        loss, grad_norm = self._figures["loss"], self._figures["grad_norm"]
        step_s = pending.ended.seconds_since(self._previous_end)
        waited_s = None if pending.arrived is None else pending.arrived.seconds_since(self._previous_end)
        self._previous_end = pending.ended
        self.seconds += step_s
        done, experiment = pending.step + 1, self._experiment
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        is_last = done == experiment.total_steps or stops > 0
        is_due = done % experiment.tracking.log_every == 0 or is_last or not is_finite or spiked
        if self._events is not None and (is_due or self._scalars):
            spikes = None if self._spikes is None else self._spikes.found + spiked
            self._log_step(pending, (step_s, waited_s), shares, spikes)
        self._scalars = {}
        if self._spikes is not None:
            if spiked:
                self._spikes.report(done, loss, grad_norm, self._log_spike)
        elif experiment.numerics.stop_on_non_finite and not is_finite:
            raise NonFiniteLoss(
                f"Step {done:,} has loss {loss:g} and gradient norm {grad_norm:g}, so training has diverged. "
                "Checkpoints of earlier steps are kept. Train with a lower learning rate or a longer warm-up: "
                "run.clone(learning_rate=..., warmup_steps=...). stop_on_non_finite=False trains on after such a step.",
                step=done,
                loss=loss,
                grad_norm=grad_norm,
            )
        return bool(stops > 0)

    def _log_step(
        self,
        pending: _PendingStep,
        times: tuple[float, float | None],
        shares: Sequence[float],
        spikes: int | None,
    ) -> None:
        """Log a step that took the first of `times` in seconds, and waited the second for its batch."""
        assert self._events is not None
        experiment, plan, done = self._experiment, self._plan, pending.step + 1
        batch, samples = experiment.batches.at(pending.step), experiment.samples_before(done)
        finished = FinishedStep(
            step=done,
            loss=self._figures["loss"],
            grad_norm=self._figures["grad_norm"],
            learning_rate=pending.learning_rate,
            step_s=times[0],
            waited_s=times[1],
            seconds=self.seconds,
            tokens_per_sample=experiment.seq_len,
            samples_per_step=batch,
            samples=samples,
            flops_per_step=flops_of(plan, batch),
            flops=flops_of(plan, samples),
            peak_flops=peak_flops(plan),
            shares=dict(zip(shared_columns(), shares, strict=True)),
            world=plan.world,
            scalars={name: self._figures[name] for name in self._names} | self._scalars,
            spikes=spikes,
        )
        log_event(self._events, "step", **logged_columns(finished))

    def _log_spike(self, facts: Mapping[str, Any]) -> None:
        if self._events is not None:
            log_event(self._events, "spike", **facts)

    def restart_clock(self) -> None:
        """Leave the time since the last step, such as the pause for a checkpoint, out of the next step's time."""
        self._previous_end = Timestamp.now(self._device)
