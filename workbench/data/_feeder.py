"""`Feeder`: one process per node that makes the samples of a stream and hands them to the ranks through a `Ring`.

It is a process of its own, so that tokenising takes no time from a rank, and ends when its input does, which the kernel
closes even if the rank that started it was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.data._child import Child, answers
from workbench.data._ring import Ring
from workbench.data._stream import SampleStream
from workbench.errors import DataError, in_words
from workbench.user_code import pickled

BATCHES_AHEAD = 8
"""Global batches that a ring holds at least: the loaders of a rank read up to six of them ahead."""

OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables by which a user-defined dataset may give each rank a share; here one process reads for all of them."""


class Feeder:
    """The process that writes a ring, seen from the rank that started it."""

    def __init__(self, stream: SampleStream, ring: Ring, first: int, state: Mapping[str, Any] | None) -> None:
        """Begin with sample `first`, from a state at or before it; None is the beginning of the stream."""
        self._ring, self._first = ring, first
        self._states: deque[Mapping[str, Any]] = deque([state] if state else ())
        others = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
        self._child = Child("workbench.data._feeder", others, [ring.descriptor])
        self._reader = threading.Thread(target=self._read_states, name="states of the stream", daemon=True)
        self._reader.start()
        with contextlib.suppress(BrokenPipeError):  # the readers report a process that ended
            self._child.input.write(pickled("data", (stream, ring, first, state)))
            self._child.input.flush()

    def state(self, sample: int) -> Mapping[str, Any] | None:
        """Return the state of the stream from which that sample, or a later one, can be made again."""
        while len(self._states) > 1 and self._states[1]["first"] <= sample:
            self._states.popleft()
        return self._states[0] if self._states and self._states[0]["first"] <= sample else None

    def close(self) -> None:
        """End the process, and wait for its end."""
        self._child.end()
        self._reader.join()
        self._child.output.close()

    def _read_states(self) -> None:
        for line in self._child.output:
            self._states.append(json.loads(line))
        self._child.process.wait()
        with contextlib.suppress(OSError):  # the ring may be closed by now
            self._ring.abandon(self._first)


def new_ring_file() -> tuple[int, Path]:
    """Make an empty file for a ring, on this node's own disk, and open it."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="workbench-stream-")
    except OSError as error:
        raise DataError(
            f"No file can be made in {tempfile.gettempdir()}: {error.strerror}. Streamed data passes through one. "
            "Point TMPDIR at a folder that has room.",
        ) from error
    return descriptor, Path(path)


def ring_for(stream: SampleStream, descriptor: int, global_batch: int, readers: int, vocabulary: int) -> Ring:
    """Return the ring of a stream: two chunks, or several global batches, whichever is more."""
    capacity = max(2 * stream.buffer, BATCHES_AHEAD * global_batch)
    return Ring(descriptor, stream.record_bytes, capacity, readers, stream.dtype, vocabulary)


def main() -> None:
    """Write the samples of a stream to a ring until the input ends."""
    states = answers()
    stream, ring, first, state = pickle.load(sys.stdin.buffer)
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()  # with the parent
    ring.begin(first)
    try:
        for chunk in stream.chunks(state):
            skipped = max(0, first - chunk.first)
            if skipped >= len(chunk.records):
                continue
            if chunk.state is not None:
                states.write(json.dumps(chunk.state).encode() + b"\n")
                states.flush()
            ring.write(chunk.first + skipped, chunk.records[skipped:])
    except BaseException as error:
        traceback.print_exc()
        said = f"Reading the data raised {in_words(error)}. The log of rank 0 has the traceback."
        ring.fail(str(error) if isinstance(error, DataError) else said)
        sys.exit(1)
