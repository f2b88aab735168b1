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
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from workbench.data._text import Advance, Paragraph, TextSource
from workbench.errors import DataError
from workbench.home import cache_home

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
    sample = _training_sample(source, progress)
    train = _wordpiece if kind == "wordpiece" else _byte_level_bpe
    with _bar("Training the vocabulary", len(sample), " paragraphs", progress) as advance:
        return train(sample, vocab_size, advance)


def _training_sample(source: TextSource, progress: bool) -> list[str]:
    """Paragraphs taken evenly from the text, about `TRAINING_BYTES` of them at most."""
    stride = max(1, round(source.text_bytes / TRAINING_BYTES))
    with _bar("Reading for the vocabulary", source.size, source.unit, progress) as advance:
        return [text for index, (_, text) in enumerate(source.paragraphs(advance)) if index % stride == 0]


def _wordpiece(sample: list[str], vocab_size: int, advance: Advance) -> Tokenizer:
    """BERT's uncased tokeniser: lower case, accents stripped, ideographs apart.

    Left alone, the trainer numbers the continuing characters (`##a`) in the order in which it meets them in
    a hash table, breaks ties by those numbers, and so learns another vocabulary in every process. Naming
    them beforehand, as special tokens, makes it repeatable; the tokeniser returned is built from the result
    and has BERT's five special tokens only.
    """
    special = SPECIAL_TOKENS["wordpiece"]
    tokenizer = _untrained_wordpiece({})
    # Each character may enter twice (alone and continuing a word); more would overflow the vocabulary.
    alphabet, continuing = _alphabet(sample, tokenizer, limit=min(6000, (vocab_size - len(special)) // 4))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=[*special, *(f"##{character}" for character in continuing)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_counted(sample, advance), trainer=trainer)
    trained = _untrained_wordpiece(tokenizer.get_vocab())
    trained.add_special_tokens(list(special))
    return trained


def _untrained_wordpiece(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _alphabet(sample: list[str], tokenizer: Tokenizer, limit: int) -> tuple[list[str], list[str]]:
    """The `limit` most frequent characters after normalisation, and those of them that can continue a word."""
    frequency: Counter[str] = Counter()
    continuing: set[str] = set()
    for raw, times in _character_counts(sample).items():
        words = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str("a" + raw))
        for character in "".join(word for word, _ in words)[1:]:
            frequency[character] += times
        if len(words) == 1:
            continuing.update(words[0][0][1:])
    ranked = sorted(frequency, key=lambda character: (-frequency[character], character))
    kept = sorted(ranked[:limit])
    return kept, [character for character in kept if character in continuing]


def _character_counts(sample: list[str]) -> dict[str, int]:
    counts = np.zeros(sys.maxunicode + 1, dtype=np.int64)
    for first in range(0, len(sample), 1024):
        text = "".join(sample[first : first + 1024])
        codes, times = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32), return_counts=True)
        counts[codes] += times
    return {chr(code): int(counts[code]) for code in np.flatnonzero(counts)}


def _byte_level_bpe(sample: list[str], vocab_size: int, advance: Advance) -> Tokenizer:
    """GPT-2's tokeniser: byte-pair encoding over bytes, so that nothing is unknown."""
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
    tokenizer.train_from_iterator(_counted(sample, advance), trainer=trainer)
    return tokenizer


def _counted(sample: list[str], advance: Advance) -> Iterator[list[str]]:
    for first in range(0, len(sample), 1024):
        yield (batch := sample[first : first + 1024])
        advance(len(batch))


def _write_tokens(path: Path, tokenizer: Tokenizer, source: TextSource, kind: str, progress: bool) -> NDArray[np.int64]:
    """Append every paragraph's ids; returns where documents start, and the total last.

    BPE streams carry the end-of-text token after each document and a line break after each paragraph.
    """
    dtype = _dtype(tokenizer.get_vocab_size())
    tokenizer.encode_special_tokens = True  # a "[SEP]" in the text is text
    starts: list[int] = []
    total = 0
    with path.open("wb") as file, _bar("Tokenising", source.size, source.unit, progress) as advance:
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
def _bar(title: str, total: int, unit: str, progress: bool) -> Iterator[Advance]:
    if not progress:
        yield lambda _: None
        return
    from tqdm.auto import tqdm

    with tqdm(desc=title, total=total, unit=unit, unit_scale=True) as bar:
        yield bar.update


def _dtype(vocabulary: int) -> Any:
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32
