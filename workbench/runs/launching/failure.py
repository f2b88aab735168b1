"""The cause of a failed run: the earliest error file of a rank, or one made from the launcher's log."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from dataclasses import dataclass

from workbench.errors import InvalidArgument, RunFailed
from workbench.execution.heartbeat import read_beat
from workbench.rundir import RunDir, read_record, write_record
from workbench.runs.launching.processes import rank_records
from workbench.secrets import masked_words

LOG_TAIL_LINES = 30
LOST_PEER = re.compile(r"(?i)connection (was )?(reset|closed|refused)|closed by peer|broken pipe|remote process exited")
"""Messages of a rank that has lost another one."""
LAST_WORDS_LINES = 10


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank, as that rank wrote it."""

    rank: int
    stage: int | None
    type: str
    message: str
    traceback: str
    time: float
    is_origin: bool = False
    """True if the rank knows that the cause is in its own stage."""

    @property
    def sentence(self) -> str:
        """Return rank, stage, error type and the first line of the message."""
        stage = "" if self.stage is None else f" (stage {self.stage})"
        return f"rank {self.rank}{stage}: {self.type}: {self.message}".split("\n", 1)[0]


def root_cause(run: RunDir) -> RankError | None:
    """Return the earliest of the error files; the other ranks usually die because the first one did.

    An error that all ranks raise together is told by a rank of the stage where it arose.
    """
    errors = []
    for path in run.errors.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # a damaged file
            value, written = read_record(path), path.stat().st_mtime
            text = {name: str(value.get(name, "")) for name in ("message", "traceback")}
            error_type, when = str(value.get("type", "Error")), float(value.get("time", written))
            is_origin = bool(value.get("is_origin"))
            errors.append(
                RankError(int(value["rank"]), value.get("stage"), error_type, **text, time=when, is_origin=is_origin)
            )
    return min(errors, key=lambda error: (not error.is_origin, error.time), default=None)


def run_failed(run: RunDir, message: str) -> RunFailed:
    """Return the exception for a failed run: its root cause, the worker's own traceback, and the path of the log."""
    cause = root_cause(run)
    name = run.path.name
    if cause is None:
        log, damaged = run.log("launcher"), sorted(path.name for path in run.errors.glob("*.json"))
        why = f"The error files {', '.join(damaged)} are damaged." if damaged else "No rank left an error file."
        return RunFailed(
            f"Run {name} failed: {message} {why} The launcher's log ends with:\n\n{log_tail(run, 'launcher')}\n"
            f"The whole log is {log}."
        )
    # The error already holds the traceback with which the log ends.
    before = log_tail(run, cause.rank, None).rpartition("Traceback (most recent call last)")
    lines = "\n".join((before[0] or before[2]).rstrip().splitlines()[-LAST_WORDS_LINES:])
    said = f"Before that it printed:\n\n{lines}\n\n" if lines else ""
    facts = {each: getattr(cause, each) for each in ("rank", "stage", "type", "traceback")}
    return RunFailed(
        f"Run {name} failed on {cause.sentence}\n\n{cause.traceback.rstrip()}\n\n{said}"
        f"The rank's whole log is {run.log(cause.rank)}.",
        **facts,
        log=lines,
    )


def record_silent_death(run: RunDir, launcher_output: str) -> bool:
    """Write the error file for a rank that could not: it was killed by a signal, or died before its first line.

    `launcher_output` is the output of Accelerate and torchrun; their report names each rank and its exit code. The
    death of a rank that a signal killed is dated before the errors of the others, which only found that it no longer
    answers; so is that of a rank which just left, if all others report a lost connection. Returns False if the
    launcher's output adds nothing to the error files.
    """
    reported = {int(path.stem) for path in run.errors.glob("*.json")}
    earliest = root_cause(run)
    deaths = [(rank, code) for rank, code in _exits(launcher_output) if rank not in reported]
    silent = [(rank, code) for rank, code in deaths if code < 0 and code != -signal.SIGTERM]
    if not silent and earliest is not None and LOST_PEER.search(earliest.message):
        silent = [(rank, code) for rank, code in deaths if code >= 0]
    if not silent and reported:
        return False
    rank, exit_code = next(iter(silent or deaths), (0, None))
    stages = {int(r["rank"]): r.get("stage") for r in rank_records(run)}
    when = time.time() if earliest is None else earliest.time - 1e-3
    error_type, message = _exit_meaning(exit_code)
    beat = read_beat(run, rank)
    if beat is not None and (exit_code or 0) >= 0:
        message += f" Its last activity was {beat.activity!r}, in step {beat.step:,}."
    fields = {"rank": rank, "stage": stages.get(rank), "type": error_type, "message": message, "time": when}
    write_record(run.error(rank), {**fields, "traceback": masked_words(log_tail(run, rank) or launcher_output[-4000:])})
    return True


def log_tail(run: RunDir, rank: int | str, lines: int | None = LOG_TAIL_LINES) -> str:
    """Return the last `lines` of a rank's log (all of it for None), "" when there is none."""
    if lines is not None and lines < 0:
        raise InvalidArgument(f"tail={lines} is no number of lines. Give 0 or more, or None for all.")
    if not re.fullmatch(r"\w[\w-]*", str(rank)):
        raise InvalidArgument(f"{str(rank)[:80]!r} names no log. Give a rank, or 'launcher'.")
    try:
        text = run.log(rank).read_text(errors="replace")
    except OSError:
        return ""
    return text if lines is None else "".join(text.splitlines(keepends=True)[-lines or len(text) :])


def _exits(output: str) -> list[tuple[int, int]]:
    """Return rank and exit code from each entry of torchrun's report, or of the one process that Accelerate started."""
    entries = re.findall(r"^\s*rank\s*:\s*(\d+).*\n\s*exitcode\s*:\s*(-?\d+)", output, flags=re.MULTILINE)
    if entries:
        return [(int(rank), int(code)) for rank, code in entries]
    killed = re.search(r"died with <Signals\.(\w+)", output)
    if killed:
        return [(0, -int(signal.Signals[killed[1]]))]
    status = re.search(r"non-zero exit status (\d+)", output)
    return [(0, int(status[1]))] if status else []


def _exit_meaning(exit_code: int | None) -> tuple[str, str]:
    """Return an error type and a sentence for an exit code; None means that it is unknown."""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = {
            "SIGKILL": "Usually the machine ran out of memory: take a smaller micro-batch, or fewer ranks.",
            "SIGSEGV": "A compiled library crashed; the log of the rank ends with the Python lines that called it.",
            "SIGBUS": "Usually /dev/shm is full.",
        }.get(name, "")
        return name, f"the process was killed by {name}. {hint}".rstrip()
    if exit_code is None:
        return "Exit", "the process ended without a word."
    return "Exit", (
        f"the process ended with exit code {exit_code} before it could say why: the model, the data or a library "
        f"called os._exit({exit_code})."
    )
