"""The launcher: asks the gate whether an attempt can start, writes the run directory, and starts the supervisor."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import json
import os
import re
import shutil
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from workbench.base.code_identity import (
    FUNCTIONS,
    IMPORTED,
    Definition,
    and_more,
    changed_on_disk,
    compared_with_files,
    identities_json,
    identity,
    read_identities,
    way_out,
)
from workbench.base.display import CELLS, sent_cells
from workbench.base.errors import (
    CheckpointError,
    DataError,
    InvalidExperiment,
    PlanMismatch,
    RunExists,
    RunNotFound,
    WorkbenchError,
)
from workbench.base.user_code import innermost, pickled, source_of, user_path
from workbench.data import data_fingerprint, held_out_fingerprint
from workbench.execution.checkpoint.files import step_of
from workbench.experiment import USER_PARTS, user_parts
from workbench.measure.calibration import local_cluster
from workbench.measure.detection import num_gpus
from workbench.models import Pretrained
from workbench.planning.runnable import CAPTURED_FIELDS, check_runnable, facts_for
from workbench.record.event_log import Status
from workbench.record.rundir import (
    LAUNCHES,
    NO_ROOM,
    RunDir,
    append_event,
    check_unedited,
    locked,
    note_runs_root,
    process_alive,
    process_record,
    read_json,
    read_record,
    runs_root,
    what_was_started,
    write_json,
    write_record,
)
from workbench.runs.environment import environment
from workbench.runs.launching import device_queue, fork_server, processes
from workbench.runs.launching.supervisor import AHEAD, worker_environment
from workbench.runs.status import complete_checkpoints, read_status, written_elsewhere
from workbench.runs.tracking.delivery import check_installed, tracker_settings

if TYPE_CHECKING:
    from workbench.capture.captured_model import Facts
    from workbench.experiment import Experiment
    from workbench.planning.plan import Plan

FINGERPRINTS = {"data_fingerprint": data_fingerprint, "held_out_fingerprint": held_out_fingerprint}
"""Fields of `environment.json` that describe the samples of a run."""


@dataclass(frozen=True)
class Attempt:
    """One attempt to train an experiment under a plan, and what its run directory is made of."""

    experiment: Experiment
    plan: Plan
    directory: str | os.PathLike[str] | None = None
    """The run directory; by default that of the continued run, or `<name>-<date>-<time>` among the runs."""
    resume: str | os.PathLike[str] | None = None
    """The run, or one of its checkpoints, from which the training goes on."""
    code: Mapping[str, bytes] | None = None
    """Files of `code/`; by default the experiment's own model, datasets and functions."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `environment.json` beside the machine's: the data's fingerprint, the run that was cloned, the sweep."""


def start_attempt(
    attempt: Attempt,
    facts: Facts | None = None,
    *,
    progress: bool | None = None,
    worker: str = processes.WORKER,
    is_training: bool = True,
    share: float = 1.0,
) -> RunDir:
    """Start training in processes of its own and return at once; the kernel stays free, and may go away.

    Runs that need the same devices queue. `facts` and `progress` are those of `check_runnable`. `worker` is the
    module that each rank executes; the directory of ranks that do not train (`is_training`) is no run of a tracker's or
    of a notebook's. Runs train beside each other on a device as long as their `share`s of it add up to
    1; all processes of a run on CPUs are on one device.

    Raises what `check_runnable` raises, `RunExists`, `RunNotFound` and `CheckpointError` before any process starts.
    """
    # All that can be refused is refused before a directory exists, so that a refused launch leaves nothing behind.
    attempt = _checked(attempt, facts, progress, is_tracked=is_training)
    if attempt.plan.world > 1:
        _check_loopback()
    devices = device_queue.devices_for(attempt.plan)
    device_queue.queue_folder()
    with written(attempt) as run:
        note_runs_root(run.path.parent)
        if not is_training:
            run.tracker.unlink(missing_ok=True)  # the result is not a run of its own
        append_event(run.events, "status", state="queued", message="")
        _start_supervisor(run, attempt.plan, devices, worker, share)
    if os.environ.get(LAUNCHES) and is_training:
        with contextlib.suppress(OSError), open(os.environ[LAUNCHES], "a") as file:
            file.write(f"{run.path}\n")
    return run


def _check_loopback() -> None:
    """Raise `WorkbenchError` if ranks of this machine cannot meet; they would wait for each other for minutes."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError as error:
        raise WorkbenchError(
            f"Several ranks meet over this machine's loopback interface, and 127.0.0.1 cannot be reached: "
            f"{error.strerror or error}. Bring it up (ip link set lo up), or train in one process: "
            "wb.plan(experiment, wb.measure.local_cluster(processes=1))."
        ) from None


def import_ahead() -> None:
    """Start to import what the ranks of this process's first run will need, while the process still plans it.

    JupyterLab calls it in the kernel that waits for a click on a card, or that a click has started. What is imported
    for ranks on GPUs takes no memory of theirs.
    """
    gpus = num_gpus()
    device_type, world = ("cuda", gpus) if gpus else ("cpu", local_cluster().gpus)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(user_path())}
    ranks = fork_server.kind_of_ranks(worker_environment(environment, world, device_type, ()))
    command = (processes.SUPERVISOR, AHEAD, device_type, str(world))
    fork_server.client().start_ahead(*command, environment=environment, ranks=ranks)


def write_attempt(attempt: Attempt, facts: Facts | None = None, *, progress: bool | None = None) -> RunDir:
    """Write the run directory as `start_attempt` does and start nothing: Slurm, `torchrun` or Accelerate will."""
    with written(_checked(attempt, facts, progress)) as run:
        note_runs_root(run.path.parent)
        write_json(run.launcher, {})  # an empty record says that somebody else will start the run
        append_event(run.events, "status", state="queued", message="Prepared; start it on its nodes.")
    return run


def _checked(attempt: Attempt, facts: Facts | None, progress: bool | None, is_tracked: bool = True) -> Attempt:
    """Return an attempt that may be started, with its length in steps.

    It has the fingerprint of its data if they were checked here.
    """
    if attempt.resume is None and isinstance(attempt.experiment.model, Pretrained):
        attempt.experiment.model.check_weights()
    if is_tracked:
        check_installed(attempt.experiment)
    check_runnable(attempt.experiment, attempt.plan, facts, progress=progress)
    for note in attempt.plan.loss_depends:
        warnings.warn(note, stacklevel=6)
    attempt = replace(attempt, experiment=attempt.experiment.resolved())
    if progress is None or "data_fingerprint" in attempt.provenance or not attempt.experiment.data.is_loaded:
        return attempt
    prints = {name: read(attempt.experiment) for name, read in FINGERPRINTS.items()}
    provenance = prints | dict(attempt.provenance)
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
    # A clone with another rate, seed or number of steps has the graphs that were checked, and starts at once.
    is_checked = plan == Stored.load(run.plan) and all(
        value_of(before, name) == value_of(experiment, name) for name in CAPTURED_FIELDS
    )
    facts = None if is_checked else facts_for(experiment, plan)
    code = code_of_clone(run, experiment)
    attempt = Attempt(experiment, plan, code=code, provenance={"cloned_from": run.path.name})
    return start_attempt(attempt, facts, progress=None if is_checked else False, worker=worker)


def _start_supervisor(run: RunDir, plan: Plan, devices: tuple[str, ...], worker: str, share: float) -> None:
    """Start the detached process that sees the run through, and queue it before any later launch."""
    device_type, environment = plan.cluster.device.type, _environment(run)
    ranks = fork_server.kind_of_ranks(worker_environment(environment, plan.world, device_type, ()))
    start = fork_server.client().start
    command = (processes.SUPERVISOR, str(run.path))
    supervisor = process_record(start(*command, log=run.log("launcher"), environment=environment, ranks=ranks))
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
    there = processes.Processes.of(run)
    elsewhere = not status.final and there.are_elsewhere
    being_launched = not status.final and not there.is_described  # its supervisor will look for the request
    if not (there.are_left or elsewhere or being_launched):
        return
    request.touch()
    if there.supervisor and not elsewhere and not process_alive(there.supervisor):  # asked again: it may have just left
        if not run.kill_file.exists():
            processes.send_signal(there.ranks, signal.SIGTERM)
        command = (processes.SUPERVISOR, "--reap", str(run.path))
        processes.start_detached(*command, log=run.log("launcher"), environment=_environment(run))


# The run directory: claimed for one run, described, and cleared of an earlier attempt when the run goes on

OWNER_ONLY = 0o700
"""Mode of a run directory: experiments, commands and logs are for nobody else, unless the owner says so by chmod."""
LONGEST_NAME = 100
"""Letters of an experiment's name that its directory takes over; file systems end at 255."""
CODE_PATH = "path.json"
"""File in `code/` that lists where the modules of a model or dataset lie; the run may be continued from elsewhere."""


@contextlib.contextmanager
def written(attempt: Attempt) -> Iterator[RunDir]:
    """Write a run directory that ranks can start from; nobody else can start them while the block runs."""
    experiment, resume = attempt.experiment, attempt.resume
    code = user_code(experiment) if attempt.code is None else attempt.code
    with _unwritable_named():
        checkpoint = None if resume is None else checkpoint_of(Path(resume))
    step = 0 if checkpoint is None else step_of(checkpoint)
    if step > experiment.total_steps:
        raise CheckpointError(
            f"{checkpoint} is of step {step:,}, after the {experiment.total_steps:,} steps asked for. Ask for more "
            "steps, or launch the experiment anew."
        )
    model, start = None, b""
    if checkpoint is not None:
        source = RunDir(checkpoint.parent.parent)
        _check_data(source, experiment, attempt.provenance)
        model, start = read_identities(source.code / FUNCTIONS).get("model"), _start_tensors(source)
    with _unwritable_named(), _own_directory(attempt, checkpoint) as run:
        write_record(run.experiment, experiment.to_json())
        write_record(run.plan, attempt.plan.to_json())
        write_record(run.environment, {**environment(), **attempt.provenance})
        settings = tracker_settings(run, experiment)
        if settings is None:
            run.tracker.unlink(missing_ok=True)
        else:
            run.tracking.mkdir(exist_ok=True)
            write_json(run.tracker, settings)
        for name, content in code.items():
            (run.code / name).write_bytes(content)
        if attempt.code is None:  # it replaces what a run had that goes on, whose model may be the same
            (run.code / IMPORTED).unlink(missing_ok=True)
            run.start_tensors.unlink(missing_ok=True)
            if start and read_identities(run.code / FUNCTIONS).get("model") == model:
                run.start_tensors.write_bytes(start)
        write_json(run.started, what_was_started(run))
        if checkpoint is not None:
            write_json(run.resume, {"checkpoint": str(checkpoint), "step": step})
        for file in (run.experiment, run.plan, run.environment, run.started, run.tracker, *run.code.iterdir()):
            with contextlib.suppress(OSError):  # the tracker's file may be absent
                file.chmod(OWNER_ONLY & 0o600)
        yield run


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint at `path`, which is a checkpoint's directory, or a run's: then its newest complete one."""
    path = path.absolute()
    if re.fullmatch(r"step-\d+", path.name):
        if not path.is_dir():
            raise CheckpointError(f"There is no checkpoint {path}. Its run lists those it has: run.checkpoints.")
        return path
    run = RunDir(path)
    if not run.experiment.is_file():
        raise RunNotFound(f"There is no run in {path}. wb.list_runs() shows those that there are.")
    status, seen = read_status(run)
    if status.final:
        processes.wait_left(run)
    if processes.run_alive(run) or written_elsewhere(run, read_status(run, seen)[0]):
        raise RunExists(f"Run {path.name} is still {status.state}. Stop it first: run.stop(wait=True).")
    checkpoints = complete_checkpoints(run)
    if not checkpoints:
        raise CheckpointError(
            f"Run {path.name} has no checkpoint to continue from. Launch the experiment anew, with checkpoint_every "
            "set if it may be interrupted."
        )
    return checkpoints[-1].path


@contextlib.contextmanager
def _own_directory(attempt: Attempt, checkpoint: Path | None) -> Iterator[RunDir]:
    """Make the run's directory, or clear the last attempt's traces from the one that is continued."""
    continued = None if checkpoint is None else checkpoint.parent.parent
    if attempt.directory is not None:
        run = RunDir(Path(attempt.directory).expanduser().absolute())
        continued = continued if continued is not None and continued.resolve() == run.path.resolve() else None
    else:
        run = RunDir(continued or new_directory(str(attempt.experiment.name)))
    if continued is None:
        if run.path.is_dir() and any(run.path.iterdir()):
            raise _taken(run)
        if run.path.exists() and not run.path.is_dir():
            raise RunExists(f"{run.path} is a file. Choose a directory for the run.")
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.path.mkdir(mode=OWNER_ONLY, exist_ok=True)
    try:
        with _locked(run):
            if continued is not None and checkpoint is not None:
                aside = clear_attempt(run)
                # Checkpoints after this one belong to a curve that the run is about to abandon. The latest goes first,
                # so that after an interruption the newest one that is left is still of one curve.
                for later in reversed(complete_checkpoints(run)):
                    if later.step > step_of(checkpoint):
                        (aside / "checkpoints").mkdir(exist_ok=True)
                        later.path.rename(aside / "checkpoints" / later.path.name)
            elif run.experiment.exists():
                raise _taken(run)
            for folder in (run.logs, run.ranks, run.errors, run.code, run.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            yield run
    except OSError as error:
        if continued is None and error.errno in NO_ROOM:
            shutil.rmtree(run.path, ignore_errors=True)
        raise


@contextlib.contextmanager
def _unwritable_named() -> Iterator[None]:
    """Turn the error of a disk without room, or of a folder that cannot be used, into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            remedy = "Free some space there, or set WORKBENCH_RUNS to a folder on another disk."
        elif error.errno in (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT):
            remedy = f"Give another directory than {str(error.filename)[:100]}."
        else:
            raise
        said = f"The run could not be written: {error.strerror}. {remedy}"
        raise WorkbenchError(said) from None


@contextlib.contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    """Hold the run's lock: two kernels that started one run at once would train it twice, into the same files."""
    try:
        run.lock.touch()
    except OSError as error:
        raise WorkbenchError(
            f"{run.path} cannot be written: {error.strerror}. run.clone() trains the same in a folder of your own."
        ) from None
    with locked(run.lock, wait=False) as alone:
        if not alone:
            raise RunExists(
                f"{run.path} is being started by somebody else right now. Follow it: wb.load_run({str(run.path)!r})."
            )
        yield


def new_directory(name: str) -> Path:
    """Make `<runs>/<name>-<yyyymmdd-hhmmss>`, such that no two launches share one."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:LONGEST_NAME].strip("-.") or "run"
    stem = f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    root = runs_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            path = root / (stem if attempt == 1 else f"{stem}-{attempt}")
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=OWNER_ONLY)
                return path
    except OSError as error:
        raise WorkbenchError(
            f"No run can be written to {root}: {error.strerror}. Set WORKBENCH_RUNS to a folder that can be written."
        ) from None
    raise AssertionError("a thousand runs in one second")


def _taken(run: RunDir) -> RunExists:
    if not run.experiment.exists():
        return RunExists(f"{run.path} is not empty. Choose another directory, or leave it out.")
    return RunExists(
        f"{run.path} holds a run. Choose another directory, leave it out, or continue that run: "
        f"wb.load_run({str(run.path)!r}).resume()."
    )


def clear_attempt(run: RunDir, *, among_nodes: bool = False) -> Path:
    """Move the files of the last attempt (who ran it, what failed) to `attempts/<n>`; the events go on.

    Set `among_nodes` for a multi-node launch, where other nodes, perhaps on this host, may already have begun the next
    attempt. Returns that folder. Raises `RunExists` for a run that still has processes.
    """
    if not processes.run_alive(run):
        processes.wait_left(run)  # its last status belongs to this attempt
    left = [*processes.survivors(run), *processes.supervisors(run)] if among_nodes else processes.strays(run)
    if processes.run_alive(run) or left:
        raise RunExists(f"{run.path} is still running. Stop it first: run.stop(wait=True).")
    number = max((int(path.name) for path in run.path.glob("attempts/*") if path.name.isdigit()), default=0) + 1
    aside = run.path / "attempts" / str(number)
    aside.mkdir(parents=True)
    for path in (run.experiment, run.plan, run.environment, run.tracker):
        if path.exists():  # copied, because the directory must be a readable run at every moment
            shutil.copy2(path, aside)
    for path in (run.launcher, run.resume, run.ranks, run.stacks, run.errors, run.stop_file, run.kill_file):
        if path.exists():
            path.rename(aside / path.name)
    return aside


def _check_data(run: RunDir, experiment: Experiment, provenance: Mapping[str, Any]) -> None:
    """Raise `DataError` if the files that the run was trained on hold another text now.

    An experiment that names other data asks for the change. User-defined data are not executed here.
    """
    from workbench.experiment import Experiment as Read

    recorded = None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a run that does not say what it was trained on
        recorded, then = read_record(run.environment).get("data_fingerprint"), read_record(run.experiment)
    if not recorded or provenance.get("accepted_changed_data") or experiment.data.is_user_defined:
        return
    if then.get("data") != json.loads(json.dumps(experiment.data.to_json())):
        return
    before = Read.from_json(then)
    is_named = not any(data is not None and data.is_user_defined for data in (before.data, before.eval_data))
    found = data_fingerprint(before) if is_named else None
    if found is not None and found != recorded:
        raise DataError(
            f"{experiment.data.name} has changed since {run.path.name} was trained on it: its first and last samples "
            f"have the fingerprint {found[:12]} instead of {recorded[:12]}. Restore the text, or continue with the new "
            "one: run.resume(accept_changed_data=True)."
        )


def user_code(experiment: Experiment) -> dict[str, bytes]:
    """Return the files of `code/`: the user-defined parts that are here, pickled, their source, and their identities.

    Raises `InvalidExperiment` if a module on disk holds other code or values than this process.
    """
    files, identities = dict[str, bytes](), dict[str, dict[str, Definition]]()
    for name, value in user_parts(experiment).items():
        if value is not None:
            files[f"{name}.pkl"] = pickled(name, value)
            files[f"{name}.py"] = _source(value).encode()
            found = identity(value, held=name not in ("data", "eval_data"))  # a dataset may hold much
            identities[name] = compared_with_files(found, psutil.Process().create_time())
    for part, of_part in identities.items():
        if changed := changed_on_disk(of_part):
            raise InvalidExperiment(
                f"The {part} would be another in the workers, which import its files: {changed[0]}"
                f"{and_more(changed)}. It was edited after it was imported, or replaced here. "
                "Restart the kernel, or importlib.reload the module and make the experiment anew; what you replaced, "
                "write into the file, or define it in a cell."
            )
    if files:
        files[FUNCTIONS] = identities_json(identities)
        files[CELLS] = sent_cells(content for name, content in files.items() if name.endswith(".pkl"))
        files[CODE_PATH] = path_json(user_path())
    return files


def code_of_clone(run: RunDir, experiment: Experiment) -> dict[str, bytes]:
    """Return the files of `code/` for a clone: those that the run stored of the parts that are only described here.

    With the same model and seed, it has the tensors of the run's start.
    """
    described = [name for name, value in user_parts(experiment).items() if value is None]
    names = [f"{part}.{ending}" for part in described for ending in ("pkl", "py")]
    code = {name: path.read_bytes() for name in names if (path := run.code / name).exists()}
    require_stored_code(run, described)
    code |= user_code(experiment)
    if code:
        for name in (FUNCTIONS, IMPORTED):
            stored = read_identities(run.code / name)
            own = json.loads(code.get(name, b"{}"))
            code[name] = identities_json({part: stored[part] for part in described if part in stored}, own)
        code[CODE_PATH] = path_json([*_code_path(run), *user_path()])
    before, now = read_record(run.experiment), json.loads(json.dumps(experiment.to_json()))
    is_same = all(before.get(name) == now.get(name) for name in ("model", "seed"))
    if is_same and user_parts(experiment).get("model") is None:
        code |= {run.start_tensors.name: start} if (start := _start_tensors(run)) else {}
    return code


def _start_tensors(run: RunDir) -> bytes:
    return run.start_tensors.read_bytes() if run.start_tensors.exists() else b""


def require_stored_code(run: RunDir, parts: Iterable[str] = USER_PARTS) -> None:
    """Raise `PlanMismatch` if a file that the stored parts import holds other code than when the run was started.

    Nothing of them is executed. What only an import tells, such as a number that is computed, the first rank compares.
    """
    identities = read_identities(run.code / FUNCTIONS)
    for part in parts:
        if changed := changed_on_disk(identities.get(part, {})):
            raise PlanMismatch(
                f"The code of {run.path.name} was edited since it was started, in what its {part} reads: {changed[0]}"
                f"{and_more(changed)}. {way_out(part)}"
            )


def continued_provenance(run: RunDir, experiment: Experiment, accepts_changed_data: bool = False) -> dict[str, Any]:
    """Return what `environment.json` says beside the machine, for a continuation of the run as `experiment`.

    A user-defined dataset is not read here, so its fingerprint is dropped when the last samples change.
    """
    before: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # a continuation needs none of it
        before = read_record(run.environment)
    provenance: dict[str, Any] = {name: before[name] for name in ("cloned_from", *FINGERPRINTS) if name in before}
    if not experiment.data.is_user_defined:
        provenance |= {name: read(experiment) for name, read in FINGERPRINTS.items()}
    elif experiment.total_steps != read_record(run.experiment)["steps"]:
        provenance["data_fingerprint"] = None
    if accepts_changed_data:
        provenance["accepted_changed_data"] = True
    return provenance


def path_json(entries: Iterable[str]) -> bytes:
    """Return the content of `CODE_PATH`."""
    return json.dumps(list(dict.fromkeys(entries)), indent=2).encode()


def _code_path(run: RunDir) -> list[str]:
    try:
        return [str(entry) for entry in read_json(run.code / CODE_PATH)]
    except (OSError, ValueError):
        return []


def worker_path(run: RunDir) -> Iterable[str]:
    """Return the module search path of the ranks: this process's, then that of the run's own code."""
    return dict.fromkeys([*user_path(), *_code_path(run)])


def _source(value: Any, found: Callable[[Any], str | None] | None = None) -> str:
    """Return the source of what was pickled, for people, where Python can find it: that of equal items once.

    `found` returns the source of a function or class; it takes a tenth of a second, and a dataset may have many items.
    """
    found = found or functools.cache(source_of)
    if isinstance(value, list):
        return "\n\n".join(dict.fromkeys(_source(each, found) for each in value))
    if isinstance(value, dict):
        return "\n\n".join(f"# {name}\n{_source(function, found)}" for name, function in value.items())
    inner = innermost(value)
    described: Any = inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner)
    return found(described) or f"# {described!r}: its source was not found\n"
