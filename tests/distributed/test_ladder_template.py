"""The template of the scaling ladder, executed in its smallest preset with real trainings."""

import pytest

import workbench as wb
from tests.distributed.documents import executed


def test_the_template_predicts_a_pair_before_it_trains_it_and_says_how_far_it_was_off(tmp_path, monkeypatch):
    document = executed("scaling_ladder", tmp_path, monkeypatch, preset="rehearsal")
    fitted, later = {}, {}
    for run in document.runs:
        experiment = run.experiment
        held_out = experiment.model.name in ("bert-1x32", "bert-2x64")
        (later if held_out else fitted)[experiment.model.name, experiment.steps] = run
        width = experiment.model.hidden_size
        assert experiment.model.initial_scale["*"] == pytest.approx((32 / width) ** 0.5), "by the width rule"
        assert (experiment.optimizer.muon_scale, experiment.optimizer.rate_scale["*"]) == ("spectral", 1.0)
    assert sorted(fitted) == [(f"bert-{size}", steps) for size in ("1x16", "2x32", "4x64") for steps in (4, 8, 16)]
    assert sorted(later) == [("bert-1x32", 16), ("bert-2x64", 16)]

    law = wb.analysis.scaling_law(list(fitted.values()))
    assert len(law.points) == 9
    assert not law.left_out
    [figure] = document.figures("wb.figures.ladder(law, points)")
    names = [trace.get("name", "") for trace in figure["data"]]
    assert sum("predicted" in name for name in names) == 2, "a line for each size of the held-out pair"
    verdict, ladder = map(document.printed, ("def losses(", "def at_equal_tokens("))
    predicted = law.predict(
        wb.analysis.parameters_without_embeddings(later["bert-1x32", 16].experiment.model), 16 * 8 * 16
    )
    measured = float(later["bert-1x32", 16].evaluations().eval_loss[-1])
    word = "within" if predicted.low <= measured <= predicted.high else "outside"
    assert f"- 1 × 32: {predicted.value:.3f} ({predicted.low:.3f} to {predicted.high:.3f}) nats predicted" in verdict
    assert f"{measured:.3f} measured over 1 seed: {word} the interval" in verdict
    assert "by the law of 11 runs of 5 sizes" in ladder
    assert "After 10 B tokens" in ladder
