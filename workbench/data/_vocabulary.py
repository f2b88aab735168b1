"""Vocabularies that are trained on a text: WordPiece for masked models, byte-level BPE for the others."""

from __future__ import annotations

import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from workbench.data._text import Advance
from workbench.data._tokenizer import SpecialTokens

SMALLEST_WITH_WORDS = 256
"""Vocabulary size from which WordPiece keeps at least half of its entries for pieces of words."""
SENTINELS = 100
"""Sentinels of a vocabulary for sequence-to-sequence models, as T5 has (arXiv:1910.10683)."""
SPECIAL_TOKENS = {
    "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "bpe": ("<|endoftext|>",),
    "span_bpe": ("<pad>", "</s>", *(f"<extra_id_{number}>" for number in range(SENTINELS))),
}
"""Special tokens of each type of tokeniser that is trained here; the id of a token is its index."""
ACCENTS = Regex(r"[\u0300-\u036f]")
"""Combining marks of Latin, Greek and Cyrillic letters. Those of other scripts are letters of their own: the voiced
marks of Japanese (U+3099, U+309A), and vowels of Indic scripts and Thai."""


def special_tokens_of(tokenizer_type: str, vocab_size: int) -> SpecialTokens:
    """Return the special tokens of a tokeniser that is trained here, with up to `vocab_size` ids."""
    names = SPECIAL_TOKENS[tokenizer_type]
    number = {name: names.index(name) for name in names}
    special = tuple(range(len(names)))
    if tokenizer_type == "wordpiece":
        cls, sep = (number["[CLS]"],), (number["[SEP]"],)
        return SpecialTokens(vocab_size, special, mask=number["[MASK]"], frame=(cls, sep, sep))
    if tokenizer_type == "bpe":
        return SpecialTokens(vocab_size, special, end=0, line_breaks=True)
    end = number["</s>"]
    return SpecialTokens(
        vocab_size, special, end=end, frame=((), (end,), (end,)), sentinels=special[2:], line_breaks=True
    )


def train_wordpiece(sample: list[str], vocab_size: int, advance: Advance, *, strip_accents: bool = False) -> Tokenizer:
    """Train a tokeniser as BERT's uncased one: Unicode is normalised (NFKC), case lowered, and ideographs separated.

    Unlike BERT's it keeps accents, unless `strip_accents` asks for Latin, Greek and Cyrillic letters without.

    By default the trainer numbers the continuing characters (`##a`) in the order of a hash table and breaks ties by
    those numbers, so that every process learns another vocabulary. Naming them beforehand, as special tokens, makes
    training repeatable; the returned tokeniser is built from the result and has BERT's five special tokens only.
    """
    special = SPECIAL_TOKENS["wordpiece"]
    tokenizer = _untrained_wordpiece({}, strip_accents)
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
    trained = _untrained_wordpiece(tokenizer.get_vocab(), strip_accents)
    trained.add_special_tokens(list(special))
    frame = [(token, trained.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    trained.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=frame
    )
    return trained


def _untrained_wordpiece(vocabulary: dict[str, int], strip_accents: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    bert = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=False, lowercase=True)
    without = [normalizers.NFD(), normalizers.Replace(ACCENTS, ""), normalizers.NFC()] if strip_accents else []
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), *without, bert])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _alphabet(sample: list[str], tokenizer: Tokenizer, limit: int) -> tuple[list[str], list[str]]:
    """Return the `limit` most frequent characters after normalisation, and those of them that can continue a word."""
    counts = np.zeros(sys.maxunicode + 1, dtype=np.int64)
    for first in range(0, len(sample), 1024):
        # Marks that a text writes after their letters are composed first, or the letters would not be counted.
        text = unicodedata.normalize("NFKC", "\n".join(sample[first : first + 1024]))
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


def train_byte_level_bpe(sample: list[str], vocab_size: int, advance: Advance, *, special: str = "bpe") -> Tokenizer:
    """Train GPT-2's tokeniser: byte-pair encoding over bytes, so that no character is unknown.

    `special` names the entry of `SPECIAL_TOKENS` with which the vocabulary begins. With sentinels, the tokeniser ends a
    text with `</s>`, as T5's does.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS[special]),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_counted(sample, advance), trainer=trainer)
    if special == "span_bpe":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
        )
    return tokenizer


def _counted(sample: list[str], advance: Advance) -> Iterator[list[str]]:
    for first in range(0, len(sample), 1024):
        yield (batch := sample[first : first + 1024])
        advance(len(batch))
