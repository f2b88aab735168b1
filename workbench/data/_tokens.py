"""Tokenise a text once: train a vocabulary on it, and store its token ids in the cache.

One folder per (text, tokeniser, vocabulary size) holds `tokens.bin` (uint16, or uint32 for vocabularies over
65,536), `documents.npy` (the offset at which each document begins), `tokenizer.json` and `facts.json`.
The folder appears whole or not at all, and processes that want the same one wait for the first. Until then a folder
with the ending `.part` holds what is done (`_partial.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from workbench.data._encoding import Encoder, encode_all
from workbench.data._partial import PartialTokens, can_go_on
from workbench.data._text import Advance, TextSource
from workbench.data._vocabulary import end_of_text, load_byte_level_bpe, train_byte_level_bpe, train_wordpiece
from workbench.data._vocabulary_file import vocabulary_digest
from workbench.errors import DataError
from workbench.home import cache_home
from workbench.machine import available_cores
from workbench.units import gib

FORMAT = 2
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
    """`wordpiece` or `bpe`."""
    vocab_size: int
    tokenizer_of: Path | None = None
    """Folder of another text whose tokeniser is used; None trains one on the text itself."""
    tokenizer_file: str | None = None
    """File or folder with the vocabulary to use, which then is not trained."""

    @property
    def folder(self) -> Path:
        """Folder of the cache that holds the tokens."""
        key = f"{FORMAT} {self.fingerprint} {self.tokenizer_type} {self.vocab_size}"
        if self.tokenizer_of is not None:
            key += f" {self.tokenizer_of.name.partition('.')[0]}"
        elif self.tokenizer_file is not None:
            key += f" file {vocabulary_digest(self.tokenizer_file)}"
        return cache_home() / "tokens" / hashlib.sha256(key.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TokenStore:
    """A tokenised corpus on disk; its arrays are memory-mapped when first read, and not pickled."""

    folder: Path
    tokens: int
    documents: int
    vocabulary: int
    """Number of ids of the vocabulary, below `vocab_size` if it was trained on a small text."""
    seconds: float
    """Time that tokenising took."""

    @cached_property
    def ids(self) -> NDArray[Any]:
        """Every token of the corpus in order, shape `(tokens,)`."""
        return np.asarray(np.memmap(self.folder / "tokens.bin", dtype=_dtype(self.vocabulary), mode="r"))

    @cached_property
    def document_starts(self) -> NDArray[np.int64]:
        """Offsets into `ids`, ascending, the first 0; shape `(documents,)`."""
        starts: NDArray[np.int64] = np.load(self.folder / "documents.npy", mmap_mode="r")
        return np.asarray(starts)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_in(self.folder)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("ids", "document_starts")}


def tokenised(
    key: TokensKey, name: str, source: Callable[[], TextSource], progress: bool, workers: int | None = None
) -> tuple[TokenStore, bool]:
    """Return the tokens of a text, and True if they were in the cache; tokenise the text if not.

    `source` is called only if there is work to do. Several processes may ask at once: one works, with `workers`
    processes (one per core by default), and the others wait. Work that was killed goes on where it stopped.
    """
    folder = key.folder
    if (store := _opened(folder)) is not None:
        return store, True
    with _only_process(folder):
        if (store := _opened(folder)) is not None:
            return store, True
        part = folder.with_name(f"{folder.name}.part")
        try:
            part.mkdir(exist_ok=True)
            _write_facts(part, name, key, _fill(part, key, source(), progress, workers))
            if folder.exists():  # Its files are damaged: processes that have them open keep what they opened.
                shutil.rmtree(folder)
            part.rename(folder)
        except DataError as error:
            if "line" in error.facts:  # The text must change, and then has another folder.
                shutil.rmtree(part, ignore_errors=True)
            raise
        except OSError as error:
            raise _unwritable(folder.parent, error) from error
    store = _opened(folder)
    assert store is not None
    return store, False


def tokenizer_in(folder: Path) -> Tokenizer:
    """Return the tokeniser of a folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def vocabulary_folder(key: TokensKey, source: Callable[[], TextSource], progress: bool) -> Path:
    """Return a folder that holds the `tokenizer.json` of a text: that of its tokens, or one made without them."""
    if _opened(key.folder) is not None:
        return key.folder
    folder = key.folder.with_name(f"{key.folder.name}.vocabulary")
    with _only_process(folder):
        if not (folder / "tokenizer.json").is_file():
            try:
                folder.mkdir(exist_ok=True)
                _vocabulary_of(key, source(), progress).save(str(folder / "tokenizer.part"))
                (folder / "tokenizer.part").replace(folder / "tokenizer.json")
            except OSError as error:
                raise _unwritable(folder.parent, error) from error
    return folder


def encoder_of(folder: Path, tokenizer_type: str) -> tuple[Encoder, int]:
    """Return the encoder with the tokeniser in a folder, and the number of its ids."""
    tokenizer = tokenizer_in(folder)
    vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1
    end = end_of_text(tokenizer) if tokenizer_type == "bpe" else None
    return Encoder(folder / "tokenizer.json", np.dtype(_dtype(vocabulary)).name, end), vocabulary


def held_out_of_stream(
    key: TokensKey, name: str, vocabulary: Path, tokens: int, read: Callable[[], Iterator[NDArray[Any]]], progress: bool
) -> TokenStore:
    """Return the first tokens that a stream holds out, at most so many, from the cache or from `read`.

    `vocabulary` is the folder of their tokeniser.
    """
    folder = key.folder.with_name(f"{key.folder.name}.held_out_{tokens}")
    if (store := _opened(folder)) is not None:
        return store
    with _only_process(folder):
        if (store := _opened(folder)) is not None:
            return store
        part, begun = folder.with_name(f"{folder.name}.part"), time.monotonic()
        encoder, entries = encoder_of(vocabulary, key.tokenizer_type)
        try:
            for old in (part, folder):
                shutil.rmtree(old, ignore_errors=True)
            part.mkdir()
            shutil.copy(vocabulary / "tokenizer.json", part)
            ids = np.empty(0, encoder.dtype)
            with _bar("Holding text out", tokens, " tokens", progress) as advance:
                for more in read():
                    advance(len(more))
                    ids = np.concatenate([ids, more])[:tokens]
                    if len(ids) == tokens:
                        break
            ids.tofile(part / "tokens.bin")
            np.save(part / "documents.npy", np.zeros(1, np.int64))
            counts = {"tokens": len(ids), "documents": 1, "vocabulary": entries}
            _write_facts(part, name, key, {**counts, "seconds": time.monotonic() - begun})
            part.rename(folder)
        except OSError as error:
            raise _unwritable(folder.parent, error) from error
    store = _opened(folder)
    assert store is not None
    return store


def is_tokenised(key: TokensKey) -> bool:
    """Return True if the cache holds the tokens."""
    return _opened(key.folder) is not None


def _opened(folder: Path) -> TokenStore | None:
    """Return the tokens in a folder of the cache, or None if there are none or they are damaged."""
    try:
        facts = json.loads((folder / "facts.json").read_text())
        store = TokenStore(folder, **{key: facts[key] for key in ("tokens", "documents", "vocabulary", "seconds")})
        intact = _is_intact(folder, facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return store if intact else None


def _is_intact(folder: Path, facts: dict[str, Any]) -> bool:
    """Return True if the files of a folder are those that were written.

    A file is read only if it was touched since. Folders of an earlier version know no digests; their sizes are checked.
    """
    if (folder / "tokens.bin").stat().st_size != facts["tokens"] * np.dtype(_dtype(facts["vocabulary"])).itemsize:
        return False
    if not all((folder / name).is_file() for name in ("documents.npy", "tokenizer.json")):
        return False
    if facts.get("digest", _digest_of_facts(facts)) != _digest_of_facts(facts):
        return False
    for name, written in facts.get("files", {}).items():
        found = (folder / name).stat()
        if found.st_size != written["bytes"]:
            return False
        if found.st_mtime_ns != written["mtime_ns"] and _digest(folder / name) != written["blake2b"]:
            return False
    return True


def _digest_of_facts(facts: dict[str, Any]) -> str:
    text = json.dumps({name: value for name, value in facts.items() if name != "digest"}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()


@contextlib.contextmanager
def _only_process(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel releases even if the process is killed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f"{folder.name}.lock").open("w")
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unwritable(folder: Path, error: OSError) -> DataError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            f"The token cache at {folder} cannot be written: {error.strerror}. "
            "Point WORKBENCH_HOME at a folder that can.",
            path=str(folder),
        )
    free = shutil.disk_usage(folder).free
    return DataError(
        f"The disk of the token cache at {folder} is full ({gib(free)} are free). What is tokenised is kept, and the "
        "next attempt goes on there. Free space, or point WORKBENCH_HOME at a larger disk.",
        path=str(folder),
        free_bytes=free,
    )


def _fill(part: Path, key: TokensKey, source: TextSource, progress: bool, workers: int | None) -> dict[str, Any]:
    """Train a vocabulary on the text, unless that is done; tokenise what is left of it; return the facts."""
    begun = time.monotonic()
    if not can_go_on(part):
        shutil.rmtree(part)
        part.mkdir()
        _vocabulary_of(key, source, progress).save(str(part / "tokenizer.json"))
    encoder, vocabulary = encoder_of(part, key.tokenizer_type)
    end = encoder.end
    if workers is None:
        workers = 0 if source.text_bytes <= SMALL_BYTES else available_cores()
    with PartialTokens(part, encoder.dtype) as tokens:
        begun -= tokens.seconds
        blocks = source.blocks(tokens.position)
        with _bar("Tokenising", source.size, source.unit, progress, tokens.advance) as advance:
            for block, encoded in encode_all(blocks, encoder, workers):
                own = encoded if tokens.tokens or end is None else encoded.without_first_end()
                tokens.append(own.ids, own.starts, block.end, block.advance, time.monotonic() - begun)
                advance(block.advance)
    documents = tokens.finish()
    return {
        "tokens": tokens.tokens,
        "documents": documents,
        "vocabulary": vocabulary,
        "seconds": time.monotonic() - begun,
    }


def _write_facts(part: Path, name: str, key: TokensKey, found: dict[str, Any]) -> None:
    """Write the values that describe finished tokens, and last of all the digests of their files."""
    facts: dict[str, Any] = {"name": name, "type": key.tokenizer_type, **found}
    facts["files"] = {
        name: {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "blake2b": _digest(part / name)}
        for name in ("tokens.bin", "documents.npy", "tokenizer.json")
        if (stat := (part / name).stat())
    }
    facts["digest"] = _digest_of_facts(facts)
    (part / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")


def _vocabulary_of(key: TokensKey, source: TextSource, progress: bool) -> Tokenizer:
    """Return the tokeniser of a text: that of another text, one in a file, or one that is trained on this text."""
    if key.tokenizer_of is not None:
        return tokenizer_in(key.tokenizer_of)
    if key.tokenizer_file is not None:
        return load_byte_level_bpe(key.tokenizer_file)
    sample = _training_sample(source, progress)
    train = train_wordpiece if key.tokenizer_type == "wordpiece" else train_byte_level_bpe
    with _bar("Training the vocabulary", len(sample), " paragraphs", progress) as advance:
        return train(sample, key.vocab_size, advance)


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
    if not progress:
        yield lambda _: None
        return
    from tqdm.auto import tqdm

    with tqdm(desc=title, total=total, unit=unit, unit_scale=True, initial=done) as bar:
        yield bar.update


def _dtype(vocabulary: int) -> Any:
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32
