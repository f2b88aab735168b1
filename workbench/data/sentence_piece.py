"""SentencePiece's reading of a text (https://github.com/google/sentencepiece): its normalisation, and Unigram pieces.

The library `tokenizers` applies the rules of a model to each grapheme, where SentencePiece goes by the longest prefix
of the rest of the text that has a rule: a kana and a voiced mark after it are two characters in one and one in the
other. Of two ways to cut a word that are equally likely, such as "..." with the pieces "." and "..", it takes another
one than SentencePiece, whose sums are rounded to fp32.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

BLANK = "\u2581"
"""Character that stands for a blank in pieces."""


@dataclass(frozen=True)
class Normalization:
    """Change that a model of SentencePiece makes to a text before it is cut into pieces."""

    rules: Mapping[str, str]
    """Replacement of each sequence of characters; the longest one that a place begins with is replaced."""
    symbols: Sequence[str]
    """Tokens that text may hold, which no rule changes."""
    joins_blanks: bool
    """True if blanks at both ends are removed, and one is left of several."""
    first_blank: bool
    last_blank: bool
    """True if the text gets a blank before, or after it."""

    def __call__(self, text: str) -> str:
        """Return the normalised text, in which blanks are `BLANK`."""
        parts, end, at = list[str](), 0, 0  # `end` is where the last replaced sequence ends
        while (found := self._places.search(text, at)) is not None:
            start, length = found.start(), 0
            if start > at and text[start] in self._seconds:  # the second character of a rule
                start -= 1
                length = self._length(text, start)
                start += not length
            if not length and found.lastindex:  # a symbol
                at = found.end()
                continue
            length = length or self._length(text, start)
            if length:
                parts += [text[end:start], self.rules[text[start : start + length]]]
                end = start + length
            at = start + max(1, length)
        text = "".join(parts) + text[end:] if parts else text
        if self.joins_blanks:
            text = re.sub(" {2,}", " ", text).lstrip(" ")
        if not text:
            return ""
        text = BLANK * self.first_blank + text.replace(" ", BLANK)
        if self.joins_blanks:
            text = text.rstrip(BLANK)
        return text + BLANK * self.last_blank

    def _length(self, text: str, start: int) -> int:
        """Return the length of the longest rule that a place begins with, 0 if there is none."""
        longest = min(self._longest, len(text) - start)
        return next((length for length in range(longest, 0, -1) if text[start : start + length] in self.rules), 0)

    @cached_property
    def _seconds(self) -> frozenset[str]:
        return frozenset(rule[1] for rule in self.rules if len(rule) > 1)

    @cached_property
    def _places(self) -> re.Pattern[str]:
        """Pattern of the places of symbols, of rules of one character, and of the second characters of longer ones."""
        wanted = sorted({*self._seconds, *(rule for rule in self.rules if len(rule) == 1)})
        # Python's `re` looks a class of characters up in a table if all are below U+10000, and reads a list otherwise.
        classes = ["".join(re.escape(each) for each in wanted if ord(each) < 0x10000)]
        classes += ["\U00010000-\U0010ffff"] if wanted and ord(wanted[-1]) >= 0x10000 else []
        symbols = "|".join(map(re.escape, sorted(self.symbols, key=len, reverse=True)))
        places = [*([f"({symbols})"] if symbols else []), *(f"[{each}]" for each in classes if each)]
        return re.compile("|".join(places) or "(?!)", re.DOTALL)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.rules), default=0)


NORMAL, USER_DEFINED = 1, 4
"""Types of the pieces that text is cut into, in SentencePiece's file."""
UNKNOWN_PENALTY = 10.0
"""Distance of the score of an unknown character from the least one of a piece (`unigram_model.cc`)."""
UNIT = 2.0**-22
"""Twice the largest relative error of a sum in fp32: two of one length that are nearer than that may change places."""
MOST_LETTERS = 1 << 22
"""Letters of the different words of a text whose pieces are kept."""
_FP32 = struct.Struct("f")


@dataclass(frozen=True)
class _Word:
    """The best way to cut a word."""

    ids: list[int]
    scores: list[float]
    """Score of each piece, an unknown character included."""
    score: float
    """Their sum."""
    margin: float
    """Least difference of two sums that were compared."""


class Unigram:
    """The most likely pieces of a text (Kudo, arXiv:1804.10959), in fp32 and in the order in which SentencePiece looks.

    Words that are divided by blanks are cut apart, each different one once; where the rounded sum of what is before a
    word may decide between two ways, it is cut again, from that sum on.
    """

    def __init__(self, pieces: Sequence[tuple[str, float, int]], unknown: int, fallback: bool) -> None:
        """`pieces` have a text, a score and a type each; with `fallback`, unknown characters are bytes."""
        normal = [score for _, score, kind in pieces if kind == NORMAL]
        least, most = min(normal, default=0.0), max(normal, default=0.0)
        self._unknown = unknown, _rounded(least - UNKNOWN_PENALTY)
        self._pieces = {
            piece: (number, _rounded(len(piece.encode()) * most) - 0.1 if kind == USER_DEFINED else score)
            for number, (piece, score, kind) in enumerate(pieces)
            if kind in (NORMAL, USER_DEFINED)
        }
        self._prefixes = {piece[:end] for piece in self._pieces for end in range(1, len(piece) + 1)}
        numbers = {piece: number for number, (piece, _, _) in enumerate(pieces)}
        self._bytes = [numbers.get(f"<0x{byte:02X}>", unknown) for byte in range(256)] if fallback else []
        self._is_divided = BLANK in self._pieces and not any(BLANK in piece[1:] for piece in self._pieces)
        self._words: dict[str, _Word] = {}
        self._letters = 0

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a normalised text."""
        words = re.findall(f"{BLANK}[^{BLANK}]*|[^{BLANK}]+", text) if self._is_divided else [text] if text else []
        ids, known = list[int](), self._words
        before, roughly = 0.0, 0.0  # sum of the scores so far: in fp32, of all but those that wait, and of all
        waiting = list[list[float]]()
        for word in words:
            found = known.get(word)
            if found is None:
                found = self._cut(word, 0.0)
                self._letters += len(word)
                if self._letters > MOST_LETTERS:
                    known.clear()
                    self._letters = len(word)
                known[word] = found
            if found.margin <= UNIT * (abs(roughly) + abs(found.score)) and roughly:
                for score in itertools.chain.from_iterable(waiting):
                    before = _rounded(before + score)
                waiting.clear()
                found = self._cut(word, before)
            roughly += found.score
            waiting.append(found.scores)
            ids += found.ids
        return ids

    def _cut(self, word: str, before: float) -> _Word:
        """Return the best way to cut a word after pieces whose scores have the sum `before`."""
        size = len(word)
        sums, starts, numbers = [before, *[0.0] * size], [-1] * (size + 1), [-1] * (size + 1)
        scores, margin = [0.0] * (size + 1), math.inf
        for start in range(size):
            here, is_known = sums[start], False
            for end in range(start + 1, size + 1):
                piece = word[start:end]
                if piece not in self._prefixes:
                    break
                if piece not in self._pieces:
                    continue
                number, score = self._pieces[piece]
                is_known |= end == start + 1
                total = here + score  # compared as it is, and kept in fp32
                margin = margin if starts[end] < 0 else min(margin, abs(total - sums[end]))
                if starts[end] < 0 or total > sums[end]:
                    sums[end], starts[end], numbers[end], scores[end] = _rounded(total), start, number, score
            if not is_known:
                end, total = start + 1, _rounded(here + self._unknown[1])
                margin = margin if starts[end] < 0 else min(margin, abs(total - sums[end]))
                if starts[end] < 0 or total > sums[end]:
                    sums[end], starts[end], numbers[end], scores[end] = total, start, *self._unknown
        ends, end = list[int](), size
        while end > 0:
            ends.append(end)
            end = starts[end]
        ids = list[int]()
        for end in reversed(ends):
            if numbers[end] != self._unknown[0]:
                ids.append(numbers[end])
            elif self._bytes:
                ids += [self._bytes[byte] for byte in word[starts[end] : end].encode()]
            elif not ids or ids[-1] != self._unknown[0]:  # unknown characters beside each other are one token
                ids.append(self._unknown[0])
        used = [scores[end] for end in reversed(ends)]
        return _Word(ids, used, sum(used), margin)


def _rounded(value: float) -> float:
    """Return a number in fp32."""
    rounded: float = _FP32.unpack(_FP32.pack(value))[0]
    return rounded


class SentencePiece:
    """Reader of texts in the way of a model of SentencePiece: normalised, and in pieces if it is a Unigram model."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        self.normalization = Normalization(**described["normalization"])
        self.unigram = None if described["unigram"] is None else Unigram(**described["unigram"])


def rules_of(charsmap: bytes) -> dict[str, str]:
    """Return the rules in a model's `precompiled_charsmap`.

    It holds the size of a double-array trie in bytes, the trie (https://github.com/s-yata/darts-clone), whose units
    have 32 bits, and the replacements, each of which ends in a zero byte. The value of a rule is where its own begins.
    """
    if len(charsmap) < 4:
        return {}
    size = int.from_bytes(charsmap[:4], "little")
    units, texts = np.frombuffer(charsmap[4 : 4 + size], dtype="<u4").astype(np.int64), charsmap[4 + size :]
    labels = np.arange(1, 256)

    def children(unit: int) -> int:
        return (unit >> 10) << ((unit & 512) >> 6)

    rules, todo = dict[str, str](), [(b"", children(int(units[0])))]
    while todo:
        prefix, node = todo.pop()
        places = node ^ labels
        places = places[places < len(units)]
        for place in places[(units[places] & (1 << 31 | 255)) == (node ^ places)].tolist():
            unit, key = int(units[place]), prefix + bytes([node ^ place])
            below = place ^ children(unit)
            if unit >> 8 & 1:
                start = int(units[below]) & (1 << 31) - 1
                rules[key.decode(errors="ignore")] = texts[start : texts.index(0, start)].decode(errors="replace")
            todo.append((key, below))
    return rules
