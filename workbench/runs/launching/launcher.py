"""The launcher: asks the gate whether an attempt can start, writes the run directory, and starts the supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.data import data_fingerprint
from workbench.errors import PlanInfeasible
from workbench.measure.calibration import local_cluster
from workbench.models import Pretrained
from workbench.planning.runnable import CAPTURED_FIELDS, captured_model, check_runnable
from workbench.rundir import (
    RunDir,
    append_event,
    check_unedited,
    note_runs_root,
    process_alive,
    process_record,
    read_json,
    read_record,
    write_json,
)
from workbench.runs.launching import device_queue, fork_server, processes
from workbench.runs.launching.run_directory import Attempt, code_of_clone, worker_path, written
from workbench.runs.launching.supervisor import AHEAD, worker_environment
from workbench.runs.status import Status, runs_elsewhere, supervisor_record
from workbench.user_code import user_path

if TYPE_CHECKING:
    from workbench.capture.captured_model import CapturedModel
    from workbench.experiment import Experiment
    from workbench.planning.plan import Plan

LAUNCHES = "WORKBENCH_LAUNCHES"
"""Environment variable that names a file to which `launch` adds the path of each run.

`workbench execute` learns from it which runs a notebook launched.
"""
REPLAY = "WORKBENCH_REPLAY"
"""Environment variable that names a JSON list of `{experiment, plan}`: the launches that a notebook is to repeat."""
_SAME_PLAN = ("model", "global_batch", "seq_len", "precision", "optimizer")


def launch(
    attempt: Attempt,
    captured: CapturedModel | None = None,
    *,
    progress: bool | None = None,
    worker: str = processes.WORKER,
    share: float = 1.0,
) -> RunDir:
    """Start training in processes of its own and return at once; the kernel stays free, and may go away.

    Runs that need the same devices queue. `captured` and `progress` are those of `check_runnable`. `worker` is the
    module that each rank executes. Runs train beside each other on a device as long as their `share`s of it add up to
    1; all processes of a run on CPUs are on one device.

    Raises what `check_runnable` raises, `RunExists`, `RunNotFound` and `CheckpointError` before any process starts.
    """
    attempt = _checked(attempt, captured, progress)
    devices = devices_for(attempt.plan)
    device_queue.queue_folder()
    is_training = worker not in (processes.EVALUATOR, processes.BISECTOR)
    with written(attempt) as run:
        note_runs_root(run.path.parent)
        if not is_training:
            run.tracker.unlink(missing_ok=True)  # the result is not a run of its own on W&B
        append_event(run.events, "status", state="queued", message="")
        _start_supervisor(run, attempt.plan, devices, worker, share)
    if os.environ.get(LAUNCHES) and is_training:
        with contextlib.suppress(OSError), open(os.environ[LAUNCHES], "a") as file:
            file.write(f"{run.path}\n")
    return run


def import_ahead() -> None:
    """Start to import what the ranks of this process's first run will need, while the process still plans it.

    JupyterLab calls it in the kernel of a template whose card was clicked. Ranks on GPUs are new processes, for which
    nothing can be imported ahead.
    """
    cluster = local_cluster()
    if cluster.device.type == "cpu":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(user_path())}
        threads = worker_environment(environment, cluster.gpus, "cpu", ())["OMP_NUM_THREADS"]
        command = (processes.SUPERVISOR, AHEAD, str(cluster.gpus))
        fork_server.client().start_ahead(*command, environment=environment, threads=threads)


def prepare(attempt: Attempt, captured: CapturedModel | None = None, *, progress: bool | None = None) -> RunDir:
    """Write the run directory as `launch` does and start nothing: Slurm, `torchrun` or `accelerate launch` will."""
    with written(_checked(attempt, captured, progress)) as run:
        note_runs_root(run.path.parent)
        write_json(run.launcher, {})  # an empty record says that somebody else will start the run
        append_event(run.events, "status", state="queued", message="Prepared; start it on its nodes.")
    return run


def _checked(attempt: Attempt, captured: CapturedModel | None, progress: bool | None) -> Attempt:
    """Return an attempt that may be started, with its length in steps.

    It has the fingerprint of its data if they were checked here.
    """
    if attempt.resume is None and isinstance(attempt.experiment.model, Pretrained):
        attempt.experiment.model.check_weights()
    check_runnable(attempt.experiment, attempt.plan, captured, progress=progress)
    for note in attempt.plan.loss_depends:
        warnings.warn(note, stacklevel=6)
    attempt = replace(attempt, experiment=attempt.experiment.resolved())
    if progress is None or "data_fingerprint" in attempt.provenance or not attempt.experiment.data.is_loaded:
        return attempt
    provenance = {"data_fingerprint": data_fingerprint(attempt.experiment), **attempt.provenance}
    return replace(attempt, provenance=provenance)


def clone(run: RunDir, plan: Plan, changes: Mapping[str, Any], *, worker: str = processes.WORKER) -> RunDir:
    """Launch the run's experiment again with `changes`, in a directory of its own; see `Run.clone`.

    What the run passed before it started is not checked again: its model is captured only for a change that needs it.
    """
    from workbench.experiment import Experiment, value_of
    from workbench.planning.plan import Plan as Stored

    check_unedited(run)
    before = Experiment.from_json(read_record(run.experiment))
    experiment = before.replace(**changes)
    is_checked = plan == Stored.load(run.plan) and all(
        value_of(before, name) == value_of(experiment, name) for name in CAPTURED_FIELDS
    )
    captured = None if is_checked else captured_model(experiment, plan)
    code = code_of_clone(run, experiment)
    attempt = Attempt(experiment, plan, code=code, provenance={"cloned_from": run.path.name})
    return launch(attempt, captured, progress=None if is_checked else False, worker=worker)


def devices_for(plan: Plan) -> tuple[str, ...]:
    """Return the devices of this node that the run may be given; raises where the plan needs more."""
    device_type = plan.cluster.device.type
    devices = device_queue.node_devices(device_type)
    if device_type != "cpu" and len(devices) < plan.world:
        raise PlanInfeasible(
            f"The plan uses {plan.world} × {plan.cluster.device.name}, and this machine offers "
            f"{len(devices) or 'no'} GPU{'s' * (len(devices) != 1)}. Plan for this machine: wb.plan(experiment), or "
            "launch it there."
        )
    return devices


def _start_supervisor(run: RunDir, plan: Plan, devices: tuple[str, ...], worker: str, share: float) -> None:
    """Start the detached process that sees the run through, and queue it before any later launch."""
    device_type, environment = plan.cluster.device.type, _environment(run)
    threads = worker_environment(environment, plan.world, device_type, ())["OMP_NUM_THREADS"]
    start = fork_server.client().start
    command = (processes.SUPERVISOR, str(run.path))
    supervisor = process_record(start(*command, log=run.log("launcher"), environment=environment, threads=threads))
    try:
        needed = 1 if device_type == "cpu" else plan.world
        ticket = device_queue.take_ticket(run, pool=devices, count=needed, supervisor=supervisor, share=share)
        planned = {"world": plan.world, "device_type": device_type, "precision": plan.precision}
        record = {"supervisor": supervisor, "ticket": str(ticket.path), "worker": worker, "plan": planned}
        write_json(run.launcher, record)
    except BaseException:
        processes.send_signal([supervisor], signal.SIGKILL)  # it waits for the record that could not be written
        raise


def _environment(run: RunDir) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(worker_path(run))}


def request_end(run: RunDir, request: Path, status: Status) -> None:
    """Ask a run that has not ended to do so: `request` is its STOP or KILL file.

    A process that ends the ranks is started where the run's own supervisor is gone.
    """
    supervisor = supervisor_record(run)
    elsewhere = not status.final and runs_elsewhere(run)
    being_launched = not status.final and not run.launcher.exists()  # its supervisor will look for the request
    if not (processes.run_alive(run) or elsewhere or being_launched):
        return
    request.touch()
    if supervisor and not elsewhere and not any(map(process_alive, supervisor)):
        if not run.kill_file.exists():
            processes.send_signal(processes.rank_records(run), signal.SIGTERM)
        command = (processes.SUPERVISOR, "--reap", str(run.path))
        processes.start_detached(*command, log=run.log("launcher"), environment=_environment(run))


def replayed_plan(experiment: Experiment) -> Plan | None:
    """Return the plan that `workbench reproduce` wants the next run to have, if this machine can run it."""
    from workbench.planning.plan import Plan

    file, launches = os.environ.get(REPLAY), os.environ.get(LAUNCHES)
    if not file or not launches:
        return None
    recorded = read_json(Path(file))
    done = len(set(Path(launches).read_text().splitlines()))  # a run that was continued counts once
    if done >= len(recorded):
        return None
    asked, then = json.loads(json.dumps(experiment.to_json())), recorded[done]["experiment"]
    if any(asked.get(field) != then.get(field) for field in _SAME_PLAN):
        return None
    plan = Plan.from_json({**recorded[done]["plan"], "candidates": []})
    try:
        devices_for(plan)
    except PlanInfeasible:
        return None
    return plan
