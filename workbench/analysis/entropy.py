"""The loss of context-free prediction: what a model reaches that knows how frequent each token is, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.data._sampling import MASK_SHARE, RANDOM_SHARE, CausalSamples
from workbench.data._source import SampleRequest
from workbench.data._split import SplicedTokens
from workbench.data._vocabulary import SPECIAL_TOKENS
from workbench.errors import DataError, InvalidArgument

BLOCK = 1 << 22
"""Tokens that are counted at a time."""


@dataclass(frozen=True)
class ContextFree:
    """Lowest losses without context, in nats per predicted token."""

    unigram_entropy: float
    """Entropy of the tokens' frequencies in the text, its held-out part included."""
    loss: float
    """Lowest loss of a model that sees only the position that it predicts. It is the unigram entropy for a causal
    model. A masked model also sees the tokens that masking leaves or replaces, and so reaches less."""


def context_free(experiment: SampleRequest) -> ContextFree:
    """Return the losses of context-free prediction of an experiment's text, from the frequencies of its tokens.

    The text is prepared first if it has not been. Raises `DataError` for data that are no text.
    """
    from workbench.data._datasets import StreamedDataset, TextDataset

    if not hasattr(experiment, "data"):
        raise InvalidArgument(f"context_free cannot use experiment={experiment!r:.80}. Give an Experiment.")
    dataset = None if experiment.data.is_user_defined else experiment.data.dataset(experiment)
    if isinstance(dataset, StreamedDataset):
        raise DataError(
            f"{experiment.data.name} is streamed, and its tokens are counted over all of it. Describe "
            "the text with streaming=False."
        )
    if not isinstance(dataset, TextDataset):
        raise DataError(
            f"{experiment.data.name} is a user-defined dataset, in which nothing says what the tokens are. Count them, "
            "and give the entropy of their frequencies as a number."
        )
    store = dataset.samples.text
    whole = store.store if isinstance(store, SplicedTokens) else store
    counts = np.zeros(whole.vocabulary, dtype=np.int64)
    for start in range(0, len(whole.ids), BLOCK):
        counts += np.bincount(whole.ids[start : start + BLOCK].astype(np.int64), minlength=whole.vocabulary)
    shares = counts / counts.sum()
    entropy = _entropy(shares)
    if not isinstance(dataset.samples, CausalSamples):
        return ContextFree(entropy, masked_loss(shares, len(SPECIAL_TOKENS["wordpiece"])))
    return ContextFree(entropy, entropy)


def masked_loss(shares: NDArray[Any], special: int) -> float:
    """Return the lowest loss without context under BERT's masking, for tokens with these frequencies.

    Where [MASK] is shown, the loss is the unigram entropy H. Another token x is shown where masking kept it, with
    probability k p(x), or drew it among the n words, with r / n. Of these, the token was kept in the share
    a = k p(x) / (k p(x) + r / n); otherwise it has the frequencies p. The loss there is the entropy of this mixture.
    The first `special` tokens are no words.
    """
    kept, drawn = 1 - MASK_SHARE - RANDOM_SHARE, RANDOM_SHARE / max(1, len(shares) - special)
    words = np.arange(len(shares)) >= special
    shown = kept * shares + drawn * words
    seen, p = shown[shown > 0], shares[shown > 0]
    other = (drawn * words)[shown > 0] / seen
    own = 1 - other + other * p
    entropy = _entropy(shares)
    # The entropy of the mixture: its own token, and the others with probability `other` times their frequency.
    rest = other * (entropy + _p_log_p(p)) - _p_log_p(other) * (1 - p)
    mixture = -_p_log_p(own) + rest
    return float(MASK_SHARE * entropy + (seen * mixture).sum())


def _p_log_p(p: NDArray[Any]) -> NDArray[Any]:
    return np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0)


def _entropy(shares: NDArray[Any]) -> float:
    return float(-_p_log_p(shares).sum())
