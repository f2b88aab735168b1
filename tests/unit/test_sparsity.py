"""Patterns of sparse training as pure functions, refusals before any process starts, and FLOPs by hand."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import workbench as wb
from tests.exhaustive import EXHAUSTIVE
from workbench.analysis.pareto import ParetoPoint
from workbench.base.errors import InvalidExperiment, UnknownParameter
from workbench.capture.captured_model import CapturedModel
from workbench.cost.sparse_matrices import check_sparsity, product_flops, sparse_matrices
from workbench.experiment import Experiment
from workbench.figures.run_views import LOOKS, draw_exploration, draw_pareto, draw_pattern
from workbench.planning.planner import graph
from workbench.record.history import Patterns, read_tail
from workbench.record.rundir import event_line
from workbench.sparsity import Dynamic, Static, learning_rate
from workbench.sparsity.pattern import block_sums, expanded, initial, is_explored, is_present, largest, moved, uniform
from workbench.sweeps.queue import label
from workbench.sweeps.sweep import Axes

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": 64}


def experiment(**changes: object) -> Experiment:
    fields = {"model": wb.models.bert(**SIZES), "data": wb.data.corpus("demo", vocab_size=400), "seq_len": 32}
    return Experiment.of(**{**fields, **changes})


@pytest.mark.parametrize("block", [1, 2, 8])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_the_number_of_blocks_stays_and_the_smallest_are_pruned(block: int, sparsity: float) -> None:
    dynamic = Dynamic(sparsity=sparsity, block=block, updates=20, prune_ratio=0.7)
    shape, generator = (32, 64), torch.Generator().manual_seed(3)
    count = shape[0] * shape[1] // block**2
    pattern = initial(shape, block, dynamic.kept(count), "0/weight")
    explored = is_present(pattern)
    for update, step in enumerate(dynamic.update_steps(100)):
        weight = torch.randn(shape, generator=generator) * expanded(is_present(pattern), block)
        sizes, before = block_sums(weight, block), is_present(pattern)
        wanted = round(dynamic.ratio(step, 100) * int(before.sum()))
        result = moved(pattern[None], sizes[None], uniform([f"0/weight/{update}"], pattern.shape), wanted)
        [pattern], [stayed] = result.patterns, result.stayed
        after = is_present(pattern)
        pruned, grown = before & ~after, after & ~before
        assert int(after.sum()) == dynamic.kept(count)
        assert int(pruned.sum()) == int(grown.sum()) == result.moved == min(wanted, int((~before).sum()))
        if result.moved:
            assert sizes[pruned].max() <= sizes[stayed].min()
        assert torch.equal(stayed, before & after)
        explored |= after
        assert torch.equal(is_explored(pattern), explored)


def test_weights_of_one_shape_move_together_as_each_by_itself() -> None:
    keys, shape = ["a", "b", "c"], (16, 8)
    patterns = torch.stack([initial(shape, 1, 40, key) for key in keys])
    sizes = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0)) * is_present(patterns)
    growth = uniform(keys, shape)
    together = moved(patterns, sizes, growth, 11)
    for at in range(3):
        alone = moved(patterns[at][None], sizes[at][None], growth[at][None], 11)
        assert torch.equal(alone.patterns[0], together.patterns[at])
        assert torch.equal(alone.stayed[0], together.stayed[at])
        assert int(is_present(together.patterns[at]).sum()) == 40


def test_block_sums_are_sums_of_absolute_values() -> None:
    matrix = torch.arange(-8.0, 8.0).view(4, 4)
    by_hand = [
        [sum(abs(matrix[r, c].item()) for r in rows for c in cols) for cols in ((0, 1), (2, 3))]
        for rows in ((0, 1), (2, 3))
    ]
    assert block_sums(matrix, 2).tolist() == by_hand


def test_equal_scores_are_chosen_in_order_and_only_eligible_ones() -> None:
    eligible = torch.tensor([[False, True], [True, True]])
    assert largest(torch.zeros(2, 2), eligible, 2).tolist() == [[False, True], [True, False]]


def test_regrowth_is_a_function_of_its_key_and_looks_uniform() -> None:
    keys = ["7/layer.0/3", "8/layer.0/3", "7/layer.1/3", "7/layer.0/4"]
    [drawn] = uniform(keys[:1], (200, 100))
    together = uniform(keys, (200, 100))
    assert torch.equal(drawn, together[0])
    assert torch.corrcoef(together.flatten(1))[0, 1:].abs().max() < 0.03
    assert len(drawn.unique()) == drawn.numel()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.mean() == pytest.approx(0.5, abs=0.01)
    assert drawn.var() == pytest.approx(1 / 12, abs=0.003)


def test_regrowth_is_splitmix64_of_the_position_in_exact_whole_numbers() -> None:
    """Python's own integers are the oracle: torch has no unsigned ones, and repeats the sign in a shift."""

    def by_hand(key: str, position: int) -> float:
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
        bits = ((position + 1) * 0x9E3779B97F4A7C15 + seed) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            bits = (bits ^ (bits >> shift)) * factor % 2**64
        return (bits >> 11) * 2.0**-53

    keys = ["0/weight/0", "7/layer.0/3"]
    expected = [[by_hand(key, position) for position in range(1000)] for key in keys]
    assert uniform(keys, (20, 50)).flatten(1).tolist() == expected


@pytest.mark.parametrize(("updates", "steps"), [(1, 10), (7, 100), (160, 1000), (50, 50)])
def test_updates_lie_at_distinct_steps_between_the_first_and_the_last(updates: int, steps: int) -> None:
    found = Dynamic(updates=updates).update_steps(steps)
    assert len(set(found)) == updates
    assert min(found) >= 1
    assert max(found) <= steps
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_prune_ratio_falls_as_a_half_cosine() -> None:
    dynamic = Dynamic(prune_ratio=0.4)
    assert [dynamic.ratio(step, 100) for step in (0, 50, 100)] == pytest.approx([0.4, 0.2, 0.0])


def test_the_learning_rate_rule_is_that_of_the_paper() -> None:
    assert learning_rate(2e-4, 0.0) == 2e-4
    assert learning_rate(1.0, 0.9) == pytest.approx(math.exp(1.969 * 0.81 + 0.2905 * 0.9))


@pytest.mark.parametrize(
    "sparsity", [None, Static(0.8, 4, "bert.encoder"), Dynamic(block=1, updates=3, regrow="gradient")]
)
def test_an_experiment_with_a_sparsity_survives_json(sparsity: Static | None) -> None:
    written = experiment(sparsity=sparsity)
    assert Experiment.from_json(json.loads(json.dumps(written.to_json()))) == written


def test_the_scope_chooses_hidden_matrices_only() -> None:
    captured = graph(experiment())
    chosen = sparse_matrices(captured, Static(0.5, 8))
    assert len(chosen) == 2 * 6
    assert all(".encoder." in name for name in chosen)
    assert chosen["bert.encoder.layer.0.intermediate.dense.weight"] == (128, 32)
    everywhere = sparse_matrices(captured, Static(0.5, 8, scope="*"))
    assert everywhere.keys() > chosen.keys()
    assert not any("embeddings" in name or "decoder" in name for name in everywhere)
    assert len(sparse_matrices(captured, Static(0.5, 8, scope="*.attention.self.*"))) == 2 * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity": 1.0}, "sparsity=1.0 must be below 1"),
        ({"sparsity": float("nan")}, "sparsity=nan is not finite"),
        ({"block": 0}, "block=0 must be 1 or more"),
        ({"block": True}, "is not a whole number"),
        ({"block": 2.0}, "is not a whole number"),
        ({"updates": 0}, "updates=0 must be 1 or more"),
        ({"prune_ratio": 0.0}, "must be greater than 0"),
        ({"regrow": "gradients"}, "Did you mean 'gradient'"),
        ({"scope": ""}, "scope=''"),
    ],
)
def test_values_that_describe_no_pattern_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidExperiment, match=message):
        Dynamic(**changes)


def test_more_updates_than_steps_and_other_types_are_refused() -> None:
    with pytest.raises(InvalidExperiment, match=r"updates=160 .* 100 steps"):
        experiment(steps=100, sparsity=Dynamic())
    with pytest.raises(InvalidExperiment, match=r"wb\.sparsity\.Dynamic"):
        experiment(sparsity=0.9)
    with pytest.raises(UnknownParameter, match="updates"):
        Dynamic(update=3)


@pytest.mark.parametrize(
    ("sparsity", "message"),
    [
        (Static(0.5, 5), r"block=5 does not divide the 32 × 32 weight .*a divisor of 32"),
        (Static(0.9, 16), r"leaves 0 blocks of 16 × 16 .*at most 0.5"),
        (Static(0.5, 4, "decoder_layers"), r"scope='decoder_layers' matches none .*encoder"),
    ],
)
def test_blocks_that_do_not_suit_the_model_are_refused_before_a_process_starts(sparsity: Static, message: str) -> None:
    asked = experiment(sparsity=sparsity)
    with pytest.raises(InvalidExperiment, match=message):
        check_sparsity(asked, SimpleNamespace(block_sparse=False), CapturedModel(asked, 2))


PUBLISHED = {
    "Mini": (4, 256, None, 2.617),
    "Small": (4, 512, None, 10.07),
    "Medium": (8, 512, 0.9, 2.738),
    "Base": (12, 768, 0.9, 8.33),
}
"""Layers, width, sparsity, and the GFLOP of one sequence that arXiv:2108.06277 gives."""
CAPTURED = PUBLISHED if EXHAUSTIVE else ("Mini", "Medium")


@pytest.mark.parametrize("name", CAPTURED)
def test_flops_agree_with_a_hand_count_and_with_the_published_ones(name: str) -> None:
    """The source counts forward and backward of the layers for one sequence of 128 tokens."""
    layers, hidden, sparsity, published = PUBLISHED[name]
    rows, weights, density = 128, 12 * hidden**2 * layers, 1.0 if sparsity is None else 1 - sparsity
    attention = 2 * 2 * 128 * 128 * hidden * layers
    by_hand = 3 * (2 * rows * weights * density + attention)
    assert by_hand / 1e9 == pytest.approx(published, rel=1e-3)

    model = wb.models.bert(hidden_size=hidden, num_layers=layers, num_heads=hidden // 64)
    captured = graph(experiment(model=model, seq_len=128))
    names = sparse_matrices(captured, Static(0.0, 1))
    assert sum(product_flops(captured, names).values()) == captured.micro_batch * 2 * rows * weights
    pattern = None if sparsity is None else Static(sparsity, 1)
    assert wb.analysis.sample_flops(experiment(model=model, seq_len=128, sparsity=pattern)).layers == pytest.approx(
        by_hand, rel=1e-5
    )


@pytest.mark.parametrize("layers", [1, 2])
def test_the_head_is_not_of_the_layers_in_a_model_of_one_layer_either(layers: int) -> None:
    """A model of one layer is captured as one block, which holds the head as well."""
    model = wb.models.bert(hidden_size=32, num_layers=layers, num_heads=2, vocab_size=64, next_sentence=False)
    data = wb.data.corpus("demo", vocab_size=64, masked_share=0.25)
    counted = wb.analysis.sample_flops(experiment(model=model, data=data, seq_len=16))
    assert counted.layers == layers * (3 * 2 * 16 * 12 * 32**2 + 3 * 2 * 2 * 16 * 16 * 32)
    assert counted.head == 3 * 2 * 16 * (32**2 + 32 * 64)
    assert counted.at_labels == counted.layers + counted.head / 4


def event(step: int, update: int, explored: int, picture: list[str], time: float) -> dict[str, object]:
    counts = {"blocks": 40, "present": 4, "explored": explored, "moved": 2 if update else 0}
    spent = {"tokens": 64.0 * step, "flops": 1e6 * step, "seconds": 0.5 * step}
    shown = {"weight": "layer.0.weight", "pattern": picture, "prune_ratio": 0.5}
    return {"type": "sparsity", "time": time, "step": step, "update": update, **counts, **spent, **shown}


def start(time: float, resumed_from: str | None = None) -> dict[str, object]:
    return {"type": "start", "time": time, "devices": 1, "resumed_from": resumed_from}


BEFORE, AFTER, ANEW = ["#.", ".#"], ["##", ".."], [".#", "#."]


def patterns(folder: Path) -> Patterns:
    """Return the patterns of a run that stopped after its first update and made its second one anew."""
    events = [start(0.0), event(0, 0, 4, BEFORE, 1.0), event(3, 1, 6, AFTER, 2.0), event(5, 2, 8, BEFORE, 3.0)]
    events += [start(4.0, "checkpoints/step-00000004"), event(5, 2, 7, ANEW, 5.0)]
    (folder / "events.jsonl").write_bytes(b"".join(event_line(each.pop("type"), **each) for each in events))
    return read_tail(folder / "events.jsonl").patterns


def test_the_patterns_of_a_resumed_run_are_those_of_its_last_attempt(tmp_path: Path) -> None:
    found = patterns(tmp_path)
    assert found.step.tolist() == [0, 3, 5]
    assert found.explored.tolist() == pytest.approx([0.1, 0.15, 0.175])
    assert found.present.tolist() == pytest.approx([0.1] * 3)
    assert found.moved.tolist() == [0.0, 0.5, 0.5]
    assert found.flops.tolist() == [0.0, 3e6, 5e6]
    assert [picture.tolist() for picture in found.pictures][2] == [[False, True], [True, False]]
    assert repr(found) == "Patterns(10 % of the blocks present, 2 updates, 17.5 % explored)"


def test_the_slider_shows_what_each_update_did(tmp_path: Path) -> None:
    figure = draw_pattern(patterns(tmp_path), "run <b>")
    assert [step.label for step in figure.layout.sliders[0].steps] == ["0", "3", "5"]
    assert [step.args[0]["visible"].index(True) for step in figure.layout.sliders[0].steps] == [0, 1, 2]
    names = list(LOOKS)
    drawn = [[[names[state] for state in row] for row in trace.z] for trace in figure.data]
    assert drawn[0] == [["stayed", "absent"], ["absent", "stayed"]]
    assert drawn[1] == [["stayed", "regrown"], ["absent", "pruned"]]
    assert "run &lt;b&gt;" in figure.layout.title.text


def test_exploration_has_a_line_for_each_run_in_both_panels(tmp_path: Path) -> None:
    figure = draw_exploration({"one": patterns(tmp_path), "two": patterns(tmp_path)})
    assert [trace.name for trace in figure.data] == ["one", "one", "two", "two"]
    assert list(figure.data[0].y) == pytest.approx([0.1, 0.15, 0.175])


def test_the_pareto_front_joins_what_nothing_beats_in_both_cost_and_loss() -> None:
    points = [
        ParetoPoint("dense", "dense", "dense", 1, 10.0, 50.0, (2.0, 2.2)),
        ParetoPoint("static", "static", "static", 1, 2.0, 60.0, (2.5,)),
        ParetoPoint("dynamic", "dynamic", "dynamic", 1, 2.0, 55.0, (2.3,)),
    ]
    figure = draw_pareto(points, published={"dense Small": (10.07, 2.31)})
    fronts = [trace for trace in figure.data if trace.name == "Pareto front"]
    assert [list(front.x) for front in fronts] == [[2.0, 10.0], [50.0]]
    assert [list(front.y) for front in fronts] == [pytest.approx([2.3, 2.1]), pytest.approx([2.1])]
    [dense, _] = [trace for trace in figure.data if trace.name == "dense"]
    assert (dense.y[0] - dense.error_y.arrayminus[0], dense.y[0] + dense.error_y.array[0]) == pytest.approx((2.0, 2.2))
    ticks = dict(zip(figure.layout.xaxis.tickvals, figure.layout.xaxis.ticktext, strict=True))
    assert [text for at, text in ticks.items() if 1 <= at <= 10] == ["1", "2", "5", "10"]
    [grey] = [trace for trace in figure.data if trace.name == "published"]
    assert (*grey.text, *grey.x, *grey.y) == ("dense Small", 10.07, 2.31)


def test_no_two_marks_of_a_large_family_look_alike() -> None:
    points = [
        ParetoPoint(f"{model}, {group} {block}", f"model {model}", group, block, 1.0 + model, 1.0, (2.0,))
        for model in range(12)
        for group, blocks in (("dense", [1]), ("static", [1, 4, 8, 16]), ("dynamic", [1, 4, 8, 16]))
        for block in blocks
    ]
    figure = draw_pareto(points)
    marks = [trace for trace in figure.data if trace.mode == "markers"]
    looks = {trace.name: (trace.marker.color, trace.marker.symbol, trace.marker.size) for trace in marks}
    assert len(looks) == len(set(looks.values())) == len(points)


def test_an_axis_of_sparsities_has_short_names() -> None:
    assert label(Dynamic(0.9, 16).to_json()) == "90 % dynamic 16×16"
    assert label(Dynamic(0.8, 1, regrow="gradient").to_json()) == "80 % dynamic 1×1, by gradient"
    assert label(None) is None
    values = [None, Static(0.8, 4), Dynamic(0.8, 4)]
    axes = Axes(experiment(steps=200), {"sparsity": values})
    assert axes.json_values("sparsity") == [None, *(value.to_json() for value in values[1:])]
    assert [axes.experiment_of({"sparsity": at}).sparsity for at in range(3)] == values
