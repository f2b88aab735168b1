"""A comparison states which run is lower at equal cost, where curves cross, and how certain that is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from figure_values import curve, in_one_line

from workbench.analysis.contrast import Interval, contrast_curves, difference, setting_differences, standings
from workbench.analysis.curve import Curve, Scatter
from workbench.analysis.seed_contrast import contrast_seeds
from workbench.base.errors import UnknownParameter
from workbench.figures.curves_view import loss_curves
from workbench.figures.run_views import contrast_report, differences
from workbench.figures.run_views import draw_contrast as drawn
from workbench.runs.loss_basis import loss_basis, why_not_compared


def line(name: str, slope: float, offset: float, noise: float = 0.02, steps: int = 1500, seed: int = 0) -> Curve:
    """A loss that falls along a straight line over 15 M tokens."""
    step = np.arange(1, steps + 1)
    loss = offset - slope * step / steps + np.random.default_rng(seed).normal(0, noise, steps)
    return Curve(name, {"step": step, "tokens": step * 10_000, "flops": step * 1e12, "loss": loss})


def test_straight_lines_cross_where_geometry_says_and_the_interval_holds_it() -> None:
    for seed in range(5):
        found = difference(line("a", 2.0, 6.0, seed=seed), line("b", 1.0, 5.5, seed=seed + 50))
        assert found.crossover is not None
        assert found.crossover.low <= 7.5e6 <= found.crossover.high
        assert found.crossover.value == pytest.approx(7.5e6, rel=0.03)
        assert found.value[-1] == pytest.approx(-0.5, abs=0.04)
        assert found.describe().startswith("one seed each: cannot tell; a ended below b by 0.")


def zigzag(name: str, *corners: tuple[float, float]) -> Curve:
    """A loss without noise that runs straight from corner to corner; x is in millions of tokens."""
    tokens = np.linspace(corners[0][0], corners[-1][0], 121)
    loss = np.interp(tokens, *np.array(corners).T)
    return Curve(name, {"step": np.arange(1, 122), "tokens": 1e6 * tokens, "loss": loss})


def test_of_several_crossings_the_last_is_told_to_a_fraction_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference is +1 at 0, -1 at 4 M, +3 at 8 M and -1 at 12 M tokens: it is 0 at 2 M, 5 M and 11 M.

    On a grid of 4 M tokens the last crossing is three quarters of the way from one point to the next.
    """
    monkeypatch.setattr("workbench.analysis.contrast.GRID_POINTS", 4)
    monkeypatch.setattr("workbench.analysis.contrast.SMOOTHING", 1e-9)
    corners = ((0.0, 6.0), (4.0, 4.0), (8.0, 8.0), (12.0, 4.0))
    found = difference(zigzag("a", *corners), zigzag("b", (0.0, 5.0), (12.0, 5.0)))
    assert found.value == pytest.approx([1.0, -1.0, 3.0, -1.0])
    assert found.crossover is not None
    assert found.crossover.value == pytest.approx(11e6)
    assert "the curves last cross at 11" in found.describe()


@pytest.mark.parametrize("steps", [15, 60, 1500])
def test_the_band_holds_the_true_difference_about_as_often_as_it_says(steps: int) -> None:
    """With 15 and 60 points the smoothing is narrower than their distance."""
    held = []
    for seed in range(60):
        found = difference(line("a", 1.0, 5.1, 0.1, steps, seed), line("b", 1.0, 5.0, 0.1, steps, seed + 500))
        at = np.searchsorted(found.x, found.x[0] + np.arange(steps) / max(1, steps - 1) * np.ptp(found.x))
        held.append(((found.low <= 0.1) & (found.high >= 0.1))[np.minimum(at, len(found.x) - 1)])
    assert 0.85 <= np.mean(held) <= 0.95


def test_noise_that_both_runs_have_is_none_of_their_difference() -> None:
    """Batches in the same order move both curves alike, unless the runs recorded at other positions."""
    own, same = line("a", 1.0, 5.1, 0.1), line("b", 1.0, 5.0, 0.1)
    sparser = Curve("c", {name: values[::3] for name, values in same.columns.items()})
    alike, unlike = difference(own, same), difference(own, sparser)
    assert (alike.high - alike.low).max() < 1e-9
    assert (unlike.high - unlike.low)[-1] > 0.03


def test_more_noise_makes_a_wider_band() -> None:
    calm, loud = (difference(line("a", 1.0, 5.0, noise), line("b", 1.0, 5.0, noise, seed=1)) for noise in (0.01, 0.1))
    assert np.mean(loud.high - loud.low) > 5 * np.mean(calm.high - calm.low)


def test_curves_that_do_not_cross_have_no_crossover() -> None:
    found = difference(line("a", 1.0, 5.0), line("b", 1.0, 7.0, seed=1))
    assert found.crossover is None
    assert "do not cross" in found.describe()


def test_one_seed_each_is_told_apart_only_by_how_far_seeds_scatter() -> None:
    """The runs end 0.5 apart; seeds that scatter by 0.1 part two runs by 1.86 × 0.1 × √2 = 0.26 at most."""
    runs = [line("a", 1.0, 5.0), line("b", 1.0, 5.5, seed=7)]
    for scatter, sure, words in (
        (None, False, "one seed each: cannot tell"),
        (Scatter(0.1, np.inf), True, "a is lower"),
        (Scatter(0.3, np.inf), False, "too close to call"),
    ):
        found = contrast_curves(runs, scatter=scatter)
        [standing, _] = found.standings
        assert standing.sure is found.differences[0].distinguishable is sure
        assert words in str(standing)
        assert words in found.differences[0].describe()
        assert words in contrast_report(found).to_html()
        assert ("train each with three seeds" in repr(found)) is (scatter is None)
    assert found.differences[0].margin == pytest.approx(0.789, abs=1e-3)
    assert "seeds scatter by 0.3 as given, which alone parts two runs by up to 0.79" in repr(found)


def test_equal_cost_is_the_most_that_every_run_has_spent() -> None:
    short, long = line("short", 1.0, 5.0, steps=500), line("long", 1.0, 6.0, seed=1)
    found = {standing.axis: standing for standing in standings([short, long])}
    assert set(found) == {"tokens", "flops"}
    assert found["tokens"].at == pytest.approx(5e6)
    assert found["tokens"].best == "short"


def test_runs_are_compared_where_they_meet_though_on_another_axis_they_never_do() -> None:
    """One step of the large run costs more FLOPs than the small run as a whole."""
    small, large = line("small", 1.0, 5.0), line("large", 1.0, 6.0)
    large = Curve("large", {**large.columns, "flops": 1e6 * np.asarray(large.columns["flops"])})
    assert [standing.axis for standing in standings([small, large])] == ["tokens"]
    assert [standing.axis for standing in contrast_curves([small, large]).standings] == ["tokens"]
    with pytest.raises(UnknownParameter, match="share no stretch of x='flops'"):
        contrast_curves([small, large], x="flops")


def test_the_same_seed_gives_the_same_numbers() -> None:
    first, again = (difference(line("a", 2.0, 6.0), line("b", 1.0, 5.5, seed=1)) for _ in range(2))
    assert first.crossover == again.crossover
    assert (first.low == again.low).all()


def test_a_million_points_are_compared_as_quickly_as_a_thousand() -> None:
    found = difference(line("a", 2.0, 6.0, steps=1_000_000), line("b", 1.0, 5.5, steps=1_000_000, seed=1))
    assert found.crossover is not None
    assert found.crossover.value == pytest.approx(5e9, rel=0.01)


def test_runs_that_share_no_axis_are_refused_in_one_sentence() -> None:
    with pytest.raises(UnknownParameter, match="recorded 0 finite losses over x='time'"):
        difference(line("a", 1.0, 5.0), line("b", 1.0, 5.0), x="time")
    with pytest.raises(UnknownParameter, match="Did you mean 'tokens'"):
        difference(line("a", 1.0, 5.0), line("b", 1.0, 5.0), x="tokns")


def test_what_differs_is_named_by_its_place_and_nothing_else_is() -> None:
    first = {"experiment": {"learning_rate": 1e-3, "model": {"hidden_size": 64}, "name": "a"}, "plan": {"zero": 0}}
    second = {"experiment": {"learning_rate": 1e-4, "model": {"hidden_size": 64}, "name": "b"}, "plan": {"data": 2}}
    assert setting_differences([first, second]) == (
        ("experiment.learning_rate", ("0.001", "0.0001")),
        ("plan.zero", ("0", "–")),
        ("plan.data", ("–", "2")),
    )


def test_a_contrast_shows_itself_without_markup_of_the_users() -> None:
    found = contrast_curves([curve("<b>a"), curve("c", seed=1)], [{"x": "<i>"}, {"x": "y"}])
    page = contrast_report(found).to_html()
    assert "&lt;b&gt;a" in page
    assert "<i>" not in page
    assert "at equal tokens" in repr(found)
    parts = [trace.meta for trace in differences(found.differences).data]
    assert parts[:2] == ["band", "difference"]


def test_an_interval_below_the_last_digit_is_not_written() -> None:
    assert Interval(0.208, 0.208, 0.208).describe() == "0.208"
    assert Interval(3.0, 3.0 - 2e-16, 3.0 + 2e-16).describe() == "3"
    assert Interval(0.0, -2e-16, 2e-16).describe() == "0"
    assert Interval(3.0, np.nan, np.nan).describe() == "3"
    assert Interval(3.0, 2.9, 3.1).describe() == "3.00 ± 0.10"
    assert Interval(0.20812, 0.20799, 0.20825).describe() == "0.20812 ± 0.00013"
    apart = difference(zigzag("a", (0, 3.0), (10, 3.0)), zigzag("b", (0, 3.208), (10, 3.208)))
    words = "noise along the curves is unknown, so this holds for these two runs, not for these two recipes"
    verdict = "one seed each: cannot tell; a ended below b by 0.208"
    assert apart.describe() == f"{verdict} (the {words}); the curves do not cross"


BERT = {
    "model": {"type": "named", "family": "bert", "next_sentence": False, "dropout": 0.0},
    "data": {"type": "corpus", "path": "a.txt", "vocab_size": 256, "objective": None, "masked_share": 0.15},
    "evaluation": {"every": 100, "samples": 512, "data": None},
    "seq_len": 32,
    "global_batch": 8,
    "loss": None,
}
OTHERS = {
    "vocabulary (256 tokens and 64 tokens)": {"data": {**BERT["data"], "vocab_size": 64}},
    "masked share (15 % and 30 %)": {"data": {**BERT["data"], "masked_share": 0.3}},
    "sequence length (32 and 16)": {"seq_len": 16},
    "loss function (masked tokens and next token)": {"model": {"family": "opt"}},
    "loss function (masked tokens and masked tokens, z_loss of the outputs)": {"loss": "z_loss"},
    "dropout (0 and 0.1)": {"model": {**BERT["model"], "dropout": 0.1}},
    "text of the tokeniser (a.txt and b.txt)": {"data": {**BERT["data"], "path": "b.txt"}},
}
HELD_OUT = {
    "held-out set (512 samples of a part of a.txt and 64 samples of a part of a.txt)": {
        "evaluation": {**BERT["evaluation"], "samples": 64}
    },
    "masked share (15 % and 30 %)": {"evaluation": {**BERT["evaluation"], "masked_share": 0.3}},
}


@pytest.mark.parametrize(
    ("said", "changes", "held_out"),
    [(said, changes, held_out) for held_out, cases in enumerate((OTHERS, HELD_OUT)) for said, changes in cases.items()],
)
def test_losses_that_are_measured_on_different_things_get_no_verdict_anywhere(said, changes, held_out) -> None:
    def run(name: str, experiment: dict, offset: float) -> Curve:
        drawn = line(name, 1.0, offset)
        sparse = {key: values[249::250] for key, values in drawn.columns.items()}
        evaluated = {**sparse, "eval_loss": sparse["loss"]} if held_out else None
        return dataclasses.replace(drawn, evaluations=evaluated, basis=loss_basis(experiment))

    runs = [run("a", BERT, 5.0), run("b", {**BERT, **changes}, 8.0)]
    found = contrast_curves(runs, scatter=Scatter(0.01, np.inf))
    assert said in repr(found).splitlines()[0]
    assert said in found.headline
    assert found.differences == ()
    assert not any(standing.sure or "lower" in str(standing) for standing in found.standings)
    assert said in in_one_line(drawn(found).layout.title.subtitle.text)
    first = in_one_line(loss_curves(runs).layout.title.subtitle.text)
    assert said in first.partition("</b>")[0]
    seeds = contrast_seeds({"one": [runs[0], runs[0]], "other": [runs[1], runs[1]]})
    assert said in repr(seeds)
    assert said in in_one_line(drawn(seeds).layout.title.subtitle.text)
    same = contrast_curves([runs[0], run("c", {**BERT, "global_batch": 32, "precision": "bf16"}, 8.0)])
    assert same.incomparable is None
    assert len(same.differences) == 1


def test_the_masks_of_training_do_not_keep_held_out_losses_from_being_compared() -> None:
    """The held-out samples of both are masked at 15 %."""
    other = {**BERT, "data": {**BERT["data"], "masked_share": 0.3}}
    bases = [loss_basis(BERT), loss_basis(other)]
    assert why_not_compared(bases, held_out=True) is None
    assert "masked share" in (why_not_compared(bases, held_out=False) or "")
    assert bases[0].held_out_in_words is None
    assert bases[1].held_out_in_words == "masked at 15 % where training masks 30 %, which is easier"
    assert loss_basis({**other, "evaluation": {"masked_share": 0.3}}).held_out_in_words is None


def test_a_loss_that_compares_the_samples_of_a_batch_depends_on_its_size() -> None:
    sizes = [{**BERT, "global_batch": size} for size in (8, 32)]
    assert why_not_compared([loss_basis(each) for each in sizes], held_out=True) is None
    coupled = [loss_basis(each, coupled=True) for each in sizes]
    assert "samples of one loss (8 and 32)" in (why_not_compared(coupled, held_out=True) or "")


def test_held_out_losses_on_other_samples_under_the_same_description_do_not_compare() -> None:
    """A file was edited between the runs, or another dataset of the same class and size was given."""
    one, other, unknown = (dataclasses.replace(loss_basis(BERT), held_out_samples=s) for s in ("1f", "2e", None))
    assert "the held-out samples are not the same" in (why_not_compared([one, other], held_out=True) or "")
    assert why_not_compared([one, other], held_out=False) is None
    assert why_not_compared([one, unknown], held_out=True) is None, "a run that does not say it has other samples"


def test_held_out_and_training_losses_are_not_one_order() -> None:
    assert "some are held-out losses" in (why_not_compared([loss_basis(BERT)] * 2, [True, False]) or "")
    assert why_not_compared([None, loss_basis(BERT)], True) is None


def test_sparse_held_out_losses_are_not_read_where_there_are_none() -> None:
    """The long run was evaluated at its beginning and its end alone, the short one where it ended."""

    def run(name: str, steps: int, at: list[int]) -> Curve:
        whole = line(name, 1.0, 5.0, steps=steps)
        evaluated = {key: np.asarray(values)[at] for key, values in whole.columns.items()}
        return dataclasses.replace(whole, evaluations={**evaluated, "eval_loss": evaluated["loss"]})

    short, long, same = run("short", 300, [0, 299]), run("long", 1500, [0, 1499]), run("same", 300, [0, 299])
    assert contrast_curves([short, long]).loss == "Training loss"
    assert contrast_curves([short, same]).loss == "Held-out loss"


def test_dozens_of_factors_of_a_rule_are_one_row() -> None:
    def described(factors: dict) -> dict:
        scale = {"rate_scale": factors, "decay_scale": factors}
        return {"experiment": {"learning_rate": 1e-3, **(scale if factors else {})}}

    rule = {f"*.layer.{index}.*": 0.5 + index / 10 for index in range(12)}
    [row] = setting_differences([described({}), described(rule)])
    assert row == ("factors of rate_scale, decay_scale", ("–", "24, 0.5 to 1.6"))
    [one] = setting_differences([{"rate_scale": {"*": 1.0}}, {"rate_scale": {"*": 0.5}}])
    assert one == ("rate_scale.*", ("1.0", "0.5"))
    assert setting_differences([{"gathers": False}, {}]) == ()


def test_a_headline_is_one_sentence_with_the_difference_that_the_table_has_at_equal_cost() -> None:
    runs = [line("a", 1.0, 5.0), line("b", 1.0, 5.5, seed=7)]
    for scatter, told, verdict in (
        (None, "with one seed each, this cannot tell which recipe is better.", "one seed each: cannot tell"),
        (Scatter(0.1, np.inf), "more than seeds alone part two runs (up to 0.26).", "a is lower"),
        (Scatter(0.3, np.inf), "too close to call: seeds alone part two runs (up to 0.79).", "too close to call"),
    ):
        found = contrast_curves(runs, scatter=scatter)
        head, rows = found.table
        assert head == ("training loss at equal", "", "a", "b", "difference", "verdict")
        assert [row[0] for row in rows] == ["tokens", "FLOPs"]
        by = rows[0][4].removeprefix("+")
        assert by == "0.501 ± 0.011"
        assert rows[0][-1] == verdict
        start = "At equal tokens (15 M tokens), the training loss of a is "
        assert found.headline.startswith(f"{start}{by} below that of b; ")
        assert found.headline.endswith(told)
        assert found.headline.count(". ") == 0, "one sentence"
    apart = contrast_curves([*runs, line("c", 1.0, 5.7, seed=9)], scatter=Scatter(0.1, np.inf))
    assert "a has the lowest training loss of 3 runs" in apart.headline
    assert [row[2:] for row in apart.table[1]][1] == (
        "c",
        "4.0077 ± 0.0049",
        "4.7097 ± 0.0059",
        "+0.7019 ± 0.0091",
        "a is lower",
    )


def test_the_table_and_the_difference_agree_where_the_noise_is_wider_than_the_seeds_scatter() -> None:
    """Both compare the distance with the larger of the two."""
    runs = [line("a", 1.0, 5.0, noise=1.0), line("b", 1.0, 5.05, noise=1.0, seed=7)]
    found = contrast_curves(runs, scatter=Scatter(1e-4, np.inf))
    assert abs(found.differences[0].value[-1]) > 1e-3
    assert not found.differences[0].distinguishable
    assert found.table[1][0][-1] == found.standings[0].verdict == "too close to call"


def test_a_report_shows_a_sentence_a_picture_and_a_table_and_folds_the_rest(monkeypatch) -> None:
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda value, **_: shown.append(value))
    report = contrast_report(contrast_curves([line("<b>a", 1.0, 5.0), line("b", 1.0, 5.5)]))
    report._ipython_display_()
    headline, picture, rest = shown
    assert headline["text/html"].count("<p") == 1
    assert "&lt;b&gt;a" in headline["text/html"]
    assert picture is report.picture
    opened, folded = rest["text/html"].split("<details>")
    assert opened.startswith("<table")
    assert "cannot tell" in opened
    assert "the curves do not cross" in folded
    assert "<b>a" not in opened + folded
    assert headline["text/plain"] not in rest["text/plain"]
    assert repr(report).startswith(headline["text/plain"])


def test_runs_of_one_seed_that_draw_other_dropout_say_so_with_the_distance_of_their_first_losses() -> None:
    runs = [line("a", 1.0, 5.0, noise=0.0), line("b", 1.0, 5.013, noise=0.0)]

    def told(dropout: float | None = 0.1, seed: int = 0, micro_batch: int = 8, tensor: int = 1, apart: int = 1) -> str:
        model = {"name": "bert"} if dropout is None else {"name": "bert", "dropout": dropout}
        first = {
            "experiment": {"model": model, "seed": 0, "learning_rate": 1e-3},
            "plan": {"micro_batch": 8, "tensor": 1},
        }
        second = {
            "experiment": {"model": model, "seed": seed, "learning_rate": 2e-3},
            "plan": {"micro_batch": micro_batch, "tensor": tensor},
        }
        return repr(contrast_curves([runs[0], runs[apart]], [first, second]))

    distance = abs(runs[1].columns["loss"][0] - runs[0].columns["loss"][0])
    words = "a and b draw other dropout masks from the same seed (micro-batch 8 and 2): their first losses"
    assert words in told(micro_batch=2)
    assert f"are {distance:.2g} apart for that alone" in told(micro_batch=2)
    assert "(tensor-parallel degree 1 and 2)" in told(tensor=2)
    assert "other numbers, or have statistics" in told(None, micro_batch=2)
    for silent in (told(), told(0.0, micro_batch=2), told(seed=1, micro_batch=2), told(None, micro_batch=2, apart=0)):
        assert "from the same seed" not in silent
