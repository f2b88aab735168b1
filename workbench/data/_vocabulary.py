"""Vocabularies: trained on a text, or read from files, for WordPiece and byte-level BPE."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from workbench.data._text import Advance

SMALLEST_WITH_WORDS = 256
"""Vocabulary size from which WordPiece keeps at least half of its entries for pieces of words."""
PAD, UNKNOWN, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = {"wordpiece": (PAD, UNKNOWN, CLS, SEP, MASK), "bpe": (END_OF_TEXT,)}
"""Special tokens of each type of tokeniser that is trained here; the id of a token is its index."""


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
