"""The plateau of context-free prediction: where it lies, which curves left it, and which runs are ended on it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

import workbench as wb
from workbench.analysis import ladder
from workbench.analysis.ladder import (
    FORMS,
    KAPLAN,
    ChinchillaLaw,
    KaplanLaw,
    LadderPoint,
    Law,
    ScalingLaw,
    fit,
    scaling_law,
)
from workbench.analysis.plateau import MARGIN, left_plateau, masked_loss, stop_on_plateau
from workbench.base.errors import DataError, InvalidArgument, InvalidExperiment, WorkbenchError
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
    assert masked_loss(shares, np.arange(8) >= special) == pytest.approx(best, rel=1e-12)


def test_the_level_comes_from_the_text_of_the_experiment(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    text = tmp_path / "text.txt"
    text.write_text("\n".join("abab ba ab" for _ in range(400)))
    corpus = wb.data.corpus(text, vocab_size=300)
    options = {"vocab_size": 300, "max_positions": 32}
    masked = wb.Experiment(model=wb.models.bert(32, 1, 4, next_sentence=False, **options), data=corpus, seq_len=16)
    causal = wb.Experiment(model=wb.models.gpt2(32, 1, 4, **options), data=corpus, seq_len=16)
    found = wb.analysis.context_free(masked)
    words = np.bincount(masked.data.reads(masked).dataset().samples.store.ids)
    p = words[words > 0] / words.sum()
    assert found.unigram_entropy == pytest.approx(float(-(p * np.log(p)).sum()))
    assert 0 < found.loss < found.unigram_entropy
    assert wb.analysis.context_free(causal).loss == wb.analysis.context_free(causal).unigram_entropy
    own = causal.replace(data=lambda: [{"input_ids": 0}])
    with pytest.raises(DataError, match="a user-defined dataset, in which nothing says what the tokens are"):
        wb.analysis.context_free(own)


SIZES, BUDGETS = (6e3, 26e3, 60e3, 240e3), (0.25e6, 0.5e6, 1e6)
LAWS: dict[str, Law] = {
    "chinchilla": ChinchillaLaw(1.2, 20.0, 400.0, 0.3, 0.45),
    "kaplan": KaplanLaw(3e6, 0.15, 3e7, 0.25),
}
MODEL = {"vocab_size": 64, "max_positions": 16, "layout": "pre_ln", "next_sentence": False, "dropout": 0.0}


def points(law: Law, noise: float = 0.0, seeds: int = 1, sizes: Sequence[float] = SIZES) -> list[LadderPoint]:
    """Return the losses that a law gives to every size at every budget, with noise in their logarithm."""
    random = np.random.default_rng(0)
    return [
        LadderPoint(n, d, float(law.loss(n, d) * np.exp(noise * random.normal())))
        for n in sizes
        for d in BUDGETS
        for _ in range(seeds)
    ]


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resample as often as what is asked of the intervals here needs."""
    monkeypatch.setattr(ladder, "RESAMPLES", 60)


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resample less, for tests of what needs no interval."""
    monkeypatch.setattr(ladder, "RESAMPLES", 10)


def noisy_points() -> list[LadderPoint]:
    """Return three runs of every size and budget that scatter by 0.5 %, by Kaplan et al.'s form."""
    return points(LAWS["kaplan"], noise=0.005, seeds=3)


@functools.cache
def noisy_law() -> ScalingLaw:
    """Return their law."""
    return scaling_law(noisy_points())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_fit_finds_the_law_that_made_the_losses(form) -> None:
    made = points(LAWS[form.name])
    n, d, losses = (np.array([getattr(p, name) for p in made]) for name in ("parameters", "tokens", "loss"))
    found = form.law(**fit(form, n, d, losses, np.ones((1, len(made)))))
    assert np.log(found.loss(n, d) / losses) == pytest.approx(np.zeros(len(made)), abs=2e-4)
    assert found.loss(1e6, 2e6)[0] == pytest.approx(LAWS[form.name].loss(1e6, 2e6), rel=2e-3)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_one_run_that_went_wrong_does_not_move_the_law(form) -> None:
    made = points(LAWS[form.name])
    n, d, losses = (np.array([getattr(p, name) for p in made]) for name in ("parameters", "tokens", "loss"))
    losses[4] *= 1.3
    found = form.law(**fit(form, n, d, losses, np.ones((1, len(made)))))
    errors = np.delete(np.abs(np.log(found.loss(n, d) / losses)), 4)
    assert errors.max() < 0.01, "a fit of least squares would be off by several per cent"


def test_a_size_that_was_left_out_lies_in_the_interval_of_its_prediction() -> None:
    law = noisy_law()
    predicted = law.predict(1e6, 1.5e6)
    assert predicted.low < LAWS["kaplan"].loss(1e6, 1.5e6) < predicted.high
    assert predicted.high - predicted.low < 0.3
    difference, true = law.difference(60e3, 1e6, 4e6), LAWS["kaplan"].difference(60e3, 1e6, 4e6)
    assert difference.low < true < difference.high


def test_intervals_widen_with_the_distance_from_the_runs() -> None:
    law = noisy_law()
    shares = [((at := law.predict(size, 1e6)).high - at.low) / at.value for size in (60e3, 1e7, 1e9)]
    assert shares == sorted(shares)


def test_the_form_that_made_the_losses_predicts_sizes_left_out_better_and_comes_first() -> None:
    assert isinstance(noisy_law().law, KaplanLaw)
    assert noisy_law().fits[0].held_out < noisy_law().fits[1].held_out


def test_the_law_says_its_errors_and_the_scatter_between_seeds() -> None:
    law = noisy_law()
    assert law.noise == pytest.approx(0.005, rel=0.4)
    assert "Runs that differ in their seed alone scatter by" in repr(law)
    assert "36 runs: 4 sizes from 6 k to 240 k parameters without embeddings, 250 k to 1 M tokens" in repr(law)


@pytest.mark.usefixtures("few_resamples")
def test_runs_on_a_plateau_are_said_to_follow_no_law() -> None:
    """All sizes end at one loss after the smallest budget, which no form can do together with what follows."""
    found = noisy_points()
    stuck = [dataclasses.replace(point, loss=6.0) if point.tokens == BUDGETS[0] else point for point in found]
    words = "Both forms miss the runs by at least"
    assert words in repr(scaling_law(stuck))
    assert words not in repr(scaling_law(found))
    assert words not in repr(scaling_law(points(LAWS["chinchilla"], seeds=2))), "seeds that end alike show no scatter"


@pytest.mark.usefixtures("few_resamples")
def test_the_order_of_the_runs_does_not_matter() -> None:
    law, other = scaling_law(noisy_points()), scaling_law(noisy_points()[::-1])
    assert law.predict(1e6, 1.5e6) == other.predict(1e6, 1.5e6)


@pytest.mark.usefixtures("few_resamples")
def test_three_sizes_give_a_law_without_an_error_of_left_out_sizes() -> None:
    law = scaling_law(points(LAWS["chinchilla"], noise=0.003, sizes=SIZES[:3]))
    assert law.fits[0].held_out is None
    assert "needs four sizes" in repr(law)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            points(KAPLAN, sizes=SIZES[:1]),
            r"3 ends of trainings have only 1 of the 3 sizes that a scaling law needs \(6 k\)",
        ),
        (points(KAPLAN)[::3], r"4 ends of trainings have only 1 of the 3 budgets of tokens .* \(250 k\)"),
        ([], "0 ends of trainings have only 0 of the 3 sizes"),
    ],
    ids=["one size", "one budget", "nothing"],
)
def test_too_little_is_refused_with_numbers_and_a_way_out(made, words) -> None:
    with pytest.raises(InvalidExperiment, match=words) as refused:
        scaling_law(made)
    assert "expected_difference" in str(refused.value)


def test_a_loss_that_is_no_loss_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="loss=nan is not a number above 0"):
        scaling_law([*points(KAPLAN), LadderPoint(1e6, 1e6, float("nan"))])


def test_parameters_are_counted_without_embeddings_and_their_shared_read_out() -> None:
    count = wb.analysis.parameters_without_embeddings
    layer = 12 * 32**2 + 13 * 32  # two norms, four projections, the feed-forward, and the biases
    head = 32**2 + 3 * 32 + 64  # transform, its norm, and a bias for each token
    final_norm = 2 * 32
    assert count(wb.models.bert(32, 2, 2, **MODEL)) == 2 * layer + head + final_norm
    assert count(wb.models.bert(32, 2, 2, **{**MODEL, "vocab_size": 640})) - count(
        wb.models.bert(32, 2, 2, **MODEL)
    ) == (640 - 64)


def test_kaplans_law_expects_of_the_pair_what_the_paper_gives() -> None:
    """The values are those of arXiv:2001.08361's joint fit for 0.303 and 2.39 G parameters."""
    options = {"layout": "pre_ln", "next_sentence": False}
    small, large = wb.models.bert_large(**options), wb.models.bert(1920, 54, 30, **options)
    for tokens, nats in ((40e6, 0.01), (1e9, 0.08), (10e9, 0.26)):
        expected = wb.analysis.expected_difference(small, large, tokens)
        assert expected.difference.value == pytest.approx(nats, abs=0.005)
    assert "bert-54x1920 (2.39 B) is expected 0.26 nats below bert-large (303 M)" in str(expected)
    flops = expected.equal_flops_from
    assert flops == pytest.approx(3.39e19, rel=0.01)
    few, many = expected.parameters
    law = wb.analysis.KAPLAN
    assert law.loss(few, flops / 6 / few) == pytest.approx(law.loss(many, flops / 6 / many), abs=1e-6)
    assert "At equal FLOPs it is ahead from 3.4e+19 on, or 18.7 B tokens of bert-large." in str(expected)
    assert wb.analysis.expected_difference(small, small, 1e9).equal_flops_from is None
    chinchilla = ChinchillaLaw(1.8172, 482.0, 2085.43, 0.3478, 0.3658)
    assert chinchilla.difference(303e6, 2.39e9, 1e9) == pytest.approx(0.277, abs=0.005)
    by_hand = 1.8172 + 482.0 / 70e9**0.3478 + 2085.43 / 1.4e12**0.3658
    assert chinchilla.loss(70e9, 1.4e12) == pytest.approx(by_hand), "of their model of 70 G parameters"
