"""`Ring`: a file of bounded size through which one process hands samples, in the order of training, to a node's ranks.

A sample is a record of fixed size, at the slot of its number modulo the capacity. The process that writes waits for the
slowest reader, and a reader waits for the record. Files are read and written by system calls, which order memory on
every processor. The writer holds a lock that the kernel releases with the process, so that readers never wait for one
that is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import DataError

HEADER_BYTES = 8192
_PRODUCED, _MESSAGE, _READERS = 0, 64, 4096
"""Offsets in the header: number of the next sample that is written, a message of the writer, and the first sample that
each reader still needs."""
_POLL_S = 0.002
"""Seconds between two looks at the header while waiting."""
_ALIVE_S = 0.5
"""Seconds of waiting between two looks whether the writer lives."""
_STARTED = -1
"""Value of the first number until the writer has its lock."""


@dataclass(frozen=True)
class Ring:
    """The file, opened by one process, with the shape of its records."""

    descriptor: int
    record_bytes: int
    capacity: int
    """Number of records that the file holds."""
    readers: int
    dtype: str = "uint8"
    """Type of the numbers in a record, for `ids`."""
    vocabulary: int = 0
    """Number of ids of the vocabulary, where the records are windows of text."""

    def clear(self, first: int) -> None:
        """Prepare a new file whose first sample will be `first`."""
        os.ftruncate(self.descriptor, HEADER_BYTES + self.capacity * self.record_bytes)
        for reader in range(self.readers):
            self.release(reader, first)
        self._put(_PRODUCED, _STARTED)

    # The writer

    def begin(self, first: int) -> None:
        """Take the writer's lock, and say that samples from `first` on will come."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1)
        self._put(_PRODUCED, first)

    def write(self, first: int, records: NDArray[Any]) -> None:
        """Write records, one a row, as the samples from `first` on; waits for the slowest reader."""
        rows = np.ascontiguousarray(records).view(np.uint8).reshape(len(records), self.record_bytes)
        while len(rows):
            needed = struct.unpack(f"<{self.readers}q", os.pread(self.descriptor, 8 * self.readers, _READERS))
            room = min(needed) + self.capacity - first
            count = min(len(rows), room, self.capacity - first % self.capacity)
            if count <= 0:
                time.sleep(_POLL_S)
                continue
            os.pwrite(self.descriptor, rows[:count].tobytes(), self._offset(first))
            first, rows = first + count, rows[count:]
            self._put(_PRODUCED, first)

    def fail(self, message: str) -> None:
        """Leave a message for the readers; the writer ends after it."""
        text = message.encode()[: _READERS - _MESSAGE - 2]
        os.pwrite(self.descriptor, struct.pack("<H", len(text)) + text, _MESSAGE)

    def abandon(self, first: int) -> None:
        """Tell the readers that the writer has ended, even if it never began."""
        if self._get(_PRODUCED) == _STARTED:
            self._put(_PRODUCED, first)

    # The readers

    def release(self, reader: int, below: int) -> None:
        """Say that a reader needs no sample below that number any more."""
        self._put(_READERS + 8 * reader, below)

    def read(self, index_B: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the records of some samples, shape `(B, record_bytes)`; waits until all are written.

        Raises `DataError` with the writer's message if it has ended without them.
        """
        last, looked = int(index_B.max()), time.monotonic()
        while self._get(_PRODUCED) <= last:
            time.sleep(_POLL_S)
            if time.monotonic() - looked > _ALIVE_S:
                looked = time.monotonic()
                self._require_writer(last)
        rows = b"".join(os.pread(self.descriptor, self.record_bytes, self._offset(index)) for index in index_B.tolist())
        return np.frombuffer(rows, np.uint8).reshape(len(index_B), self.record_bytes)

    def windows(self, index_B: NDArray[np.int64]) -> NDArray[Any]:
        """Return the token ids of some samples of text, shape `(B, width)`."""
        return self.read(index_B).view(self.dtype)

    def _require_writer(self, index: int) -> None:
        """Raise `DataError` if the writer has begun and has ended before that sample."""
        if self._get(_PRODUCED) == _STARTED:
            return
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1)
        except OSError:
            return
        with contextlib.suppress(OSError):
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1)
        if self._get(_PRODUCED) <= index:
            size = struct.unpack("<H", os.pread(self.descriptor, 2, _MESSAGE))[0]
            message = os.pread(self.descriptor, size, _MESSAGE + 2).decode(errors="replace")
            raise DataError(message or WRITER_LOST)

    def _offset(self, index: int) -> int:
        return HEADER_BYTES + index % self.capacity * self.record_bytes

    def _put(self, at: int, value: int) -> None:
        os.pwrite(self.descriptor, struct.pack("<q", value), at)

    def _get(self, at: int) -> int:
        return int(struct.unpack("<q", os.pread(self.descriptor, 8, at))[0])


WRITER_LOST = (
    "The process that streams the data ended unexpectedly; -9 in the log of rank 0 often means that memory ran out. "
    "Resume the run, if need be with a smaller shuffle_buffer."
)
