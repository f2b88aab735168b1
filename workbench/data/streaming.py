"""Processes that tokenise text and hand samples to the ranks: encoders, streams, the ring and its feeder.

Child processes encode blocks of text (`encode_all`), for a text that is stored and for one that is streamed. A stream
(`SampleStream`) makes the samples of a training one after the other. One process for each node (`Feeder`) runs it and
hands its samples, through a file of bounded size (`Ring`), to all ranks of the node. A mixture of streams is a stream
(`MixedStream`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
import psutil
from numpy.typing import NDArray

from workbench.base.errors import DataError, in_words
from workbench.base.user_code import pickled
from workbench.data.sampling import MixedOrder, shuffled_within
from workbench.data.text import Paragraph, Position, TextBlock, TextSource
from workbench.data.tokenizer import TextTokenizer

# A child process that reads its input and writes answers to its output. It is neither a fork nor a `multiprocessing`
# child, so that it neither copies this process nor repeats the user's script. It ends when its input does, which the
# kernel closes even if this process was killed.


class Child:
    """The process, seen from the one that started it."""

    def __init__(
        self, work: Callable[[], None], environment: Mapping[str, str], descriptors: Sequence[int] = ()
    ) -> None:
        """Start a function of a module, which begins with `answers`; it inherits the open files `descriptors`."""
        root = str(Path(__file__).resolve().parents[2])
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {work.__module__} import {work.__name__} as work; work()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
            env={**environment, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])},
        )
        self.input, self.output = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)

    def end(self) -> None:
        """End the process, and wait for its end; its last answers can still be read."""
        with contextlib.suppress(OSError):
            self.input.close()
        self.process.kill()
        self.process.wait()


def answers() -> IO[bytes]:
    """Return the file for the answers of this process, a child, and send to its log what libraries print."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process.
    file = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return file


# Blocks of text become token ids, in child processes or in this one.

CHUNK_CHARACTERS = 1 << 18
"""Characters tokenised at once; each occupies about a hundred bytes of the library's objects."""
AHEAD = 2
"""Blocks per worker that are read before the first of them must be done."""


@dataclass(frozen=True)
class Encoder:
    """A tokeniser in a folder, and the values that decide which ids a block of text becomes."""

    folder: Path
    dtype: str
    """Type of the ids, `uint16` or `uint32`."""
    end: int | None = None
    """Id that ends each document; None for masked models, whose samples have an end of their own."""
    begin: int | None = None
    """Id that begins each document."""
    line_breaks: bool = False
    """True if a line break stands between the paragraphs of a document."""

    def load(self) -> TextTokenizer:
        return TextTokenizer.of_folder(self.folder).for_text()


@dataclass(frozen=True)
class Encoded:
    """Token ids of a block."""

    ids: NDArray[Any]
    starts: NDArray[np.int64]
    """Offsets in `ids` at which documents begin."""

    def after(self, tokens: int, encoder: Encoder) -> Encoded:
        """Return the block as it follows so many tokens: without the end of the document before if there is none."""
        if tokens or encoder.end is None or not len(self.ids):
            return self
        return Encoded(self.ids[1:], self.starts - 1)


def encode(block: TextBlock, tokenizer: TextTokenizer, encoder: Encoder) -> Encoded:
    """Return the ids of a block; raise `DataError` for bytes that are no text.

    The token that ends a document stands here before the document that follows it.
    """
    arrays: list[NDArray[Any]] = []
    starts: list[int] = []
    total, before = 0, "\n" if encoder.line_breaks else ""
    for chunk in _chunks(block.paragraphs()):
        texts = [text if starts_document else before + text for starts_document, text in chunk]
        ids: list[int] = []
        begun = total
        for (starts_document, _), encoded in zip(chunk, tokenizer.batch(texts), strict=True):
            if starts_document:
                if encoder.end is not None:
                    ids.append(encoder.end)
                starts.append(begun + len(ids))
                if encoder.begin is not None:
                    ids.append(encoder.begin)
            ids += encoded
        total += len(ids)
        arrays.append(np.asarray(ids, dtype=encoder.dtype))
    return Encoded(np.concatenate([np.empty(0, encoder.dtype), *arrays]), np.unique(np.asarray(starts, dtype=np.int64)))


def _chunks(paragraphs: Iterable[Paragraph]) -> Iterator[list[Paragraph]]:
    chunk: list[Paragraph] = []
    characters = 0
    for paragraph in paragraphs:
        chunk.append(paragraph)
        characters += len(paragraph[1])
        if characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def encode_all(blocks: Iterable[TextBlock], encoder: Encoder, workers: int) -> Iterator[tuple[TextBlock, Encoded]]:
    """Yield the blocks with their ids, in order, which so many processes encode (`Encoders`)."""
    with contextlib.closing(Encoders(encoder, workers)) as encoders:
        yield from encoders.encode(blocks)


class Encoders:
    """Processes that encode the blocks of one text, or of several with one tokeniser, until they are closed.

    Zero processes mean this one, with the library's own threads.
    """

    def __init__(self, encoder: Encoder, workers: int) -> None:
        self._encoder, self._workers, self._stack = encoder, workers, contextlib.ExitStack()
        if workers:
            self._idle: queue.SimpleQueue[EncodingProcess] = queue.SimpleQueue()
            with contextlib.ExitStack() as started:
                for _ in range(workers):
                    self._idle.put(started.enter_context(contextlib.closing(EncodingProcess(encoder))))
                self._stack = started.pop_all()
            # The pool is left before the processes end, and so waits for the blocks that they have.
            self._pool = self._stack.enter_context(ThreadPoolExecutor(workers))
            self._stack.callback(self._pool.shutdown, cancel_futures=True)

    def close(self) -> None:
        """End the processes."""
        self._stack.close()

    def encode(self, blocks: Iterable[TextBlock]) -> Iterator[tuple[TextBlock, Encoded]]:
        """Yield the blocks of one text with their ids, in order.

        Raises `DataError` for text that cannot be read, and for a process that was killed.
        """
        if self._workers == 0:
            tokenizer = self._encoder.load()
            yield from ((block, encode(block, tokenizer, self._encoder)) for block in blocks)
            return
        waiting: deque[tuple[TextBlock, Future[Encoded]]] = deque()
        for block in blocks:
            waiting.append((block, self._pool.submit(self._encode_by_any, block)))
            while len(waiting) > self._workers * AHEAD or (waiting and waiting[0][1].done()):
                yield waiting[0][0], waiting.popleft()[1].result()
        yield from ((block, future.result()) for block, future in waiting)

    def _encode_by_any(self, block: TextBlock) -> Encoded:
        worker = self._idle.get()
        try:
            return worker.encode(block)
        finally:
            self._idle.put(worker)


class EncodingProcess:
    """A process that encodes one block after the other, until it is closed."""

    def __init__(self, encoder: Encoder) -> None:
        self._child = Child(encode_blocks, {**os.environ, "TOKENIZERS_PARALLELISM": "false"})
        self._send(encoder)

    def close(self) -> None:
        """End the process."""
        self._child.end()
        self._child.output.close()

    def encode(self, block: TextBlock) -> Encoded:
        """Return the ids of a block; raise `DataError` for bytes that are no text, or if the process was killed."""
        try:
            self._send(block)
            answer = pickle.load(self._child.output)
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self._child.process.wait()
            raise DataError(
                f"A process that tokenises ended unexpectedly (exit code {code}; -9 often means that memory ran out). "
                "What is done is kept. Run it again with fewer processes: wb.runs.tokenize(experiment, workers=1)."
            ) from None
        if isinstance(answer, DataError):
            raise answer
        return cast(Encoded, answer)

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has used."""
        times = psutil.Process(self._child.process.pid).cpu_times()
        return float(times.user + times.system)

    def _send(self, value: Any) -> None:
        pickle.dump(value, self._child.input, protocol=pickle.HIGHEST_PROTOCOL)
        self._child.input.flush()


def encode_blocks() -> None:
    """Encode the blocks that come after an encoder on standard input, until it ends."""
    file = answers()
    with contextlib.suppress(EOFError, BrokenPipeError):
        encoder: Encoder = pickle.load(sys.stdin.buffer)
        tokenizer = encoder.load()
        while True:
            block = pickle.load(sys.stdin.buffer)
            try:
                answer: Any = encode(block, tokenizer, encoder)
            except DataError as error:
                answer = error
            pickle.dump(answer, file, protocol=pickle.HIGHEST_PROTOCOL)
            file.flush()


# A stream is a sequence of chunks: `buffer` consecutive windows of the text, in an order that is a function of the
# seed, the epoch and the chunk. The state of a stream before a chunk is a small value from which the stream goes on
# exactly: a position in the text before the chunk's first token, and the number of tokens before that position.


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
    name: str = "The text"

    @property
    def dtype(self) -> str:
        return self.encoder.dtype

    @property
    def record_bytes(self) -> int:
        return self.width * np.dtype(self.dtype).itemsize

    def chunks(self, state: Mapping[str, Any] | None = None, encoders: Encoders | None = None) -> Iterator[Chunk]:
        """Yield chunks of windows, epoch after epoch, which `encoders` encode, or processes of this text alone.

        Raises `DataError` for text that cannot be read, or that gives no window.
        """
        state = state or {"first": 0, "epoch": 0, "chunk": 0, "position": (), "tokens": 0}
        first, epoch, number = state["first"], state["epoch"], state["chunk"]
        marks = deque([(tuple(state["position"]), int(state["tokens"]))])
        """Positions after blocks, each with the tokens before it; the first is not after the next chunk's beginning."""
        waiting: list[NDArray[Any]] = []
        drop = number * self.buffer * self.width - self._read_before(marks[0][1])
        """Tokens to come that belong to earlier chunks."""
        last_id = -1
        blocks = self._blocks(marks[0][0])
        every = encode_all(blocks, self.encoder, self.workers) if encoders is None else encoders.encode(blocks)
        for block, encoded in every:
            is_last, tokens = not block.end, marks[-1][1]
            ids = encoded.after(tokens, self.encoder).ids
            if is_last and tokens and self.encoder.end not in (None, last_id):  # the last document ends, too
                ids = np.asarray([self.encoder.end], self.dtype)
            last_id = int(ids[-1]) if len(ids) else last_id
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
                    f"{self.name} gives no window of {self.width} tokens. Give more text, or a shorter seq_len."
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


# Streams of several sources are one stream in the order of a mixture. Each source is read in its own chunks and its own
# order, as if training read it alone. A chunk of the mixture ends where a source has no sample at hand.


@dataclass(frozen=True)
class MixedStream:
    """The samples of several sources, in the order of a mixture.

    The record of a source that is read by its index (None among the `streams`) is empty.
    """

    streams: tuple[SampleStream | None, ...]
    order: MixedOrder

    @property
    def _streamed(self) -> list[SampleStream]:
        return [stream for stream in self.streams if stream is not None]

    @property
    def record_bytes(self) -> int:
        return self._streamed[0].record_bytes

    @property
    def dtype(self) -> str:
        return self._streamed[0].dtype

    @property
    def buffer(self) -> int:
        """Largest number of samples in a chunk: all sources may need their next chunk at once."""
        return sum(stream.buffer for stream in self._streamed)

    def chunks(self, state: Mapping[str, Any] | None = None) -> Iterator[Chunk]:
        """Yield chunks without end; raise `DataError` for a source that cannot be read or gives no sample."""
        first, states = (state["first"], list(state["sources"])) if state else (0, [None] * len(self.streams))
        texts = [stream for stream in self._streamed if isinstance(stream, TextStream)]
        with contextlib.ExitStack() as stack:
            encoders = None
            if texts:  # which have one tokeniser
                encoders = stack.enter_context(
                    contextlib.closing(Encoders(texts[0].encoder, max(text.workers for text in texts)))
                )
            sources = [
                stream.chunks(own, encoders) if isinstance(stream, TextStream) else stream and stream.chunks(own)
                for stream, own in zip(self.streams, states, strict=True)
            ]
            read: list[Chunk | None] = [None] * len(sources)
            ends = self.order.given(first).tolist()
            """Number of the first sample of each source that is not at hand."""
            while True:
                [part], [number] = self.order.of(np.asarray([first]))
                while (source := sources[part]) is not None and ends[part] <= number:
                    read[part] = chunk = next(source)
                    ends[part], states[part] = chunk.first + len(chunk.records), chunk.state or states[part]
                missing = [
                    int(self.order.places(part, np.asarray([ends[part]]))[0])
                    for part, source in enumerate(sources)
                    if source is not None
                ]
                index = np.arange(first, min(first + self.buffer, *missing))
                part_B, number_B = self.order.of(index)
                records = np.zeros((len(index), self.record_bytes // np.dtype(self.dtype).itemsize), self.dtype)
                for part, held in enumerate(read):
                    if held is not None:
                        of_part = part_B == part
                        records[of_part] = held.records[number_B[of_part] - held.first]
                yield Chunk(first, records, {"first": first, "sources": list(states)})
                first += len(index)


# The ring: a sample is a record of fixed size, at the slot of its number modulo the capacity. The process that writes
# waits for the slowest reader, and a reader waits for the record. Files are read and written by system calls, which
# order memory on every processor. The writer holds a lock that the kernel releases with the process, so that readers
# never wait for one that is gone.

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
            if time.monotonic() - looked <= _ALIVE_S or self._get(_PRODUCED) == _STARTED:
                continue
            looked = time.monotonic()
            try:  # the writer's lock, which is free only if it has ended
                fcntl.lockf(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1)
            except OSError:
                continue
            with contextlib.suppress(OSError):
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1)
            if self._get(_PRODUCED) <= last:
                size = struct.unpack("<H", os.pread(self.descriptor, 2, _MESSAGE))[0]
                message = os.pread(self.descriptor, size, _MESSAGE + 2).decode(errors="replace")
                raise DataError(message or WRITER_LOST)
        rows = b"".join(os.pread(self.descriptor, self.record_bytes, self._offset(index)) for index in index_B.tolist())
        return np.frombuffer(rows, np.uint8).reshape(len(index_B), self.record_bytes)

    def windows(self, index_B: NDArray[np.int64]) -> NDArray[Any]:
        """Return the token ids of some samples of text, shape `(B, width)`."""
        return self.read(index_B).view(self.dtype)

    def _offset(self, index: int) -> int:
        return HEADER_BYTES + index % self.capacity * self.record_bytes

    def _put(self, at: int, value: int) -> None:
        os.pwrite(self.descriptor, struct.pack("<q", value), at)

    def _get(self, at: int) -> int:
        return int(struct.unpack("<q", os.pread(self.descriptor, 8, at))[0])


@dataclass(frozen=True)
class SourceRing(Ring):
    """The samples of one source of a mixture in the ring of all, by their numbers in that source."""

    order: MixedOrder | None = None
    source: int = 0

    def read(self, index_B: NDArray[np.int64]) -> NDArray[np.uint8]:
        assert self.order is not None
        return super().read(self.order.places(self.source, index_B))


WRITER_LOST = (
    "The process that streams the data ended unexpectedly; -9 in the log of rank 0 often means that memory ran out. "
    "Resume the run, if need be with a smaller shuffle_buffer."
)


# The feeder is a process of its own, so that tokenising takes no time from a rank.

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
        self._child = Child(feed_ring, others, [ring.descriptor])
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


def feed_ring() -> None:
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
