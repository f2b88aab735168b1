"""`ExperimentText`: a text as one experiment reads it, tokenised before the training or while it trains."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.data._datasets import StreamedDataset, TextDataset
from workbench.data._encoding import Encoder, EncodingProcess
from workbench.data._sampling import EVALUATION_SEED, MASKED_SHARE, SAMPLES, TokenSamples
from workbench.data._source import DataSource, Prepared, SampleRequest
from workbench.data._split import SplicedTokens, split, split_of_stream
from workbench.data._store import TokenStore
from workbench.data._stream import TextStream
from workbench.data._text import TextSource
from workbench.data._tokenizer import SpecialTokens, TextTokenizer
from workbench.data._tokens import SMALL_BYTES, TokensKey, encoder_of, is_tokenised, tokenised, vocabulary_folder
from workbench.errors import DataError
from workbench.machine import available_cores

DEFAULT_BUFFER = 4096
"""Samples among which a streamed text is shuffled."""
PASSES = 3
"""Measurements of the same excerpts; the fastest counts, because processes that share a core only slow one down."""
HANDING_ON = 1.2
"""Time of a stream over that of encoding its blocks alone: reading, cutting and handing the samples on take the rest.

Fitted to `benchmarks/data_supply.py` on one text and two idle cores, where one core needed 1.23 times the time and two
cores 1.34 times (`benchmarks/results/data_supply_encoding_alone_2cores.json`)."""


@dataclass(frozen=True)
class ExperimentText:
    """A text, and the experiment that decides which samples are made of it."""

    data: Any
    """`TextData` that describes it."""
    request: SampleRequest

    @cached_property
    def objective(self) -> str:
        return str(self.data._objective(self.request))

    @cached_property
    def key(self) -> TokensKey:
        data, tokenizer_type = self.data, self.data._tokenizer_type(self.request)
        accents = tokenizer_type == "wordpiece" and data.strip_accents
        return TokensKey(
            data._fingerprint(), tokenizer_type, data.vocab_size, tokenizer=data.tokenizer, strip_accents=accents
        )

    @cached_property
    def tokens(self) -> SpecialTokens:
        """Special tokens of the tokeniser; one is trained if there is none."""
        return SpecialTokens.of_folder(self.tokenizer_folder())

    @property
    def width(self) -> int:
        """Tokens of the text in one sample."""
        return SAMPLES[self.objective].width_of(self.request.seq_len, self.tokens, self.data.masked_share)

    @property
    def has_own_split(self) -> bool:
        """True if evaluations read a part of this text."""
        return self.request.evaluation is not None and self.request.eval_data is None

    def prepare(self, progress: bool, workers: int | None = None) -> Prepared:
        """Do what `DataSource.prepare` says."""
        if self.data.streaming:
            return self._prepare_stream(progress)
        store, reused = self.store(progress, workers)
        self._require_a_sequence(store, self.width)
        text = self._trained_on()
        if self.request.eval_data is not None:
            self.request.eval_data.held_out(self.request, self.data)
        return Prepared(
            name=self.data.name,
            samples=text.tokens // self.width,
            tokens=store.tokens,
            documents=store.documents,
            vocabulary=store.vocabulary,
            folder=store.folder,
            seconds=store.seconds,
            reused=reused,
        )

    def store(self, progress: bool = False, workers: int | None = None) -> tuple[TokenStore, bool]:
        """Return the tokenised text, and True if it came from the cache."""
        return tokenised(self.key, self.data.name, self.data._source, progress, workers)

    def tokenizer_folder(self, progress: bool = False) -> Path:
        """Return the folder that holds the tokeniser of the text, after training one if there is none."""
        if self.data.streaming:
            return vocabulary_folder(self.key, self.data._source, progress)
        return self.store(progress)[0].folder

    def dataset(self) -> TextDataset | StreamedDataset:
        """Return the samples of the training in order."""
        length = self.request.total_samples
        if not self.data.streaming:
            self.prepare(progress=False)
            return TextDataset(self._samples(self._trained_on(), buffer=self.data.shuffle_buffer), length)
        stream = self.stream()
        values: tuple[Any, ...] = (
            self.width,
            stream.buffer,
            stream.seed,
            stream.held_out,
            self.objective,
            self.data.masked_share,
        )
        values += (True,) if self.data.whole_words else ()
        identity = hashlib.sha256(repr((self.key.folder.name, *values)).encode()).hexdigest()
        vocabulary = encoder_of(stream.encoder.folder, self.key.tokenizer_type)[1]
        samples = self._samples  # a value of its own: the lambda travels to other processes without the experiment
        return StreamedDataset(stream, length, identity, lambda ring: TextDataset(samples(ring), length), vocabulary)

    def stream(self) -> TextStream:
        """Return the windows that training reads, as a stream."""
        source = self.data._source()
        encoder, _ = encoder_of(self.tokenizer_folder(), self.key.tokenizer_type)
        held_out: tuple[tuple[int, int], ...] = ()
        if self.has_own_split:
            part = self._parts()[1]
            held_out = tuple(zip(part.starts.tolist(), part.ends.tolist(), strict=True))
        workers = 0 if source.text_bytes <= SMALL_BYTES else available_cores()
        return TextStream(source, encoder, self.width, self._buffer, self.request.seed, held_out, workers)

    def held_out(self, trained_on: DataSource | None = None) -> TextDataset:
        """Return the held-out samples, spread evenly over the part of the text, or over another text."""
        request = self.request
        assert request.evaluation is not None
        trained = self if trained_on is None else ExperimentText(trained_on, request)
        if trained_on is None:
            text: TokenStore | SplicedTokens = self._parts()[1]
        else:
            if self.data.streaming:
                raise DataError(
                    f"{self.data.name} is eval_data, which is read whole and not streamed. Remove streaming=True."
                )
            folder, tokenizer_type = trained.tokenizer_folder(), trained.key.tokenizer_type
            key = TokensKey(self.data._fingerprint(), tokenizer_type, trained.data.vocab_size, tokenizer_of=folder)
            text = tokenised(key, self.data.name, self.data._source, progress=False)[0]
            self._require_a_sequence(text, trained.width)
        count = min(request.evaluation.samples, text.tokens // trained.width)
        samples = trained._samples(text, seed=EVALUATION_SEED, masked_share=trained.held_out_share, in_order=count)
        return TextDataset(samples, count)

    @property
    def held_out_share(self) -> float:
        """Fraction of the positions that a held-out sample hides."""
        assert self.request.evaluation is not None
        if self.objective == "seq2seq":  # whose shapes depend on it
            return float(self.data.masked_share)
        return self.request.evaluation.masked_share or MASKED_SHARE

    @property
    def _buffer(self) -> int:
        return int(self.data.shuffle_buffer or DEFAULT_BUFFER)

    @property
    def _samples(self) -> functools.partial[TokenSamples]:
        """Samples of the training, made from a text."""
        return functools.partial(
            SAMPLES[self.objective],
            seq_len=self.request.seq_len,
            seed=self.request.seed,
            tokens=self.tokens,
            masked_share=self.data.masked_share,
            joints=TextTokenizer.of_folder(self.tokenizer_folder()).joints() if self.data.whole_words else None,
        )

    def _trained_on(self) -> TokenStore | SplicedTokens:
        """Return the text that training reads: all of it, unless a part is held out."""
        return self._parts()[0] if self.has_own_split else self.store()[0]

    def _parts(self, progress: bool = False) -> tuple[SplicedTokens, SplicedTokens]:
        """Return the text for training and the held-out text; raise `DataError` if either is too small."""
        assert self.request.evaluation is not None
        samples = self.request.evaluation.samples
        if not self.data.streaming and self.data.shuffle_buffer is None:
            return split(self.store(progress)[0], self.data.name, samples, self.width)
        return split_of_stream(lambda first: self._beginning(first, progress), self.data.name, samples, self.width)

    def _beginning(self, first: int, progress: bool) -> TokenStore:
        """Return the tokenised text, or of a streamed one that is not stored more than its `first` tokens."""
        if not self.data.streaming or is_tokenised(self.key):
            return self.store(progress)[0]
        key = replace(self.key, first=first, tokenizer_of=self.tokenizer_folder(progress))
        return tokenised(key, self.data.name, self.data._source, progress)[0]

    def _prepare_stream(self, progress: bool) -> Prepared:
        """Make the vocabulary and the held-out samples; count samples exactly if the text is small or also stored."""
        source = self.data._source()
        samples = None
        if source.text_bytes <= SMALL_BYTES or is_tokenised(self.key):
            stored = replace(self.data, streaming=False, shuffle_buffer=self._buffer)
            samples = ExperimentText(stored, self.request).prepare(progress).samples
        folder = self.tokenizer_folder(progress)
        encoder, vocabulary = encoder_of(folder, self.key.tokenizer_type)
        tokens, tokens_per_core_s = _tokenizing_rate(self.key.folder, self.data._source, encoder)
        held_out = self._parts(progress)[1].tokens if self.has_own_split else 0
        return Prepared(
            name=self.data.name,
            samples=max(1, (tokens - held_out) // self.width) if samples is None else samples,
            tokens=tokens,
            vocabulary=vocabulary,
            folder=folder,
            streamed=True,
            tokens_per_core_s=tokens_per_core_s,
        )

    def _require_a_sequence(self, store: TokenStore, width: int) -> None:
        """Raise `DataError` if the text is shorter than one sequence, of which `width` tokens are text."""
        if store.tokens < width:
            raise DataError(
                f"{self.data.name} holds {store.tokens} tokens, fewer than the {width} of one sequence "
                f"(seq_len={self.request.seq_len}). Give more text, or a shorter seq_len."
            )


@functools.lru_cache(maxsize=64)
def _tokenizing_rate(folder: Path, open: Callable[[], TextSource], encoder: Encoder) -> tuple[int, float]:  # noqa: ARG001
    """Return the tokens of a text, about, and how many a core makes in a second; measured once on its excerpts."""
    excerpts, share = open().excerpts()
    with contextlib.closing(EncodingProcess(encoder)) as worker:
        ids = worker.encode(excerpts).ids  # the first time loads the library
        seconds = []
        for _ in range(PASSES):
            begun = worker.cpu_seconds() + time.thread_time()
            worker.encode(excerpts)
            seconds.append(worker.cpu_seconds() + time.thread_time() - begun)
    return round(len(ids) / share), len(ids) / max(HANDING_ON * min(seconds), 1e-6)
