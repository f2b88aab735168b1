"""Read and log the scalars of steps that were launched, and call the user's functions with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from workbench.base.errors import NonFiniteLoss, UnknownParameter, suggestion
from workbench.data.datasets import untouched_generators
from workbench.execution.blocks.step_context import Timestamp
from workbench.execution.trainer import Spikes, StepResult, Trainer, pipeline_ranks_with
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.record.columns import WEIGHTS, FinishedStep, logged_columns, logging_scalars
from workbench.record.rundir import RunDir, log_event
from workbench.record.step_table import log_step


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
    apart_s: float
    """Seconds that are no part of the step's time."""


IN_HASTE = 1e6
"""Number that a rank which a signal asked to stop adds to that of the ranks which want to; there are fewer ranks."""
LEAST_ENTROPY = 0.1
"""Cross-entropy in nats a token that no text which a model does not know by heart falls below: a third of what Shannon
found for one letter of English, 0.6 bits (https://doi.org/10.1002/j.1538-7305.1951.tb01366.x)."""


class StepLog:
    """Logs each step after the next one was launched, so that reading its scalars does not idle the device.

    `events` is the `events.jsonl` of the run, or None on ranks that only follow the stop flag. `seconds` is the
    training time so far. `names` are those of the scalars that the model logs.
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
        self._wants_stop = self.in_haste = False
        self._may_fall_low = events is not None and not experiment.data.is_user_defined
        """True until a loss on text was lower than that of any text that is new to a model."""
        self._previous_end = Timestamp.now(device)

    def add(self, step: int, result: StepResult, arrived: Timestamp | None = None) -> bool:
        """Start to copy the scalars of a step that was launched, and log the step before it.

        `arrived` is the moment at which the step's batch was there. Returns True if, in an earlier step, a rank asked
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
        ended = Timestamp.now(self._device)
        self._pending = _PendingStep(step, result.learning_rate, scalars, arrived, ended, result.apart_s)
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

    def _read(self, pending: _PendingStep) -> tuple[float, bool]:
        """Wait for a step and keep its figures; return the number of ranks that stop, and True for a loss spike."""
        pending.ended.wait()
        loss, squared_norm, stops, *others = pending.scalars.tolist()
        spiked = self._spikes is not None and bool(others.pop())  # `add` has put it last
        own = dict(zip(self._names, others, strict=True))
        rate = pending.learning_rate
        self._figures = {"loss": loss, "grad_norm": squared_norm**0.5, "learning_rate": rate, **own}
        return stops, spiked

    def flush(self) -> bool:
        """Wait for the pending step, if there is one, and log it. Returns True if a rank has asked to stop so far.

        Raises `NonFiniteLoss` on every rank if the experiment says so and the loss or the gradient norm is NaN or
        infinite: the update with such a gradient has already destroyed the weights. With a rule for spikes, raises what
        `Spikes.reported` raises.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return self._wants_stop
        stops, spiked = self._read(pending)
        self.in_haste |= stops >= IN_HASTE
        self._wants_stop |= stops > 0  # until it is heeded: an evaluation reads a step too
        loss, grad_norm = self._figures["loss"], self._figures["grad_norm"]
        step_s = max(0.0, pending.ended.seconds_since(self._previous_end) - pending.apart_s)
        waited_s = None if pending.arrived is None else pending.arrived.seconds_since(self._previous_end)
        self._previous_end = pending.ended
        self.seconds += step_s
        done, experiment = pending.step + 1, self._experiment

        # The step's row in the log
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        is_last = done == experiment.total_steps or stops > 0
        is_due = done % experiment.tracking.log_every == 0 or is_last or not is_finite or spiked
        if self._events is not None and (is_due or self._scalars):
            plan, batch, samples = self._plan, experiment.batches.at(pending.step), experiment.samples_before(done)
            finished = FinishedStep(
                step=done,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=pending.learning_rate,
                step_s=step_s,
                waited_s=waited_s,
                seconds=self.seconds,
                tokens_per_sample=experiment.seq_len,
                samples_per_step=batch,
                samples=samples,
                flops_per_step=flops_of(plan, batch),
                flops=flops_of(plan, samples),
                peak_flops=peak_flops(plan),
                scalars={name: self._figures[name] for name in self._names} | self._scalars,
                spikes=None if self._spikes is None else self._spikes.found + spiked,
            )
            log_step(self._events.parent, **logged_columns(finished))
            if self._may_fall_low and 0 <= loss < LEAST_ENTROPY:
                self._may_fall_low = False
                said = (
                    f"The loss of step {done:,}, {loss:.3g}, is less than the entropy of any text, {LEAST_ENTROPY} "
                    "nats a token, that the model has not learned by heart. Is it a mean cross-entropy, the model sees "
                    "what it predicts: its loss must compare logits[:, :-1] with labels[:, 1:], for instance, where "
                    "labels are the inputs, and no position may attend to a later one."
                )
                log_event(self._events, "code_problem", message=said)
        self._scalars = {}

        # What follows from a spike, or from a number that is not finite
        if self._spikes is not None:
            if spiked:
                facts = self._spikes.reported(done, loss, grad_norm)
                if self._events is not None:
                    log_event(self._events, "spike", **facts)
        elif experiment.numerics.stop_on_non_finite and not is_finite:
            raise NonFiniteLoss(
                f"Step {done:,} has loss {loss:g} and gradient norm {grad_norm:g}, so training has diverged. "
                "Checkpoints of earlier steps are kept. Train with a lower learning rate or a longer warm-up: "
                "run.clone(learning_rate=..., warmup_steps=...). stop_on_non_finite=False trains on after such a step.",
                step=done,
                loss=loss,
                grad_norm=grad_norm,
            )
        return self._wants_stop

    def restart_clock(self) -> None:
        """Leave the time since the last step, such as the pause for a checkpoint, out of the next step's time."""
        self._previous_end = Timestamp.now(self._device)


# Callbacks: the user's functions that are called after each step, and the view of the training that they are given.


class Weights(Mapping[str, torch.Tensor]):
    """Copies of the model's parameters by name, each gathered from all ranks when it is asked for.

    Every rank must ask for the same names in the same order. To change a copy changes nothing in the training.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __getitem__(self, name: str) -> torch.Tensor:
        trainer = self._trainer
        graph, here = trainer.graph, trainer.coordinate
        canonical = next((first for first, others in graph.ties.items() if name in others), name)
        if canonical not in graph.parameters:
            raise UnknownParameter(f"The model has no parameter {name!r}. {suggestion(name, graph.parameters)}")
        own, owner = trainer.stages.model_parameters(), pipeline_ranks_with(canonical, trainer.plan, graph)[0]
        if canonical in own:
            value = trainer.full(canonical, own[canonical]).clone().contiguous()
        else:
            spec = graph.parameters[canonical]
            value = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=trainer.context.device)
        if trainer.plan.pipeline > 1:
            dist.broadcast(value, group=here.pipeline_group, group_src=owner)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._trainer.graph.parameters)

    def __len__(self) -> int:
        return len(self._trainer.graph.parameters)


class StepView:
    """The training after a step, as a callback sees it; what it may ask for is done when all callbacks have run."""

    def __init__(self, step: int, trainer: Trainer, log: StepLog, folder: Path) -> None:
        self.step = step
        """Number of completed steps, from 1."""
        self.steps = trainer.experiment.total_steps
        """Number of steps that the experiment asks for."""
        self.is_main = dist.get_rank() == 0
        """True on rank 0, where files are to be written."""
        self.folder = folder
        """Folder of the run."""
        self.parameters: Mapping[str, torch.Tensor] = Weights(trainer)
        """Copies of the weights by name; each is gathered from all ranks when it is asked for."""
        self._log = log
        self.wants_stop = self.wants_checkpoint = False

    @property
    def metrics(self) -> Mapping[str, float]:
        """The figures of this step, equal on all ranks; waits until the device has finished it.

        They are `loss`, `grad_norm`, `learning_rate`, the scalars that the model logs, and `eval_loss` and the metrics
        of the last evaluation before this step.
        """
        return {**self._log.evaluated, **self._log.latest}

    def stop(self) -> None:
        """Ask for the end of the training after this step, with a checkpoint, as `run.stop()` does."""
        self.wants_stop = True

    def checkpoint(self) -> None:
        """Ask for a checkpoint of this step."""
        self.wants_checkpoint = True


class Callbacks:
    """Calls the user's functions on every rank, and tells all ranks what any of them asked for."""

    def __init__(self, trainer: Trainer, run: RunDir, begin: Callable[[str], None]) -> None:
        """`begin` is told that the rank calls functions, for which it may take its time."""
        self._trainer, self._folder, self._begin = trainer, run.path, begin
        self._functions = functions = trainer.experiment.callbacks
        # On the hosts, so that no device is waited for.
        self._group = dist.new_group(backend="gloo") if functions and dist.get_world_size() > 1 else None

    def run(self, step: int, log: StepLog) -> tuple[bool, bool]:
        """Call all functions after `step` steps; return whether to stop, and whether to write a checkpoint."""
        if not self._functions:
            return False, False
        self._begin("callbacks")
        view = StepView(step, self._trainer, log, self._folder)
        with untouched_generators(self._trainer.context.device), torch.no_grad(), logging_scalars() as logged:
            for function in self._functions:
                function(view)
        found: dict[str, float] = {}
        for scalar in logged:
            value = float(scalar.value)
            if scalar.reduce == WEIGHTS:  # of the weighted value before it
                value = found[scalar.name] / value if value else math.nan
            found[scalar.name] = value
        log.add_scalars(found)
        asked = torch.tensor([view.wants_stop, view.wants_checkpoint], dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._group)
        return bool(asked[0]), bool(asked[1])
