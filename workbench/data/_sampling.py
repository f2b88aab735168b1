"""Training samples as pure functions of (seed, index), the same under every plan, on every rank and in every batch.

Randomness is counter-based: a hash of (seed, purpose, sample, position), never a generator with a state.
Shapes: B samples of a batch, S tokens of a sequence, H hidden (masked) positions of a sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from workbench.data._ring import Ring
from workbench.data._split import SplicedTokens
from workbench.data._store import TokenStore
from workbench.data._vocabulary import CLS, MASK, SEP, SPECIAL_TOKENS

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

IGNORED = -100
"""Label that PyTorch's cross-entropy ignores."""
MASKED_SHARE = 0.15
"""Fraction of the positions of a sample that a masked model predicts (BERT, arXiv:1810.04805, section 3.1), unless the
text says otherwise. Evaluations always hide this fraction."""
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Fractions of the masked positions replaced by [MASK] and by a random token; the rest stay (BERT, section 3.1)."""

PERMUTE, SPLIT, CONTINUE, ELSEWHERE, SELECT, REPLACE, REPLACEMENT, BUFFER, ITEM = range(9)
"""Purposes of the random numbers; each is part of the hash, so that no two share their numbers."""

EVALUATION_SEED = 0x4556414C
"""Seed of the masks of held-out samples, the same in every experiment."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def mixed(value: U64) -> U64:
    """Scatter every bit by the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection."""
    value = (value ^ (value >> _S30)) * _M1
    value = (value ^ (value >> _S27)) * _M2
    return value ^ (value >> _S31)


def hashed(seed: int, purpose: int, counter: I64 | U64) -> U64:
    """Return 64 random bits for each entry of `counter`."""
    key = mixed(np.asarray([(seed * 64 + purpose) & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GAMMA)
    return mixed(mixed(counter.astype(np.uint64) * _GAMMA + key) + key)


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


@dataclass(frozen=True)
class TokenSamples(ABC):
    """Samples of a token stream that is cut into windows of `width`, which are read in a new order each epoch."""

    store: TokenStore | SplicedTokens | Ring
    seq_len: int
    seed: int
    masked_share: float = MASKED_SHARE
    """Fraction of the positions that a masked model predicts."""
    in_order: int | None = None
    """Number of samples that are read in the order of the text, spread evenly over it; None for a new order each
    epoch."""
    buffer: int | None = None
    """Number of consecutive samples that are shuffled at a time; None for an order over the whole text."""

    SPECIAL_POSITIONS: ClassVar[int] = 0
    """Positions of a sample that special tokens take."""

    @property
    def text(self) -> TokenStore | SplicedTokens:
        """The tokens, where all of them are stored."""
        assert not isinstance(self.store, Ring)
        return self.store

    @property
    def width(self) -> int:
        """Tokens of the stream in one sample."""
        return self.seq_len - self.SPECIAL_POSITIONS

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
        if isinstance(self.store, Ring):  # which holds windows in the order of training
            return self.store.windows(index_B)
        ids_BS: NDArray[Any] = self.store.ids[self.starts(index_B)[:, None] + np.arange(self.width)]
        return ids_BS

    @abstractmethod
    def batch(self, index_B: I64) -> dict[str, NDArray[Any]]:
        """Return the fields of the samples with those indices, each with a leading batch dim."""


class CausalSamples(TokenSamples):
    """Samples whose `input_ids` and `labels` are one window of the stream; the model shifts them."""

    def batch(self, index_B: I64) -> dict[str, NDArray[Any]]:
        ids_BS = self.windows(index_B).astype(np.int64)
        return {"input_ids": ids_BS, "labels": ids_BS.copy()}


class MaskedSamples(TokenSamples):
    """Samples `[CLS] window [SEP]` with BERT's masking. A window may run on from one document into the next."""

    SPECIAL_POSITIONS = 2

    def batch(self, index_B: I64) -> dict[str, NDArray[Any]]:
        ids_BS = np.empty((len(index_B), self.seq_len), dtype=np.int64)
        ids_BS[:, 0], ids_BS[:, -1] = special_id(CLS), special_id(SEP)
        ids_BS[:, 1:-1] = self.windows(index_B)
        input_ids, labels = masked(ids_BS, index_B, self.seed, self.store.vocabulary, self.masked_share)
        return {"input_ids": input_ids, "labels": labels}


class PairedSamples(TokenSamples):
    """Samples `[CLS] A [SEP] B [SEP]` without padding: B continues A or, half the time, is from another document.

    A window of the stream is split at a random position in its middle half. `next_sentence_label` is 0 for a
    true continuation and 1 otherwise, as in `transformers`. If the split falls between two documents, there is
    nothing to continue, and B comes from another document too.
    """

    SPECIAL_POSITIONS = 3

    def batch(self, index_B: I64) -> dict[str, NDArray[Any]]:
        starts_B = self.starts(index_B)
        quarter = max(1, self.width // 4)
        span = np.full(len(index_B), self.width - 2 * quarter + 1, dtype=np.int64)
        length_B = quarter + below(hashed(self.seed, SPLIT, index_B), span)
        second_B, random_B = self._second(index_B, starts_B, length_B)

        position_S = np.arange(self.seq_len)
        in_first_BS = position_S <= length_B[:, None]
        source_BS = np.where(
            in_first_BS, starts_B[:, None] + position_S - 1, (second_B - length_B)[:, None] + position_S - 2
        )
        ids_BS = self.text.ids[np.clip(source_BS, 0, self.text.tokens - 1)].astype(np.int64)
        ids_BS[:, 0], ids_BS[:, -1] = special_id(CLS), special_id(SEP)
        ids_BS[np.arange(len(index_B)), length_B + 1] = special_id(SEP)
        input_ids, labels = masked(ids_BS, index_B, self.seed, self.store.vocabulary, self.masked_share)
        return {
            "input_ids": input_ids,
            "token_type_ids": (position_S >= length_B[:, None] + 2).astype(np.int64),
            "labels": labels,
            "next_sentence_label": random_B.astype(np.int64),
        }

    def _second(self, index_B: I64, starts_B: I64, length_B: I64) -> tuple[I64, NDArray[np.bool_]]:
        """Return the offset of each second segment, and True for those that do not continue the first."""
        split_B = starts_B + length_B
        length_B = self.width - length_B
        starts = self.text.document_starts
        after_B = np.searchsorted(starts, split_B - 1, side="right")
        after_last_B = np.where(after_B < len(starts), starts[np.minimum(after_B, len(starts) - 1)], self.text.tokens)
        coin_B = hashed(self.seed, CONTINUE, index_B) & np.uint64(1)
        wanted_B = coin_B.astype(bool) | (after_last_B == split_B)
        # B avoids the document in which A ends or, in a corpus of one document, the window of A.
        other_B, has_other_B = self._clear_of(starts[after_B - 1], after_last_B, length_B, index_B)
        apart_B, has_apart_B = self._clear_of(starts_B, starts_B + self.width, length_B, index_B)
        random_B = wanted_B & (has_other_B | has_apart_B)
        return np.where(random_B, np.where(has_other_B, other_B, apart_B), split_B), random_B

    def _clear_of(self, first_B: I64, end_B: I64, length_B: I64, index_B: I64) -> tuple[I64, NDArray[np.bool_]]:
        """Return a random offset whose `length_B` tokens do not touch first … end - 1, and True if there is one."""
        before_B = np.maximum(first_B - length_B + 1, 0)
        after_B = np.maximum(self.text.tokens - length_B + 1 - end_B, 0)
        choices_B = before_B + after_B
        chosen_B = below(hashed(self.seed, ELSEWHERE, index_B), np.maximum(choices_B, 1))
        return np.where(chosen_B < before_B, chosen_B, end_B + chosen_B - before_B), choices_B > 0


def masked(ids_BS: I64, index_B: I64, seed: int, vocabulary: int, share: float = MASKED_SHARE) -> tuple[I64, I64]:
    """Mask as BERT does: return inputs with a `share` of the positions hidden, and labels that are -100 elsewhere.

    Every sample hides `round(share * S)` positions and at least one, drawn among all but [CLS] and [SEP]. Of these,
    80 % become [MASK], 10 % become a random token and 10 % stay. The choice depends on seed, sample and position
    only.
    """
    batch, seq_len = ids_BS.shape
    counter_BS = index_B[:, None] * seq_len + np.arange(seq_len)
    order_BS = hashed(seed, SELECT, counter_BS)
    order_BS[(ids_BS == special_id(CLS)) | (ids_BS == special_id(SEP))] = np.iinfo(np.uint64).max
    hidden = max(1, round(share * seq_len))
    position_BH = np.argpartition(order_BS, hidden - 1, axis=1)[:, :hidden]

    original_BH = np.take_along_axis(ids_BS, position_BH, axis=1)
    counter_BH = np.take_along_axis(counter_BS, position_BH, axis=1)
    coin_BH = unit(hashed(seed, REPLACE, counter_BH))
    num_special = len(SPECIAL_TOKENS["wordpiece"])
    words = np.full(position_BH.shape, vocabulary - num_special, dtype=np.int64)
    random_BH = num_special + below(hashed(seed, REPLACEMENT, counter_BH), words)
    shown_BH = np.where(coin_BH < MASK_SHARE, special_id(MASK), original_BH)
    shown_BH = np.where((coin_BH >= MASK_SHARE) & (coin_BH < MASK_SHARE + RANDOM_SHARE), random_BH, shown_BH)

    input_BS, labels_BS = ids_BS.copy(), np.full((batch, seq_len), IGNORED, dtype=np.int64)
    np.put_along_axis(input_BS, position_BH, shown_BH, axis=1)
    np.put_along_axis(labels_BS, position_BH, original_BH, axis=1)
    return input_BS, labels_BS


def special_id(token: str) -> int:
    return SPECIAL_TOKENS["wordpiece"].index(token)


SAMPLES: dict[str, type[TokenSamples]] = {
    "clm": CausalSamples,
    "mlm": MaskedSamples,
    "mlm_nsp": PairedSamples,
}
"""Samples of each objective."""
