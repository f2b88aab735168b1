"""From an experiment and a plan to a detached run: checks, the run directory, and the supervisor's start."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.data import CustomData
from workbench.errors import CheckpointError, PlanInfeasible, PlanMismatch, RunExists, WorkbenchError
from workbench.models import CustomModel
from workbench.rundir import RunDir, append_event, process_record, read_json, write_json
from workbench.runs.launching import device_queue as turns
from workbench.runs.launching import processes
from workbench.runs.records.environment import environment
from workbench.runs.run import Run, load_run, runs_root
from workbench.runs.tracking.wandb_run import tracker_settings
from workbench.units import count
from workbench.user_code import pickled, user_path

if TYPE_CHECKING:
    from workbench.experiment import Experiment
    from workbench.planning.plan import Plan

WORKER = processes.WORKER
LONGEST_NAME = 100
"""Letters of an experiment's name that its directory takes: file systems end at 255."""


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
    _check_host(plan)
    turns.queue_folder()
    with _written(experiment, plan, directory, resume, facts, code) as run:
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

    Raises `RunExists`, `PlanMismatch`, `PlanInfeasible` or `CheckpointError`.
    """
    check_plan(experiment, plan)
    _check_host(plan)
    with _written(experiment, plan, directory, resume, facts, None) as run:
        write_json(run.launcher, {})  # known to be started by somebody else
        append_event(run.events, "status", state="queued", message="Prepared; start it on its nodes.")
    return Run(run.path)


@contextlib.contextmanager
def _written(
    experiment: Experiment,
    plan: Plan,
    directory: str | os.PathLike[str] | None,
    resume: Run | str | os.PathLike[str] | None,
    facts: Mapping[str, Any] | None,
    code: Mapping[str, bytes] | None,
) -> Iterator[RunDir]:
    """A run directory that ranks can start from; nobody else starts them while the block runs."""
    code = _user_code(experiment) if code is None else code
    checkpoint = None if resume is None else _checkpoint(resume)
    if checkpoint is not None and _step_of(checkpoint) > experiment.steps:
        raise CheckpointError(
            f"{checkpoint} is of step {_step_of(checkpoint):,}, after the {experiment.steps:,} steps asked for. Ask "
            "for more steps, or launch the experiment anew.",
            step=_step_of(checkpoint),
            steps=experiment.steps,
        )
    with _own_directory(experiment, directory, checkpoint) as run:
        _describe(run, experiment, plan, facts or {})
        for name, content in code.items():
            (run.code / name).write_bytes(content)
        if checkpoint is not None:
            write_json(run.resume, {"checkpoint": str(checkpoint), "step": _step_of(checkpoint)})
        yield run


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
    if code:
        code[CODE_PATH] = _path_json([*_code_path(run.directory), *user_path()])
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
    kind = plan.cluster.device.type
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


def _check_host(plan: Plan) -> None:
    from workbench.planning.refusals import too_large_to_build

    refusal = too_large_to_build(plan)
    if refusal is not None:
        raise refusal


def _checkpoint(resume: Run | str | os.PathLike[str]) -> Path:
    """The checkpoint meant by a run, a run directory or a checkpoint directory: the newest complete one."""
    path = Path(resume.path if isinstance(resume, Run) else resume).absolute()
    if re.fullmatch(r"step-\d+", path.name):
        if not path.is_dir():
            raise CheckpointError(f"There is no checkpoint {path}. Its run lists those it has: run.checkpoints.")
        return path
    run = resume if isinstance(resume, Run) else load_run(path)
    if run.status.final:
        processes.wait_left(run.directory)
    if run.alive or run.heard_elsewhere:
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


@contextlib.contextmanager
def _own_directory(
    experiment: Experiment, directory: str | os.PathLike[str] | None, checkpoint: Path | None
) -> Iterator[RunDir]:
    """Make the run's directory, or clear the last attempt's traces from the one that is continued."""
    continued = None if checkpoint is None else checkpoint.parent.parent
    if directory is not None:
        run = RunDir(Path(directory).expanduser().absolute())
        continued = continued if continued is not None and continued.resolve() == run.path.resolve() else None
    else:
        run = RunDir(continued or _new_directory(str(experiment.name)))
    if continued is None:
        _claim(run)
    with _alone(run):
        if continued is not None:
            clear_attempt(run)
        elif run.experiment.exists():
            raise _taken(run)
        for folder in (run.logs, run.ranks, run.errors, run.code, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        yield run


@contextlib.contextmanager
def _alone(run: RunDir) -> Iterator[None]:
    """Two kernels, or two buttons, that start the same run at once would train it twice, into the same files."""
    try:
        file = run.lock.open("a")
    except OSError as error:
        raise WorkbenchError(
            f"{run.path} cannot be written: {error.strerror}. wb.clone(run) trains the same in a folder of your own.",
            directory=str(run.path),
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunExists(
                f"{run.path} is being started by somebody else right now. Follow it: wb.load_run({str(run.path)!r}).",
                directory=str(run.path),
            ) from None
        yield


def _new_directory(name: str) -> Path:
    """`runs/<name>-<yyyymmdd-hhmmss>`, made so that no two launches share one."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:LONGEST_NAME].strip("-.") or "run"
    stem = f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    root = runs_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            path = root / (stem if attempt == 1 else f"{stem}-{attempt}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise WorkbenchError(
            f"No run can be kept in {root}: {error.strerror}. Set WORKBENCH_RUNS to a folder that can be written.",
            folder=str(root),
        ) from None
    raise AssertionError("a thousand runs in one second")


def _claim(run: RunDir) -> None:
    if run.path.is_dir() and any(run.path.iterdir()):
        raise _taken(run)
    if run.path.exists() and not run.path.is_dir():
        raise RunExists(f"{run.path} is a file. Choose a directory for the run.", directory=str(run.path))
    run.path.mkdir(parents=True, exist_ok=True)


def _taken(run: RunDir) -> RunExists:
    what = "holds a run" if run.experiment.exists() else "is not empty"
    return RunExists(
        f"{run.path} {what}. Choose another directory, leave it out, or continue that run with "
        f"resume={str(run.path)!r}.",
        directory=str(run.path),
    )


def clear_attempt(run: RunDir, *, among_nodes: bool = False) -> None:
    """Put aside how the last attempt was described, who ran it and what failed; go on with the same events.

    `among_nodes`: others, perhaps on this host, may have begun the next attempt.
    """
    if not processes.run_alive(run):
        processes.wait_left(run)  # its last status belongs to this attempt
    left = [*processes.survivors(run), *processes.supervisors(run)] if among_nodes else processes.strays(run)
    if processes.run_alive(run) or left:
        raise RunExists(f"{run.path} is still running. Stop it first: run.stop(wait=True).", directory=str(run.path))
    number = max((int(path.name) for path in run.path.glob("attempts/*") if path.name.isdigit()), default=0) + 1
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
    recorded = read_json(Path(file))
    done = len(set(Path(launches).read_text().splitlines()))  # a run that was continued is still one
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
    own: dict[str, Any] = {"model": model.factory} if isinstance(model, CustomModel) and "model" in only else {}
    own |= {"data": data.dataset_or_factory} if isinstance(data, CustomData) and "data" in only else {}
    files = {}
    for name, value in own.items():
        files[f"{name}.pkl"] = pickled(name, value)
        files[f"{name}.py"] = _source(value).encode()
    if files:
        files[CODE_PATH] = _path_json(user_path())
    return files


CODE_PATH = "path.json"
"""In `code/`: where the modules lie that a model or dataset is found in; the run may be continued from elsewhere."""


def _path_json(entries: Iterable[str]) -> bytes:
    return json.dumps(list(dict.fromkeys(entries)), indent=2).encode()


def _code_path(run: RunDir) -> list[str]:
    try:
        return [str(entry) for entry in read_json(run.code / CODE_PATH)]
    except (OSError, ValueError):
        return []


def _source(value: Any) -> str:
    """For people and for later: what the pickle was made from, where Python can find it."""
    while isinstance(value, functools.partial):
        value = value.func
    described = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    try:
        return inspect.getsource(described)
    except (OSError, TypeError):
        return f"# {described!r}: its source was not found\n"


def _start_supervisor(run: RunDir, plan: Plan, devices: tuple[str, ...], worker: str) -> None:
    """Start the detached process that sees the run through, and queue it before any later launch."""
    kind = plan.cluster.device.type
    with run.log("launcher").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench.runs.launching.supervisor", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # or an interrupt of the kernel would reach it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(worker_path(run))},
        )
    try:
        supervisor = process_record(process.pid)
        count = 1 if kind == "cpu" else plan.world
        ticket = turns.take_ticket(run, kind=kind, pool=devices, count=count, supervisor=supervisor)
        told = {"supervisor": supervisor, "ticket": str(ticket.path), "worker": worker}
        summary = {"world": plan.world, "kind": kind, "precision": plan.precision}
        write_json(run.launcher, {**told, "plan": summary})
    except BaseException:
        process.kill()  # it waits for what could not be written
        raise
    finally:
        threading.Thread(target=process.wait, name=f"reap {run.path.name}", daemon=True).start()


def worker_path(run: RunDir) -> Iterable[str]:
    """Where the ranks find modules: as this process does, and where the run's own code found them."""
    return dict.fromkeys([*user_path(), *_code_path(run)])
