"""Every block, byte and action of a plan is in its partition, memory, timeline and prediction figures."""

from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from figure_values import in_one_line, plan
from plan_values import plan_of

from workbench.base.errors import UnknownParameter
from workbench.base.tensors import TensorSpec
from workbench.base.units import GIB, count, gib
from workbench.figures import theme
from workbench.figures.plan_view import CHARACTER_SHARE, draw_partition, plan_mimebundle, show_plan
from workbench.figures.theme import SUBTITLE_LETTERS, TITLE_LETTERS
from workbench.figures.timeline_view import NUMBERED_LANE, draw_timeline, measured_timeline, prediction
from workbench.planning.plan import Memory
from workbench.planning.prediction import MicroBatchTimes, simulate
from workbench.planning.prediction import timeline as simulated
from workbench.strategy import build_schedule


def parts(figure: Any, part: str) -> list[Any]:
    return [trace for trace in figure.data if trace.meta == part]


@pytest.mark.parametrize(("stages", "blocks"), [(1, 4), (1, 200), (2, 4), (4, 56), (16, 98)])
def test_every_block_is_drawn_once_in_its_stage(stages: int, blocks: int) -> None:
    value = plan(stages, blocks)
    traces = parts(draw_partition(value), "blocks")
    assert [len(trace.x) for trace in traces] == [s.end_block - s.first_block for s in value.stages]
    names = [text.split("</b>")[0].removeprefix("<b>") for trace in traces for text in trace.hovertext]
    assert tuple(names) == value.block_names


@pytest.mark.parametrize(("stages", "blocks"), [(4, 56), (1, 200)])
def test_blocks_of_a_row_touch_and_never_overlap(stages: int, blocks: int) -> None:
    for trace in parts(draw_partition(plan(stages, blocks)), "blocks"):
        rows: dict[float, list[tuple[float, float]]] = {}
        for y, start, width in zip(trace.y, trace.base, trace.x, strict=True):
            rows.setdefault(y, []).append((start, width))
        for cells in rows.values():
            for (start, width), (following, _) in itertools.pairwise(cells):
                assert start + width == pytest.approx(following)


def test_a_block_is_as_wide_as_its_share_of_the_stages_compute() -> None:
    plain, again = (plan_of(pipeline=2, schedule="1f1b", recompute=mode) for mode in ("none", "full"))
    first, last = parts(draw_partition(plain), "blocks")
    layer = first.x[1]
    assert first.text[0] == "emb"
    assert first.x[0] < layer / 2
    assert [*first.x[1:], *last.x[:-1]] == pytest.approx([layer] * (len(first.x) + len(last.x) - 2), rel=0.02)
    again = plan_of(pipeline=2, schedule="1f1b", recompute="full")
    assert (
        again.stages[0].block_shares[0]
        < plan_of(pipeline=2, schedule="1f1b", recompute="none").stages[0].block_shares[0]
    )


def test_a_stages_row_is_as_long_as_its_forward_and_backward() -> None:
    value = plan(4, 56)
    for stage, trace in zip(value.stages, parts(draw_partition(value), "blocks"), strict=True):
        assert sum(trace.x) == pytest.approx(stage.forward_ms + stage.backward_ms)


def test_the_heading_says_that_blocks_are_captured_in_cuda_graphs() -> None:
    value = plan(2, 8)
    captured = dataclasses.replace(value, cuda_graphs=True)
    assert show_plan(captured).layout.title.text.endswith("CUDA graphs</b>")
    assert "CUDA graphs" not in show_plan(value).layout.title.text


def test_each_block_says_how_it_is_recomputed_and_the_heading_in_how_many() -> None:
    value = plan(2, 8)
    first, second = value.stages
    some = replace(first, recompute="full", recompute_first=1, recompute_rest="selective")
    value = replace(value, stages=(some, replace(second, recompute="selective", recompute_first=2)))
    texts = [text for trace in parts(draw_partition(value), "blocks") for text in trace.hovertext]
    found = [re.findall(r"(?:<br>|^)((?:selective )?activation checkpointing)", text) for text in texts]
    selective = ["selective activation checkpointing"]
    assert found == [["activation checkpointing"], selective, selective, selective, selective, selective, [], []]
    words = "activation checkpointing in 1 and selective in 5 of 8 blocks"
    assert words in in_one_line(show_plan(value).layout.title.text)
    assert words in value.describe()


def test_memory_is_stacked_by_category_up_to_each_stages_total() -> None:
    value = plan(4, 56, memory_limit_bytes=32 * GIB)
    stacks = parts(draw_partition(value), "memory")
    assert [trace.name for trace in stacks] == ["parameters", "gradients", "optimiser", "activations", "workspace"]
    for stage in value.stages:
        assert sum(trace.x[stage.index] for trace in stacks) * GIB == pytest.approx(stage.memory.total)


def test_a_device_with_several_stages_shows_what_all_of_them_hold() -> None:
    value = plan(8, 56, chunks=2, memory_limit_bytes=64 * GIB)
    figure = show_plan(value)
    held = {rank: value.stages[rank].memory.total + value.stages[rank + 4].memory.total for rank in range(4)}
    stacks = parts(figure, "memory")
    for rank in range(4):
        assert sum(trace.x[rank] for trace in stacks) * GIB == pytest.approx(held[rank])
    assert figure.layout.yaxis2.ticktext[3] == f"{gib(value.device_bytes(3))}<br>stages 3, 7"
    assert f"{value.peak_bytes / GIB:.1f} GiB of" in in_one_line(figure.layout.title.subtitle.text)


def test_the_users_memory_limit_takes_the_place_of_the_devices() -> None:
    value = plan(4, 56, memory_limit_bytes=32 * GIB)
    figure = draw_partition(value)
    assert f"{value.peak_bytes / 32 / GIB:.0%} of your 32.0 GiB" in figure.layout.annotations[1].text
    assert figure.layout.shapes[0].x0 == 32.0


def test_the_total_of_each_stage_stands_beside_the_axis_where_no_limit_crosses_it() -> None:
    value = plan(4, 56)
    axis = draw_partition(value).layout.yaxis2
    assert axis.side == "right"
    assert list(axis.ticktext) == [gib(stage.memory.total) for stage in value.stages]


def test_memory_is_labelled_where_the_label_fits() -> None:
    for figure in (draw_partition(plan(4, 56, memory_limit_bytes=32 * GIB)), draw_partition(plan(4, 8))):
        end = figure.layout.xaxis2.range[1]
        pairs = [pair for t in parts(figure, "memory") for pair in zip(t.x, t.text, strict=True)]
        words = [f"{x:.3g}" for x, _ in pairs]
        fits = [x >= CHARACTER_SHARE * end * len(word) for (x, _), word in zip(pairs, words, strict=True)]
        assert [text for _, text in pairs] == [word * fit for word, fit in zip(words, fits, strict=True)]
        assert {*fits} == {False, True}


def test_a_small_models_memory_is_counted_in_the_unit_of_its_total() -> None:
    value = plan(2, 8)
    small = replace(value, stages=tuple(replace(s, memory=Memory(0, 0, 0, 3 << 20, 0)) for s in value.stages))
    figure = draw_partition(small)
    assert in_one_line(figure.layout.xaxis2.title.text) == "peak of a device (MiB)"
    assert figure.layout.yaxis2.ticktext[0] == "3.0 MiB"


def test_the_axis_of_memory_is_the_device_or_ends_at_the_peak_where_that_is_little() -> None:
    """The bars of the categories are as long as their bytes."""
    value = plan(4, 8)
    figure = draw_partition(value)
    assert not figure.layout.shapes
    assert figure.layout.xaxis2.range[1] == pytest.approx(1.05 * value.peak_bytes / GIB)
    lengths = [sum(trace.x[rank] for trace in parts(figure, "memory")) for rank in range(4)]
    assert lengths == pytest.approx([value.device_bytes(rank) / GIB for rank in range(4)])
    assert (
        f"{value.peak_bytes / value.cluster.device.memory_bytes:.0%} of 139.8 GiB" in figure.layout.annotations[1].text
    )
    full = draw_partition(plan(4, 56, memory_limit_bytes=32 * GIB))
    assert full.layout.xaxis2.range[1] == pytest.approx(1.05 * 32)
    assert [line.x0 for line in full.layout.shapes] == [32.0]


def test_each_part_says_what_its_numbers_are_and_no_colour_of_it_returns_in_another() -> None:
    figure = show_plan(plan(4, 56, data=2))
    told = {note.text.partition("</b>")[0][3:]: in_one_line(note.text) for note in figure.layout.annotations}
    told["Devices"] = in_one_line(figure.layout.xaxis4.title.text)
    assert list(told) == ["Blocks", "Memory", "One step", "Devices"]
    assert [
        word in told[part] for part, word in (("Blocks", "layer"), ("One step", "micro-batch"), ("Devices", "stage"))
    ]
    used = {part: {trace.marker.color for trace in parts(figure, part)} for part in ("memory", "actions", "around")}
    used["map"] = {trace.marker.color for trace in parts(figure, "map")}
    for one, other in itertools.combinations(used.values(), 2):
        assert not one & other
    assert {trace.marker.color[0] for trace in parts(figure, "blocks")} == used["map"], "a stage has one colour"


def test_parameters_that_two_stages_hold_are_counted_once_and_named() -> None:
    """The output layer of this BERT is its table of embeddings: both ends of the pipeline hold it."""
    one, cut = plan_of(pipeline=1), plan_of(pipeline=2)
    assert cut.parameters == one.parameters == one.stages[0].parameters
    tied = cut.stages[-1].tied_parameters
    assert sum(stage.parameters for stage in cut.stages) - tied == one.parameters
    assert tied > 0
    facts = in_one_line(show_plan(cut).layout.title.subtitle.text)
    assert f"parameters {count(one.parameters)}, {count(tied)} of them (tied) in two stages" in facts
    assert "tied" not in show_plan(one).layout.title.subtitle.text


def test_stages_have_different_colours_from_their_neighbours() -> None:
    colours = [trace.marker.color[0] for trace in parts(draw_partition(plan(16, 98)), "blocks")]
    assert all(a != b for a, b in itertools.pairwise(colours))


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 4), (4, 32), (8, 64)])
def test_every_action_of_the_schedule_is_drawn_once(stages: int, microbatches: int) -> None:
    figure = draw_timeline(plan(stages, 56, microbatches))
    for name in ("forward", "backward"):
        traces = [trace for trace in figure.data if trace.name == name]
        facts = [(round(rank), int(facts[1])) for t in traces for rank, facts in zip(t.y, t.customdata, strict=True)]
        assert sorted(facts) == [(rank, i) for rank in range(stages) for i in range(microbatches)]
        numbers = [[int(text) for text in t.text] for t in traces if t.text is not None]
        few_enough = 2 * microbatches <= NUMBERED_LANE
        assert numbers == ([[int(facts[1]) for facts in t.customdata] for t in traces] if few_enough else [])
        assert [trace.showlegend for trace in traces].count(True) == 1


def test_actions_too_narrow_for_a_bar_are_areas_that_cover_their_time() -> None:
    value = plan(2, 8, microbatches=300)
    lanes = simulated(value).lanes
    areas = parts(draw_timeline(value), "actions")
    assert {(trace.name, trace.type) for trace in areas} == {("forward", "scatter"), ("backward", "scatter")}
    for rank, lane in enumerate(lanes):
        drawn = np.concatenate([np.array(trace.x)[np.isclose(trace.y, rank - 0.4)] for trace in areas])
        assert len(drawn) == 2 * len(lane)
        spans = sorted((first, second) for first, second in drawn.reshape(-1, 2))
        assert np.allclose(spans, [(action.start_ms, action.end_ms) for action in lane], rtol=1e-5)


def test_hover_tells_when_an_action_ran_and_how_long() -> None:
    """plotly.js replaces %{x} of a bar by the bar's end."""
    figure = draw_timeline(plan(2, 8, microbatches=4))
    for trace in parts(figure, "actions"):
        assert trace.hovertemplate.count("%{base:") == trace.hovertemplate.count("%{x:") == 1
        assert [length for *_, length in trace.customdata] == list(trace.x)
    [idle] = parts(figure, "idle")
    assert list(idle.customdata) == list(idle.x)
    assert "%{customdata:" in idle.hovertemplate


def test_hatched_time_is_the_bubble_that_the_title_states() -> None:
    value = plan(4, 56, microbatches=8)
    figure = draw_timeline(value)
    schedule = build_schedule("1f1b", 4, 8)
    times = [[getattr(s, name) for s in value.stages] for name in ("forward_ms", "backward_ms")]
    link = value.cluster.group_link(4)
    sends = [1e3 * (link.latency_s + s.send_bytes / link.bandwidth) for s in value.stages]
    simulated = simulate(schedule, MicroBatchTimes(*times, sends))
    [idle] = parts(figure, "idle")
    assert sum(idle.x) / (4 * simulated.step_ms) == pytest.approx(simulated.bubble_fraction)
    assert f"bubble {simulated.bubble_fraction:.1%}" in figure.layout.title.subtitle.text


def test_no_line_of_a_title_is_wider_than_a_narrow_figure_and_the_figure_grows_for_more_lines() -> None:
    short, long = draw_partition(plan(4)), draw_partition(plan(4, model=" ".join(["bert-large"] * 12)))
    title = long.layout.title
    for lines, letters in ((title.text, TITLE_LETTERS), (title.subtitle.text, SUBTITLE_LETTERS)):
        assert max(len(re.sub("<[^>]*>", "", line).strip()) for line in lines.split("<br>")) <= letters
    grown = long.layout.height - short.layout.height
    assert grown == long.layout.margin.t - short.layout.margin.t > 0, "the plot keeps its height"


def test_one_figure_shows_the_whole_plan() -> None:
    value = plan(4, 56, microbatches=8)
    figure = show_plan(value)
    metas = {"blocks", "memory", "actions", "idle", "around", "map", "link"}
    assert {trace.meta for trace in figure.data} == metas
    subtitle = in_one_line(figure.layout.title.subtitle.text)
    assert all(fact in subtitle for fact in ("step 800 ms", "MFU 43.0%"))
    assert "bubble 8.6% of all pipeline ranks, 10.0% of the busiest" in subtitle
    assert "batch 64 samples = 1 replica × 8 micro-batches × 8 samples" in subtitle


def test_labels_in_narrow_bars_vanish_instead_of_shrinking() -> None:
    for figure in (draw_partition(plan()), show_plan(plan()), draw_timeline(plan())):
        assert figure.layout.uniformtext.mode == "hide"
        last = [trace for trace in figure.data if trace.type == "bar"][-1]
        assert last.text is not None  # plotly.js applies the mode only if the last subplot's bars have text


def test_a_notebook_stores_a_plan_as_figure_and_as_a_sentence() -> None:
    value = plan(2, 8)
    bundle = plan_mimebundle(value)
    assert bundle["application/vnd.plotly.v1+json"]["layout"]["title"]["text"].startswith("<b>bert-1920x54 on")
    assert bundle["text/plain"] == repr(value)


def test_prediction_states_the_error_of_each_quantity() -> None:
    value = plan(2, 8)
    peaks = {stage.index: stage.memory.total / 1.25 for stage in value.stages}
    figure = prediction(value, {"step_ms": 1000.0, "tokens_per_s": 128e3, "mfu": 0.43, "peak_bytes": peaks})
    ticks = [axis.ticktext for axis in figure.select_xaxes()]
    assert ticks[:3] == [("<b>-20.0%</b>",), ("<b>+25.0%</b>",), ("<b>+0.0%</b>",)]
    assert all("+25.0%" in tick for tick in ticks[3])


def test_a_quantity_that_was_measured_as_nothing_has_no_error() -> None:
    [ticks] = [axis.ticktext for axis in prediction(plan(2, 8), {"step_ms": 0.0}).select_xaxes()]
    assert ticks == ("<b>–</b>",)


def test_memory_on_cpus_is_compared_as_on_gpus_and_the_step_is_said_to_be_predicted_for_idle_cores() -> None:
    value = plan(2, 8)
    cpu = dataclasses.replace(value.cluster, device=dataclasses.replace(value.cluster.device, type="cpu"))
    measured = {"step_ms": 1000.0, "peak_bytes": {0: GIB, 1: GIB}}
    figure, on_gpus = (prediction(dataclasses.replace(value, cluster=each), measured) for each in (cpu, value.cluster))
    assert [axis.ticktext for axis in figure.select_xaxes()] == [axis.ticktext for axis in on_gpus.select_xaxes()]
    titles = [in_one_line(each.text) for each in figure.layout.annotations[:2]]
    assert titles == ["Step time (ms), predicted for idle cores", "Peak memory of a device (GiB)"]


def test_numbers_of_many_devices_stand_upright_beside_each_other() -> None:
    for stages, angle in ((4, 0), (16, -90)):
        value = plan(stages, 32)
        peaks = {rank: value.device_bytes(rank) for rank in range(stages)}
        assert {trace.textangle for trace in prediction(value, {"peak_bytes": peaks}).data} == {angle}


def test_predicted_memory_of_a_device_is_that_of_all_its_stages() -> None:
    """Runs measure devices, and under an interleaved schedule a device holds several stages."""
    value = plan(4, 8, chunks=2)
    measured = {0: 10 * GIB, 1: 20 * GIB}
    figure = prediction(value, {"peak_bytes": measured})
    predicted, found = figure.data
    assert list(predicted.y) == [value.device_bytes(rank) / GIB for rank in (0, 1)]
    assert list(found.y) == [10.0, 20.0]
    assert predicted.y[0] * GIB == value.stages[0].memory.total + value.stages[2].memory.total
    [ticks] = [axis.ticktext for axis in figure.select_xaxes()]
    assert ticks[1].startswith("stages 1, 3<br>")


def test_one_figure_sets_a_measured_step_below_its_prediction_and_beside_it_time_and_memory() -> None:
    value = plan(4, 8, microbatches=4, chunks=2)
    slower = simulate(build_schedule("interleaved", 2, 4, 2), MicroBatchTimes([1.0] * 4, [2.2] * 4, [0.0] * 4))
    figure = prediction(value, {"step_ms": 1000.0, "peak_bytes": {0: 10 * GIB}}, step=slower)
    titles = [in_one_line(note.text) for note in figure.layout.annotations]
    assert titles[:2] == ["Step time (ms)", "Peak memory of a device (GiB)"]
    assert titles[2].startswith("<b>predicted</b>")
    assert titles[3].startswith("<b>measured, one sampled step</b>")
    assert sum(len(trace.x) for trace in parts(figure, "actions")) == 2 * 2 * 4 * 4
    times = [axis.range for axis in figure.select_xaxes() if str(axis.title.text).startswith("time (ms)")]
    assert len(times) == 2
    assert times[0] == times[1]
    named = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert sorted(named) == [
        "backward",
        "exposed communication",
        "forward",
        "idle (bubble)",
        "measured",
        "predicted",
        "update",
    ]


def test_prediction_leaves_out_what_was_not_measured() -> None:
    figure = prediction(plan(2, 8), {"step_ms": 1000.0, "mfu": float("nan"), "peak_bytes": {}, "tokens_per_s": None})
    assert [note.text for note in figure.layout.annotations] == ["Step time (ms)"]


def test_prediction_of_nothing_is_refused() -> None:
    with pytest.raises(UnknownParameter, match="step_ms"):
        prediction(plan(2, 8), {"mfu": float("nan")})
    with pytest.raises(UnknownParameter, match="Did you mean 'peak_bytes'"):
        prediction(plan(2, 8), {"peak_byte": 1})


def test_the_tensors_that_cross_a_cut_stand_between_its_stages_with_names_and_shapes() -> None:
    crossing = {
        0: [TensorSpec("hidden", (8, 512, 1920), "bfloat16"), TensorSpec("bias<0>", (1, 30, 512, 512), "float32")],
        1: [TensorSpec("hidden", (8, 512, 1920), "bfloat16")],
    }
    figure = draw_partition(plan(stages=3), crossing=crossing)
    [marks] = [trace for trace in figure.data if trace.meta == "crossing"]
    assert list(marks.y) == [0.5, 1.5]
    assert "hidden  bfloat16 8 × 512 × 1920" in marks.hovertext[0]
    assert "bias&lt;0&gt;  float32 1 × 30 × 512 × 512" in marks.hovertext[0]


def test_a_measured_step_is_drawn_below_its_prediction_on_the_same_axis() -> None:
    chosen = plan(stages=2, microbatches=4)
    events = [
        {
            "type": "actions",
            "rank": rank,
            "step": 6,
            "origin_s": 1000.0 + rank * 1e-3,
            "actions": [[a.type, a.stage, a.micro_batch, a.start_ms + 5, a.end_ms + 5] for a in lane],
        }
        for rank, lane in enumerate(simulated(chosen).lanes)
    ]
    measured = measured_timeline([*events, {**events[0], "step": 206}, {"type": "step", "step": 7}])
    assert measured is not None
    assert measured.lanes[0][0].start_ms == 0.0
    assert measured.lanes[1][0].start_ms == pytest.approx(simulated(chosen).lanes[1][0].start_ms + 1.0)
    assert measured.in_flight == (2, 1)
    figure = draw_timeline(chosen, measured)
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range
    titles = [note.text for note in figure.layout.annotations]
    assert titles[0].startswith("<b>predicted</b>")
    assert titles[1].startswith("<b>measured, one sampled step</b>")


def test_a_sampled_step_is_as_long_as_the_history_has_it_and_what_was_not_recorded_is_drawn() -> None:
    """Of a step of 52.5 ms, forward and backward took 14.5; the pale bar has the rest, and words say so."""
    rows = [["F", 0, 0, 2.0, 6.0], ["B", 0, 0, 6.0, 16.5]]
    events = [{"type": "actions", "rank": 0, "step": 6, "origin_s": 0.0, "actions": rows}]
    columns: Any = SimpleNamespace(step=np.array([5.0, 6.0, 7.0]), step_ms=np.array([50.0, 52.5, 51.0]))
    measured = measured_timeline(events, columns)
    assert measured is not None
    assert (measured.step_ms, measured.end_ms) == (14.5, 52.5)
    figure = prediction(plan(1), {"step_ms": 52.0}, step=measured)
    [rest] = [trace for trace in figure.data if trace.name == "rest of the step, not recorded"]
    assert (list(rest.base), list(rest.x)) == ([14.5], [38.0])
    assert rest.showlegend is not False
    words = figure.layout.annotations[-1].text
    assert words.startswith("<b>measured, one sampled step</b>: 52.5 ms, of which forward and backward 14.5 ms; ")
    unknown = measured_timeline(events)
    assert unknown is not None
    assert unknown.end_ms == 14.5


def test_a_run_without_recorded_actions_has_no_measured_step() -> None:
    assert measured_timeline([{"type": "step", "step": 1}]) is None


def seen_by_rank(figure: Any, name: str) -> dict[int, list[tuple[float, float]]]:
    """Return start and end of each bar of a name, by pipeline rank."""
    spans: dict[int, list[tuple[float, float]]] = {}
    for trace in figure.data:
        if trace.name == name:
            for y, start, length in zip(trace.y, trace.base, trace.x, strict=True):
                spans.setdefault(round(y), []).append((start, start + length))
    return spans


def test_the_picture_of_a_step_ends_where_the_step_does() -> None:
    """After the last backward come exposed communication and the update, whose lengths the plan's stages say."""
    value = plan(2, 8, microbatches=4, data=4)
    parts_ms = {"forward_wait_ms": 0.1, "backward_wait_ms": 0.3, "host_wait_ms": 0.2, "overlapped_ms": (0.4, 0.5, 0.6)}
    stages = tuple(
        replace(stage, **parts_ms, end_wait_ms=5.0 + stage.index, optimizer_ms=2.0) for stage in value.stages
    )
    length = simulated(replace(value, stages=stages)).step_ms
    value = replace(value, stages=stages, prediction=replace(value.prediction, step_ms=length + 8.5))
    figure = draw_timeline(value)
    assert figure.layout.xaxis.range[1] == pytest.approx(1.005 * (length + 8.5))
    exposed, beside = (
        seen_by_rank(figure, "exposed communication"),
        seen_by_rank(figure, "communication beside compute"),
    )
    update, host = seen_by_rank(figure, "update"), seen_by_rank(figure, "waiting for the host")
    for rank in range(2):
        assert len(exposed[rank]) == 2 * 4 + 1
        assert exposed[rank][-1] == pytest.approx((length, length + 5.5 + rank))  # half a ms is of tied parameters
        assert update[rank] == [pytest.approx((length + 5.5 + rank, length + 7.5 + rank))]
        assert sum(end - start for start, end in host[rank]) == pytest.approx(4 * 0.2)
        assert sum(end - start for start, end in beside[rank]) == pytest.approx(4 * (0.4 + 0.5) + 0.6)
    assert f"{length + 8.5:.1f} ms" in figure.layout.title.subtitle.text


def test_a_stored_plan_without_its_stages_ends_shows_them_from_its_prediction() -> None:
    value = plan(1, 8, microbatches=2, data=4)
    length = simulated(value).step_ms
    value = replace(value, prediction=replace(value.prediction, step_ms=length + 9.0, optimizer_ms=4.0))
    figure = draw_timeline(value)
    assert seen_by_rank(figure, "exposed communication")[0] == [pytest.approx((length, length + 5.0))]
    assert seen_by_rank(figure, "update")[0] == [pytest.approx((length + 5.0, length + 9.0))]
    assert list(parts(figure, "idle")[0].x) == []


@pytest.mark.parametrize(
    ("stages", "data", "places", "words"),
    [
        (4, 1, ["GPU 0", "GPU 1", "GPU 2", "GPU 3"], "All devices are in one node."),
        (
            4,
            4,
            ["node 0, GPUs 0–3", "node 0, GPUs 4–7", "node 1, GPUs 0–3", "node 1, GPUs 4–7"],
            "stages 1 → 2 cross nodes",
        ),
        (
            2,
            16,
            ["nodes 0–1", "nodes 2–3"],
            "The link between stages crosses nodes; the 16 replicas of a stage are in 2 nodes.",
        ),
    ],
)
def test_a_map_says_which_devices_hold_each_stage_and_which_links_cross_nodes(stages, data, places, words) -> None:
    value = plan(stages, 56, data=data)
    figure = show_plan(value)
    assert [text.split("<br>")[0].split(" · ")[1] for text in figure.layout.yaxis.ticktext] == places
    cells = parts(figure, "map")
    assert sum(len(trace.x) for trace in cells) == stages * data
    assert [trace.marker.color for trace in cells] == [theme.stage_color(s, stages) for s in range(stages)]
    assert len({(base, y) for trace in cells for base, y in zip(trace.base, trace.y, strict=True)}) == stages * data
    assert words in in_one_line(figure.layout.xaxis4.title.text)
    dotted = [trace.line.dash == "dot" for trace in parts(figure, "link")]
    size = value.cluster.gpus_per_node
    assert dotted == [
        any((s * data + i) // size != ((s + 1) * data + i) // size for i in range(data)) for s in range(stages - 1)
    ]


def test_a_map_of_processes_on_cpus_names_no_gpu() -> None:
    value = plan(2, 8)
    cpu = replace(value.cluster, device=replace(value.cluster.device, type="cpu"))
    figure = show_plan(replace(value, cluster=cpu))
    assert figure.layout.xaxis4.ticktext[0] == "process 0"
    assert all("node 0, process" in words for trace in parts(figure, "map") for words in trace.hovertext)


def test_a_plan_whose_batch_is_too_small_for_its_devices_says_so_first() -> None:
    few = plan(2, 8, data=1)
    many = replace(plan(2, 8, data=4), prediction=replace(few.prediction, tokens_per_s=1.6 * 160e3))
    first = in_one_line(show_plan(many, few).layout.title.subtitle.text)
    assert "The batch is too small for 8 devices: 1.6 times the tokens/s of 2</span></b>" in first
    fast = replace(many, prediction=replace(few.prediction, tokens_per_s=3.6 * 160e3))
    assert "from 2 to 8 devices (× 4): 3.6 times the tokens/s" in in_one_line(
        show_plan(fast, few).layout.title.subtitle.text
    )
    assert "times the tokens" not in show_plan(many).layout.title.subtitle.text
