"""Text to token ids, once: a vocabulary trained on the text itself, and a flat file of ids in the cache.

One folder per (text, tokeniser, vocabulary size) holds `tokens.bin` (uint16, or uint32 for vocabularies over
65,536), `documents.npy` (the offset at which each document begins), `tokenizer.json` and `facts.json`.
It appears whole or not at all, and processes that want the same one wait for the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from workbench.data._text import Paragraph, TextSource
from workbench.errors import DataError

FORMAT = 1
CHUNK_CHARACTERS = 2 << 20
"""Text in flight while tokenising; each character costs about a hundred bytes of the library's objects."""
TRAINING_BYTES = 64 << 20
"""A vocabulary is trained on at most about this much text, taken evenly from the whole."""

PAD, UNKNOWN, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = {"wordpiece": (PAD, UNKNOWN, CLS, SEP, MASK), "bpe": (END_OF_TEXT,)}
"""By kind of tokeniser; their ids are their places."""


@dataclass(frozen=True)
class TokenStore:
    """A tokenised corpus on disk; the arrays are mapped when first read, and not pickled."""

    folder: Path
    kind: str
    tokens: int
    documents: int
    vocabulary: int
    """Size of the trained vocabulary, which a small text does not fill."""
    seconds: float
    """That tokenising took."""

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
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("ids", "document_starts")}


def cache_home() -> Path:
    """`$WORKBENCH_HOME`, or the user's cache folder by the platform's custom."""
    if home := os.environ.get("WORKBENCH_HOME"):
        return Path(home).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "workbench"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workbench"


def tokenised(
    name: str, fingerprint: str, source: Callable[[], TextSource], kind: str, vocab_size: int, progress: bool
) -> tuple[TokenStore, bool]:
    """The store for this text, made now unless it is in the cache; with whether it was.

    `source` is called only when there is work to do. Safe when several processes ask at once.
    """
    folder = _folder(fingerprint, kind, vocab_size)
    if (store := _opened(folder)) is not None:
        return store, True
    with _only_process(folder):
        if (store := _opened(folder)) is not None:
            return store, True
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
        part.mkdir()
        _fill(part, name, source(), kind, vocab_size, progress)
        part.rename(folder)
    store = _opened(folder)
    assert store is not None
    return store, False


def is_tokenised(fingerprint: str, kind: str, vocab_size: int) -> bool:
    return _opened(_folder(fingerprint, kind, vocab_size)) is not None


def _folder(fingerprint: str, kind: str, vocab_size: int) -> Path:
    key = hashlib.sha256(f"{FORMAT} {fingerprint} {kind} {vocab_size}".encode()).hexdigest()[:16]
    return cache_home() / "tokens" / key


def _opened(folder: Path) -> TokenStore | None:
    try:
        facts = json.loads((folder / "facts.json").read_text())
    except FileNotFoundError:
        return None
    return TokenStore(folder, **{key: facts[key] for key in ("kind", "tokens", "documents", "vocabulary", "seconds")})


@contextlib.contextmanager
def _only_process(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which the kernel releases even when the process is killed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f"{folder.name}.lock").open("w")
    except OSError as error:
        raise DataError(
            f"The token cache at {folder.parent} cannot be written: {error.strerror}. "
            "Point WORKBENCH_HOME at a folder that can.",
            path=str(folder.parent),
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fill(part: Path, name: str, source: TextSource, kind: str, vocab_size: int, progress: bool) -> None:
    begun = time.monotonic()
    tokenizer = _train(source, kind, vocab_size, progress)
    tokenizer.save(str(part / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    starts = _write_tokens(part / "tokens.bin", tokenizer, source, kind, progress)
    np.save(part / "documents.npy", starts[:-1])
    facts = {
        "name": name,
        "kind": kind,
        "tokens": int(starts[-1]),
        "documents": len(starts) - 1,
        "vocabulary": vocabulary,
        "seconds": time.monotonic() - begun,
    }
    (part / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")


def _train(source: TextSource, kind: str, vocab_size: int, progress: bool) -> Tokenizer:
    stride = max(1, round(source.text_bytes / TRAINING_BYTES))
    tokenizer, trainer = _wordpiece(vocab_size) if kind == "wordpiece" else _byte_level_bpe(vocab_size)
    with _bar("Training the vocabulary", source, progress) as advance:
        sample = (text for index, (_, text) in enumerate(source.paragraphs(advance)) if index % stride == 0)
        tokenizer.train_from_iterator(sample, trainer=trainer)
    return tokenizer


def _wordpiece(vocab_size: int) -> tuple[Tokenizer, Any]:
    """BERT's uncased tokeniser, untrained: lower case, accents stripped, ideographs apart."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    special = list(SPECIAL_TOKENS["wordpiece"])
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        # Each character may enter twice (alone and continuing a word); more would overflow the vocabulary.
        limit_alphabet=min(6000, (vocab_size - len(special)) // 4),
        special_tokens=special,
        show_progress=False,
    )
    return tokenizer, trainer


def _byte_level_bpe(vocab_size: int) -> tuple[Tokenizer, Any]:
    """GPT-2's tokeniser, untrained: byte-pair encoding over bytes, so that nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS["bpe"]),
        show_progress=False,
    )
    return tokenizer, trainer


def _write_tokens(path: Path, tokenizer: Tokenizer, source: TextSource, kind: str, progress: bool) -> NDArray[np.int64]:
    """Append every paragraph's ids; returns where documents start, and the total last.

    BPE streams carry the end-of-text token after each document and a line break after each paragraph.
    """
    dtype = _dtype(tokenizer.get_vocab_size())
    tokenizer.encode_special_tokens = True  # a "[SEP]" in the text is text
    starts: list[int] = []
    total = 0
    with path.open("wb") as file, _bar("Tokenising", source, progress) as advance:
        for chunk in _chunks(source.paragraphs(advance)):
            texts = _with_breaks(chunk) if kind == "bpe" else [text for _, text in chunk]
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for (starts_document, _), encoding in zip(chunk, encodings, strict=True):
                if starts_document and kind == "bpe" and total:
                    total += _append(file, [0], dtype)
                if starts_document and (not starts or starts[-1] != total):
                    starts.append(total)
                total += _append(file, encoding.ids, dtype)
    if starts and starts[-1] == total:  # a last document of which nothing remained
        starts.pop()
    return np.asarray([*starts, total], dtype=np.int64)


def _with_breaks(chunk: list[Paragraph]) -> list[str]:
    return [text if starts_document else "\n" + text for starts_document, text in chunk]


def _append(file: Any, ids: list[int], dtype: Any) -> int:
    file.write(np.asarray(ids, dtype=dtype).tobytes())
    return len(ids)


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


@contextlib.contextmanager
def _bar(title: str, source: TextSource, progress: bool) -> Iterator[Callable[[int], None]]:
    if not progress:
        yield lambda _: None
        return
    from tqdm.auto import tqdm

    with tqdm(desc=title, total=source.size, unit=source.unit, unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update


def _dtype(vocabulary: int) -> Any:
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32
