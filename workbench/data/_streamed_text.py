"""`StreamedText`: the parts of a text that is tokenised while training reads it, and what is known of it before."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.data._sampling import EVALUATION_SEED, SAMPLES
from workbench.data._source import Prepared
from workbench.data._split import HELD_OUT_SHARE, none_held_out
from workbench.data._stream import EVERYTHING, HELD_OUT, TRAINING, Ids, TextStream
from workbench.data._text import TextSource
from workbench.data._tokenizing_rate import TokenizingRate, tokenizing_rate
from workbench.data._tokens import SMALL_BYTES, TokensKey, encoder_of, held_out_of_stream, vocabulary_folder
from workbench.machine import available_cores

if TYPE_CHECKING:
    from workbench.data._datasets import StreamedDataset, TextDataset


@dataclass(frozen=True)
class StreamedText:
    """A text, and the values of an experiment that decide which samples are made of it."""

    name: str
    key: TokensKey
    open: Callable[[], TextSource]
    objective: str
    seq_len: int
    seed: int
    masked_share: float
    buffer: int
    held_out_samples: int | None
    """Samples of the text's own held-out part that evaluations read; None if training reads everything."""

    @property
    def width(self) -> int:
        """Tokens of the text in one sample."""
        return self.seq_len - SAMPLES[self.objective].SPECIAL_POSITIONS

    def vocabulary(self, progress: bool) -> Path:
        """Return the folder of the tokeniser, after training one if there is none."""
        return vocabulary_folder(self.key, self.open, progress)

    def stream(self, wanted: str) -> TextStream:
        """Return the stream of some documents of the text."""
        source = self.open()
        encoder, _ = encoder_of(self.vocabulary(progress=False), self.key.tokenizer_type)
        workers = 0 if source.text_bytes <= SMALL_BYTES else available_cores()
        return TextStream(source, encoder, self.width, self.buffer, self.seed, wanted, workers)

    def prepare(self, samples: int | None, progress: bool) -> Prepared:
        """Make the vocabulary and the held-out samples; `samples` is the number of samples if it is known exactly."""
        folder = self.vocabulary(progress)
        if self.held_out_samples is not None:
            self.held_out(self.held_out_samples, progress)
        rate = self.rate()
        share = 1.0 if self.held_out_samples is None else 1 - HELD_OUT_SHARE
        return Prepared(
            name=self.name,
            samples=max(1, int(rate.tokens * share) // self.width) if samples is None else samples,
            tokens=rate.tokens,
            vocabulary=encoder_of(folder, self.key.tokenizer_type)[1],
            folder=folder,
            streamed=True,
            tokens_per_core_s=rate.tokens_per_core_s,
        )

    def rate(self) -> TokenizingRate:
        """Return how many tokens the text has, about, and how fast a core makes them."""
        encoder, _ = encoder_of(self.vocabulary(progress=False), self.key.tokenizer_type)
        return tokenizing_rate(self.key.folder, self.open, encoder)

    def held_out(self, samples: int, progress: bool) -> TextDataset:
        """Return the first held-out samples of the text, in its order."""
        from workbench.data._datasets import TextDataset

        def read() -> Iterator[Ids]:
            return self.stream(HELD_OUT).passed()

        folder = self.vocabulary(progress)
        store = held_out_of_stream(self.key, self.name, folder, samples * self.width, read, progress)
        count = min(samples, store.tokens // self.width)
        if count == 0:
            raise none_held_out(self.name, tokens=store.tokens)
        return TextDataset(SAMPLES[self.objective](store, self.seq_len, EVALUATION_SEED, buffer=1), count)

    def dataset(self, length: int) -> StreamedDataset:
        """Return the samples of a training, which a process makes while it reads them."""
        from workbench.data._datasets import StreamedDataset, TextDataset

        stream = self.stream(EVERYTHING if self.held_out_samples is None else TRAINING)
        vocabulary = encoder_of(stream.encoder.file.parent, self.key.tokenizer_type)[1]
        parts = (self.key.folder.name, self.width, self.buffer, self.seed, stream.wanted, self.objective)
        identity = hashlib.sha256(repr((*parts, self.masked_share)).encode()).hexdigest()
        samples = functools.partial(
            SAMPLES[self.objective], seq_len=self.seq_len, seed=self.seed, masked_share=self.masked_share
        )
        return StreamedDataset(stream, length, identity, lambda ring: TextDataset(samples(ring), length), vocabulary)
