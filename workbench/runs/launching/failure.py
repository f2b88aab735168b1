"""Why a run died: the earliest error that a rank wrote, or what the launcher's log says of one that could not."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import RunFailed
from workbench.rundir import RunDir, read_json, write_json
from workbench.runs.launching.processes import rank_records

LOG_TAIL_LINES = 30
LAST_WORDS_LINES = 10


@dataclass(frozen=True)
class RankError:
    """What killed a rank, in that rank's own words."""

    rank: int
    stage: int | None
    type: str
    message: str
    traceback: str
    time: float

    @property
    def sentence(self) -> str:
        return f"{_place(self.rank, self.stage)}: {self.type}: {self.message}".split("\n", 1)[0]


def root_cause(run: RunDir) -> RankError | None:
    """The earliest of the error files; the other ranks usually die of the first one's death."""
    errors = []
    for path in run.errors.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            errors.append(_rank_error(read_json(path), written=path.stat().st_mtime))
    return min(errors, key=lambda error: error.time, default=None)


def run_failed(run: RunDir, message: str) -> RunFailed:
    """The exception for a failed run: its root cause, the worker's own traceback, and where the log is."""
    cause = root_cause(run)
    name = run.path.name
    if cause is None:
        log = run.log("launcher")
        return RunFailed(
            f"Run {name} failed: {message} The launcher's log ends with:\n\n{log_tail(run, 'launcher')}\n"
            f"The whole log is {log}.",
            run=str(run.path),
        )
    lines = last_words(run, cause.rank)
    said = f"Before that it printed:\n\n{lines}\n\n" if lines else ""
    return RunFailed(
        f"Run {name} failed on {cause.sentence}\n\n{cause.traceback.rstrip()}\n\n{said}"
        f"The rank's whole log is {run.log(cause.rank)}.",
        run=str(run.path),
        rank=cause.rank,
        stage=cause.stage,
        type=cause.type,
        traceback=cause.traceback,
        log=lines,
    )


def last_words(run: RunDir, rank: int, lines: int = LAST_WORDS_LINES) -> str:
    """The last lines that a rank printed before its traceback, which the error has already."""
    before = log_tail(run, rank, None).rpartition("Traceback (most recent call last)")
    return "\n".join((before[0] or before[2]).rstrip().splitlines()[-lines:])


def record_silent_death(run: RunDir, launcher_output: str) -> bool:
    """Write the error file that a rank could not write: killed by a signal, or dead before its first line.

    `launcher_output` is what Accelerate and torchrun printed; their report names each rank and its exit code.
    A rank that a signal killed comes before the others' complaints that it no longer answers. False when
    nothing is known that the error files do not say.
    """
    reported = {int(path.stem) for path in run.errors.glob("*.json")}
    deaths = [(rank, code) for rank, code in _exits(launcher_output) if rank not in reported]
    killed = [(rank, code) for rank, code in deaths if code < 0 and code != -signal.SIGTERM]
    if not killed and reported:
        return False
    rank, exit_code = next(iter(killed or deaths), (0, None))
    stages = {int(r["rank"]): r.get("stage") for r in rank_records(run)}
    earliest = root_cause(run)
    when = time.time() if earliest is None else earliest.time - 1e-3
    kind, message = _exit_meaning(exit_code)
    fields = {"rank": rank, "stage": stages.get(rank), "type": kind, "message": message, "time": when}
    write_json(run.error(rank), {**fields, "traceback": log_tail(run, rank) or launcher_output[-4000:]})
    return True


def log_tail(run: RunDir, rank: int | str, lines: int | None = LOG_TAIL_LINES) -> str:
    """The last `lines` of a rank's log (all of it for None); "" when there is none."""
    try:
        text = run.log(rank).read_text(errors="replace")
    except OSError:
        return ""
    return text if lines is None else "".join(text.splitlines(keepends=True)[-lines:])


def _rank_error(value: Mapping[str, Any], written: float) -> RankError:
    return RankError(
        rank=int(value["rank"]),
        stage=value.get("stage"),
        type=str(value.get("type", "Error")),
        message=str(value.get("message", "")),
        traceback=str(value.get("traceback", "")),
        time=float(value.get("time", written)),
    )


def _place(rank: int, stage: int | None) -> str:
    return f"rank {rank}" if stage is None else f"rank {rank} (stage {stage})"


def _exits(output: str) -> list[tuple[int, int]]:
    """Rank and exit code of each entry of torchrun's report, or of the one process that Accelerate started."""
    entries = re.findall(r"^\s*rank\s*:\s*(\d+).*\n\s*exitcode\s*:\s*(-?\d+)", output, flags=re.MULTILINE)
    if entries:
        return [(int(rank), int(code)) for rank, code in entries]
    killed = re.search(r"died with <Signals\.(\w+)", output)
    if killed:
        return [(0, -int(signal.Signals[killed[1]]))]
    status = re.search(r"non-zero exit status (\d+)", output)
    return [(0, int(status[1]))] if status else []


def _exit_meaning(exit_code: int | None) -> tuple[str, str]:
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = {
            "SIGKILL": "Usually the machine ran out of memory: take a smaller micro-batch, or fewer ranks.",
            "SIGSEGV": "A compiled library crashed.",
            "SIGBUS": "Usually /dev/shm is full.",
        }.get(name, "")
        return name, f"the process was killed by {name}. {hint}".rstrip()
    if exit_code is None:
        return "Exit", "the process ended without a word."
    return "Exit", f"the process ended with exit code {exit_code} before it could say why."
