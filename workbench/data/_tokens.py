"""Tokenise a text once: train a vocabulary on it, and store its token ids in the cache.

One folder per (text, tokeniser, vocabulary size) holds them, as `_store.py` describes. Processes that want the same one
wait for the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.data._encoding import Encoder, encode_all
from workbench.data._split import document_runs
from workbench.data._store import (
    TOKENIZER_FACTS,
    PartialTokens,
    TokenStore,
    can_go_on,
    dtype_of,
    only_process,
    opened,
    tokenizer_files,
    write_facts,
)
from workbench.data._text import Advance, TextSource
from workbench.data._tokenizer import SpecialTokens, TextTokenizer, digest_of, folder_of
from workbench.data._vocabulary import train_byte_level_bpe, train_wordpiece
from workbench.errors import DataError
from workbench.home import cache_home
from workbench.machine import available_cores
from workbench.units import count as count_text
from workbench.waiting import waiting

FORMAT = 4
"""Version of the folder's format; part of its name."""
SMALL_BYTES = 8 << 20
"""Size of a text up to which starting worker processes does not pay."""
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


def encoder_of(folder: Path, tokenizer_type: str) -> tuple[Encoder, int]:
    """Return the encoder with the tokeniser in a folder, and the number of its ids."""
    tokens = SpecialTokens.of_folder(folder)
    dtype = np.dtype(dtype_of(tokens.vocabulary)).name
    if tokenizer_type == "wordpiece":  # samples of masked models have special tokens of their own
        return Encoder(folder, dtype, line_breaks=tokens.line_breaks), tokens.vocabulary
    return Encoder(folder, dtype, tokens.end, tokens.begin, tokens.line_breaks), tokens.vocabulary


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
    encoder, vocabulary = encoder_of(part, key.tokenizer_type)
    if workers is None:
        workers = 0 if source.text_bytes <= SMALL_BYTES else available_cores()
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
        tokens.finish()
    store = TokenStore(part, tokens.tokens, tokens.documents, vocabulary, time.monotonic() - begun)
    edges, hashes = document_runs(store.ids, store.document_starts, store.tokens)
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
    sample = _training_sample(source, progress)
    with _bar("Training the vocabulary", len(sample), " paragraphs", progress) as advance:
        if key.tokenizer_type == "wordpiece":
            trained = train_wordpiece(sample, key.vocab_size, advance, strip_accents=key.strip_accents)
        else:
            trained = train_byte_level_bpe(sample, key.vocab_size, advance, special=key.tokenizer_type)
    TextTokenizer(trained).write(folder)


def _training_sample(source: TextSource, progress: bool) -> list[str]:
    """Return paragraphs taken evenly from the text, about `TRAINING_BYTES` of them at most."""
    stride = max(1, round(source.text_bytes / TRAINING_BYTES))
    sample: list[str] = []
    number = itertools.count()
    with _bar("Reading for the vocabulary", source.size, source.unit, progress) as advance:
        for block in source.blocks():
            sample += [text for _, text in block.paragraphs() if next(number) % stride == 0]
            advance(block.advance)
    return sample


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
