"""Text as a stream of windows in the order of training, cut and shuffled while it is tokenised.

A stream is a sequence of *chunks*: `buffer` consecutive windows, in an order that is a function of the seed, the epoch
and the chunk. The state of a stream before a chunk is a small value from which the stream goes on exactly: a position
in the text before the chunk's first token, and how many tokens to drop from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.data._encoding import Encoded, Encoder, encode_all
from workbench.data._sampling import shuffled_within
from workbench.data._split import HASHED_TOKENS, is_held_out
from workbench.data._text import LineBlock, Position, TextBlock, TextSource
from workbench.errors import DataError

Ids = NDArray[Any]
EVERYTHING, TRAINING, HELD_OUT = "everything", "training", "held out"
"""Documents that a stream passes on."""


@dataclass(frozen=True)
class Chunk:
    """Some consecutive samples of a training."""

    first: int
    """Number of its first sample."""
    records: NDArray[Any]
    """One sample a row, in the order of training."""
    state: Mapping[str, Any] | None
    """Value from which the stream goes on with this chunk, as JSON; None if it goes on with an earlier one."""


class SampleStream(Protocol):
    """A source of samples that are made one after the other."""

    @property
    def record_bytes(self) -> int:
        """Size of one sample in bytes."""

    @property
    def dtype(self) -> str:
        """Type of the numbers in a sample."""

    @property
    def buffer(self) -> int:
        """Largest number of samples in a chunk."""

    def chunks(self, state: Mapping[str, Any] | None) -> Iterator[Chunk]:
        """Yield chunks without end, from a state on; None is the beginning."""


@dataclass
class _Documents:
    """Passes on the documents of one side of the split; remembers what the next block needs to know."""

    wanted: str
    is_wanted: bool | None = None
    """Side of the document that is being read; None until enough of it is known."""
    beginning: Ids = field(default_factory=lambda: np.empty(0, np.int64))

    def feed(self, encoded: Encoded) -> list[Ids]:
        """Return the tokens of a block that are passed on, and those before it that waited for the decision."""
        if self.wanted == EVERYTHING:
            return [encoded.ids]
        passed: list[Ids] = []
        edges = [0, *encoded.starts.tolist(), len(encoded.ids)]
        for number, (begin, end) in enumerate(pairwise(edges)):
            if number:
                passed += self.end()
            passed += self._add(encoded.ids[begin:end])
        return passed

    def end(self) -> list[Ids]:
        """Return what waited for a decision when a document ends."""
        waited, was_decided = self.beginning, self.is_wanted is not None
        self.is_wanted, self.beginning = None, waited[:0]
        return [] if was_decided or not self._wants(waited) else [waited]

    def _add(self, ids: Ids) -> list[Ids]:
        if self.is_wanted is None:
            ids = np.concatenate([self.beginning.astype(ids.dtype), ids])
            if len(ids) < HASHED_TOKENS:
                self.beginning = ids
                return []
            self.is_wanted, self.beginning = self._wants(ids[:HASHED_TOKENS]), ids[:0]
        return [ids] if self.is_wanted else []

    def _wants(self, beginning: Ids) -> bool:
        return len(beginning) > 0 and is_held_out(beginning) == (self.wanted == HELD_OUT)


@dataclass(frozen=True)
class _Mark:
    """State of the stream after a block."""

    position: Position
    """Place in the text after the block."""
    passed: int
    """Tokens of the epoch that were passed on."""
    has_begun: bool
    """True if any token of the epoch was made."""
    is_wanted: bool | None = None
    beginning: tuple[int, ...] = ()


@dataclass(frozen=True)
class TextStream:
    """The windows of a text, `width` tokens each, in chunks of `buffer` windows."""

    source: TextSource
    encoder: Encoder
    width: int
    buffer: int
    seed: int
    wanted: str
    """Documents that are passed on: `EVERYTHING`, `TRAINING` or `HELD_OUT`."""
    workers: int

    @property
    def dtype(self) -> str:
        return self.encoder.dtype

    @property
    def record_bytes(self) -> int:
        return self.width * np.dtype(self.dtype).itemsize

    def chunks(self, state: Mapping[str, Any] | None = None) -> Iterator[Chunk]:
        """Yield chunks of windows, epoch after epoch.

        Raises `DataError` for text that cannot be read, or that gives no window.
        """
        state = state or {"first": 0, "epoch": 0, "chunk": 0, "mark": asdict(_Mark((), 0, False))}
        first, epoch, number = state["first"], state["epoch"], state["chunk"]
        cutter = _Cutter(self, _Mark(**{**state["mark"], "position": tuple(state["mark"]["position"])}), number)
        for block, encoded in encode_all(self._blocks(cutter.marks[0].position), self.encoder, self.workers):
            is_last = not block.end
            for windows, mark in cutter.feed(block, encoded, is_last):
                order = shuffled_within(self.seed, epoch, number, np.arange(len(windows)), len(windows))
                yield Chunk(first, windows[order], {"first": first, "epoch": epoch, "chunk": number, "mark": mark})
                first, number = first + len(windows), number + 1
            if is_last:
                if number == 0:
                    raise DataError(
                        f"The text gives no window of {self.width} tokens. Give more text, or a shorter seq_len.",
                        width=self.width,
                    )
                epoch, number, cutter = epoch + 1, 0, _Cutter(self, _Mark((), 0, False), 0)

    def passed(self) -> Iterator[Ids]:
        """Yield the tokens of one epoch that are passed on, in pieces; none of them may be left."""
        documents, has_begun = _Documents(self.wanted), False
        for _, encoded in encode_all(self.source.blocks(), self.encoder, self.workers):
            own = encoded if has_begun or self.encoder.end is None else encoded.without_first_end()
            has_begun = has_begun or len(encoded.ids) > 0
            yield from documents.feed(own)
        yield from documents.end()

    def _blocks(self, after: Position) -> Iterator[TextBlock]:
        """Yield the blocks of every epoch, each epoch followed by an empty block whose end is the beginning."""
        while True:
            yield from self.source.blocks(after)
            yield LineBlock((), False, 0, ())
            after = ()


class _Cutter:
    """Cuts the tokens of one epoch into chunks, and remembers where each begins."""

    def __init__(self, stream: TextStream, mark: _Mark, number: int) -> None:
        self._stream, self._size = stream, stream.buffer * stream.width
        self._documents = _Documents(stream.wanted, mark.is_wanted, np.asarray(mark.beginning, dtype=np.int64))
        self._has_begun = mark.has_begun
        self._begin = number * self._size
        self._waiting: list[Ids] = []
        self._passed = mark.passed
        self.marks = deque([mark])
        """States after blocks; the first is not after the beginning of the next chunk."""

    def feed(self, block: TextBlock, encoded: Encoded, is_last: bool) -> Iterator[tuple[NDArray[Any], dict[str, Any]]]:
        """Yield the chunks that a block completes, each with the mark from which it can be cut again."""
        if not self._has_begun and self._stream.encoder.end is not None and len(encoded.ids):
            encoded = encoded.without_first_end()
        self._has_begun = self._has_begun or len(encoded.ids) > 0
        for ids in [*self._documents.feed(encoded), *(self._documents.end() if is_last else ())]:
            self._waiting.append(ids[max(0, self._begin - self._passed) :])
            self._passed += len(ids)
        ready = np.concatenate(self._waiting) if self._is_complete(is_last) else None
        while ready is not None and len(ready) >= (self._stream.width if is_last else self._size):
            count = min(self._stream.buffer, len(ready) // self._stream.width)
            windows = ready[: count * self._stream.width].reshape(count, self._stream.width)
            yield windows, asdict(self._first_mark())
            ready = ready[count * self._stream.width :]
            self._begin += count * self._stream.width
        if ready is not None:
            self._waiting = [ready] if len(ready) else []
        documents = self._documents
        beginning = tuple(documents.beginning.tolist())
        self.marks.append(_Mark(block.end, self._passed, self._has_begun, documents.is_wanted, beginning))

    def _is_complete(self, is_last: bool) -> bool:
        return bool(self._waiting) and (is_last or self._passed >= self._begin + self._size)

    def _first_mark(self) -> _Mark:
        """Return the last mark that is not after the beginning of the chunk, and forget those before it."""
        while len(self.marks) > 1 and self.marks[1].passed <= self._begin:
            self.marks.popleft()
        return self.marks[0]
