"""Tokenise a text once for all experiments that read it, or while an experiment trains (`TextReading`).

A vocabulary is trained on the text unless it comes with one, and its token ids are stored in the cache. One folder for
each (text, tokeniser, vocabulary size) holds them, as `store.py` describes. Processes that want the same one wait for
the first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from workbench.base.display import waiting
from workbench.base.errors import DataError
from workbench.base.machine import available_cores, cache_home
from workbench.base.tensors import TensorSpec
from workbench.base.units import count as count_text
from workbench.data.datasets import StreamedDataset, TextDataset
from workbench.data.duplicates import by_label, document_hashes, groups_of, joined, overlap_in_words
from workbench.data.sampling import (
    EVALUATION_SEED,
    MASKED_SHARE,
    SAMPLES,
    SEPARATE_SAMPLES,
    EncodedPrompts,
    SpanSamples,
    TokenSamples,
    encoded_prompts,
)
from workbench.data.source import Prepared, Reading, SampleRequest
from workbench.data.store import (
    I64,
    TOKENIZER_FACTS,
    PartialTokens,
    SplicedTokens,
    Split,
    TokenStore,
    can_go_on,
    document_runs,
    dtype_of,
    only_process,
    opened,
    split,
    split_by_groups,
    split_of_stream,
    tokenizer_files,
    write_facts,
)
from workbench.data.streaming import Encoder, EncodingProcess, TextStream, encode_all
from workbench.data.text import SMALLEST_VOCABULARY, TOKENIZER_OF_OBJECTIVE, Advance, TextSource
from workbench.data.tokenizer import (
    SpecialTokens,
    TextTokenizer,
    digest_of,
    folder_of,
    other_tokens,
    special_tokens_of,
    train_byte_level_bpe,
    train_wordpiece,
)

FORMAT = 5
"""Version of the folder's format; part of its name."""
SMALL_BYTES = 8 << 20
"""Size of a text up to which a stream needs no worker processes."""
STORED_WITHOUT_WORKERS = 16 << 20
"""Size of a text up to which starting worker processes does not pay where it is stored.

On two busy cores, 12 MB took 5.3 s of processor time without and 5.9 s with them."""
SHORTEST_SEQUENCE = 8
"""Shortest sequence that a sample of text has room in."""
TRAINING_BYTES = 64 << 20
"""Approximate size of the sample, taken evenly from the text, on which a vocabulary is trained."""


@dataclass(frozen=True)
class TokensKey:
    """The values that decide how a text is tokenised."""

    fingerprint: str
    """Key of the text's content, from `TextSource.fingerprint`."""
    tokenizer_type: str
    """`wordpiece`, `bpe` or `span_bpe`: what is trained, and how documents are separated."""
    vocab_size: int
    tokenizer_of: Path | None = None
    """Folder of another text whose tokeniser is used; None trains one on the text itself."""
    tokenizer: str | None = None
    """File or folder with the tokeniser to use; then none is trained."""
    strip_accents: bool = False
    """True if the WordPiece that is trained strips accents."""
    is_framed: bool = False
    """True if special tokens stand around each document of a masked model, and not around each sample."""
    first: int | None = None
    """Tokenise until there are more tokens than that; None tokenises the whole text."""

    @property
    def folder(self) -> Path:
        """Folder of the cache that holds the tokens."""
        key = f"{FORMAT} {self.fingerprint} {self.tokenizer_type} {self.vocab_size} {self.first}"
        if self.tokenizer_of is not None:
            key += f" {self.tokenizer_of.name.partition('.')[0]}"
        elif self.tokenizer is not None:
            key += f" file {digest_of(self.tokenizer)}"
        elif self.strip_accents:
            key += " without accents"
        key += " framed" * self.is_framed
        return cache_home() / "tokens" / hashlib.sha256(key.encode()).hexdigest()[:16]


def tokenised(
    key: TokensKey, name: str, source: Callable[[], TextSource], progress: bool, workers: int | None = None
) -> tuple[TokenStore, bool]:
    """Return the tokens of a text, and True if they were in the cache; tokenise the text if not.

    `source` is called only if there is work to do. Several processes may ask at once: one works, with `workers`
    processes (one per core by default), and the others wait. Work that was killed goes on where it stopped.
    """
    folder = key.folder
    if (store := opened(folder)) is not None:
        return store, True
    with only_process(folder):
        if (store := opened(folder)) is not None:
            return store, True
        part = folder.with_name(f"{folder.name}.part")
        part.mkdir(exist_ok=True)
        try:
            _fill(part, key, name, source(), progress, workers)
        except DataError as error:
            if "line" in error.facts:  # The text must change, and then has another folder.
                shutil.rmtree(part, ignore_errors=True)
            raise
        if folder.exists():  # Its files are damaged: processes that have them open keep what they opened.
            shutil.rmtree(folder)
        part.rename(folder)
    store = opened(folder)
    assert store is not None
    return store, False


def vocabulary_folder(key: TokensKey, source: Callable[[], TextSource], progress: bool) -> Path:
    """Return a folder that holds the tokeniser of a text: that of its tokens, or one made without them."""
    if key.tokenizer is not None:
        return folder_of(key.tokenizer)
    if opened(key.folder) is not None:
        return key.folder
    folder = key.folder.with_name(f"{key.folder.name}.vocabulary")
    with only_process(folder):
        if not (folder / TOKENIZER_FACTS).is_file():
            part = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            _write_tokenizer(part, key, source(), progress)
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
    return folder


def encoder_of(folder: Path, key: TokensKey) -> tuple[Encoder, int]:
    """Return the encoder with the tokeniser in a folder, and the number of its ids."""
    tokens = SpecialTokens.of_folder(folder)
    begin, end = tokens.begin, tokens.end
    if key.tokenizer_type == "wordpiece":  # the special tokens of masked models frame samples, or else documents
        [begin], [end] = (tokens.prefix, tokens.suffix) if key.is_framed else ([None], [None])
    return Encoder(
        folder, np.dtype(dtype_of(tokens.vocabulary)).name, end, begin, tokens.line_breaks
    ), tokens.vocabulary


def is_tokenised(key: TokensKey) -> bool:
    """Return True if the cache holds the tokens."""
    return opened(key.folder) is not None


def _fill(part: Path, key: TokensKey, name: str, source: TextSource, progress: bool, workers: int | None) -> None:
    """Train a vocabulary on the text, unless that is done; tokenise what is left of it; write the facts."""
    begun = time.monotonic()
    if not can_go_on(part):
        shutil.rmtree(part)
        part.mkdir()
        _write_tokenizer(part, key, source, progress)
    encoder, vocabulary = encoder_of(part, key)
    if workers is None:
        workers = 0 if source.text_bytes <= STORED_WITHOUT_WORKERS else available_cores()
    with PartialTokens(part, encoder.dtype) as tokens:
        begun -= tokens.seconds
        blocks = source.blocks(tokens.position)
        with _bar("Tokenising", source.size, source.unit, progress, tokens.advance) as advance:
            for block, encoded in encode_all(blocks, encoder, workers):
                own = encoded.after(tokens.tokens, encoder)
                tokens.append(own.ids, own.starts, block.end, block.advance, time.monotonic() - begun)
                advance(block.advance)
                if key.first is not None and tokens.tokens > key.first:
                    break
            else:  # all of the text: its last document ends, too
                if encoder.end is not None:
                    tokens.end_with(encoder.end, time.monotonic() - begun)
        tokens.finish()
    store = TokenStore(part, tokens.tokens, tokens.documents, vocabulary, time.monotonic() - begun)
    last = int(store.ids[-1] == encoder.end) if store.tokens else 0  # the same text without its end has these hashes
    edges, hashes = document_runs(store.ids, store.document_starts, store.tokens - last)
    edges[-1] = store.tokens
    np.save(part / "runs.npy", np.stack([edges.astype(np.uint64), np.append(hashes, np.uint64(0))]))
    counts = {"tokens": store.tokens, "documents": store.documents, "vocabulary": vocabulary, "seconds": store.seconds}
    write_facts(part, {"name": name, "type": key.tokenizer_type, **counts})


def _write_tokenizer(folder: Path, key: TokensKey, source: TextSource, progress: bool) -> None:
    """Write the tokeniser of a text: that of another text, one that was given, or one that is trained on this text."""
    given = folder_of(key.tokenizer) if key.tokenizer is not None else key.tokenizer_of
    if given is not None:
        for name in tokenizer_files(given):
            shutil.copyfile(given / name, folder / name)
        return
    # The sample: paragraphs taken evenly from the text, about `TRAINING_BYTES` of them at most.
    stride = max(1, round(source.text_bytes / TRAINING_BYTES))
    sample: list[str] = []
    number = itertools.count()
    with _bar("Reading for the vocabulary", source.size, source.unit, progress) as advance:
        for block in source.blocks():
            sample += [text for _, text in block.paragraphs() if next(number) % stride == 0]
            advance(block.advance)
    with _bar("Training the vocabulary", len(sample), " paragraphs", progress) as advance:
        if key.tokenizer_type == "wordpiece":
            trained = train_wordpiece(sample, key.vocab_size, advance, strip_accents=key.strip_accents)
        else:
            trained = train_byte_level_bpe(sample, key.vocab_size, advance, special=key.tokenizer_type)
    TextTokenizer(trained).write(folder)


@contextlib.contextmanager
def _bar(title: str, total: int, unit: str, progress: bool, done: int = 0) -> Iterator[Advance]:
    """Show how much of `total` is done: as text, because the widget of a progress bar is broken in a saved notebook."""
    if not progress:
        yield lambda _: None
        return
    with waiting(title) as say:
        reached = done

        def advance(count: int) -> None:
            nonlocal reached
            reached += count
            say(f"{reached / max(total, 1):.0%} of {count_text(total)}{unit}")

        yield advance


# A text as one experiment reads it, tokenised before the training or while it trains.

DEFAULT_BUFFER = 4096
"""Samples among which a streamed text is shuffled."""
PASSES = 3
"""Measurements of the same excerpts; the fastest counts, because processes that share a core only slow one down."""
HANDING_ON = 1.2
"""Time of a stream over that of encoding its blocks alone: reading, cutting and handing the samples on take the rest.

Fitted to `benchmarks/data_supply.py` on one text and two idle cores, where one core needed 1.23 times the time and two
cores 1.34 times (`benchmarks/results/data_supply_encoding_alone_2cores.json`)."""


@dataclass(frozen=True, eq=False)
class TextReading(Reading):
    """Turns a text into the samples of one experiment: checked, tokenised, counted, held out and cut to length."""

    data: Any
    """`TextData` that describes it."""
    request: SampleRequest

    @cached_property
    def objective(self) -> str:
        """Objective that the text is prepared for; raises `DataError` if it is unknown or contradictory."""
        model, data = self.request.model, self.data
        if data.objective and model.objective and data.objective != model.objective:
            raise DataError(
                f"{data.name} is prepared for {data.objective!r}, but {model.name} learns {model.objective!r}. "
                "Remove the objective of the corpus, or change the model."
            )
        if (objective := data.objective or model.objective) is None:
            raise DataError(
                f"{data.name} is text, and nothing says what {model.name} learns from it. "
                'Give the corpus an objective ("mlm", "mlm_nsp", "clm" or "seq2seq"), or pass a dataset of tensors.'
            )
        return str(objective)

    @cached_property
    def key(self) -> TokensKey:
        data, tokenizer_type = self.data, TOKENIZER_OF_OBJECTIVE[self.objective]
        accents = tokenizer_type == "wordpiece" and data.strip_accents
        return TokensKey(
            data._fingerprint(),
            tokenizer_type,
            data.vocab_size,
            tokenizer=data.tokenizer,
            strip_accents=accents,
            is_framed=data.separate_documents and self.objective == "mlm",
        )

    @property
    def is_tokenised(self) -> bool:
        """True if the cache holds the tokens."""
        return is_tokenised(self.key)

    @cached_property
    def tokens(self) -> SpecialTokens:
        """Special tokens of the tokeniser; one is trained if there is none."""
        return SpecialTokens.of_folder(self.tokenizer_folder())

    @cached_property
    def _expected_tokens(self) -> SpecialTokens:
        """Special tokens of the tokeniser that was given or will be trained."""
        if self.data.tokenizer is not None:
            return SpecialTokens.of_folder(folder_of(self.data.tokenizer))
        return special_tokens_of(TOKENIZER_OF_OBJECTIVE[self.objective], self.data.vocab_size)

    @property
    def width(self) -> int:
        """Tokens of the text in one sample."""
        return self._samples_type.width_of(self.request.seq_len, self.tokens, self.data.masked_share)

    @property
    def _samples_type(self) -> type[TokenSamples]:
        return (SEPARATE_SAMPLES if self.data.separate_documents else SAMPLES)[self.objective]

    @property
    def holds_out(self) -> bool:
        """True if evaluations read a part of this text."""
        return self.request.evaluation is not None and self.request.eval_data is None

    def check(self) -> None:
        check_sizes(self)
        self.data.check_source(self)

    def batch_specs(self) -> dict[str, TensorSpec]:
        length, objective = self.request.seq_len, self.objective
        shapes: dict[str, tuple[int, ...]] = {"input_ids": (length,), "labels": (length,)}
        if self.data.separate_documents:
            shapes = {"input_ids": (length,), "position_ids": (length,), "labels": (length,)}
        if objective == "seq2seq":
            shapes["labels"] = (SpanSamples.label_length(length, self._expected_tokens, self.data.masked_share),)
        if objective == "mlm_nsp":
            shapes = {"input_ids": (length,), "token_type_ids": (length,), "labels": (length,)}
            shapes["next_sentence_label"] = ()
        return {name: TensorSpec(name, shape, "int64") for name, shape in shapes.items()}

    def labelled_share(self) -> float:
        return 1.0 if self.objective in ("clm", "seq2seq") else float(self.data.masked_share)

    def text_tokenizer(self) -> TextTokenizer:
        """Return the tokeniser, whose `encode` and `decode` turn text into ids and samples back into text."""
        return TextTokenizer.of_folder(self.tokenizer_folder())

    def encoded(self, prompts: Sequence[str]) -> EncodedPrompts:
        return encoded_prompts(prompts, self.text_tokenizer(), self.tokens, self.objective, self.request.seq_len)

    def prepare(self, progress: bool = True, workers: int | None = None) -> Prepared:
        if self.data.streaming:
            return self._prepare_stream(progress)
        store, reused = self.store(progress, workers)
        self._require_a_sequence(store, self.width)
        text = self.trained_on()
        if self.request.eval_data is not None:
            self.evaluated_on()
        return Prepared(
            name=self.data.name,
            samples=text.tokens // self.width,
            tokens=store.tokens,
            documents=store.documents,
            vocabulary=store.vocabulary,
            folder=store.folder,
            seconds=store.seconds,
            reused=reused,
            held_out=self.held_out_in_words(),
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
            return TextDataset(self._samples(self.trained_on(), buffer=self.data.shuffle_buffer), length)
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
        vocabulary = encoder_of(stream.encoder.folder, self.key)[1]
        samples = self._samples  # a value of its own: the lambda travels to other processes without the experiment
        return StreamedDataset(stream, length, identity, lambda ring: TextDataset(samples(ring), length), vocabulary)

    def stream(self) -> TextStream:
        """Return the windows that training reads, as a stream."""
        source = self.data._source()
        encoder, _ = encoder_of(self.tokenizer_folder(), self.key)
        held_out: tuple[tuple[int, int], ...] = ()
        if self.holds_out:
            part = self._parts().held_out
            held_out = tuple(zip(part.starts.tolist(), part.ends.tolist(), strict=True))
        workers = 0 if source.text_bytes <= SMALL_BYTES else available_cores()
        seed, name = self.request.seed, self.data.name
        return TextStream(source, encoder, self.width, self._buffer, seed, held_out, workers, name)

    def held_out(self, trained_on: Reading | None = None) -> TextDataset:
        """Return the held-out samples, spread evenly over the part of the text, or over another text."""
        request = self.request
        assert request.evaluation is not None
        trained = self if trained_on is None else cast(TextReading, trained_on)
        if trained_on is None:
            text: TokenStore | SplicedTokens = self._parts().held_out
        else:
            if self.data.streaming:
                raise DataError(
                    f"{self.data.name} is eval_data, which is read whole and not streamed. Remove streaming=True."
                )
            folder, own = trained.tokenizer_folder(), self.data._fingerprint()
            key = replace(trained.key, fingerprint=own, tokenizer_of=folder, tokenizer=None, strip_accents=False)
            text = tokenised(key, self.data.name, self.data._source, progress=False)[0]
            self._require_a_sequence(text, trained.width)
        count = min(request.evaluation.samples, text.tokens // trained.width)
        share = request.evaluation.masked_share or MASKED_SHARE
        if trained.objective == "seq2seq":  # whose shapes depend on it
            share = trained.data.masked_share
        return TextDataset(trained._samples(text, seed=EVALUATION_SEED, masked_share=share, in_order=count), count)

    @property
    def _buffer(self) -> int:
        return int(self.data.shuffle_buffer or DEFAULT_BUFFER)

    @property
    def _samples(self) -> functools.partial[TokenSamples]:
        """Samples of the training, made from a text."""
        return functools.partial(
            self._samples_type,
            seq_len=self.request.seq_len,
            seed=self.request.seed,
            tokens=self.tokens,
            masked_share=self.data.masked_share,
            joints=self.text_tokenizer().joints() if self.data.whole_words else None,
        )

    def trained_on(self) -> TokenStore | SplicedTokens:
        """Return the text that training reads: all of it, unless a part is held out."""
        return self._parts().training if self.holds_out else self.store()[0]

    def held_out_in_words(self, beside: Sequence[TextReading] = ()) -> str:
        """Return the numbers of what is held out, and how much of the held-out text training reads too, as sentences.

        They are empty where nothing is evaluated. `beside` are the other texts of a mixture. What a stream reads is not
        compared.
        """
        if self.request.evaluation is None:
            return ""
        parts = self._parts() if self.holds_out else None
        if self.data.streaming:
            return str(parts or "")
        if parts is not None:
            trainings = [parts.training, *(each.trained_on() for each in beside if not each.data.streaming)]
            return f"{parts} {overlap_in_words(trainings, parts.held_out, self.width)}".rstrip()
        held_out = self.evaluated_on()
        text = held_out.samples.text if isinstance(held_out, TextDataset) else None
        return "" if text is None else overlap_in_words([self.store()[0]], text, self.width)

    def note(self) -> str:
        """Return what is held out if that is something else than whole documents of all of the text.

        The numbers of a text that is not tokenised yet are not known.
        """
        if not self.holds_out:
            return ""
        if self.is_tokenised:
            parts = self._parts()
            return "" if parts.is_whole and not parts.documents[1] else f"Of {self.data.name}, {parts}"
        if not self.data.streaming:
            return ""
        return f"{self.data.name} is streamed: held-out samples are text of its beginning, whatever comes later."

    def _parts(self, progress: bool = False) -> Split:
        """Return the text for training and the held-out text; raise `DataError` if either is too small."""
        assert self.request.evaluation is not None
        samples = self.request.evaluation.samples
        if self.data.deduplicate is not None or self.data.held_out_by is not None:
            store = self.store(progress)[0]
            return split_by_groups(
                store, self.data.name, samples, self.width, self._groups(store), document_hashes(store)
            )
        if not self.data.streaming and self.data.shuffle_buffer is None:
            return split(self.store(progress)[0], self.data.name, samples, self.width)

        def beginning(first: int) -> TokenStore:
            """Return the tokenised text, or of a streamed one that is not stored more than its `first` tokens."""
            if not self.data.streaming or self.is_tokenised:
                return self.store(progress)[0]
            key = replace(self.key, first=first, tokenizer_of=self.tokenizer_folder(progress))
            return tokenised(key, self.data.name, self.data._source, progress)[0]

        return split_of_stream(beginning, self.data.name, samples, self.width)

    def _groups(self, store: TokenStore) -> I64:
        """Return a number for each document, the same for documents that are held out together."""
        data = self.data
        groups = np.arange(store.documents) if data.deduplicate is None else groups_of(store, data.deduplicate)
        if data.held_out_by in (None, "document"):
            return groups
        labels = data._source().labels(data.held_out_by)
        if len(labels) != store.documents:
            raise DataError(
                f"{data.name} has {len(labels):,} rows or files with text, and {store.documents:,} of them have a "
                f"token, so that the {data.held_out_by} of each cannot be told. Remove the others, or held_out_by."
            )
        return joined(groups, *by_label(labels))

    def _prepare_stream(self, progress: bool) -> Prepared:
        """Make the vocabulary and the held-out samples; count samples exactly if the text is small or also stored."""
        samples, _ = self.counted(progress)
        folder = self.tokenizer_folder(progress)
        encoder, vocabulary = encoder_of(folder, self.key)
        tokens, tokens_per_core_s = _tokenizing_rate(self.key.folder, self.data._source, encoder)
        parts = self._parts(progress) if self.holds_out else None
        return Prepared(
            name=self.data.name,
            samples=samples,
            tokens=tokens,
            vocabulary=vocabulary,
            folder=folder,
            streamed=True,
            tokens_per_core_s=tokens_per_core_s,
            held_out=str(parts or ""),
        )

    def counted(self, progress: bool = False) -> tuple[int | None, bool]:
        if not self.data.streaming:
            return super().counted()
        if self.data._source().text_bytes <= SMALL_BYTES or self.is_tokenised:
            stored = replace(self.data, streaming=False, shuffle_buffer=self._buffer)
            return TextReading(stored, self.request).prepare(progress).samples, False
        try:
            tokens = int(self._estimate.read_text())
        except (OSError, ValueError):
            encoder, _ = encoder_of(self.tokenizer_folder(progress), self.key)
            tokens, _ = _tokenizing_rate(self.key.folder, self.data._source, encoder)
            with contextlib.suppress(OSError):  # of a cache that cannot be written: it is estimated again
                part = self._estimate.with_name(f"{self._estimate.name}.{os.getpid()}.part")
                part.write_text(str(tokens))
                part.replace(self._estimate)
        held_out = self._parts(progress).held_out.tokens if self.holds_out else 0
        return max(1, (tokens - held_out) // self.width), True

    @property
    def is_counted(self) -> bool:
        """True if the cache holds the tokens, or of a streamed text an estimate of their number."""
        return self.is_tokenised or (self.data.streaming and self._estimate.is_file())

    @property
    def _estimate(self) -> Path:
        """File of the cache with the estimated number of tokens of a streamed text."""
        return self.key.folder.with_name(f"{self.key.folder.name}.estimate")

    def _require_a_sequence(self, store: TokenStore, width: int) -> None:
        """Raise `DataError` if the text is shorter than one sequence, of which `width` tokens are text."""
        if store.tokens < width:
            raise DataError(
                f"{self.data.name} holds {store.tokens} tokens, fewer than the {width} of one sequence "
                f"(seq_len={self.request.seq_len}). Give more text, or a shorter seq_len."
            )


def _check_tokenizer(reading: TextReading) -> None:
    """Raise `DataError` for a tokeniser that has changed, lacks what samples need, or is not that of the weights."""
    data, model, objective = reading.data, reading.request.model, reading.objective
    known, tokens = model.pretrained, reading._expected_tokens
    if data.tokenizer is not None:
        if tokens.vocabulary != data.vocab_size:
            raise DataError(
                f"{data.tokenizer} had {data.vocab_size:,} ids and now has {tokens.vocabulary:,}. Describe the "
                "data again, or restore the file."
            )
        if (lack := SAMPLES[objective].lack_of(tokens)) is not None:
            way = "tokenizer.add_special_tokens({…}), or leave tokenizer out: one is trained on the text"
            if known is not None:
                way = (
                    "tokenizer.add_special_tokens({…}), the model a row for it, model.resize_token_embeddings("
                    "len(tokenizer)), and save both in a folder"
                )
            raise DataError(
                f"{data.tokenizer} has {lack}, which samples for {objective!r} need. Give the tokeniser one with {way}."
            )
        if known is not None and (wrong := other_tokens(folder_of(data.tokenizer), known.path)):
            raise DataError(
                f"{data.name} is read with the tokeniser {data.tokenizer}, and the weights of {model.name} were "
                f'trained with that in {known.path}: {wrong}. Give the text tokenizer="{known.path}".'
            )
    elif known is not None:
        is_folder = os.path.isdir(known.path)
        given = f'"{known.path}"' if is_folder else f'transformers.AutoTokenizer.from_pretrained("{known.path}")'
        raise DataError(
            f"{data.name} would be read with a vocabulary that is trained on it, and the weights of {model.name} were "
            f"trained with another, whose ids stand for other tokens. Give the text tokenizer={given}"
            + (", or the folder of its tokeniser." if is_folder else ".")
        )


def check_sizes(reading: TextReading) -> None:
    """Raise `DataError` if the sequence length, the vocabulary or the tokeniser does not suit the model."""
    data, request, objective = reading.data, reading.request, reading.objective
    model, known = request.model, request.model.pretrained
    least = SMALLEST_VOCABULARY[TOKENIZER_OF_OBJECTIVE[objective]]
    if data.streaming and objective == "mlm_nsp":
        raise DataError(
            f"{data.name} is streamed, and {model.name} predicts next sentences, whose other half may stand "
            "anywhere in the text. Train without (next_sentence=False), or remove streaming=True."
        )
    if data.separate_documents and (objective not in SEPARATE_SAMPLES or data.streaming):
        what = "streamed, and a stream has no places of documents" if data.streaming else f"read for {objective!r}"
        way = "streaming=True" if data.streaming else "separate_documents=True, or choose the objective 'clm' or 'mlm'"
        raise DataError(f"{data.name} is {what}, so that its documents cannot be told apart in a sample. Remove {way}.")
    _check_tokenizer(reading)
    tokens = reading._expected_tokens
    if data.separate_documents and objective == "mlm" and not (len(tokens.prefix) == 1 == len(tokens.suffix)):
        raise DataError(
            f"The tokeniser of {data.name} sets {len(tokens.prefix)} special tokens before a text and "
            f"{len(tokens.suffix)} after it, and documents that are told apart need one each. Remove "
            "separate_documents=True, or give a tokeniser that frames a text as BERT's does."
        )
    if data.whole_words and objective not in ("mlm", "mlm_nsp"):
        raise DataError(
            f"whole_words says how masked models hide words, and the objective is {objective!r}. Remove it."
        )
    if objective == "seq2seq" and request.seq_len >= SHORTEST_SEQUENCE:
        spans = SpanSamples.spans(request.seq_len, tokens, data.masked_share)
        if tokens.sentinels and spans > len(tokens.sentinels):
            raise DataError(
                f"seq_len={request.seq_len} and masked_share={data.masked_share:g} hide {spans} spans, and the "
                f"tokeniser has {len(tokens.sentinels)} sentinels. Give shorter sequences or a smaller share."
            )
        share = None if request.evaluation is None else request.evaluation.masked_share
        if share not in (None, data.masked_share):
            raise DataError(
                f"Held-out samples of a sequence-to-sequence model have the shapes of training, and hide "
                f"{data.masked_share:g} of the text too. Remove masked_share={share:g} from the evaluation."
            )

    # Sizes that do not suit the model.
    if request.seq_len < SHORTEST_SEQUENCE:
        raise DataError(
            f"seq_len={request.seq_len} is too short for a sample of text. Give at least {SHORTEST_SEQUENCE}."
        )
    if model.vocab_size is not None and data.vocab_size > model.vocab_size:
        if hasattr(data, "path"):
            data._source()  # a file that is missing matters first
        way = (
            f"the model vocab_size={data.vocab_size}"
            if data.tokenizer is not None
            else (f"the data vocab_size={model.vocab_size}, or the model vocab_size={data.vocab_size}")
        )
        if known is not None:
            way = (
                "the model more rows, model.resize_token_embeddings(len(tokenizer)), save both in a folder, and "
                "describe that with wb.models.pretrained"
            )
        raise DataError(
            f"{data.name} is tokenised into a vocabulary of {data.vocab_size:,}, but {model.name} embeds "
            f"{model.vocab_size:,} tokens. Give {way}."
        )
    if data.tokenizer is None and data.vocab_size < least:
        raise DataError(
            f"vocab_size={data.vocab_size} is less than the {least} that byte-level tokens need. "
            f"Give the data at least vocab_size={least}."
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
