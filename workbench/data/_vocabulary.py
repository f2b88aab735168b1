"""Vocabularies: trained on a text, or read from files, for WordPiece and byte-level BPE."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from workbench.data._text import Advance
from workbench.errors import DataError

SMALLEST_WITH_WORDS = 256
"""Vocabulary size from which WordPiece keeps at least half of its entries for pieces of words."""
REMEDY = (
    "Give the tokenizer.json of a byte-level BPE, such as GPT-2's or OPT's, or the folder that holds it, or one with "
    "vocab.json and merges.txt."
)
PAD, UNKNOWN, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = {"wordpiece": (PAD, UNKNOWN, CLS, SEP, MASK), "bpe": (END_OF_TEXT,)}
"""Special tokens of each type of tokeniser that is trained here; the id of a token is its index."""
ENDS_OF_TEXT = ("</s>", END_OF_TEXT, "<|end_of_text|>", "<eos>")
"""Special tokens that end a document, in OPT, GPT-2 and others; the first that a vocabulary has is used."""


def train_wordpiece(sample: list[str], vocab_size: int, advance: Advance) -> Tokenizer:
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
    counts = np.zeros(sys.maxunicode + 1, dtype=np.int64)
    for first in range(0, len(sample), 1024):
        text = "".join(sample[first : first + 1024])
        codes, times = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32), return_counts=True)
        counts[codes] += times
    frequency: Counter[str] = Counter()
    continuing: set[str] = set()
    for code in np.flatnonzero(counts).tolist():
        words = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str("a" + chr(code)))
        for character in "".join(word for word, _ in words)[1:]:
            frequency[character] += int(counts[code])
        if len(words) == 1:
            continuing.update(words[0][0][1:])
    ranked = sorted(frequency, key=lambda character: (-frequency[character], character))
    alphabet = sorted(ranked[:limit])
    return alphabet, [character for character in alphabet if character in continuing]


def train_byte_level_bpe(sample: list[str], vocab_size: int, advance: Advance) -> Tokenizer:
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


def vocabulary_files(path: str) -> tuple[Path, ...]:
    """Return the files of a vocabulary: a `tokenizer.json`, or a `vocab.json` and a `merges.txt`.

    `path` is such a folder or a file of the first type. Raises `DataError` if there is none.
    """
    given = Path(path)
    if os.path.isfile(given):  # unlike `Path.is_file` also for a name that is too long for a file
        return (given,)
    for names in (("tokenizer.json",), ("vocab.json", "merges.txt")):
        if all(os.path.isfile(given / name) for name in names):
            return tuple(given / name for name in names)
    is_folder = os.path.isdir(given)
    missing = f"The folder {path} holds no tokenizer.json" if is_folder else f"There is no tokeniser at {path}"
    raise DataError(f"{missing}. {REMEDY}")


def vocabulary_digest(path: str) -> str:
    """Return a hash of the content of a vocabulary's files, wherever they are."""
    digest = hashlib.sha256()
    try:
        for file in vocabulary_files(path):
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {REMEDY}") from None
    return digest.hexdigest()


def number_of_ids(tokenizer: Tokenizer) -> int:
    """Return the largest id that a tokeniser gives, and one more."""
    return int(max(tokenizer.get_vocab().values(), default=-1)) + 1


def load_byte_level_bpe(path: str) -> Tokenizer:
    """Load a byte-level BPE from a local file or folder; raise `DataError` if it is none."""
    files = vocabulary_files(path)
    try:
        tokenizer = Tokenizer.from_file(str(files[0])) if len(files) == 1 else _from_merges(*map(str, files))
    except Exception as error:  # the library raises bare `Exception`
        raise DataError(f"{path} cannot be loaded as a tokeniser: {error}. {REMEDY}") from error
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    if parts["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(parts["pre_tokenizer"]):
        raise DataError(f"{path} is a {parts['model']['type']} tokeniser that does not work on bytes. {REMEDY}")
    if end_of_text(tokenizer) is None:
        raise DataError(
            f"{path} has no token that ends a document: none of {', '.join(ENDS_OF_TEXT)}. Add one to its vocabulary."
        )
    return tokenizer


def require_suitable(path: str, tokenizer_type: str, size: int) -> None:
    """Raise `DataError` unless a file holds a byte-level BPE of that size, and the objective uses one."""
    if tokenizer_type != "bpe":
        raise DataError(
            f"{path} is for causal models, and masked ones need the special tokens of BERT. Leave tokenizer_file out: "
            "a WordPiece vocabulary is trained on the text."
        )
    if (found := number_of_ids(load_byte_level_bpe(path))) != size:
        raise DataError(f"{path} had {size:,} ids and now has {found:,}. Describe the data again, or restore the file.")


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that ends a document, or None if there is none."""
    # A learned token of the same letters is none: text about HTML may have taught "</s>".
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    return next((int(special[token]) for token in ENDS_OF_TEXT if token in special), None)


def _from_merges(vocabulary: str, merges: str) -> Tokenizer:
    """Return GPT-2's tokeniser with the vocabulary of two files."""
    tokenizer = Tokenizer(models.BPE.from_file(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The files do not say which tokens are special. Those of OPT and other models of fairseq begin with "<s>".
    end = "</s>" if tokenizer.token_to_id("<s>") == 0 else END_OF_TEXT
    if tokenizer.token_to_id(end) is not None:
        tokenizer.add_special_tokens([end])
    return tokenizer
