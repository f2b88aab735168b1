"""From an experiment and a plan to a detached run: checks, the run directory, and the supervisor's start."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import CheckpointError, PlanInfeasible, PlanMismatch, RunExists
from workbench.rundir import RunDir, append_event, process_record, read_json, write_json
from workbench.runs import processes, turns
from workbench.runs.environment import environment
from workbench.runs.run import Run, load_run, runs_root
from workbench.runs.tracking import tracker_settings
from workbench.units import count

if TYPE_CHECKING:
    from workbench.experiment import Experiment
    from workbench.planning.plan import Plan

WORKER = "workbench.execution.worker"


def launch(
    experiment: Experiment,
    plan: Plan,
    *,
    directory: str | os.PathLike[str] | None = None,
    resume: Run | str | os.PathLike[str] | None = None,
    facts: Mapping[str, Any] | None = None,
    code: Mapping[str, bytes] | None = None,
    worker: str = WORKER,
) -> Run:
    """Start training in processes of its own and return at once; the kernel stays free, and may go away.

    The run lives in `directory`, by default `<name>-<date>-<time>` in `$WORKBENCH_RUNS` or `./runs`. `resume`
    (a run, its directory, or one of its checkpoints) continues training: in the same directory unless another is
    given. Runs that need the same devices queue. `facts` are kept in `environment.json` beside those of the machine;
    `code` is what the run gets as `code/` in place of the experiment's own model and dataset.
    `worker` is the module that each rank executes.

    Raises `RunExists`, `PlanMismatch`, `PlanInfeasible` or `CheckpointError` before any process starts.
    """
    check_plan(experiment, plan)
    devices = _check_machine(plan)
    run = _written(experiment, plan, directory, resume, facts, code)
    append_event(run.events, "status", state="queued", message="")
    _start_supervisor(run, plan, devices, worker)
    _tell_notebook(run)
    return Run(run.path)


def prepare(
    experiment: Experiment,
    plan: Plan,
    *,
    directory: str | os.PathLike[str] | None = None,
    resume: Run | str | os.PathLike[str] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Run:
    """Write the run directory as `launch` does and start nothing: Slurm, `torchrun` or `accelerate launch` will.

    Raises `RunExists`, `PlanMismatch` or `CheckpointError`.
    """
    check_plan(experiment, plan)
    run = _written(experiment, plan, directory, resume, facts, None)
    write_json(run.launcher, {})  # known to be started by somebody else
    append_event(run.events, "status", state="queued", message="Prepared; start it on its nodes.")
    return Run(run.path)


def _written(
    experiment: Experiment,
    plan: Plan,
    directory: str | os.PathLike[str] | None,
    resume: Run | str | os.PathLike[str] | None,
    facts: Mapping[str, Any] | None,
    code: Mapping[str, bytes] | None,
) -> RunDir:
    """A run directory that ranks can start from."""
    code = _user_code(experiment) if code is None else code
    checkpoint = None if resume is None else _checkpoint(resume)
    run = _prepare_directory(experiment, directory, checkpoint)
    _describe(run, experiment, plan, facts or {})
    for name, content in code.items():
        (run.code / name).write_bytes(content)
    if checkpoint is not None:
        write_json(run.resume, {"checkpoint": str(checkpoint), "step": _step_of(checkpoint)})
    return run


def clone(run: Run, plan: Plan | None = None, *, worker: str = WORKER, **changes: Any) -> Run:
    """Launch the run's experiment again with `changes`, in a directory of its own; see `Run.clone`."""
    from workbench.experiment import Experiment

    experiment = Experiment.from_json(run.experiment).replace(**changes)
    chosen = run.plan if plan is None else plan
    if plan is None and "model" in changes:
        raise PlanMismatch(
            f"The plan of {run.name} divides {chosen.model}, and the clone has another model. Use "
            "wb.clone(run, model=…), which plans anew.",
            planned=chosen.model,
            found=experiment.model.name,
        )
    kept = {
        f"{part}.{ending}": run.directory.code / f"{part}.{ending}"
        for part in ("model", "data")
        for ending in ("pkl", "py")
        if part not in changes
    }
    code = {name: path.read_bytes() for name, path in kept.items() if path.exists()}
    code |= _user_code(experiment, only=[part for part in ("model", "data") if part in changes])
    return launch(experiment, chosen, facts={"cloned_from": run.name}, code=code, worker=worker)


def check_plan(experiment: Experiment, plan: Plan) -> None:
    """Raise `PlanMismatch` unless the plan divides this experiment's batch and sequence."""
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


def _check_machine(plan: Plan) -> tuple[str, ...]:
    """The devices of this node that the run may be given; raises where the plan needs more."""
    kind = plan.cluster.device.kind
    devices = turns.node_devices(kind)
    if kind != "cpu" and len(devices) < plan.world:
        raise PlanInfeasible(
            f"The plan uses {plan.world} × {plan.cluster.device.name}, and this machine offers "
            f"{len(devices) or 'no'} GPU{'s' * (len(devices) != 1)}. Plan for this machine: wb.plan(experiment), or "
            "launch it there.",
            world=plan.world,
            available=len(devices),
        )
    return devices


def _checkpoint(resume: Run | str | os.PathLike[str]) -> Path:
    """The checkpoint meant by a run, a run directory or a checkpoint directory: the newest complete one."""
    path = Path(resume.path if isinstance(resume, Run) else resume).absolute()
    if re.fullmatch(r"step-\d+", path.name):
        if not path.is_dir():
            raise CheckpointError(f"There is no checkpoint {path}. Its run lists those it has: run.checkpoints.")
        return path
    run = resume if isinstance(resume, Run) else load_run(path)
    if run.alive:
        raise RunExists(
            f"Run {run.name} is still {run.status.state}. Stop it first: run.stop(wait=True).", run=str(run.path)
        )
    if not run.checkpoints:
        raise CheckpointError(
            f"Run {run.name} has no checkpoint to continue from. Launch the experiment anew, with checkpoint_every "
            "set if it may be interrupted.",
            run=str(run.path),
        )
    return run.checkpoints[-1].path


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _prepare_directory(
    experiment: Experiment, directory: str | os.PathLike[str] | None, checkpoint: Path | None
) -> RunDir:
    """Make the run's directory, or clear the last attempt's traces from the one that is continued."""
    if directory is None and checkpoint is not None:
        run = RunDir(checkpoint.parent.parent)
        clear_attempt(run)
    elif directory is None:
        run = RunDir(_new_directory(str(experiment.name)))
    else:
        run = RunDir(Path(directory).expanduser().absolute())
        _claim(run, continued=checkpoint is not None and checkpoint.parent.parent == run.path)
    for folder in (run.logs, run.ranks, run.errors, run.code, run.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    return run


def _new_directory(name: str) -> Path:
    """`runs/<name>-<yyyymmdd-hhmmss>`, made so that no two launches share one."""
    stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-.') or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    root = runs_root()
    root.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 1000):
        path = root / (stem if attempt == 1 else f"{stem}-{attempt}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("a thousand runs in one second")


def _claim(run: RunDir, continued: bool) -> None:
    if run.path.is_dir() and any(run.path.iterdir()):
        if not continued:
            what = "holds a run" if run.experiment.exists() else "is not empty"
            raise RunExists(
                f"{run.path} {what}. Choose another directory, leave it out, or continue that run with "
                f"resume={str(run.path)!r}.",
                directory=str(run.path),
            )
        clear_attempt(run)
    elif run.path.exists() and not run.path.is_dir():
        raise RunExists(f"{run.path} is a file. Choose a directory for the run.", directory=str(run.path))
    run.path.mkdir(parents=True, exist_ok=True)


def clear_attempt(run: RunDir) -> None:
    """Put aside how the last attempt was described, who ran it and what failed; go on with the same events."""
    if not processes.run_alive(run):
        processes.wait_gone(processes.supervisors(run), processes.LEAVES_S)  # its last status belongs to this attempt
    if processes.run_alive(run) or processes.strays(run):
        raise RunExists(f"{run.path} is still running. Stop it first: run.stop(wait=True).", directory=str(run.path))
    number = sum(1 for _ in run.path.glob("attempts/*")) + 1
    aside = run.path / "attempts" / str(number)
    aside.mkdir(parents=True)
    for path in (run.experiment, run.plan, run.environment, run.tracker):
        if path.exists():  # stays until it is replaced: the directory is a run at every moment
            shutil.copy2(path, aside)
    for path in (run.launcher, run.resume, run.ranks, run.errors, run.stop_file, run.kill_file, run.tracking_settings):
        if path.exists():
            path.rename(aside / path.name)


def _describe(run: RunDir, experiment: Experiment, plan: Plan, facts: Mapping[str, Any]) -> None:
    write_json(run.experiment, experiment.to_json())
    write_json(run.plan, plan.to_json())
    write_json(run.environment, {**environment(), **facts})
    settings = tracker_settings(run, experiment)
    if settings is None:
        run.tracker.unlink(missing_ok=True)
    else:
        run.tracking.mkdir(exist_ok=True)
        write_json(run.tracker, settings)


LAUNCHES = "WORKBENCH_LAUNCHES"
"""Names a file to which `launch` adds the path of each run: how `workbench execute` knows what a notebook launched."""


REPLAY = "WORKBENCH_REPLAY"
"""Names a JSON list of `{experiment, plan}`: what each launch of a notebook is to repeat, in order."""
_SAME_PLAN = ("model", "global_batch", "seq_len", "precision")


def replayed_plan(experiment: Experiment) -> Plan | None:
    """The plan that `workbench reproduce` wants the next run to have, if this machine can run it."""
    from workbench.planning.plan import Plan

    file, launches = os.environ.get(REPLAY), os.environ.get(LAUNCHES)
    if not file or not launches:
        return None
    recorded, done = read_json(Path(file)), len(Path(launches).read_text().splitlines())
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


def _tell_notebook(run: RunDir) -> None:
    if os.environ.get(LAUNCHES):
        with contextlib.suppress(OSError), open(os.environ[LAUNCHES], "a") as file:
            file.write(f"{run.path}\n")


def _user_code(experiment: Experiment, only: Sequence[str] = ("model", "data")) -> dict[str, bytes]:
    """Files of `code/`: the user's own model factory and dataset, pickled for the workers, and their source."""
    model, data = experiment.model, experiment.data
    own = {"model": model.factory} if model.is_custom and "model" in only else {}
    own |= {"data": data.dataset_or_factory} if data.is_custom and "data" in only else {}
    files = {}
    for name, value in own.items():
        files[f"{name}.pkl"] = pickled(name, value)
        files[f"{name}.py"] = _source(value).encode()
    return files


def _source(value: Any) -> str:
    """For people and for later: what the pickle was made from, where Python can find it."""
    while isinstance(value, functools.partial):
        value = value.func
    described = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    try:
        return inspect.getsource(described)
    except (OSError, TypeError):
        return f"# {described!r}: its source was not found\n"


def pickled(name: str, value: Any) -> bytes:
    """By value what was defined in a cell, by reference what a module of the user's defines."""
    import cloudpickle

    from workbench.errors import InvalidExperiment

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise InvalidExperiment(
            f"The {name} cannot be sent to the workers: {type(error).__name__}: {error}. Let it build what it needs "
            "when it is called (open files, connections, locks) instead of capturing it.",
            part=name,
        ) from error


def _start_supervisor(run: RunDir, plan: Plan, devices: tuple[str, ...], worker: str) -> None:
    """Start the detached process that sees the run through, and queue it before any later launch."""
    kind = plan.cluster.device.kind
    with run.log("launcher").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench.runs.supervisor", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # or an interrupt of the kernel would reach it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(user_path())},
        )
    threading.Thread(target=process.wait, name=f"reap {run.path.name}", daemon=True).start()
    supervisor = process_record(process.pid)
    count = 1 if kind == "cpu" else plan.world
    ticket = turns.take_ticket(run, kind=kind, pool=devices, count=count, supervisor=supervisor)
    summary = {"world": plan.world, "kind": kind, "precision": plan.precision}
    write_json(run.launcher, {"supervisor": supervisor, "ticket": str(ticket.path), "plan": summary, "worker": worker})


def user_path() -> Iterable[str]:
    """This process's `sys.path` without Python's own folders: what lies beside the notebook imports in the workers."""
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    standard = tuple(str(Path(path)) for path in own)
    entries = [os.path.abspath(entry or os.curdir) for entry in sys.path]
    package = str(Path(__file__).resolve().parents[2])
    kept = [entry for entry in entries if not entry.startswith(standard) and not entry.endswith(".zip")]
    return dict.fromkeys([*kept, *(() if package.startswith(standard) else (package,))])
