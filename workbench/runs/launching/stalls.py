"""Detection of ranks that hang: a step that takes far longer than the steps before it, and which rank it waits for.

Ranks write what they do (`workbench.execution.heartbeat`), and torch what they communicate
(`workbench.execution.heartbeat`). A step counts as stalled after `STALL_FACTOR` times the
median of the latest steps, and never before `STALL_S`. Only steps, waiting for their batches and leaving the process
groups at the end are timed: loading, compiling before the first steps, evaluations and checkpoints may take any time.
"""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from workbench.base.units import duration
from workbench.execution import heartbeat
from workbench.execution.heartbeat import STACK_SIGNAL, TIMED, Beat, RankOperations, Wait, read_beat
from workbench.record.events import RankRecord
from workbench.record.rundir import RunDir, append_event, is_elsewhere, process_record, write_record
from workbench.runs.launching import processes
from workbench.runs.status import complete_checkpoints

STALL_FACTOR = 10.0
"""Multiple of the median step time from which a step counts as stalled."""
STALL_S = 60.0
"""Least number of seconds after which a step counts as stalled (`$WORKBENCH_STALL_S`)."""
STALL_LIMIT_S = 1800.0
"""Seconds without progress after which a stalled run is ended (`$WORKBENCH_STALL_LIMIT_S`)."""
KNOWN_STEPS = 3
"""Number of logged steps from which their median is trusted: the first steps of an attempt compile."""
RECENT_STEPS = 20
"""Number of latest steps over which the median is taken."""
LOOK_S = 0.5
"""Seconds between two looks at the ranks."""
ANSWER_S = 5.0
"""Seconds that ranks have to write their stacks."""
LOADER = "_worker_loop"
"""Function that a process of a `DataLoader` runs."""
WAITS_IN = ("torch/distributed/", "torch/cuda/streams.py", "torch/autograd/graph.py")
"""Files of torch in whose code a rank waits for other ranks or for its device."""
SHOWN_WAITS = 3
"""Number of operations that a message names."""
GROUPS = {
    "default_pg": "the group of all ranks",
    "mesh_pp": "the pipeline-parallel group",
    "mesh_dp_replicate": "the data-parallel group",
    "mesh_dp_shard": "the data-parallel group",
    "mesh_tp": "the tensor-parallel group",
}
"""Words for groups by torch's description of them."""
STOPPED = {
    psutil.STATUS_STOPPED: "its process is stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "a debugger holds its process",
    psutil.STATUS_DISK_SLEEP: "its process waits for a disk or a driver",
}


@dataclass(frozen=True)
class RankState:
    """The state of one rank of a stalled step."""

    record: RankRecord
    beat: Beat | None
    stack: str | None
    """Stacks of its threads; None if the rank did not answer in time."""
    reason: str = ""
    """Why the process cannot answer, where the system tells."""
    operations: RankOperations | None = None
    """Collectives that torch recorded; None where it tells nothing."""
    reader: str = ""
    """Stacks of a process that assembles the batch for which the rank waits; "" if there is none that is at work."""

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return int(self.record["rank"])

    @property
    def name(self) -> str:
        """Name rank and stage."""
        stage = self.record.get("stage")
        return f"rank {self.record['rank']}" + ("" if stage is None else f" (stage {stage})")

    @property
    def frames(self) -> list[tuple[str, int, str]]:
        """File, line and function of the main thread's frames, innermost first: the reader's if there is one."""
        return frames_of(self.reader or self.stack or "")

    @property
    def waits(self) -> bool:
        """True if the rank is in a collective, or waits for its device."""
        if self.beat is not None and self.beat.activity == "batch":
            return False
        files = [file for file, _, _ in self.frames]
        if files and files[0].endswith("torch/_ops.py"):  # an operation of torch that Python calls
            files = files[1:]
        return bool(files) and any(part in files[0] for part in WAITS_IN)

    @property
    def is_in_torch(self) -> bool:
        """True if the innermost line of the main thread is torch's own."""
        return bool(self.frames) and "/torch/" in self.frames[0][0]

    @property
    def place(self) -> str:
        """Name the innermost line of the main thread."""
        if not self.frames:
            return "outside of Python"
        file, line, function = self.frames[0]
        return f"{function} at {'/'.join(file.rsplit('/', 2)[-2:])}:{line}"


def frames_of(stacks: str) -> list[tuple[str, int, str]]:
    """Return file, line and function of the frames of the main thread, innermost first."""
    main = stacks.rpartition("(most recent call first):")[2]
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main)
    return [(file, int(line), function) for file, line, function in frames]


class StallWatch:
    """Watches the ranks of one attempt; `look` reports a stall and its end, and returns True when the run must end."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._step_ms: deque[float] = deque(maxlen=RECENT_STEPS)
        self._known = 0
        self._beats: dict[int, Beat] = {}
        self._changed_at = self._looked_at = time.monotonic()
        self._ends = False
        self._states: list[RankState] = []
        """The ranks of the present stall; empty if there is none."""

    def note_step(self, step_ms: float | None) -> None:
        """Take note of a step that was logged."""
        if step_ms is not None:
            self._known += 1
            self._step_ms.append(step_ms)

    @property
    def usual_step_ms(self) -> float | None:
        """The median of the latest steps that were logged, None before the first."""
        return statistics.median(self._step_ms) if self._step_ms else None

    def look(self) -> bool:
        """Report a stall that has begun or is over, and return True once it has lasted too long.

        Its cause is then written as the error of a rank, and the ranks must be killed.
        """
        if self._ends or time.monotonic() - self._looked_at < LOOK_S:
            return self._ends
        self._looked_at = time.monotonic()
        records = [record for record in processes.rank_records(self._run) if not is_elsewhere(record)]
        beats = {int(r["rank"]): beat for r in records if (beat := read_beat(self._run, int(r["rank"]))) is not None}
        if beats != self._beats:
            self._beats, self._changed_at = beats, time.monotonic()
            if self._states:
                self._states = []
                append_event(self._run.events, "status", state="running", message="")
        lasted_s = time.monotonic() - self._changed_at
        is_timed = self._known >= KNOWN_STEPS and bool(beats) and all(b.activity in TIMED for b in beats.values())
        if not is_timed or lasted_s < max(
            processes.seconds_of("WORKBENCH_STALL_S", STALL_S), STALL_FACTOR * statistics.median(self._step_ms) / 1e3
        ):
            return False
        if not self._states:
            self._states = self._asked(records, beats)
            append_event(self._run.events, "status", state="stalled", message=self._message(lasted_s))
        if lasted_s >= end_s():
            self._write_error(lasted_s)
            self._ends = True
        return self._ends

    def _asked(self, records: list[RankRecord], beats: Mapping[int, Beat]) -> list[RankState]:
        """Ask each rank for its stacks, and return what was found about it."""
        beating = [record for record in records if int(record["rank"]) in beats]  # others would die of the signal
        answers = self._answers([int(r["rank"]) for r in beating], lambda: processes.send_signal(beating, STACK_SIGNAL))
        states = []
        for record in beating:
            rank, reader = int(record["rank"]), ""
            stack = answers[rank] or None
            told = None if stack is None else RankOperations.asked(self._run, rank)
            reason = ""
            if stack is None:
                reason = "its process is gone"
                with contextlib.suppress(psutil.Error):
                    reason = STOPPED.get(psutil.Process(record["pid"]).status(), "")
            elif beats[rank].activity == "batch":
                reader = self._reader(record)
            states.append(RankState(record, beats[rank], stack, reason, told, reader))
        return states

    def _answers(self, ranks: Sequence[int], ask: Callable[[], object]) -> dict[int, str]:
        """Return what is written into the file of each rank's stacks after `ask`; "" where nothing is."""
        sizes = {rank: self._size(rank) for rank in ranks}
        ask()
        deadline = time.monotonic() + ANSWER_S
        while any(self._size(rank) == size for rank, size in sizes.items()) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.1)  # an answer may be half written
        return {
            rank: self._run.stack(rank).read_bytes()[size:].decode(errors="replace") if self._size(rank) > size else ""
            for rank, size in sizes.items()
        }

    def _reader(self, record: RankRecord) -> str:
        """Return the stacks of the process that assembles a rank's batch: on a GPU, processes of a `DataLoader` do.

        They were forked from the rank, and so write their stacks into its file when they are asked, one after another.
        """
        rank = int(record["rank"])
        with contextlib.suppress(psutil.Error):
            for process in filter(_writes_stacks, psutil.Process(record["pid"]).children()):
                asked: list[RankRecord] = [{**record, **process_record(process.pid)}]
                ask = functools.partial(processes.send_signal, asked, STACK_SIGNAL)
                stacks = self._answers([rank], ask)[rank]
                called = [function for _, _, function in frames_of(stacks)]
                if LOADER in called and called[called.index(LOADER) - 1] != "get":  # where it waits for work
                    return stacks
        return ""

    def _size(self, rank: int) -> int:
        with contextlib.suppress(OSError):
            return self._run.stack(rank).stat().st_size
        return 0

    def _culprits(self) -> list[RankState]:
        """Return the ranks that the others wait for: those that do not answer, or those that wait for nobody."""
        silent = [state for state in self._states if state.stack is None]
        waits = self._waits()
        blocked = {rank for wait in waits for rank in wait.waiting}
        busy = [s for s in self._states if not (s.waits or (s.is_in_torch and s.rank in blocked))]
        awaited = heartbeat.awaited(waits)
        return silent or busy or [state for state in self._states if state.rank in awaited]

    def _waits(self) -> list[Wait]:
        """Return what the ranks wait in, as torch recorded it."""
        return heartbeat.waits({s.rank: s.operations for s in self._states if s.operations is not None})

    def _message(self, lasted_s: float) -> str:
        culprits = self._culprits()
        waiting = [state for state in self._states if state not in culprits]
        step = max((state.beat.step for state in self._states if state.beat), default=0)
        median = duration(statistics.median(self._step_ms) / 1e3)
        leaves = all(state.beat is not None and state.beat.activity == "leaving" for state in self._states)
        what = "Leaving the process groups after step" if leaves else "Step"
        parts = [f"{what} {step:,} has made no progress for {duration(lasted_s)}, and steps take {median}."]
        for state in culprits:
            if state.stack is None:
                because = f": {state.reason}" if state.reason else ""
                parts.append(f"{state.name.capitalize()} does not answer{because}.")
            else:
                parts.append(f"{state.name.capitalize()} is {'' if state.waits else 'busy '}in {state.place}.")
        if self._states and not culprits:
            parts.append("Every rank of this node waits: for a rank of another node, or for a device that hangs.")
        if waiting:
            parts.append(f"Waiting: {', '.join(f'{state.name} in {state.place}' for state in waiting)}.")
        waits, names = self._waits(), {state.rank: state.name for state in self._states}
        awaited = {state.rank for state in culprits}
        named = [wait for wait in waits if awaited & {*wait.missing, *wait.unknown} or wait.others] or waits
        parts += [in_words(wait, names) for wait in named[:SHOWN_WAITS]]
        parts.append(f"Stacks are in {self._run.stacks}. The run ends after {duration(end_s())} without progress.")
        saved = complete_checkpoints(self._run)
        begin = f"`run.resume()` goes on from step {saved[-1].step:,}" if saved else "a launch begins anew"
        parts.append(f"Do not wait if the cause is known: `run.kill()`, and {begin}.")
        return " ".join(parts)

    def _write_error(self, lasted_s: float) -> None:
        culprit = next(iter(self._culprits() or self._states))
        rank = int(culprit.record["rank"])
        stacks = "\n".join(f"{state.name}:\n{state.stack or 'no answer'}" for state in self._states)
        fields = {"rank": rank, "stage": culprit.record.get("stage"), "type": "Stalled", "time": time.time()}
        write_record(self._run.error(rank), {**fields, "message": self._message(lasted_s), "traceback": stacks})


def _writes_stacks(process: psutil.Process) -> bool:
    """Return True if a process answers the signal for stacks; another one would die of it."""
    with contextlib.suppress(OSError, psutil.Error):
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False


def in_words(wait: Wait, names: Mapping[int, str]) -> str:
    """Say in a sentence what ranks wait in, and for whom; `names` are those of the ranks of this node."""
    operation = wait.operation

    def named(ranks: Sequence[int]) -> str:
        return ", ".join(names.get(rank, f"rank {rank}") for rank in ranks)

    if operation.peer is not None:
        does = f"receive {operation.sizes} from" if operation.name == "recv" else f"send {operation.sizes} to"
        silent = "does not answer" if wait.unknown else "has not begun its side"
        return f"{named(wait.waiting).capitalize()} waits to {does} {named([operation.peer])}, which {silent}."
    where = f"{operation} in {GROUPS.get(wait.words, 'a group')} (ranks {', '.join(map(str, wait.ranks))})"
    begin = f"{named(wait.waiting).capitalize()} {'waits' if len(wait.waiting) == 1 else 'wait'} in {where}"
    if wait.others:
        ((rank, entered), *_) = wait.others
        return (
            f"{begin}, but {named([rank])} entered {entered}: their code differs there, as a branch on the rank does."
        )
    if wait.missing:
        return f"{begin}, which {named(wait.missing)} {'has' if len(wait.missing) == 1 else 'have'} not entered."
    if wait.unknown:
        return f"{begin}, and nothing is known of {named(wait.unknown)}."
    return (
        f"{begin}, which all ranks have entered: a link or a device hangs. `dmesg` and `nvidia-smi -q` show errors of "
        "devices, and NCCL_DEBUG=INFO those of links."
    )


def end_s() -> float:
    """Return the seconds without progress after which a stalled run is ended."""
    return processes.seconds_of("WORKBENCH_STALL_LIMIT_S", STALL_LIMIT_S)
