"""The plateau of context-free prediction: where it lies, which curves left it, and which runs are ended on it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import workbench as wb
from workbench.analysis.plateau import MARGIN, left_plateau, masked_loss, stop_on_plateau
from workbench.errors import DataError, InvalidExperiment, WorkbenchError
from workbench.runs.run import Run

LEVEL, STEPS, TOKENS = 3.3, 1000, 64
NOISE = np.random.default_rng(0).normal(0, 0.15, STEPS)


class StandInRun(Run):
    """A run whose history and evaluations are given."""

    def __init__(self, loss: np.ndarray, held_out: np.ndarray = NOISE[:0], final: bool = False) -> None:
        super().__init__("mini")
        self.loss, self.held_out, self.final, self.asked = loss, held_out, final, False

    experiment = SimpleNamespace(total_steps=STEPS)
    status = property(lambda self: SimpleNamespace(final=self.final))

    def history(self):
        step = np.arange(1, len(self.loss) + 1)

        class Columns(dict):
            __getattr__ = dict.__getitem__

            def __len__(self):
                return len(self["step"])

        return Columns(step=step, tokens=step * TOKENS, loss=self.loss)

    def evaluations(self):
        step = 100 * np.arange(len(self.held_out))
        found = {"step": step, "tokens": step * TOKENS, "eval_loss": self.held_out}
        return type("Evaluations", (dict,), {"__len__": lambda self: len(self["step"])})(found)

    def stop(self, wait: bool = False):  # noqa: ARG002
        self.asked = self.final = True
        return self

    def wait(self, timeout: float | None = None):  # noqa: ARG002
        assert self.final or not self.asked
        return self


def falling(start: float, end: float, first: int) -> np.ndarray:
    """Return a noisy loss that stays at `start` until the step `first`, then falls linearly to `end`."""
    return np.interp(np.arange(STEPS), [0, first, STEPS], [start, start, end]) + NOISE


def test_a_curve_that_falls_below_the_plateau_left_it_where_it_crossed():
    left = left_plateau(StandInRun(falling(3.5, 2.3, 400)), LEVEL)  # below 3.2 from step 550 on
    assert left
    assert left.step == pytest.approx(550, abs=60)
    assert left.tokens == left.step * TOKENS
    assert "mini: the training loss stays below 3.20 nats" in str(left)


@pytest.mark.parametrize(
    "loss",
    [
        falling(3.5, 3.5, 400),
        falling(LEVEL, LEVEL - MARGIN / 2, 200),  # below the plateau, and not by the margin
        np.where(np.arange(STEPS) // 100 == 5, 2.9, 3.4) + NOISE,  # a dip that does not last
        np.where(np.arange(STEPS) >= STEPS - 15, 2.9, 3.4) + NOISE,  # too late to tell
        np.where(np.arange(STEPS) == STEPS - 10, np.nan, falling(3.5, 2.3, 400)),
        np.array([]),
        np.array([2.0, 2.0]),
    ],
    ids=["stays", "within the margin", "dips", "falls at the very end", "not finite", "empty", "two steps"],
)
def test_a_curve_that_stays_or_nearly_leaves_did_not_leave(loss):
    left = left_plateau(StandInRun(loss), LEVEL)
    assert not left
    assert left.tokens is None
    assert "did not stay below 3.20 nats (0.1 below context-free prediction)" in str(left)


def test_noise_that_crosses_the_line_does_not_move_the_departure_early():
    quiet = np.where(np.arange(STEPS) < 600, 3.25, 2.9)
    noisy = quiet + NOISE  # a third of the single steps on the plateau lies below 3.2
    assert (noisy[:600] < LEVEL - MARGIN).mean() > 0.2
    assert left_plateau(StandInRun(noisy), LEVEL).step == pytest.approx(610, abs=20)


def test_held_out_losses_decide_where_there_are_five():
    held_out = np.array([4.0, 3.4, 3.15, 3.3, 3.1, 3.0, 2.9])
    left = left_plateau(StandInRun(falling(3.5, 3.5, 1), held_out), LEVEL)
    assert (left.step, left.losses) == (400, "held-out")
    assert not left_plateau(StandInRun(falling(3.5, 3.5, 1), held_out[:5]), LEVEL)  # One loss below tells too little.
    assert left_plateau(StandInRun(falling(3.5, 2.3, 400), held_out[:4]), LEVEL).losses == "training"


def test_a_run_on_the_plateau_at_a_third_of_its_steps_is_stopped_with_a_sentence():
    stuck, learning = StandInRun(falling(3.5, 2.3, 400)[:340]), StandInRun(falling(3.5, 2.3, 10)[:400])
    ended = StandInRun(falling(3.5, 3.5, 1), final=True)
    (sentence,) = stop_on_plateau([stuck, learning, ended], LEVEL)
    assert (stuck.asked, learning.asked, ended.asked) == (True, False, False)
    assert "was stopped at step 340 of 1000" in sentence
    assert "learning rate" in sentence


def test_a_run_whose_loss_is_not_a_number_is_stopped():
    assert stop_on_plateau([StandInRun(np.full(340, np.nan))], LEVEL)


def test_levels_and_shares_that_cannot_be_are_refused():
    for wrong in (0, -1.0, float("nan"), "3.2", True):
        with pytest.raises(WorkbenchError, match=r"is not a loss above 0|Give a number"):
            left_plateau(StandInRun(NOISE), wrong)
    with pytest.raises(InvalidExperiment, match="share=1 is not a share between 0 and 1"):
        stop_on_plateau([], LEVEL, share=1)


def test_the_masked_loss_without_context_is_that_of_the_best_guess_from_what_is_shown():
    """The oracle writes down the joint distribution of the original token and the shown one."""
    shares = np.array([0, 0, 0.02, 0.5, 0.3, 0.1, 0.08, 0])
    special, words = 2, 6
    joint = np.zeros((8, 9))  # the last column is [MASK]
    for original, p in enumerate(shares):
        joint[original, 8] += 0.8 * p
        joint[original, original] += 0.1 * p
        joint[original, special:8] += 0.1 * p / words
    shown = joint.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        best = -np.nansum(joint * np.log(joint / shown))
    assert masked_loss(shares, special) == pytest.approx(best, rel=1e-12)


def test_the_level_comes_from_the_text_of_the_experiment(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    text = tmp_path / "text.txt"
    text.write_text("\n".join("abab ba ab" for _ in range(400)))
    corpus = wb.data.corpus(text, vocab_size=300)
    options = {"vocab_size": 300, "max_positions": 32}
    masked = wb.Experiment(model=wb.models.bert(32, 1, 4, next_sentence=False, **options), data=corpus, seq_len=16)
    causal = wb.Experiment(model=wb.models.gpt2(32, 1, 4, **options), data=corpus, seq_len=16)
    found = wb.analysis.context_free(masked)
    words = np.bincount(masked.data.dataset(masked).samples.store.ids)
    p = words[words > 0] / words.sum()
    assert found.unigram_entropy == pytest.approx(float(-(p * np.log(p)).sum()))
    assert 0 < found.loss < found.unigram_entropy
    assert wb.analysis.context_free(causal).loss == wb.analysis.context_free(causal).unigram_entropy
    own = causal.replace(data=lambda: [{"input_ids": 0}])
    with pytest.raises(DataError, match="a user-defined dataset, in which nothing says what the tokens are"):
        wb.analysis.context_free(own)
