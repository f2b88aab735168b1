"""Evaluation of a run that has ended.

Ranks load a checkpoint under its own plan, in a run directory in `evaluations/` of the run, which is removed when they
have answered (`workbench.execution.evaluating_worker`). The result becomes an event of the run.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.base.errors import (
    CheckpointError,
    DataError,
    PlanMismatch,
    RunExists,
    RunFailed,
    WorkbenchError,
)
from workbench.execution.checkpoint.files import step_of
from workbench.experiment import Experiment, counted
from workbench.planning.plan import Plan
from workbench.record.event_log import Status, read_state
from workbench.record.rundir import RunDir, append_event
from workbench.runs.launching import processes
from workbench.runs.launching.launcher import Attempt, code_of_clone, request_end, start_attempt
from workbench.runs.launching.processes import log_tail, root_cause
from workbench.runs.status import complete_checkpoints, read_experiment, read_status, wait_for_end

CARRIED = ("step", "loss", "metrics", "evaluated", "tokens", "samples", "flops", "seconds", "eval_seconds")
"""Fields of the event of an evaluation that the run takes over."""


@dataclass(frozen=True)
class EvaluationResult:
    """The result of `run.evaluate`."""

    loss: float
    """Mean loss over all samples, or over batches of `global_batch` samples if it compares samples."""
    count: int
    """Number of samples; those that fill no such batch are left out."""
    step: int
    """Steps that the evaluated checkpoint was trained for."""
    data: str | None = None
    """Name of the data; None for the samples that the run held out."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)


def evaluate(run: RunDir, data: Any, step: int | None) -> EvaluationResult:
    """Evaluate a checkpoint of a run and record the result; `Run.evaluate` describes the arguments and errors."""
    checkpoint = _checkpoint(run, step)
    experiment, plan = _evaluated_experiment(run, data), Plan.load(run.plan)
    code = code_of_clone(run, experiment)
    (run.path / "evaluations").mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="evaluation-", dir=run.path / "evaluations"))
    try:
        # A second set of the class of the held-out set has its name, and other samples by request.
        own = Experiment.from_json(read_experiment(run)).eval_data
        second = data is not None and own is not None and own.is_user_defined
        provenance = {"accepted_changed_data": True} if second else {}
        attempt = Attempt(experiment, plan, directory, resume=checkpoint, code=code, provenance=provenance)
        child = start_attempt(attempt, progress=False, worker=processes.EVALUATOR, is_training=False)
        event = _result_event(child, checkpoint)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    fields = {name: event[name] for name in CARRIED if name in event}
    if data is None:
        append_event(run.events, "evaluation", **fields)
        return _result(event, None)
    assert experiment.eval_data is not None
    append_event(run.events, "data_evaluation", **fields, data=experiment.eval_data.name)
    return _result(event, experiment.eval_data.name)


def _result(event: Mapping[str, Any], data: str | None) -> EvaluationResult:
    return EvaluationResult(
        event["loss"], int(event["evaluated"]), int(event["step"]), data, event.get("metrics") or {}
    )


def _checkpoint(run: RunDir, step: int | None) -> Path:
    """Return the checkpoint of a step, or the last one, of a run that has ended."""
    status = read_status(run)[0]
    if status.final:
        processes.wait_left(run)
    if not status.final or processes.run_alive(run):
        raise RunExists(
            f"{run.path.name} is still {status.state}, and its devices are busy. Wait for it, run.wait(), or stop it, "
            "run.stop(wait=True). A run with evaluation=wb.Evaluation(...) is evaluated while it trains."
        )
    paths = {checkpoint.step: checkpoint.path for checkpoint in complete_checkpoints(run)}
    if not paths:
        raise CheckpointError(
            f"{run.path.name} has no checkpoint that could be evaluated. Launch it anew, with checkpoint_every set if "
            "it may be interrupted."
        )
    if step is not None and step not in paths:
        steps = ", ".join(f"{each:,}" for each in paths)
        raise CheckpointError(
            f"{run.path.name} has no checkpoint of step {step:,}. It has those of the steps {steps}; more are kept "
            "with keep_checkpoints."
        )
    return paths[max(paths) if step is None else step]


def _evaluated_experiment(run: RunDir, data: Any) -> Experiment:
    """Return the experiment whose held-out samples are those to evaluate."""
    experiment = Experiment.from_json(read_experiment(run)).replace(samples=None)
    if data is not None:
        given = counted(experiment.replace(eval_data=data, eval_also=None), experiment.steps)
        if given.eval_data is None or not given.eval_data.is_user_defined:
            return given
        samples = given.eval_data.reads(given).prepare().samples
        return given if samples is None else counted(given.replace(eval_samples=samples), experiment.steps)
    if experiment.evaluation is None:
        raise WorkbenchError(
            f"{run.path.name} was trained without evaluation, so that it held no samples out. Give data of the same "
            "kind: run.evaluate(my_validation_data)."
        )
    return experiment


def wait_for_child(child: RunDir) -> Status:
    """Wait until the processes that a verb has launched for an answer have ended, which an interrupt ends.

    Raises `DataError` or `PlanMismatch` if data or changed code ended them, and `RunFailed` for another failure.
    """
    try:
        return wait_for_end(child)[0]
    except KeyboardInterrupt:
        request_end(child, child.kill_file, read_status(child)[0])
        wait_for_end(child)
        raise
    except RunFailed as failure:
        root = root_cause(child)
        for error in (DataError, PlanMismatch):
            if root is not None and root.type == error.__name__:
                raise error(root.message) from failure
        raise


def _result_event(child: RunDir, checkpoint: Path) -> dict[str, Any]:
    """Wait until the processes of an evaluation have ended, and return its event."""
    status = wait_for_child(child)
    evaluations = read_state(child.events).evaluations
    if not evaluations:
        raise WorkbenchError(
            f"The evaluation of {checkpoint.name} ended without a result: {status.message or log_tail(child, 0, 100)} "
            "Evaluate again."
        )
    evaluated = max(evaluations)
    if evaluated != step_of(checkpoint):
        raise CheckpointError(
            f"{checkpoint} is damaged. The newest checkpoint before it that is not is of step {evaluated:,}: give that "
            "step to evaluate."
        )
    return dict(evaluations[evaluated].event)
