"""Blocks of text become token ids, in child processes or in this one."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
from numpy.typing import NDArray

from workbench.data._child import Child, answers
from workbench.data._text import Paragraph, TextBlock
from workbench.data._tokenizer import TextTokenizer
from workbench.errors import DataError

I64 = NDArray[np.int64]

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
    starts: I64
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
    """Yield the blocks with their ids, in order.

    Zero workers mean this process, with the library's own threads. Raises `DataError` for text that cannot be read, and
    for a worker that was killed.
    """
    if workers == 0:
        tokenizer = encoder.load()
        yield from ((block, encode(block, tokenizer, encoder)) for block in blocks)
        return
    with contextlib.ExitStack() as stack:
        idle: queue.SimpleQueue[EncodingProcess] = queue.SimpleQueue()
        for _ in range(workers):
            idle.put(stack.enter_context(contextlib.closing(EncodingProcess(encoder))))

        def encode_by_any(block: TextBlock) -> Encoded:
            worker = idle.get()
            try:
                return worker.encode(block)
            finally:
                idle.put(worker)

        # The pool is left before the workers end, and so waits for the blocks that they have.
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        stack.callback(pool.shutdown, cancel_futures=True)
        waiting: deque[tuple[TextBlock, Future[Encoded]]] = deque()
        for block in blocks:
            waiting.append((block, pool.submit(encode_by_any, block)))
            while len(waiting) > workers * AHEAD or (waiting and waiting[0][1].done()):
                yield waiting[0][0], waiting.popleft()[1].result()
        yield from ((block, future.result()) for block, future in waiting)


class EncodingProcess:
    """A process that encodes one block after the other, until it is closed."""

    def __init__(self, encoder: Encoder) -> None:
        self._child = Child("workbench.data._encoding", {**os.environ, "TOKENIZERS_PARALLELISM": "false"})
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


def main() -> None:
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
