"""The launcher: checks an experiment and its plan, writes the run directory, and starts the supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import PlanInfeasible, PlanMismatch
from workbench.rundir import RunDir, append_event, check_unedited, process_alive, process_record, read_json, write_json
from workbench.runs.launching import device_queue, processes
from workbench.runs.launching.run_directory import code_of_clone, worker_path, written
from workbench.runs.status import Status, runs_elsewhere, supervisor_record
from workbench.units import count

if TYPE_CHECKING:
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
    experiment: Experiment,
    plan: Plan,
    *,
    directory: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    facts: Mapping[str, Any] | None = None,
    code: Mapping[str, bytes] | None = None,
    worker: str = processes.WORKER,
    cpu_share: float = 1.0,
) -> RunDir:
    """Start training in processes of its own and return at once; the kernel stays free, and may go away.

    The run lives in `directory`, by default `<name>-<date>-<time>` in `$WORKBENCH_RUNS` or `./runs`. `resume` (a run
    directory or one of its checkpoints) continues training, in the same directory unless another is given. Runs that
    need the same devices queue. `facts` are added to `environment.json`; `code` becomes `code/` in place of the
    experiment's own model and dataset. `worker` is the module that each rank executes. A run on
    CPU processes trains beside others as long as their `cpu_share`s add up to 1; a run on GPUs has its own.

    Raises `RunExists`, `RunNotFound`, `PlanMismatch`, `PlanInfeasible` or `CheckpointError` before any process starts.
    """
    devices = check_launch(experiment, plan)
    device_queue.queue_folder()
    is_training = worker != processes.EVALUATOR
    with written(experiment, plan, directory, resume, facts, code) as run:
        if not is_training:
            run.tracker.unlink(missing_ok=True)  # the run that is evaluated has the result, not a run of its own on W&B
        append_event(run.events, "status", state="queued", message="")
        _start_supervisor(run, plan, devices, worker, cpu_share)
    if os.environ.get(LAUNCHES) and is_training:
        with contextlib.suppress(OSError), open(os.environ[LAUNCHES], "a") as file:
            file.write(f"{run.path}\n")
    return run


def prepare(
    experiment: Experiment,
    plan: Plan,
    *,
    directory: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> RunDir:
    """Write the run directory as `launch` does and start nothing: Slurm, `torchrun` or `accelerate launch` will.

    Raises `RunExists`, `RunNotFound`, `PlanMismatch`, `PlanInfeasible` or `CheckpointError`.
    """
    check_plan(experiment, plan)
    _check_host(plan)
    with written(experiment, plan, directory, resume, facts, None) as run:
        write_json(run.launcher, {})  # an empty record says that somebody else will start the run
        append_event(run.events, "status", state="queued", message="Prepared; start it on its nodes.")
    return run


def clone(run: RunDir, plan: Plan, changes: Mapping[str, Any], *, worker: str = processes.WORKER) -> RunDir:
    """Launch the run's experiment again with `changes`, in a directory of its own; see `Run.clone`."""
    from workbench.experiment import Experiment

    check_unedited(run)
    experiment = Experiment.from_json(read_json(run.experiment)).replace(**changes)
    code = code_of_clone(run, experiment, changes)
    return launch(experiment, plan, facts={"cloned_from": run.path.name}, code=code, worker=worker)


def check_launch(experiment: Experiment, plan: Plan) -> tuple[str, ...]:
    """Return the devices that a run of this plan may be given; raises what `launch` raises for the plan."""
    check_plan(experiment, plan)
    devices = _check_machine(plan)
    _check_host(plan)
    return devices


def check_plan(experiment: Experiment, plan: Plan) -> None:
    """Raise `PlanMismatch` unless the plan divides this experiment's batch and sequence, in its precision."""
    for name, unit in (("global_batch", "samples a step"), ("seq_len", "tokens a sample")):
        asked, planned = getattr(experiment, name), getattr(plan, name)
        if asked != planned:
            raise PlanMismatch(
                f"The plan for {plan.model} divides {name}={count(planned)} ({unit}), but the experiment "
                f"{experiment.name} has {name}={count(asked)}. Plan it anew: wb.plan(experiment).",
                field=name,
                experiment=asked,
                plan=planned,
            )
    if experiment.precision not in ("auto", plan.precision):
        raise PlanMismatch(
            f"The plan for {plan.model} computes in {plan.precision}, but the experiment {experiment.name} asks for "
            f"{experiment.precision}. Plan it anew: wb.plan(experiment).",
            field="precision",
            experiment=experiment.precision,
            plan=plan.precision,
        )
    if plan.offload_optimizer and experiment.optimizer != "adamw":
        raise PlanMismatch(
            f"The plan for {plan.model} keeps AdamW's moments in the host's memory, and the experiment "
            f"{experiment.name} trains with {experiment.optimizer_name}, whose state stays on the device. Plan it "
            "anew: wb.plan(experiment).",
            field="optimizer",
            experiment=experiment.optimizer_name,
            plan="adamw",
        )


def _check_machine(plan: Plan) -> tuple[str, ...]:
    """Return the devices of this node that the run may be given; raises where the plan needs more."""
    device_type = plan.cluster.device.type
    devices = device_queue.node_devices(device_type)
    if device_type != "cpu" and len(devices) < plan.world:
        raise PlanInfeasible(
            f"The plan uses {plan.world} × {plan.cluster.device.name}, and this machine offers "
            f"{len(devices) or 'no'} GPU{'s' * (len(devices) != 1)}. Plan for this machine: wb.plan(experiment), or "
            "launch it there.",
            world=plan.world,
            available=len(devices),
        )
    return devices


def _check_host(plan: Plan) -> None:
    from workbench.planning.refusals import too_large_to_build

    refusal = too_large_to_build(plan)
    if refusal is not None:
        raise refusal


def _start_supervisor(run: RunDir, plan: Plan, devices: tuple[str, ...], worker: str, cpu_share: float) -> None:
    """Start the detached process that sees the run through, and queue it before any later launch."""
    process = _spawn_supervisor(run)
    try:
        supervisor = process_record(process.pid)
        device_type = plan.cluster.device.type
        needed, share = (1, cpu_share) if device_type == "cpu" else (plan.world, 1.0)
        ticket = device_queue.take_ticket(run, pool=devices, count=needed, supervisor=supervisor, share=share)
        facts = {"world": plan.world, "device_type": device_type, "precision": plan.precision}
        record = {"supervisor": supervisor, "ticket": str(ticket.path), "worker": worker, "plan": facts}
        write_json(run.launcher, record)
    except BaseException:
        process.kill()  # it waits for the record that could not be written
        raise
    finally:
        threading.Thread(target=process.wait, name=f"reap {run.path.name}", daemon=True).start()


def _spawn_supervisor(run: RunDir, *options: str) -> subprocess.Popen[bytes]:
    with run.log("launcher").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", processes.SUPERVISOR, *options, str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # otherwise an interrupt of the kernel would reach it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(worker_path(run))},
        )


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
        _spawn_supervisor(run, "--reap")


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
        _check_machine(plan)
    except PlanInfeasible:
        return None
    return plan
