"""The run directory: the only contract between a notebook, the launcher and the ranks.

Everything that a run leaves lies in one folder, readable without importing torch and without unpickling:

    experiment.json      what was asked for
    plan.json            how it was divided, with the prediction
    started.json         copy of what determines the training in the two files above, as the run was started
    environment.json     machine, versions, git state
    user_data.json       fingerprint of a user-defined dataset, computed by the ranks
    code/                user-defined models, datasets and functions: model.pkl, data.pkl, … for the workers, their
                         source beside them, functions.json and imported.json with their identities (in the process
                         that started the run, and in its first rank), and path.json, which lists the folders of their
                         modules; start.pt with the tensors that the model held at the start beside what checkpoints
                         store
    tracker.json         tracker, project and id of the run there, for its recorder (wandb.json in older runs); absent
                         when tracking is off
    resume.json          checkpoint (absolute path) and step to start from; absent for a fresh start
    events.jsonl         one JSON object a line, appended as it happens; live figures read it
    steps.table          the logged steps in binary, but for the latest, which stand in steps.tail
                         (`workbench.record.step_table`)
    launcher.json        process ids and start times of the supervisor, the launcher and the ranks
    ranks/<rank>.json    pid and created (`this_process()`), rank, stage and device of each rank
    ranks/<rank>.beat    what the rank does now: step, activity (`workbench.execution.heartbeat`)
    stacks/<rank>.txt    stacks of the rank's threads, once it was asked for them
    stacks/<rank>.groups.json       the rank's process groups, and where it is asked for its collectives
    stacks/<rank>.collectives.json  what it answered (`workbench.execution.heartbeat`)
    logs/<rank>.log      what each rank printed; logs/launcher.log the launcher's own
    errors/<rank>.json   a dead rank's rank, stage, type, message, traceback, time
    reserve              a little room, given back so that a run on a full disk can say how it ended
    STOP, KILL           ask the ranks to write a checkpoint and leave, or the supervisor to kill them
    lock                 held while somebody starts the run, or continues it
    checkpoints/step-<n>/
    tokenizer/           files of the text's tokeniser, which exports carry
    attempts/<n>/        the same files of earlier attempts, once a run was resumed
    tracking/            Weights & Biases files
    remote.json          the W&B address of a run that was copied from there; absent for a run of this machine
    labels.json          tags, a note and the archive: what people say of the run; absent until somebody does
    plan.html            the plan as a small page without a script, once the recorder has written it
    notebook.ipynb       the executed notebook that launched the run, if `workbench execute` ran it

Events are dicts with `type` and `time` (Unix seconds); `workbench.record.events` lists the fields of each type, and
those of `launcher.json` and `ranks/<rank>.json`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import psutil

from workbench.base.errors import PlanMismatch, RunNotFound
from workbench.base.machine import cache_home, current_folder
from workbench.record.events import Event, ProcessRecord, State, is_event

T = TypeVar("T")
LAUNCHES = "WORKBENCH_LAUNCHES"
"""Environment variable that names a file to which `launch` adds the path of each run.

`workbench execute` learns from it which runs a notebook launched.
"""
STATES = get_args(State)
FINAL_STATES = ("finished", "stopped", "failed")
KILLED = "Killed; what was trained since the last checkpoint is lost."
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors of a full disk."""
RECORD_BYTES = 2**25
"""Largest size of a JSON file, and of one event's line, that is read."""
LOG_BYTES = 2**36
"""Largest size of a log that is read: of events, steps, or what a rank printed."""
_CLOCK_SLACK_S = 2.0
"""Tolerated difference of start times, which are computed from the boot time and move when the clock is set."""


STOP_GRACE_S = 300.0
"""Seconds that the ranks may go without any event after a stop was asked for (`$WORKBENCH_STOP_GRACE_S`)."""
RESERVE_BYTES = 2**16
"""Size of the reserve of a run: room for an error file and a few events."""
RETRY_S = 1.0
"""Seconds between two trials to write what a full disk has not taken at the end of a run."""
RECORD_CHECKSUM = "crc32_of_record"
"""Field with the checksum of a record that `write_record` wrote."""
CHECKSUM = b', "crc32": "'
"""Beginning of the last field of an event's line: the CRC-32 of what stands before it."""
_SUFFIX = len(CHECKSUM) + 10
ROOTS_FILE = "runs_folders.json"
"""File of the cache with the folders in which runs were launched."""
_WAITING: dict[Path, list[bytes]] = {}
"""Lines of this process that a full disk has not taken yet."""
_WAITING_LOCK = threading.Lock()


def runs_root() -> Path:
    """Return the folder of runs: `$WORKBENCH_RUNS`, or `runs` in the current directory."""
    folder = Path(os.environ.get("WORKBENCH_RUNS") or "runs").expanduser()
    return folder if folder.is_absolute() else current_folder() / folder


def known_runs_roots() -> list[Path]:
    """Return `runs_root()` and every folder in which this user launched a run, as far as they exist."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        noted = [Path(folder) for folder in read_json(cache_home() / ROOTS_FILE)]
        return [folder for folder in dict.fromkeys([runs_root(), *noted]) if folder.is_dir()]
    return [runs_root()] if runs_root().is_dir() else []


def note_runs_root(folder: Path) -> None:
    """Let other programs of this user find a folder of runs; folders that are gone are forgotten."""
    known = known_runs_roots()
    if folder not in known or not (cache_home() / ROOTS_FILE).exists():
        with contextlib.suppress(OSError):  # a cache that cannot be written
            write_json(cache_home() / ROOTS_FILE, [str(root) for root in dict.fromkeys([*known, folder])])


def stop_grace_s() -> float:
    """Return `$WORKBENCH_STOP_GRACE_S`, or its default."""
    return float(os.environ.get("WORKBENCH_STOP_GRACE_S") or STOP_GRACE_S)


def until_there_is_room(write: Callable[[], T], limit_s: float, reserve: Path | None = None) -> T:
    """Call `write` until no full disk stops it, for at most `limit_s` seconds; then raise its last `OSError`.

    The last trial has the room of the file `reserve`, which is deleted for it.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno in NO_ROOM and time.monotonic() > deadline and reserve is not None and reserve.exists():
                reserve.unlink()
                continue
            if error.errno not in NO_ROOM or time.monotonic() > deadline:
                raise
        time.sleep(RETRY_S)


def remedy_for(error: OSError) -> str:
    """Return what to do about a file that cannot be written."""
    if error.errno in NO_ROOM:
        return "Free some space on that disk."
    if error.errno == errno.EROFS:
        return "Its file system is read-only: mount it for writing, or copy the folder to another one."
    return "Make the folder writable for you, or take another one."


class _Entry:
    """A path in a run directory, read as an attribute of `RunDir`."""

    def __init__(self, name: str, older: str = "") -> None:
        self._name, self._older = name, older

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        older = run.path / self._older
        return older if self._older and older.exists() else run.path / self._name


class _Numbered:
    """A path of each rank or step in a run directory, read as a method of `RunDir` that takes the number."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Callable[[int | str], Path]:
        return lambda number: run.path / self._pattern.format(number)


@dataclass(frozen=True)
class RunDir:
    """The names of everything inside one run's directory."""

    path: Path
    experiment = _Entry("experiment.json")
    plan = _Entry("plan.json")
    started = _Entry("started.json")
    environment = _Entry("environment.json")
    user_data = _Entry("user_data.json")
    code = _Entry("code")
    start_tensors = _Entry("code/start.pt")
    events = _Entry("events.jsonl")
    steps = _Entry("steps.table")
    steps_tail = _Entry("steps.tail")
    tracker = _Entry("tracker.json", older="wandb.json")
    remote = _Entry("remote.json")
    labels = _Entry("labels.json")
    plan_page = _Entry("plan.html")
    notebook = _Entry("notebook.ipynb")
    resume = _Entry("resume.json")
    launcher = _Entry("launcher.json")
    reserve = _Entry("reserve")
    stop_file = _Entry("STOP")
    kill_file = _Entry("KILL")
    lock = _Entry("lock")
    checkpoints = _Entry("checkpoints")
    tokenizer = _Entry("tokenizer")
    tracking = _Entry("tracking")
    ranks = _Entry("ranks")
    errors = _Entry("errors")
    logs = _Entry("logs")
    stacks = _Entry("stacks")
    rank = _Numbered("ranks/{}.json")
    beat = _Numbered("ranks/{}.beat")
    stack = _Numbered("stacks/{}.txt")
    groups = _Numbered("stacks/{}.groups.json")
    log = _Numbered("logs/{}.log")
    error = _Numbered("errors/{}.json")
    checkpoint = _Numbered("checkpoints/step-{:08d}")

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def was_deleted(self) -> bool:
        """True if a run that has started is gone; its folder stays if a file is written while others are deleted."""
        return not self.plan.is_file()

    @property
    def log_stamp(self) -> str:
        """A text that changes whenever an event or a step is written."""
        stamps = list[int]()
        for path in (self.events, self.steps_tail):
            with contextlib.suppress(OSError):
                at = path.stat()
                stamps += [at.st_size, at.st_mtime_ns]
        return "-".join(map(str, stamps))

    def records(self, folder: Path) -> list[Path]:
        """Return the JSON files in a folder of the run, such as `ranks`; none if the folder is a link."""
        return [] if folder.is_symlink() else sorted(folder.glob("*.json"))


@contextlib.contextmanager
def opened(path: Path, most: int = LOG_BYTES) -> Iterator[int]:
    """Open a file for reading, and yield its descriptor. Nothing but a regular file is opened, and no link followed.

    A run may come from anybody: a pipe would never be read to its end, and a link may lead to any file of its reader.
    Raises `FileNotFoundError` if there is nothing, and `RunNotFound` for what is not opened, also for more than `most`
    bytes.
    """
    try:
        reason = _why_not_read(os.lstat(path), most)
        if reason is None:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                reason = _why_not_read(os.fstat(descriptor), most)  # something else may stand there by now
                if reason is None:
                    yield descriptor
            finally:
                os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):  # stale: just replaced, on a network file system
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        reason = error.strerror
    if reason is not None:
        raise RunNotFound(f"{path} cannot be read: {reason}.")


def _why_not_read(at: os.stat_result, most: int) -> str | None:
    if stat.S_ISLNK(at.st_mode):
        return "it is a link, which is not followed; put the file in its place"
    if not stat.S_ISREG(at.st_mode):
        return f"it is {'a folder' if stat.S_ISDIR(at.st_mode) else 'a pipe, a socket or a device'}, and no file"
    return f"it has {at.st_size:,} bytes, and at most {most:,} are read" if at.st_size > most else None


def read_file(path: Path, most: int = RECORD_BYTES) -> bytes:
    """Return the content of a file as `opened` opens it."""
    with opened(path, most) as descriptor:
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def next_data(descriptor: int, position: int) -> int:
    """Return the first position from `position` on that is in no hole of a sparse file; its size if there is none."""
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError as error:
        return os.fstat(descriptor).st_size if error.errno == errno.ENXIO else position


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file, which no crash can leave behind; yield False if another process holds it.

    By default the call waits until nobody else holds it.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file such that a reader sees the old file or the new one, never half of either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        part.write_text(json.dumps(value, indent=2) + "\n")
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # half a file on a full disk
            part.unlink(missing_ok=True)
        raise


def parsed(text: str | bytes) -> Any:
    """Return the value of a JSON text; raises `ValueError` for every text that is none, also for one nested too deeply.

    Other programs may write the files of a run, and numbers of thousands of digits are refused by Python itself.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """Return the value in a JSON file; raises `ValueError` for a record that differs from what `write_record` wrote."""
    value = parsed(read_file(path))
    if isinstance(value, dict) and RECORD_CHECKSUM in value:
        _compare(value)
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        value = read_json(path)
        return value if isinstance(value, dict) else {}
    return {}


def write_record(path: Path, fields: Mapping[str, Any]) -> None:
    """Write fields as `write_json` does, with a checksum that is compared when they are read."""
    write_json(path, {**fields, RECORD_CHECKSUM: _checksum(fields)})


def read_record(path: Path) -> dict[str, Any]:
    """Return the fields of a record; raises `ValueError` as `read_json` does, and if there is no checksum."""
    value = parsed(read_file(path))
    _compare(value if isinstance(value, dict) else {})
    return dict(value)


def _compare(record: dict[str, Any]) -> None:
    """Remove the checksum from a record; raises `ValueError` if it is not that of the other fields."""
    if record.pop(RECORD_CHECKSUM, None) != _checksum(record):
        raise ValueError("it differs from what was written")


def _checksum(fields: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(fields).encode()):08x}"


def what_was_started(run: RunDir) -> dict[str, Any]:
    """Return what determines the training: `experiment.json`, and `plan.json` without what the planner predicted."""
    plan, experiment = parsed(read_file(run.plan)), parsed(read_file(run.experiment))
    predicted = ("candidates", "prediction", "cluster")
    return {
        "experiment": {name: value for name, value in experiment.items() if name != RECORD_CHECKSUM},
        "plan": {name: value for name, value in plan.items() if name not in (*predicted, RECORD_CHECKSUM)},
    }


def changes_since_start(run: RunDir) -> list[str]:
    """Return what was edited in `experiment.json` and `plan.json` since the start: `"seed: 0, now 1"`."""
    if not run.started.exists():
        return []
    now = what_was_started(run)
    return [
        f"{path} of {name}.json: {_short(old)}, now {_short(new)}"
        for name, before in read_json(run.started).items()
        for path, old, new in _differences(before, now[name])
    ]


def _differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the path of each value that differs, down to `stages[1].backward_ms`, with the old and the new one as text.

    They are compared as text, because True equals 1, and a field that is gone may have had the value None.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for field in sorted(before.keys() | after.keys()):
            deeper = f"{path}.{field}" if path else field
            yield from _differences(before.get(field, _NOTHING), after.get(field, _NOTHING), deeper)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from _differences(*pair, f"{path}[{index}]")
    else:
        old, new = ("nothing" if value is _NOTHING else json.dumps(value, sort_keys=True) for value in (before, after))
        if old != new:
            yield path, old, new


_NOTHING = object()


def check_unedited(run: RunDir) -> None:
    """Raise `PlanMismatch` if somebody edited `experiment.json` or `plan.json` since the run was started."""
    try:
        changes = changes_since_start(run)
        if not changes and run.started.exists():
            read_record(run.experiment)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        changes = [f"{type(error).__name__} while the two were compared with started.json: {error}"]
    if changes:
        raise PlanMismatch(
            f"The files of {run.path.name} were edited since it was started: {'; '.join(changes)}. Undo the edit. "
            "run.clone(learning_rate=...) trains with other values, from the start."
        )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}…"


def redirect_output(log: Path) -> None:
    """Send everything that this process prints from now on, C++ included, to a log of the run."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def this_process() -> ProcessRecord:
    """Return the record of the calling process."""
    return process_record(os.getpid())


def process_record(pid: int) -> ProcessRecord:
    """Return the record of a process that runs on this host now."""
    created, ticks = psutil.Process(pid).create_time(), _ticks(pid)
    return {"pid": pid, "created": created, "ticks": ticks, "host": socket.gethostname()}


def _ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None where there is no /proc.

    Unlike a time of day, this number stays the same when the clock is set.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def is_elsewhere(record: ProcessRecord) -> bool:
    """Return True if the process is on another host, where it cannot be looked at from here."""
    here = socket.gethostname()
    return bool(record.get("host", here) != here)


def process_alive(record: ProcessRecord | None) -> bool:
    """Return True if exactly this process still runs; False for a zombie and for a process on another host."""
    if not isinstance(record, dict) or is_elsewhere(record):
        return False
    try:
        process = psutil.Process(record["pid"])
        if record.get("ticks") is not None:
            same = record["ticks"] == _ticks(record["pid"])
        else:
            same = abs(process.create_time() - record["created"]) < _CLOCK_SLACK_S
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.AccessDenied:
        return True
    except (psutil.NoSuchProcess, KeyError, OverflowError, TypeError, ValueError):  # a damaged record names none
        return False


def event_line(type: str, /, **fields: Any) -> bytes:
    """Return an event as a line of `events.jsonl`, with its checksum and its end."""
    text = json.dumps({"type": type, **fields}, allow_nan=True)[:-1].encode()
    return b'%s%s%08x"}\n' % (text, CHECKSUM, zlib.crc32(text))


def append_event(path: Path, type: str, /, **fields: Any) -> None:
    """Append one event as a line with its checksum; several processes may share the file.

    Lines that `log_event` could not write are written first. Raises `OSError` if nothing can be written.
    """
    line = event_line(type, **{"time": time.time(), **fields})
    with _WAITING_LOCK:
        lines = _WAITING.setdefault(path, [])
        lines.append(line)
        try:
            _append(path, b"".join(lines))
        except OSError:
            lines.pop()
            raise
        lines.clear()


def log_event(path: Path, type: str, /, **fields: Any) -> None:
    """Append one event as `append_event` does; on a full disk it waits in memory until a later one can be written.

    Training thus goes on, and loses no step if the disk gets room again before it ends.
    """
    fields = {"time": time.time(), **fields}
    try:
        append_event(path, type, **fields)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        with _WAITING_LOCK:
            _WAITING.setdefault(path, []).append(event_line(type, **fields))


def _append(path: Path, lines: bytes) -> None:
    """Append whole lines or nothing; a lock keeps the lines of other processes from the middle of these.

    A line that a killed process left unfinished is ended first, because it would spoil the next one as well.
    """
    # O_APPEND alone keeps two writers of one host apart, as long as each write is taken whole. A network file system
    # promises neither, and a nearly full disk takes a part: hence the lock, the loop, and the way back.
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        write_whole(descriptor, b"\n" * torn + lines, size)
    finally:
        os.close(descriptor)


def write_whole(descriptor: int, data: bytes, size: int) -> None:
    """Write at the end of a file of `size` bytes, all or nothing: a disk with little room takes a part."""
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


class EventTail:
    """A reader of a growing events file."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset
        self.damaged = 0
        """Number of lines that differ from what was written."""

    def lines(self) -> Iterator[bytes]:
        """Yield the intact lines that arrived since the last call; a torn last line waits for the next call."""
        with contextlib.suppress(FileNotFoundError), opened(self.path) as descriptor:
            size = os.fstat(descriptor).st_size
            while chunk := os.pread(descriptor, max(0, min(RECORD_BYTES, size - self.offset)), self.offset):
                end = chunk.rfind(b"\n") + 1
                if not end and len(chunk) < RECORD_BYTES:
                    return
                self.damaged += not end  # longer than any event
                self.offset = self.offset + end if end else next_data(descriptor, self.offset + len(chunk))
                lines = [line for line in chunk[:end].splitlines() if line]
                intact = [line for line in lines if is_intact(line)]
                self.damaged += len(lines) - len(intact)
                yield from intact

    def read(self, without: Sequence[str] = ()) -> list[Event]:
        """Return the events that arrived since the last call; those of the types `without` are not parsed."""
        begins = tuple(type_prefix(name) for name in without)
        events = list[Event]()
        for line in self.lines():
            if not line.startswith(begins):
                event = parse_event(line)
                self.damaged += event is None
                events += [] if event is None or event["type"] in without else [event]
        return events


def type_prefix(name: str) -> bytes:
    """Return how the line of an event of this type begins."""
    return b'{"type": "%s"' % name.encode()


def parse_event(line: bytes) -> Event | None:
    """Return the event in an intact line, or None if it holds none that a run can have written."""
    try:
        event: Any = parsed(line)
    except ValueError:
        return None
    if not is_event(event):
        return None
    event.pop("crc32", None)
    return cast(Event, event)


def is_intact(line: bytes) -> bool:
    """Return True for a line, without its end, that agrees with the checksum at its end; without one it is damaged."""
    return line[-_SUFFIX:-10] == CHECKSUM and b'%08x"}' % zlib.crc32(line[:-_SUFFIX]) == line[-10:]
