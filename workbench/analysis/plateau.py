"""The plateau of context-free prediction: its loss, the departure of runs from it, and the end of runs that stay.

Context-free prediction is what a model reaches that knows how frequent each token is, and nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.base.arguments import checked_arguments
from workbench.base.display import waiting
from workbench.base.errors import DataError, InvalidExperiment
from workbench.base.units import count
from workbench.data.sampling import MASK_SHARE, RANDOM_SHARE, CausalSamples, SpanSamples
from workbench.data.store import SplicedTokens
from workbench.experiment import Experiment
from workbench.runs.run import Run

BLOCK = 1 << 22
"""Tokens that are counted at a time."""
MARGIN = 0.1
"""Distance below the plateau that counts as having left it, in nats."""
WINDOW, LEAST_WINDOW = 0.02, 5
"""Share of the logged steps, and smallest number of them, over which training losses are averaged."""
LEAST_EVALUATIONS = 5
"""Smallest number of held-out losses from which they decide instead of the training losses."""
POLL_S = 0.5


@dataclass(frozen=True)
class ContextFree:
    """Lowest losses without context, in nats per predicted token."""

    unigram_entropy: float
    """Entropy of the tokens' frequencies in the text, its held-out part included."""
    loss: float
    """Lowest loss of a model that sees only the position that it predicts. It is the unigram entropy for a causal
    model. A masked model also sees the tokens that masking leaves or replaces, and so reaches less."""


@checked_arguments
def context_free(experiment: Experiment) -> ContextFree:
    """Return the losses of context-free prediction of an experiment's text, from the frequencies of its tokens.

    The text is prepared first if it has not been. Raises `DataError` for data that are no text.
    """
    from workbench.data.datasets import MixedDataset, StreamedDataset, TextDataset

    dataset = None if experiment.data.is_user_defined else experiment.reading.dataset()
    if isinstance(dataset, StreamedDataset):
        raise DataError(
            f"{experiment.data.name} is streamed, and its tokens are counted over all of it. Describe "
            "the text with streaming=False."
        )
    parts: Sequence[Any] = [dataset]
    weights: NDArray[Any] = np.ones(1)
    if isinstance(dataset, MixedDataset):  # of text, since it is not user-defined
        parts, weights = dataset.parts, dataset.order.given(len(dataset)) / len(dataset)
        dataset = parts[0]
    if not isinstance(dataset, TextDataset):
        raise DataError(
            f"{experiment.data.name} is a user-defined dataset, in which nothing says what the tokens are. Count them, "
            "and give the entropy of their frequencies as a number."
        )
    if isinstance(dataset.samples, SpanSamples):
        raise DataError(
            f"{experiment.data.name} is read by a sequence-to-sequence model, whose decoder sees the tokens before "
            "each that it predicts. Only causal and masked models have a loss without context."
        )
    frequencies = []
    for part in parts:  # of all of its text, the held-out part included
        store = part.samples.text
        whole = store.store if isinstance(store, SplicedTokens) else store
        counts = np.zeros(whole.vocabulary, dtype=np.int64)
        for start in range(0, len(whole.ids), BLOCK):
            counts += np.bincount(whole.ids[start : start + BLOCK].astype(np.int64), minlength=whole.vocabulary)
        frequencies.append(counts / counts.sum())
    shares: NDArray[Any] = weights @ np.stack(frequencies)
    entropy = _entropy(shares)
    if not isinstance(dataset.samples, CausalSamples):
        words = np.zeros(len(shares), dtype=bool)
        words[dataset.samples.tokens.words] = True
        return ContextFree(entropy, masked_loss(shares, words))
    return ContextFree(entropy, entropy)


def masked_loss(shares: NDArray[Any], words: NDArray[np.bool_]) -> float:
    """Return the lowest loss without context under BERT's masking, for tokens with these frequencies.

    Where [MASK] is shown, the loss is the unigram entropy H. Another token x is shown where masking kept it, with
    probability k p(x), or drew it among the n words, with r / n. Of these, the token was kept in the share
    a = k p(x) / (k p(x) + r / n); otherwise it has the frequencies p. The loss there is the entropy of this mixture.
    `words` is True for the n tokens that are no special ones.
    """
    kept, drawn = 1 - MASK_SHARE - RANDOM_SHARE, RANDOM_SHARE / max(1, int(words.sum()))
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


@dataclass(frozen=True)
class Departure:
    """Point at which a loss curve left the plateau of context-free prediction, or that it did not."""

    name: str
    level: float
    """Loss of context-free prediction, in nats."""
    tokens: float | None
    """Tokens at which the curve had left the plateau; None if it did not leave it."""
    step: float | None
    until: float
    """Tokens at the end of the curve."""
    losses: str
    """`held-out` or `training`: the losses that decided."""

    def __bool__(self) -> bool:
        return self.tokens is not None

    def __str__(self) -> str:
        limit = f"{self.level - MARGIN:.2f} nats ({MARGIN} below context-free prediction)"
        if self.tokens is None:
            return f"{self.name}: the {self.losses} loss did not stay below {limit} in {count(self.until)} tokens."
        return f"{self.name}: the {self.losses} loss stays below {limit} from {count(self.tokens)} tokens on."


@checked_arguments
def left_plateau(run: Run, level: float) -> Departure:
    """Return where the loss of a run left the plateau of context-free prediction.

    The rule: the losses are averaged over windows, and the plateau is left at the end of the first window from which on
    every window lies at least `MARGIN` (0.1 nats) below `level`; two windows that do not overlap must show it. Held-out
    losses decide if there are at least five, each a window of its own; otherwise training losses, in windows of 2 % of
    the logged steps and at least 5. A dip that does not last is no departure.

    `level` is the loss of context-free prediction, such as `wb.analysis.context_free(experiment).loss`.
    """
    _check_level(level)
    table: Any = run.evaluations()
    name, losses, window = "eval_loss", "held-out", 1
    if len(table) < LEAST_EVALUATIONS:
        table = run.history()
        name, losses, window = "loss", "training", max(LEAST_WINDOW, round(WINDOW * len(table)))
    loss, tokens, step = (np.asarray(table[column], dtype=np.float64) for column in (name, "tokens", "step"))
    until = float(tokens[-1]) if len(tokens) else 0.0
    means = np.convolve(loss, np.full(window, 1 / window), mode="valid") if len(loss) >= 2 * window else loss[:0]
    above = np.flatnonzero(~(means <= level - MARGIN))  # A NaN counts as above.
    first = int(above[-1]) + 1 if len(above) else 0
    if len(means) - first <= window:
        return Departure(run.name, level, None, None, until, losses)
    left = first + window - 1
    return Departure(run.name, level, float(tokens[left]), float(step[left]), until, losses)


@checked_arguments
def stop_on_plateau(runs: Sequence[Run], level: float, share: float = 1 / 3) -> list[str]:
    """Wait until the runs have ended, and stop each that still sits on the plateau after `share` of its steps.

    A run sits on the plateau if the mean training loss of the last tenth of the steps so far is not at least `MARGIN`
    below `level`. Returns a sentence for each run that was stopped; it wrote a checkpoint, and `run.resume()` goes on.
    Raises `RunFailed` if a run failed.
    """
    _check_level(level)
    if not 0 < share < 1:
        raise InvalidExperiment(
            f"share={share!r} is not a share between 0 and 1. Give 1/3, for instance.", parameter="share"
        )
    if not runs:
        raise InvalidExperiment("There is no run to watch. Give at least one.", parameter="runs")
    undecided, sentences = list(runs), []
    with waiting(f"waiting for {' and '.join(run.name for run in runs)}") as say:
        while undecided:
            for run in list(undecided):
                final, history = run.status.final, run.history()  # in this order, so that no step is missed
                total, reached = run.experiment.total_steps, int(history.step[-1]) if len(history) else 0
                needed = math.ceil(share * total)
                if reached:
                    say(f"{run.name}, step {reached:,} of {total:,} ({reached / total:.0%})")
                if reached < needed and not final:
                    continue
                undecided.remove(run)
                if reached < needed or final:
                    continue
                mean = float(history.loss[history.step > 0.9 * reached].mean())
                if not mean <= level - MARGIN:
                    run.stop()
                    sentences.append(
                        f"{run.name} was stopped at step {reached} of {total}: its loss of {mean:.3g} is not {MARGIN} "
                        f"below the {level:.3g} nats of context-free prediction. Try half or twice the learning rate, "
                        "or a longer warm-up; run.resume() would train on."
                    )
            time.sleep(POLL_S if undecided else 0)
        for run in runs:
            run.wait()
    return sentences


def _check_level(level: float) -> None:
    if not 0 < level < math.inf:
        raise InvalidExperiment(
            f"level={level!r} is not a loss above 0. Give wb.analysis.context_free(experiment).loss.", parameter="level"
        )
