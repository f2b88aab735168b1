"""The template of sparse training, executed in miniature with real trainings."""

import shutil
import time
from statistics import fmean

import pytest

import workbench as wb
from benchmarks import sparse_family
from tests.distributed.documents import executed
from tests.exhaustive import EXHAUSTIVE
from tests.patience import PATIENCE_S
from workbench.analysis.curve import scatter_of
from workbench.sparsity import learning_rate

STATIC, DYNAMIC = "90 % static 1×1, rescaled", "90 % dynamic 1×1, rescaled"


def test_the_template_trains_a_family_and_says_what_the_losses_show(tmp_path, monkeypatch):
    small = {"steps": 6, "global_batch": 8, "moving_blocks": [1], "dense_layers": [1, 2], "seeds": 2}
    document = executed("sparse_pareto", tmp_path, monkeypatch, **small)
    losses, flops = {}, {}
    for run in document.runs:
        experiment = run.experiment
        name = experiment.model.name, experiment.sparsity.label if experiment.sparsity else "dense"
        losses.setdefault(name, []).append(float(run.evaluations().eval_loss[-1]))
        flops[name] = wb.analysis.sample_flops(experiment).at_labels / 1e9
        dense_rate = 0.24 / experiment.model.hidden_size
        assert experiment.learning_rate == (learning_rate(dense_rate, 0.9) if experiment.sparsity else dense_rate)
    shapes = [name for name in losses if name[0].startswith(("1 × ", "2 × "))]
    assert {name: len(values) for name, values in losses.items()} == dict.fromkeys(
        [*shapes, ("Wide", "dense"), ("Wide", STATIC), ("Wide", DYNAMIC)], 2
    )
    assert len(shapes) == 2
    assert [flops[name] / flops["Wide", STATIC] for name in shapes] == pytest.approx([1, 1], abs=0.08)
    [pareto] = document.figures("        display(wb.figures.pareto(same, published=published)")
    marks = {trace["name"]: trace for trace in pareto["data"] if trace["mode"] == "markers" and trace["xaxis"] == "x"}
    assert len(marks.pop("published")["text"]) == 11
    expected = {f"{model}, {pattern}": flops[model, pattern] for model, pattern in flops}
    assert {name: mark["x"][0] for name, mark in marks.items()} == pytest.approx(expected)
    [pattern] = document.figures("wb.figures.pattern(moving[-1])")
    assert len(pattern["layout"]["sliders"][0]["steps"]) == 2, "before the first step, and after the only update"
    assert len(document.figures("")) >= 6

    table, claims = map(document.printed, ("def times(row)", "def verdict("))
    explored = {row.split(" | ")[1]: row.split(" | ")[6] for row in table.splitlines()[2:]}
    assert explored["dense"] == "–"
    assert explored[STATIC] == "10%"
    assert int(explored[DYNAMIC].rstrip("%")) > 10
    best = min(shapes, key=lambda name: fmean(losses[name]))
    for other in (("Wide", STATIC), best):
        pair = losses["Wide", DYNAMIC], losses[other]
        value, half = fmean(pair[0]) - fmean(pair[1]), scatter_of(pair).half_width(2, 2)
        low, high = value - half, value + half
        word = "not distinguishable" if low <= 0 <= high else "holds" if value < 0 else "does not hold"
        assert f"difference {value:+.3f}, 90 % interval {low:+.3f} to {high:+.3f} over 2 seeds" in claims
        [line] = [line for line in claims.splitlines() if f"{value:+.3f}, 90 %" in line]
        assert f": {word} (" in line

    if EXHAUSTIVE:
        check_later_executions(document, table, claims, small, tmp_path, monkeypatch)


def check_later_executions(document, table, claims, small, tmp_path, monkeypatch):
    """Check that runs that exist are shown without the text, and that one which was killed is trained anew."""
    # The same runs in directories as benchmarks/sparse_family.py names them, shown without the text.
    for run in document.runs:
        settings = run.experiment
        pattern = f"-{type(settings.sparsity).__name__.lower()}1" if settings.sparsity else ""
        name = settings.model.name.lower().replace(" × ", "x")
        place = tmp_path / "trained" / f"{name}{pattern}-{settings.learning_rate:.2e}-seed{settings.seed}"
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(run.path)
    (tmp_path / "addresses").rename(tmp_path / "text")
    (tmp_path / "addresses").mkdir()
    shown = executed("sparse_pareto", tmp_path, monkeypatch, **small, trained=str(tmp_path / "trained"))
    assert not shown.runs
    assert shown.printed("def times(row)") == table
    assert shown.printed("def verdict(") == claims
    (tmp_path / "addresses").rmdir()
    (tmp_path / "text").rename(tmp_path / "addresses")

    # A run that a killed machine left is trained anew, and one that has finished is left as it is.
    left, finished = tmp_path / "left", document.runs[0]
    shutil.copytree(finished.path, left)
    events = (left / "events.jsonl").read_bytes().splitlines(keepends=True)
    (left / "events.jsonl").write_bytes(b"".join(events[: len(events) // 2]))
    assert not sparse_family.has_finished(left)
    for _ in range(2):
        sparse_family.train_one(finished.experiment.to_json(), left, time.time() + 10 * PATIENCE_S)
        assert sparse_family.has_finished(left)
    assert wb.load_run(left).evaluations().eval_loss[-1] == pytest.approx(finished.evaluations().eval_loss[-1])
    assert len(list(tmp_path.glob("interrupted-*-left"))) == 1
