"""Signs of life of a rank: what it does now and, on request, the stacks of its threads and its collectives.

The supervisor reads them to tell a slow run from one that hangs, and to name the rank that the others wait for
(`workbench.runs.launching.stalls`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import http.client
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from workbench.record.rundir import RunDir, read_file, read_object, write_json

STACK_SIGNAL = signal.SIGUSR2
"""Signal that makes a rank append its stacks to `stacks/<rank>.txt`, also while it waits in compiled code."""
TIMED = ("step", "batch", "leaving")
"""Computing a step, waiting for its batch, and leaving the process groups. All other activities may take any time."""
_WIDTH = 40


@dataclass(frozen=True)
class Beat:
    """The activity of a rank; two equal beats are the same activity."""

    step: int
    """Number of the step, from 1."""
    activity: str
    number: int
    """Number of activities that the rank has begun."""


STDERR = 2
"""File descriptor of the rank's log: a crash in a compiled library leaves the Python lines that called it there."""


class Heartbeat:
    """Writes the beats of this process: one short write into the page cache for each activity, without waiting."""

    def __init__(self, run: RunDir, rank: int) -> None:
        for folder in (run.ranks, run.stacks):
            folder.mkdir(parents=True, exist_ok=True)
        self._stacks = run.stack(rank).open("a")
        faulthandler.enable(STDERR)
        faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True)
        self._descriptor = os.open(run.beat(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._step, self._number = 0, 0
        self.begin("starting")

    def begin(self, activity: str, step: int | None = None) -> None:
        """Say what the process does from now on, in step `step` (from 1) or in the last one named."""
        self._step = self._step if step is None else step
        self._number += 1
        with contextlib.suppress(OSError):  # a full disk must not end a training
            os.pwrite(self._descriptor, f"{self._number} {self._step} {activity}".ljust(_WIDTH).encode(), 0)

    def close(self) -> None:
        """Let go of the files, in a process that lives on."""
        faulthandler.unregister(STACK_SIGNAL)
        self._stacks.close()
        os.close(self._descriptor)


def read_beat(run: RunDir, rank: int) -> Beat | None:
    """Return what a rank does now, or None if it does not tell."""
    try:
        number, step, activity = read_file(run.beat(rank)).decode().split()
        return Beat(int(step), activity, int(number))
    except (OSError, ValueError):
        return None


# Collectives that torch's flight recorder knows of: read from outside a rank, and compared between ranks.
#
# Torch records every collective of NCCL and of gloo as it is enqueued, with its group, its number there and its sizes.
# It keeps `TORCH_FR_BUFFER_SIZE` of them for each rank (2,000 by default; 0 switches it off). Sends and receives are
# recorded on NCCL alone, and nothing is recorded while a CUDA graph is captured or replayed. Written for torch 2.11 to
# 2.13; `tests/unit/test_stalls.py` fails if the names are gone.

HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")
"""Names of the two recorders in torch's server: that of NCCL, absent on CPUs, and that of gloo."""
ANSWER_S = 2.0
"""Seconds that a rank has to answer; its server waits for nobody."""
_WORDS = {"_allgather_base": "all-gather", "_all_gather_base": "all-gather", "_reduce_scatter_base": "reduce-scatter"}
_DTYPES = {"Float": "fp32", "BFloat16": "bf16", "Half": "fp16", "Double": "fp64", "Long": "int64", "Byte": "uint8"}
_OTHER_SIDE = {"send": "recv", "recv": "send"}


@contextlib.contextmanager
def serving_collectives(run: RunDir, rank: int) -> Iterator[None]:
    """Let this user's processes read the collectives of this one, and write down its process groups.

    The server is torch's own. It needs no Python, so that it answers also while this process waits in a collective that
    holds the interpreter. Where it cannot start, a stall is told without collectives.
    """
    from torch._C._distributed_c10d import _WorkerServer
    from torch.distributed import distributed_c10d

    ranks_of: Mapping[Any, Mapping[int, int]] = distributed_c10d._world.pg_group_ranks
    groups = {
        str(group.group_name): {"name": str(group.group_desc), "ranks": sorted(ranks)}
        for group, ranks in ranks_of.items()
        if not isinstance(group, int)  # those that this rank is not in
    }
    # The path of a socket has at most 107 bytes, fewer than that of a run may have.
    path, server = Path(tempfile.gettempdir(), f"workbench-{os.getuid()}", f"{os.getpid()}.sock"), None
    with contextlib.suppress(OSError, RuntimeError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        mode = path.parent.stat()
        if mode.st_uid == os.getuid() and not mode.st_mode & 0o077:
            for left in path.parent.glob("*.sock"):  # by ranks that were killed, and perhaps by one with this number
                if left == path or not psutil.pid_exists(int(left.stem)):
                    left.unlink(missing_ok=True)
            with _silent():
                server = _WorkerServer(str(path), -1)
    write_json(run.groups(rank), {"socket": str(path), "groups": groups})
    try:
        yield
    finally:
        if server is not None:
            with _silent():
                server.shutdown()
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop what compiled code writes to stderr: the server announces its start and its end as warnings."""
    sys.stderr.flush()
    kept = os.dup(STDERR)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), STDERR)
    try:
        yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)


Group = tuple[str, tuple[int, ...]]
"""A process group: torch's name of it, which disjoint groups may share, and its ranks."""


@dataclass(frozen=True)
class Operation:
    """A collective, a send or a receive, as one rank recorded it."""

    group: Group
    is_pair: bool
    """True for a send and a receive, and for several of them that were enqueued together."""
    number: int
    """Number among the collectives of the group, or among its sends and receives."""
    name: str
    peer: int | None
    """The other rank of a send or a receive."""
    sizes: str
    ended: bool

    def __str__(self) -> str:
        return f"{self.name} {self.number:,}" + (f" of {self.sizes}" if self.sizes else "")


@dataclass(frozen=True)
class RankOperations:
    """The answer of one rank: its process groups with torch's words for them, and its latest operations in order."""

    groups: dict[Group, str]
    operations: list[Operation]

    @staticmethod
    def asked(run: RunDir, rank: int) -> RankOperations | None:
        """Ask a rank, and keep its answer in `stacks/<rank>.collectives.json`; None if it does not answer."""
        known = read_object(run.groups(rank))
        found: dict[str, Any] = {}
        for handler in HANDLERS:
            connection = http.client.HTTPConnection("localhost", timeout=ANSWER_S)
            with (
                contextlib.suppress(OSError, ValueError, http.client.HTTPException),
                socket.socket(socket.AF_UNIX) as connection.sock,
            ):
                connection.sock.settimeout(ANSWER_S)
                connection.sock.connect(str(known.get("socket")))
                connection.request("POST", f"/handler/{handler}", headers={"Connection": "close"})
                response = connection.getresponse()
                text = response.read()
                if response.status == http.client.OK:
                    answer = json.loads(text)
                    found[handler] = answer if isinstance(answer, dict) else {}
        if not found:
            return None
        write_json(run.stacks / f"{rank}.collectives.json", found)
        entries = [entry for dump in found.values() for entry in dump.get("entries", ())]
        return RankOperations.read(known.get("groups", {}), entries)

    @staticmethod
    def read(groups: Mapping[str, Mapping[str, Any]], entries: Sequence[Mapping[str, Any]]) -> RankOperations:
        """Read the entries of a recorder; `groups` has `name` and `ranks` of each process group.

        Of operations that were enqueued together, only the entry that closes them is ever marked as ended.
        """
        ranks_of = {name: tuple(group["ranks"]) for name, group in groups.items()}

        def place(entry: Mapping[str, Any]) -> tuple[Group, bool, int]:
            name, is_pair = entry["process_group"][0], bool(entry["is_p2p"])
            return (name, ranks_of.get(name, ())), is_pair, entry["p2p_seq_id" if is_pair else "collective_seq_id"]

        ended = {place(entry) for entry in entries if entry["retired"] or entry["state"] == "completed"}
        operations = []
        for entry in entries:
            group, is_pair, number = place(entry)
            name, _, direction = str(entry["profiling_name"]).partition(":")[2].partition(" ")
            peer = None
            if direction:  # "0->1" of a send, "1<-0" of a receive: numbers in the group
                index = int(direction.replace("<-", "->").partition("->")[2])
                peer = group[1][index] if index < len(group[1]) else index
            name = _WORDS.get(name, name.strip("_").replace("_", "-"))
            # Shape and dtype of the first inputs, in words
            sizes, types = (
                entry["input_sizes"] or entry["output_sizes"],
                entry["input_dtypes"] or entry["output_dtypes"],
            )
            words = ", ".join(" × ".join(map(str, size)) or "1" for size in sizes[:3])
            more = f" and {len(sizes) - 3} more" if len(sizes) > 3 else ""
            words = f"{words}{more} {_DTYPES.get(types[0], types[0]) if types else ''}".strip() if sizes else ""
            operations.append(Operation(group, is_pair, number, name, peer, words, place(entry) in ended))
        return RankOperations(
            {(name, ranks): str(groups[name]["name"]) for name, ranks in ranks_of.items()}, operations
        )


@dataclass(frozen=True)
class Wait:
    """Ranks that are in an operation which does not end, and those that have not entered it."""

    operation: Operation
    words: str
    """Torch's description of the group."""
    ranks: tuple[int, ...]
    """The ranks of the group."""
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    """Ranks that have not entered it, and say so."""
    unknown: tuple[int, ...] = ()
    """Ranks that told nothing."""
    others: tuple[tuple[int, Operation], ...] = ()
    """Ranks that entered another operation under the same number, or other sizes."""


def waits(found: Mapping[int, RankOperations]) -> list[Wait]:
    """Return what ranks wait in, by group; `found` is what each rank told that answered."""
    words = {group: word for told in found.values() for group, word in told.groups.items()}
    result = []
    for group, word in words.items():
        told = {
            rank: [one for one in found[rank].operations if one.group == group and not one.is_pair]
            for rank in group[1]
            if rank in found
        }

        # The earliest collective that has not ended on one of the ranks
        open_ones = [operation.number for each in told.values() for operation in each if not operation.ended]
        if not open_ones:
            continue
        number = min(open_ones)
        inside = {rank: one for rank, each in told.items() for one in each[::-1] if one.number == number}
        waiting = tuple(sorted(rank for rank, one in inside.items() if not one.ended))
        latest = {rank: max((one.number for one in each), default=0) for rank, each in told.items()}
        first = inside[waiting[0]]
        # All ranks must give the same operation, and of some the same sizes.
        fixes_sizes = first.name in ("all-reduce", "all-gather", "reduce-scatter", "broadcast")
        must_be = (first.name, first.sizes if fixes_sizes else "")
        given = {rank: (one.name, one.sizes if fixes_sizes else "") for rank, one in inside.items()}
        result.append(
            Wait(
                first,
                word,
                group[1],
                waiting,
                missing=tuple(rank for rank in sorted(latest) if latest[rank] < number),
                unknown=tuple(rank for rank in group[1] if rank not in told),
                others=tuple((rank, inside[rank]) for rank in sorted(inside) if given[rank] != must_be),
            )
        )

    # The first sends and receives of each rank that have not ended and that the other side has not entered
    for rank, answer in found.items():
        first_of: dict[Group, int] = {}
        for one in answer.operations:
            if one.peer is None or one.ended or first_of.setdefault(one.group, one.number) != one.number:
                continue  # later ones wait for the first
            has_told = one.peer in found
            entered = has_told and any(
                (other.group, other.peer, other.name, other.ended) == (one.group, rank, _OTHER_SIDE[one.name], False)
                for other in found[one.peer].operations
            )
            if not entered:
                missing, unknown = ((one.peer,), ()) if has_told else ((), (one.peer,))
                result.append(Wait(one, words.get(one.group, ""), one.group[1], (rank,), missing, unknown))
    return result


def awaited(found: Sequence[Wait]) -> set[int]:
    """Return the ranks that others wait for and that wait for nobody themselves."""
    blocked = {rank for wait in found if wait.missing or wait.unknown for rank in wait.waiting}
    return {rank for wait in found for rank in wait.missing} - blocked
