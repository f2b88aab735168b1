"""Tokenise a text once: train a vocabulary on it, and store its token ids in the cache.

One folder per (text, tokeniser, vocabulary size) holds `tokens.bin` (uint16, or uint32 for vocabularies over
65,536), `documents.npy` (the offset at which each document begins), `tokenizer.json` and `facts.json`.
The folder appears whole or not at all, and processes that want the same one wait for the first.
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

SMALLEST_WITH_WORDS = 256
"""Vocabulary size from which WordPiece keeps at least half of its entries for pieces of words."""
FORMAT = 2
"""Version of the folder's format; part of its name."""
CHUNK_CHARACTERS = 2 << 20
"""Characters tokenised at once; each occupies about a hundred bytes of the library's objects."""
TRAINING_BYTES = 64 << 20
"""Approximate size of the sample, taken evenly from the text, on which a vocabulary is trained."""

PAD, UNKNOWN, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = {"wordpiece": (PAD, UNKNOWN, CLS, SEP, MASK), "bpe": (END_OF_TEXT,)}
"""Special tokens of each type of tokeniser; the id of a token is its index."""


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

    @property
    def folder(self) -> Path:
        """Folder of the cache that holds the tokens."""
        key = f"{FORMAT} {self.fingerprint} {self.tokenizer_type} {self.vocab_size}"
        if self.tokenizer_of is not None:
            key += f" {self.tokenizer_of.name}"
        return cache_home() / "tokens" / hashlib.sha256(key.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TokenStore:
    """A tokenised corpus on disk; its arrays are memory-mapped when first read, and not pickled."""

    folder: Path
    tokens: int
    documents: int
    vocabulary: int
    """Number of entries of the trained vocabulary, below `vocab_size` if the text is small."""
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
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("ids", "document_starts")}


def tokenised(key: TokensKey, name: str, source: Callable[[], TextSource], progress: bool) -> tuple[TokenStore, bool]:
    """Return the tokens of a text, and True if they were in the cache; tokenise the text if not.

    `source` is called only if there is work to do. Several processes may ask at once.
    """
    folder = key.folder
    if (store := _opened(folder)) is not None:
        return store, True
    with _only_process(folder):
        if (store := _opened(folder)) is not None:
            return store, True
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # A process that was killed may have left one.
        part.mkdir()
        _fill(part, key, name, source(), progress)
        if folder.exists():  # Its files are damaged: processes that have them open keep what they opened.
            shutil.rmtree(folder)
        part.rename(folder)
    store = _opened(folder)
    assert store is not None
    return store, False


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
        raise DataError(
            f"The token cache at {folder.parent} cannot be written: {error.strerror}. "
            "Point WORKBENCH_HOME at a folder that can.",
            path=str(folder.parent),
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fill(part: Path, key: TokensKey, name: str, source: TextSource, progress: bool) -> None:
    """Train a vocabulary on the text, tokenise it, and write the files of its folder."""
    begun = time.monotonic()
    if key.tokenizer_of is not None:
        tokenizer = Tokenizer.from_file(str(key.tokenizer_of / "tokenizer.json"))
    else:
        sample = _training_sample(source, progress)
        train = _wordpiece if key.tokenizer_type == "wordpiece" else _byte_level_bpe
        with _bar("Training the vocabulary", len(sample), " paragraphs", progress) as advance:
            tokenizer = train(sample, key.vocab_size, advance)
    tokenizer.save(str(part / "tokenizer.json"))
    starts = _write_tokens(part / "tokens.bin", tokenizer, source, key.tokenizer_type, progress)
    np.save(part / "documents.npy", starts[:-1])
    facts: dict[str, Any] = {
        "name": name,
        "type": key.tokenizer_type,
        "tokens": int(starts[-1]),
        "documents": len(starts) - 1,
        "vocabulary": tokenizer.get_vocab_size(),
        "seconds": time.monotonic() - begun,
    }
    facts["files"] = {
        name: {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "blake2b": _digest(part / name)}
        for name in ("tokens.bin", "documents.npy", "tokenizer.json")
        if (found := (part / name).stat())
    }
    facts["digest"] = _digest_of_facts(facts)
    (part / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")


def _training_sample(source: TextSource, progress: bool) -> list[str]:
    """Return paragraphs taken evenly from the text, about `TRAINING_BYTES` of them at most."""
    stride = max(1, round(source.text_bytes / TRAINING_BYTES))
    with _bar("Reading for the vocabulary", source.size, source.unit, progress) as advance:
        return [text for index, (_, text) in enumerate(source.paragraphs(advance)) if index % stride == 0]


def _wordpiece(sample: list[str], vocab_size: int, advance: Advance) -> Tokenizer:
    """Train BERT's uncased tokeniser, which lowers the case, strips accents and separates ideographs.

    By default the trainer numbers the continuing characters (`##a`) in the order of a hash table and breaks ties by
    those numbers, so that every process learns another vocabulary. Naming them beforehand, as special tokens, makes
    training repeatable; the returned tokeniser is built from the result and has BERT's five special tokens only.
    """
    special = SPECIAL_TOKENS["wordpiece"]
    tokenizer = _untrained_wordpiece({})
    # Each character may enter twice, alone and continuing a word, so that half of the entries hold it at most. A tiny
    # vocabulary is all characters: with a quarter of 64 entries, every third token of English would be unknown.
    room = vocab_size - len(special)
    limit = room // 2 if vocab_size < SMALLEST_WITH_WORDS else min(6000, room // 4)
    alphabet, continuing = _alphabet(sample, tokenizer, limit)
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
    """Return the `limit` most frequent characters after normalisation, and those of them that can continue a word."""
    frequency: Counter[str] = Counter()
    continuing: set[str] = set()
    for raw, times in _character_counts(sample).items():
        words = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str("a" + raw))
        for character in "".join(word for word, _ in words)[1:]:
            frequency[character] += times
        if len(words) == 1:
            continuing.update(words[0][0][1:])
    ranked = sorted(frequency, key=lambda character: (-frequency[character], character))
    alphabet = sorted(ranked[:limit])
    return alphabet, [character for character in alphabet if character in continuing]


def _character_counts(sample: list[str]) -> dict[str, int]:
    counts = np.zeros(sys.maxunicode + 1, dtype=np.int64)
    for first in range(0, len(sample), 1024):
        text = "".join(sample[first : first + 1024])
        codes, times = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32), return_counts=True)
        counts[codes] += times
    return {chr(code): int(counts[code]) for code in np.flatnonzero(counts)}


def _byte_level_bpe(sample: list[str], vocab_size: int, advance: Advance) -> Tokenizer:
    """Train GPT-2's tokeniser: byte-pair encoding over bytes, so that no character is unknown."""
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


def _write_tokens(
    path: Path, tokenizer: Tokenizer, source: TextSource, tokenizer_type: str, progress: bool
) -> NDArray[np.int64]:
    """Append the ids of every paragraph to a file; return the offset of each document and, last, the total.

    BPE streams carry the end-of-text token after each document and a line break after each paragraph.
    """
    dtype = _dtype(tokenizer.get_vocab_size())
    is_bpe = tokenizer_type == "bpe"
    tokenizer.encode_special_tokens = True  # A "[SEP]" in the text is text.
    starts: list[int] = []
    total = 0
    with path.open("wb") as file, _bar("Tokenising", source.size, source.unit, progress) as advance:
        for chunk in _chunks(source.paragraphs(advance)):
            texts = ["\n" + text if is_bpe and not starts_document else text for starts_document, text in chunk]
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for (starts_document, _), encoding in zip(chunk, encodings, strict=True):
                if starts_document and is_bpe and total:
                    total += _append(file, [0], dtype)
                if starts_document and (not starts or starts[-1] != total):
                    starts.append(total)
                total += _append(file, encoding.ids, dtype)
    if starts and starts[-1] == total:  # Nothing of the last document remained.
        starts.pop()
    return np.asarray([*starts, total], dtype=np.int64)


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
