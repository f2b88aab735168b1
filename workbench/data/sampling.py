"""Training samples as pure functions of (seed, index), the same under every plan, on every rank and in every batch.

Randomness is counter-based: a hash of (seed, purpose, sample, position), never a generator with a state.
Shapes: B samples of a batch, S tokens of a sequence, H hidden (masked) positions of a sample.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.base.errors import DataError
from workbench.base.tensors import TensorSpec
from workbench.data.store import GOLDEN_RATIO, SplicedTokens, TokenStore
from workbench.data.tokenizer import SpecialTokens, TextTokenizer

if TYPE_CHECKING:
    import torch


U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

IGNORED = -100
"""Label that PyTorch's cross-entropy ignores."""
MASKED_SHARE = 0.15
"""Fraction of the positions of a sample that a masked model predicts (BERT, arXiv:1810.04805, section 3.1), unless the
text says otherwise. Evaluations always hide this fraction."""
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Fractions of the masked positions replaced by [MASK] and by a random token; the rest stay (BERT, section 3.1)."""

MEAN_SPAN = 3
"""Mean length of the spans that a sequence-to-sequence model restores (T5, arXiv:1910.10683, section 3.3.4)."""

PERMUTE, SPLIT, CONTINUE, ELSEWHERE, SELECT, REPLACE, REPLACEMENT, BUFFER, ITEM, HIDDEN, SHOWN, MIXED = range(12)
"""Purposes of the random numbers; each is part of the hash, so that no two share their numbers."""

EVALUATION_SEED = 0x4556414C
"""Seed of the masks of held-out samples, the same in every experiment."""

_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def mixed(value: U64) -> U64:
    """Scatter every bit by the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection."""
    value = (value ^ (value >> _S30)) * _M1
    value = (value ^ (value >> _S27)) * _M2
    return value ^ (value >> _S31)


def hashed(seed: int, purpose: int, counter: I64 | U64) -> U64:
    """Return 64 random bits for each entry of `counter`."""
    key = mixed(np.asarray([(seed * 64 + purpose) & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + GOLDEN_RATIO)
    return mixed(mixed(counter.astype(np.uint64) * GOLDEN_RATIO + key) + key)


def unit(bits: U64) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1), from the upper 53 bits."""
    return (bits >> _S11).astype(np.float64) * 2.0**-53


def below(bits: U64, bound: I64) -> I64:
    """Return uniform integers in 0 … bound - 1, for bounds below 2**53."""
    return np.minimum((unit(bits) * bound).astype(np.int64), bound - 1)


def shuffled(seed: int, index: I64, size: int) -> I64:
    """Return the item that training reads at `index`: each of `size` items once per epoch, in that epoch's own order.

    The permutation is a four-round Feistel network on the next even power of two, applied until the result is below
    `size` (Black and Rogaway, CT-RSA 2002); it needs no table, whatever the size.
    """
    epoch, position = np.divmod(index, size)
    return _permuted(position, [hashed(seed, PERMUTE, epoch * 4 + feistel_round) for feistel_round in range(4)], size)


def shuffled_within(seed: int, epoch: int, chunk: int, position: I64, size: int) -> I64:
    """Return the item of a chunk of `size` that training reads at each position in it: each item once."""
    counter = np.full(position.shape, ((epoch << 32) + chunk) * 4, dtype=np.int64)
    return _permuted(position, [hashed(seed, BUFFER, counter + feistel_round) for feistel_round in range(4)], size)


def shuffled_in_chunks(seed: int, index: I64, size: int, buffer: int) -> I64:
    """Return the item that training reads at `index` if only `buffer` consecutive items at a time are shuffled.

    Each of `size` items is read once per epoch. A stream can be read in this order with a buffer of so many items.
    """
    epoch_B, position_B = np.divmod(index, size)
    if buffer == 1:
        return position_B
    chunk_B = position_B // buffer
    items = np.empty_like(index)
    for epoch, chunk in np.unique(np.stack([epoch_B, chunk_B], axis=1), axis=0).tolist():
        of_chunk = (epoch_B == epoch) & (chunk_B == chunk)
        first = chunk * buffer
        inside = position_B[of_chunk] - first
        items[of_chunk] = first + shuffled_within(seed, epoch, chunk, inside, min(buffer, size - first))
    return items


def _permuted(position: I64, keys: list[U64], size: int) -> I64:
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    moved = _feistel(position.astype(np.uint64), keys, half_bits)
    while (outside := np.flatnonzero(moved >= size)).size:
        moved[outside] = _feistel(moved[outside], [key[outside] for key in keys], half_bits)
    return moved.astype(np.int64)


def _feistel(value: U64, keys: list[U64], half_bits: int) -> U64:
    shift, low = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & low
    for key in keys:
        left, right = right, left ^ (mixed(right + key) & low)
    return (left << shift) | right


@functools.lru_cache(maxsize=256)
def _period(quotas: tuple[int, ...]) -> I64:
    """Return the source of each sample of a period that has so many of each source.

    Sample j of a source with share w may come from position (j - 1) / w on and must have come by j / w. Of those that
    may come, the one that must come first is taken, which keeps every count within 1 of its share (Baruah et al.,
    Algorithmica 15, 1996: proportionate progress).
    """
    size, given = sum(quotas), [0] * len(quotas)
    order = np.empty(size, dtype=np.int64)
    for position in range(size):
        best, due = -1, size + 1
        for part, quota in enumerate(quotas):
            if given[part] * size < quota * (position + 1):
                deadline = -((given[part] + 1) * size // -quota)
                if deadline < due:
                    best, due = part, deadline
        order[position] = best
        given[best] += 1
    return order


NEVER = np.iinfo(np.int64).max
"""Place of a sample that never comes."""


class _Stretch(NamedTuple):
    """Consecutive samples of a mixture with the same weights."""

    first: int
    order: I64
    """Source of each sample of a period."""
    number: I64
    """Samples of the same source before each sample of a period."""
    quotas: I64
    """Samples of each source in a period."""
    before: I64
    """Samples of each source before the stretch."""

    def given(self, samples: int) -> I64:
        """Return the samples of each source in the first `samples` of the stretch, and all before it."""
        periods, rest = divmod(samples, len(self.order))
        return self.before + periods * self.quotas + np.bincount(self.order[:rest], minlength=len(self.quotas))


class MixedOrder:
    """The source of every sample of a mixture, and its number among those of that source."""

    def __init__(self, stretches: Sequence[tuple[int, Sequence[Fraction]]]) -> None:
        """`stretches` are the first sample of each, ascending from 0, and the shares of the sources, of sum 1."""
        self._stretches: list[_Stretch] = []
        for first, shares in stretches:
            size = math.lcm(*(share.denominator for share in shares))
            quotas = tuple(int(share * size) for share in shares)
            order = _period(quotas)
            number = np.empty_like(order)
            for part, quota in enumerate(quotas):
                number[order == part] = np.arange(quota)
            before = self.given(first) if self._stretches else np.zeros(len(quotas), dtype=np.int64)
            self._stretches.append(_Stretch(first, order, number, np.asarray(quotas), before))
        self._firsts = np.asarray([stretch.first for stretch in self._stretches])

    def __repr__(self) -> str:
        return f"MixedOrder({[(stretch.first, stretch.quotas.tolist()) for stretch in self._stretches]})"

    def given(self, samples: int) -> I64:
        """Return how many of the first `samples` come from each source."""
        stretch = next(each for each in reversed(self._stretches) if each.first <= samples)
        return stretch.given(samples - stretch.first)

    def of(self, index_B: I64) -> tuple[I64, I64]:
        """Return the source of each sample, and its number there."""
        part_B, number_B = np.empty_like(index_B), np.empty_like(index_B)
        stretch_B = np.searchsorted(self._firsts, index_B, side="right") - 1
        for position in np.unique(stretch_B).tolist():
            stretch, chosen = self._stretches[position], stretch_B == position
            period, inside = np.divmod(index_B[chosen] - stretch.first, len(stretch.order))
            part = stretch.order[inside]
            part_B[chosen] = part
            number_B[chosen] = stretch.before[part] + period * stretch.quotas[part] + stretch.number[inside]
        return part_B, number_B

    def places(self, part: int, number_B: I64) -> I64:
        """Return where samples of a source, by their numbers there, stand among all; `NEVER` for some that never come.

        `of` is the inverse.
        """
        place_B = np.full(number_B.shape, NEVER)
        before = np.asarray([stretch.before[part] for stretch in self._stretches])
        stretch_B = np.searchsorted(before, number_B, side="right") - 1  # of stretches without any, the one after
        for position in np.unique(stretch_B).tolist():
            stretch, chosen = self._stretches[position], stretch_B == position
            if quota := int(stretch.quotas[part]):
                period, inside = np.divmod(number_B[chosen] - stretch.before[part], quota)
                own = np.flatnonzero(stretch.order == part)[inside]
                place_B[chosen] = stretch.first + period * len(stretch.order) + own
        return place_B


def seeds_of_parts(seed: int, parts: int) -> list[int]:
    """Return a seed for each source of a mixture, so that no two draw alike; that of the first is the training's."""
    return [seed, *(hashed(seed, MIXED, np.arange(1, parts)) >> _S11).tolist()]


class Windows(Protocol):
    """Windows of a text that are read in the order of training, such as a stream hands them on."""

    def windows(self, index_B: I64) -> NDArray[Any]:
        """Return the token ids of some samples, shape `(B, width)`."""


@dataclass(frozen=True)
class TokenSamples(ABC):
    """Samples of a token stream that is cut into windows of `width`, which are read in a new order each epoch."""

    store: TokenStore | SplicedTokens | Windows
    seq_len: int
    seed: int
    tokens: SpecialTokens
    masked_share: float = MASKED_SHARE
    """Fraction of the positions that a masked model predicts."""
    in_order: int | None = None
    """Number of samples that are read in the order of the text, spread evenly over it; None for a new order each
    epoch."""
    buffer: int | None = None
    """Number of consecutive samples that are shuffled at a time; None for an order over the whole text."""
    joints: NDArray[np.uint8] | None = None
    """Table of the tokens that continue a word (`TextTokenizer.joints`); None masks tokens singly."""

    @property
    def text(self) -> TokenStore | SplicedTokens:
        """The tokens, where all of them are stored."""
        assert isinstance(self.store, TokenStore | SplicedTokens)
        return self.store

    @property
    def width(self) -> int:
        """Tokens of the stream in one sample."""
        return self.width_of(self.seq_len, self.tokens, self.masked_share)

    @staticmethod
    @abstractmethod
    def width_of(seq_len: int, tokens: SpecialTokens, masked_share: float) -> int:
        """Return the tokens of the stream in a sample of `seq_len` positions."""

    @staticmethod
    def lack_of(tokens: SpecialTokens) -> str | None:
        """Return what a tokeniser lacks for these samples, as the object of a sentence; None if it has all."""
        return None if tokens.mask is not None else "no mask token"

    def starts(self, index_B: I64) -> I64:
        """Return the offset in the stream of each sample's window."""
        windows = self.text.tokens // self.width
        if self.buffer is not None:
            return shuffled_in_chunks(self.seed, index_B, windows, self.buffer) * self.width
        if self.in_order is not None:
            return index_B * windows // self.in_order * self.width
        return shuffled(self.seed, index_B, windows) * self.width

    def windows(self, index_B: I64) -> NDArray[Any]:
        """Return the tokens of each sample's window."""
        if isinstance(self.store, TokenStore | SplicedTokens):
            ids_BS: NDArray[Any] = self.store.ids[self.starts(index_B)[:, None] + np.arange(self.width)]
            return ids_BS
        return self.store.windows(index_B)

    @abstractmethod
    def batch(self, index_B: I64) -> dict[str, NDArray[Any]]:
        """Return the fields of the samples with those indices, each with a leading batch dim."""


class CausalSamples(TokenSamples):
    """Samples whose `input_ids` and `labels` are one window of the stream; the model shifts them."""

    @staticmethod
    def width_of(seq_len: int, tokens: SpecialTokens, masked_share: float) -> int:  # noqa: ARG004
        return seq_len

    @staticmethod
    def lack_of(tokens: SpecialTokens) -> str | None:
        return None if tokens.end is not None else "no token that ends a document (eos_token)"

    def batch(self, index_B: I64) -> dict[str, NDArray[Any]]:
        ids_BS = self.windows(index_B).astype(np.int64)
        return {"input_ids": ids_BS, "labels": ids_BS.copy()}


class MaskedSamples(TokenSamples):
    """Samples `[CLS] window [SEP]` with BERT's masking. A window may run on from one document into the next."""

    @staticmethod
    def width_of(seq_len: int, tokens: SpecialTokens, masked_share: float) -> int:  # noqa: ARG004
        return seq_len - len(tokens.prefix) - len(tokens.suffix)

    def batch(self, index_B: I64) -> dict[str, NDArray[Any]]:
        ids_BS = _framed(self.windows(index_B), self.tokens)
        inside_BS = np.ones(ids_BS.shape, dtype=bool)
        inside_BS[:, : len(self.tokens.prefix)] = inside_BS[:, self.seq_len - len(self.tokens.suffix) :] = False
        input_ids, labels = masked(ids_BS, inside_BS, index_B, self.seed, self.tokens, self.masked_share, self.joints)
        return {"input_ids": input_ids, "labels": labels}


class PairedSamples(TokenSamples):
    """Samples `[CLS] A [SEP] B [SEP]` without padding: B continues A or, half the time, is from another document.

    A window of the stream is split at a random position in its middle half. `next_sentence_label` is 0 for a
    true continuation and 1 otherwise, as in `transformers`. If the split falls between two documents, there is
    nothing to continue, and B comes from another document too.
    """

    @staticmethod
    def width_of(seq_len: int, tokens: SpecialTokens, masked_share: float) -> int:  # noqa: ARG004
        return seq_len - sum(map(len, tokens.frame))

    @staticmethod
    def lack_of(tokens: SpecialTokens) -> str | None:
        return TokenSamples.lack_of(tokens) or (
            None if tokens.frame[1] else "no token between two segments (sep_token)"
        )

    def batch(self, index_B: I64) -> dict[str, NDArray[Any]]:
        starts_B = self.starts(index_B)
        quarter = max(1, self.width // 4)
        span = np.full(len(index_B), self.width - 2 * quarter + 1, dtype=np.int64)
        length_B = quarter + below(hashed(self.seed, SPLIT, index_B), span)
        split_B, rest_B = starts_B + length_B, self.width - length_B

        # B avoids the document in which A ends or, in a corpus of one document, the window of A.
        starts = self.text.document_starts
        after_B = np.searchsorted(starts, split_B - 1, side="right")
        after_last_B = np.where(after_B < len(starts), starts[np.minimum(after_B, len(starts) - 1)], self.text.tokens)
        coin_B = hashed(self.seed, CONTINUE, index_B) & np.uint64(1)
        wanted_B = coin_B.astype(bool) | (after_last_B == split_B)
        other_B, has_other_B = self._clear_of(starts[after_B - 1], after_last_B, rest_B, index_B)
        apart_B, has_apart_B = self._clear_of(starts_B, starts_B + self.width, rest_B, index_B)
        random_B = wanted_B & (has_other_B | has_apart_B)
        second_B = np.where(random_B, np.where(has_other_B, other_B, apart_B), split_B)

        # The ids of both segments, with the special tokens around and between them.
        prefix, between, suffix = self.tokens.frame
        position_S = np.arange(self.seq_len)
        first_end_B1 = (len(prefix) + length_B)[:, None]
        second_B1 = first_end_B1 + len(between)
        source_BS = np.where(
            position_S < first_end_B1,
            starts_B[:, None] + position_S - len(prefix),
            second_B[:, None] + position_S - second_B1,
        )
        ids_BS = self.text.ids[np.clip(source_BS, 0, self.text.tokens - 1)].astype(np.int64)
        ids_BS[:, : len(prefix)], ids_BS[:, self.seq_len - len(suffix) :] = prefix, suffix
        ids_BS[np.arange(len(index_B))[:, None], first_end_B1 + np.arange(len(between))] = between
        inside_BS = (position_S >= len(prefix)) & (position_S < self.seq_len - len(suffix))
        inside_BS = inside_BS & ((position_S < first_end_B1) | (position_S >= second_B1))
        input_ids, labels = masked(ids_BS, inside_BS, index_B, self.seed, self.tokens, self.masked_share, self.joints)
        return {
            "input_ids": input_ids,
            "token_type_ids": (position_S >= second_B1).astype(np.int64),
            "labels": labels,
            "next_sentence_label": random_B.astype(np.int64),
        }

    def _clear_of(self, first_B: I64, end_B: I64, length_B: I64, index_B: I64) -> tuple[I64, NDArray[np.bool_]]:
        """Return a random offset whose `length_B` tokens do not touch first … end - 1, and True if there is one."""
        before_B = np.maximum(first_B - length_B + 1, 0)
        after_B = np.maximum(self.text.tokens - length_B + 1 - end_B, 0)
        choices_B = before_B + after_B
        chosen_B = below(hashed(self.seed, ELSEWHERE, index_B), np.maximum(choices_B, 1))
        return np.where(chosen_B < before_B, chosen_B, end_B + chosen_B - before_B), choices_B > 0


class SpanSamples(TokenSamples):
    """Samples of a sequence-to-sequence model, which restores hidden spans of a window of the stream.

    With sentinels (T5, arXiv:1910.10683, figure 2), each span of the input is one sentinel, and `labels` are the
    sentinels with the spans after them. With a mask only (BART's text infilling, arXiv:1910.13461, section 2.2), each
    span is one mask, and `labels` are the whole window. Both end with the tokeniser's own suffix. The number of hidden
    tokens and that of spans are the same in every sample, so that its shapes are.
    """

    @staticmethod
    def width_of(seq_len: int, tokens: SpecialTokens, masked_share: float) -> int:
        # One more token of text is at most one more of the input, so that the largest window fills the input exactly.
        room = seq_len - len(tokens.prefix) - len(tokens.suffix)
        width = max(room, 2)
        while True:
            hidden, spans = _spans(width + 1, masked_share)
            if width + 1 - hidden + spans > room:
                return width
            width += 1

    @staticmethod
    def spans(seq_len: int, tokens: SpecialTokens, masked_share: float) -> int:
        """Return the number of hidden spans of a sample."""
        return _spans(SpanSamples.width_of(seq_len, tokens, masked_share), masked_share)[1]

    @staticmethod
    def label_length(seq_len: int, tokens: SpecialTokens, masked_share: float) -> int:
        """Return the length of `labels` for inputs of `seq_len` tokens."""
        width = SpanSamples.width_of(seq_len, tokens, masked_share)
        ends = len(tokens.prefix) + len(tokens.suffix)
        return ends + (sum(_spans(width, masked_share)) if tokens.sentinels else width)

    @staticmethod
    def lack_of(tokens: SpecialTokens) -> str | None:
        return (
            None if tokens.sentinels or tokens.mask is not None else "neither sentinels (<extra_id_0>) nor a mask token"
        )

    def batch(self, index_B: I64) -> dict[str, NDArray[Any]]:
        window_BW = self.windows(index_B).astype(np.int64)
        hidden, spans = _spans(self.width, self.masked_share)
        # Shown and hidden segments alternate, and the first is shown.
        lengths = [
            _segments(hashed(self.seed, purpose, index_B[:, None] * self.width + np.arange(total - 1)), spans)
            for purpose, total in ((SHOWN, self.width - hidden), (HIDDEN, hidden))
        ]
        ends_BG = np.cumsum(np.stack(lengths, axis=2).reshape(len(index_B), 2 * spans), axis=1)
        segment_BW = (np.arange(self.width) >= ends_BG[:, :, None]).sum(axis=1)
        hidden_BW = segment_BW % 2 == 1
        first_BW = hidden_BW & (np.diff(segment_BW, axis=1, prepend=0) == 1)
        marks = np.asarray(self.tokens.sentinels[:spans] or (self.tokens.mask,) * spans, dtype=np.int64)
        mark_BW = marks[segment_BW // 2 % spans]
        shown_BI = np.where(first_BW, mark_BW, window_BW)[~hidden_BW | first_BW].reshape(len(index_B), -1)
        if not self.tokens.sentinels:
            return {"input_ids": _framed(shown_BI, self.tokens), "labels": _framed(window_BW, self.tokens)}
        # Each hidden span follows its sentinel: a pair of columns for each token, of which the sentinel's is kept once.
        pair_BW2 = np.stack([mark_BW, window_BW], axis=2)
        kept_BW2 = np.stack([first_BW, hidden_BW], axis=2)
        return {
            "input_ids": _framed(shown_BI, self.tokens),
            "labels": _framed(pair_BW2[kept_BW2].reshape(len(index_B), -1), self.tokens),
        }


def _spans(width: int, share: float) -> tuple[int, int]:
    """Return the number of hidden tokens and of spans in a window, as T5's `random_spans_noise_mask` counts them."""
    hidden = min(max(round(width * share), 1), width - 1)
    return hidden, max(1, min(round(hidden / MEAN_SPAN), width - hidden))


def _segments(bits_BN: U64, count: int) -> I64:
    """Return the lengths of `count` segments, at least 1 each and N + 1 together, drawn evenly by random bits."""
    batch, cuts = bits_BN.shape
    if count == 1:
        return np.full((batch, 1), cuts + 1, dtype=np.int64)
    cut_BC = np.sort(np.argpartition(bits_BN, count - 2, axis=1)[:, : count - 1], axis=1) + 1
    return np.diff(cut_BC, axis=1, prepend=0, append=cuts + 1)


def _framed(ids_BW: NDArray[Any], tokens: SpecialTokens) -> I64:
    """Return ids between the special tokens before and after a sample."""
    prefix, _, suffix = tokens.frame
    framed_BS = np.empty((len(ids_BW), len(prefix) + ids_BW.shape[1] + len(suffix)), dtype=np.int64)
    framed_BS[:, : len(prefix)], framed_BS[:, framed_BS.shape[1] - len(suffix) :] = prefix, suffix
    framed_BS[:, len(prefix) : framed_BS.shape[1] - len(suffix)] = ids_BW
    return framed_BS


def masked(
    ids_BS: I64,
    inside_BS: NDArray[np.bool_],
    index_B: I64,
    seed: int,
    tokens: SpecialTokens,
    share: float = MASKED_SHARE,
    joints: NDArray[np.uint8] | None = None,
) -> tuple[I64, I64]:
    """Mask as BERT does: return inputs with a `share` of the positions hidden, and labels that are -100 elsewhere.

    Every sample hides `round(share * S)` positions and at least one, or all that there are, drawn among those `inside`,
    which are not special tokens. Of these, 80 % become [MASK], 10 % become a random token and 10 % stay. The choice
    depends on seed, sample and position only. With `joints`, whole words are drawn; of the last one, only as many
    tokens as are left are hidden.
    """
    batch, seq_len = ids_BS.shape
    counter_BS = index_B[:, None] * seq_len + np.arange(seq_len)
    order_BS = hashed(seed, SELECT, counter_BS)
    hidden = max(1, round(share * seq_len))
    if joints is not None:
        continues_BS = np.zeros((batch, seq_len), dtype=bool)
        continues_BS[:, 1:] = (joints[ids_BS[:, 1:], 0] & joints[ids_BS[:, :-1], 1]).astype(bool)
        continues_BS[:, 1:] &= inside_BS[:, 1:] & inside_BS[:, :-1]
        first_BS = np.maximum.accumulate(np.where(continues_BS, 0, np.arange(seq_len)), axis=1)
        order_BS = np.take_along_axis(order_BS, first_BS, axis=1)
    order_BS[~inside_BS] = np.iinfo(np.uint64).max
    if joints is None:
        position_BH = np.argpartition(order_BS, hidden - 1, axis=1)[:, :hidden]
    else:
        position_BH = np.argsort(order_BS, axis=1, kind="stable")[:, :hidden]

    original_BH = np.take_along_axis(ids_BS, position_BH, axis=1)
    counter_BH = np.take_along_axis(counter_BS, position_BH, axis=1)
    coin_BH = unit(hashed(seed, REPLACE, counter_BH))
    count = np.full(position_BH.shape, len(tokens.words), dtype=np.int64)
    random_BH = tokens.words[below(hashed(seed, REPLACEMENT, counter_BH), count)]
    assert tokens.mask is not None
    shown_BH = np.where(coin_BH < MASK_SHARE, tokens.mask, original_BH)
    shown_BH = np.where((coin_BH >= MASK_SHARE) & (coin_BH < MASK_SHARE + RANDOM_SHARE), random_BH, shown_BH)

    input_BS, labels_BS = ids_BS.copy(), np.full((batch, seq_len), IGNORED, dtype=np.int64)
    np.put_along_axis(input_BS, position_BH, shown_BH, axis=1)
    np.put_along_axis(labels_BS, position_BH, original_BH, axis=1)
    input_BS[~inside_BS], labels_BS[~inside_BS] = ids_BS[~inside_BS], IGNORED
    return input_BS, labels_BS


class SeparateSamples(TokenSamples):
    """Samples in which each document is read as if it stood alone: `position_ids` begin anew with each.

    The part of a document that a window begins with counts as a document. `Experiment.build` lets a model attend within
    documents alone (`workbench.models.attending_within_documents`).
    """

    def positions(self, index_B: I64) -> I64:
        """Return the position of each token in its document or the part of it that is in the window."""
        first_B, documents, position_S = self.starts(index_B), self.text.document_starts, np.arange(self.width)
        begins_BS = np.zeros((len(index_B), self.width), dtype=np.int64)
        after_B = np.searchsorted(documents, first_B, side="right")
        end_B = np.searchsorted(documents, first_B + self.width)
        for sample, (after, end) in enumerate(zip(after_B.tolist(), end_B.tolist(), strict=True)):
            inside = documents[after:end] - first_B[sample]
            begins_BS[sample, inside] = inside
        return position_S - np.maximum.accumulate(begins_BS, axis=1)


class SeparateCausalSamples(SeparateSamples, CausalSamples):
    """A window of the stream, whose labels leave out the first token of each document: nothing before it foretells it.

    Loss and gradients are those of a batch with each of these documents as a sample of its own.
    """

    def batch(self, index_B: I64) -> dict[str, NDArray[Any]]:
        position_BS, fields = self.positions(index_B), super().batch(index_B)
        fields["labels"][position_BS == 0] = IGNORED
        return {"input_ids": fields["input_ids"], "position_ids": position_BS, "labels": fields["labels"]}


class SeparateMaskedSamples(SeparateSamples, MaskedSamples):
    """A window of a stream in which special tokens frame each document, with BERT's masking of the others."""

    @staticmethod
    def width_of(seq_len: int, tokens: SpecialTokens, masked_share: float) -> int:  # noqa: ARG004
        return seq_len

    def batch(self, index_B: I64) -> dict[str, NDArray[Any]]:
        ids_BS = self.windows(index_B).astype(np.int64)
        inside_BS = ~np.isin(ids_BS, [*self.tokens.prefix, *self.tokens.suffix])
        input_ids, labels = masked(ids_BS, inside_BS, index_B, self.seed, self.tokens, self.masked_share, self.joints)
        return {"input_ids": input_ids, "position_ids": self.positions(index_B), "labels": labels}


SEPARATE_SAMPLES: dict[str, type[TokenSamples]] = {"clm": SeparateCausalSamples, "mlm": SeparateMaskedSamples}
"""Samples of the objectives whose documents can be read apart."""
SAMPLES: dict[str, type[TokenSamples]] = {
    "clm": CausalSamples,
    "mlm": MaskedSamples,
    "mlm_nsp": PairedSamples,
    "seq2seq": SpanSamples,
}
"""Samples of each objective."""


# Prompts of a user become token ids, for the samples of text that a model writes while it trains.


@dataclass(frozen=True)
class PromptGroup:
    """Prompts that pass through the model together, as one batch of `length` tokens."""

    prompts: tuple[int, ...]
    length: int
    specs: dict[str, TensorSpec]
    """Fields of the batch."""


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts as token ids, and the tokeniser that turns ids back into text."""

    objective: str
    """`clm`, `mlm` or `mlm_nsp`."""
    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    """Token ids of each prompt; those of a masked model are `[CLS] prompt [SEP]`."""
    tokenizer: TextTokenizer
    tokens: SpecialTokens

    @property
    def is_causal(self) -> bool:
        return self.objective == "clm"

    @property
    def vocabulary(self) -> int:
        """Number of ids of the tokeniser; a model may have more."""
        return self.tokens.vocabulary

    def groups(self, tokens: int, seq_len: int) -> list[PromptGroup]:
        """Return the prompts in groups of one length.

        A causal model reads all prompts together, padded to the longest with the `tokens` that it writes. A masked
        model would also read padding, so that only prompts of equal length go together.
        """
        import torch

        room = min(seq_len, max(map(len, self.ids)) + tokens)
        lengths = [room if self.is_causal else len(ids) for ids in self.ids]
        groups = []
        for length in dict.fromkeys(lengths):
            prompts = tuple(at for at, own in enumerate(lengths) if own == length)
            fields = self.fields(torch.empty(len(prompts), length, dtype=torch.int64))
            specs = {name: TensorSpec(name, tuple(field.shape), "int64") for name, field in fields.items()}
            groups.append(PromptGroup(prompts, length, specs))
        return groups

    def masks(self, prompt: int) -> tuple[int, ...]:
        """Return the positions of the masks in a prompt."""
        return tuple(at for at, token in enumerate(self.ids[prompt]) if token == self.tokens.mask)

    def fields(self, input_ids_PS: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a batch of the model's fields around `input_ids`, with labels that a masked model ignores."""
        import torch

        if self.is_causal:
            return {"input_ids": input_ids_PS, "labels": input_ids_PS.clone()}
        labels_PS = torch.full_like(input_ids_PS, IGNORED)
        if self.objective == "mlm":
            return {"input_ids": input_ids_PS, "labels": labels_PS}
        return {
            "input_ids": input_ids_PS,
            "token_type_ids": torch.zeros_like(input_ids_PS),
            "labels": labels_PS,
            "next_sentence_label": torch.zeros_like(input_ids_PS[:, 0]),
        }

    def continuation(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens that a causal model wrote, up to the end of the document."""
        end = self.tokens.end
        return self.tokenizer.decode(ids[: ids.index(end)] if end is not None and end in ids else ids)

    def token(self, number: int) -> str:
        """Return the text of one token."""
        return self.tokenizer.token(number)


def encoded_prompts(
    prompts: Sequence[str], tokenizer: TextTokenizer, tokens: SpecialTokens, objective: str, seq_len: int
) -> EncodedPrompts:
    """Encode prompts; raise `DataError` for one that is empty or too long, or that has no mask for a masked model."""
    if objective == "seq2seq":
        raise DataError(
            "Samples of text are written by causal and masked models, and this one is sequence-to-sequence. Remove "
            "samples, and try an export with transformers."
        )
    encoded = []
    for prompt in prompts:
        ids = tuple(tokenizer.encode(prompt))
        if objective != "clm":
            assert tokens.mask is not None
            if tokens.mask not in ids:
                mask = tokenizer.token(tokens.mask)
                raise DataError(
                    f"The prompt {prompt!r} has no {mask}, and the model fills masks. Write one where a word is to be "
                    f'found, such as "The capital of France is {mask}."'
                )
            ids = (*tokens.prefix, *ids, *tokens.suffix)
        elif tokens.begin is not None and ids:
            ids = (tokens.begin, *ids)
        if not ids:
            raise DataError(f"The prompt {prompt!r} has no token. Give at least one word.")
        if len(ids) > seq_len:
            raise DataError(
                f"The prompt {prompt[:60]!r} has {len(ids)} tokens, and the model reads {seq_len} (seq_len). Shorten "
                "the prompt."
            )
        encoded.append(ids)
    return EncodedPrompts(objective, tuple(prompts), tuple(encoded), tokenizer, tokens)
