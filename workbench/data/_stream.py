"""Text as a stream of windows in the order of training, cut and shuffled while it is tokenised.

A stream is a sequence of *chunks*: `buffer` consecutive windows, in an order that is a function of the seed, the epoch
and the chunk. The state of a stream before a chunk is a small value from which the stream goes on exactly: a position
in the text before the chunk's first token, and the number of tokens before that position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.data._encoding import Encoder, encode_all
from workbench.data._sampling import shuffled_within
from workbench.data._text import Position, TextBlock, TextSource
from workbench.errors import DataError

Ids = NDArray[Any]


@dataclass(frozen=True)
class Chunk:
    """Some consecutive samples of a training."""

    first: int
    """Number of its first sample."""
    records: NDArray[Any]
    """One sample a row, in the order of training."""
    state: Mapping[str, Any] | None
    """State of the stream before this chunk, as JSON; None if the stream goes on from an earlier one."""


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


@dataclass(frozen=True)
class TextStream:
    """The windows of a text, `width` tokens each, in chunks of `buffer` windows."""

    source: TextSource
    encoder: Encoder
    width: int
    buffer: int
    seed: int
    held_out: tuple[tuple[int, int], ...]
    """First token and end of each segment of the text that is left out, ascending."""
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
        state = state or {"first": 0, "epoch": 0, "chunk": 0, "position": (), "tokens": 0}
        first, epoch, number = state["first"], state["epoch"], state["chunk"]
        marks = deque([(tuple(state["position"]), int(state["tokens"]))])
        """Positions after blocks, each with the tokens before it; the first is not after the next chunk's beginning."""
        waiting: list[Ids] = []
        drop = number * self.buffer * self.width - self._read_before(marks[0][1])
        """Tokens to come that belong to earlier chunks."""
        for block, encoded in encode_all(self._blocks(marks[0][0]), self.encoder, self.workers):
            is_last, tokens = not block.end, marks[-1][1]
            ids = encoded.after(tokens, self.encoder).ids
            is_read = np.ones(len(ids), np.bool_)
            for begin, end in self.held_out:
                is_read[max(0, begin - tokens) : max(0, end - tokens)] = False
            waiting.append(ids[is_read] if self.held_out else ids)
            marks.append((block.end, tokens + len(ids)))
            least = self.width * (1 if is_last else self.buffer)
            if sum(map(len, waiting)) - drop >= least:
                ready, drop = np.concatenate(waiting)[drop:], 0
                while len(ready) >= least:
                    while len(marks) > 1 and self._read_before(marks[1][1]) <= number * self.buffer * self.width:
                        marks.popleft()
                    count = min(self.buffer, len(ready) // self.width)
                    windows = ready[: count * self.width].reshape(count, self.width)
                    order = shuffled_within(self.seed, epoch, number, np.arange(count), count)
                    before = {"first": first, "epoch": epoch, "chunk": number}
                    yield Chunk(first, windows[order], {**before, "position": marks[0][0], "tokens": marks[0][1]})
                    first, number, ready = first + count, number + 1, ready[count * self.width :]
                waiting = [ready]
            if is_last and number == 0:
                raise DataError(
                    f"The text gives no window of {self.width} tokens. Give more text, or a shorter seq_len."
                )
            if is_last:
                epoch, number, waiting, drop, marks = epoch + 1, 0, [], 0, deque([((), 0)])

    def _read_before(self, token: int) -> int:
        """Return how many of the tokens before one training reads."""
        return token - sum(min(end, token) - begin for begin, end in self.held_out if begin < token)

    def _blocks(self, after: Position) -> Iterator[TextBlock]:
        """Yield the blocks of every epoch, each epoch followed by an empty block whose end is the beginning."""
        while True:
            yield from self.source.blocks(after)
            yield TextBlock((), False, 0, ())
            after = ()
