"""Draw the figures of the documentation anew into docs/pictures/.

    python benchmarks/pictures.py [NAME ...]

Without a name it draws all of them. It needs kaleido and a Chrome or Chromium, but no GPU. The curves are those of the
runs under notebooks/recorded. Evaluation, samples and sweep are those of benchmarks/results/gpt-sweep, which
templates/sweep.ipynb trained with its default parameters on two CPU processes. The Pareto figures are those of
sparse_pareto_2cores.ipynb and sparse_pareto_2xH200.ipynb in notebooks/, and those of the ladder of
scaling_ladder_4xH200.ipynb. Everything else is predicted. (The SVG files in that folder are written by hand.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import options
import plotly.graph_objects as go
from plotly.subplots import make_subplots

import workbench as wb
from workbench import models
from workbench.base.tensors import TensorSpec
from workbench.base.units import GIB
from workbench.capture import Graph, build_meta, capture
from workbench.cost import Cluster
from workbench.cost.graph_profiler import profile_graph, with_optimizer
from workbench.cost.hardware import Device
from workbench.cost.profile import BlockTypeCost, Profile
from workbench.figures import theme
from workbench.figures.figure import PLOTLY_MIME
from workbench.figures.plan_view import show_plan
from workbench.notebooks.pages import decoded
from workbench.optimizers.parameters import learning_rate_factor
from workbench.planning.plan import Plan
from workbench.planning.planner import CAPTURE_BATCH
from workbench.planning.prediction import timeline
from workbench.planning.search import what_if
from workbench.record.history import answer

ROOT = options.ROOT
SEQ_LEN, GLOBAL_BATCH = 512, 256
PAIRS = {
    "Muon": (
        ("bert-large-20261127-193809", *(f"bert-large-muon-seed{seed}" for seed in (1, 2, 3))),
        ("bert-scaled-20261127-193814", "bert-scaled-muon-seed1"),
    ),
    "AdamW": (("bert-large-adamw-seed0",), ("bert-scaled-adamw-seed0",)),
}
"""The recorded runs of one text on H200: the seeds of BERT-Large, and those of scaled BERT, by optimiser."""
FAMILIES = {
    "gemm": ("matrix products", theme.FORWARD),
    "attention": ("attention", theme.BACKWARD),
    "stream": ("bound by memory", "#3E9C75"),
}
"""Label and colour of each family of kernels."""


SIZES: dict[str, dict[str, int]] = {"scaled": {"hidden_size": 1920, "num_layers": 54, "num_heads": 30}, "base": {}}
"""Sizes of the models whose costs are predicted."""
TINY = {"hidden_size": 64, "num_layers": 6, "num_heads": 2}


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(PICTURES)}")
    asked = options.parsed(parser)
    if unknown := [name for name in asked.names if name not in PICTURES]:
        parser.error(f"There is no picture {unknown[0]}.")
    if asked.tiny:
        SIZES.update(dict.fromkeys(SIZES, TINY))
    for name in asked.names or PICTURES:
        path = options.save_picture(PICTURES[name](), name, asked, width=960)
        print(f"{path.name}  {path.stat().st_size // 1000} kB", flush=True)


@cache
def scaled_bert() -> Graph:
    model = models.bert(**SIZES["scaled"])
    fields = ("input_ids", "token_type_ids", "labels")
    batch = {name: TensorSpec(name, (CAPTURE_BATCH, SEQ_LEN), "int64") for name in fields}
    batch["next_sentence_label"] = TensorSpec("next_sentence_label", (CAPTURE_BATCH,), "int64")
    return capture(build_meta(model.build), batch, name=model.name)


@cache
def costs() -> Profile:
    return profile_graph(scaled_bert(), h200(1).device, "bf16", compiled=True)


def h200(gpus: int) -> Cluster:
    return Cluster.of("h200", gpus=gpus)


def planned(**asked: Any) -> Plan:
    return what_if(costs(), h200(4), global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, **asked)


def pipeline() -> Plan:
    """Return a plan with a pipeline of four stages: not the fastest, but the one with most to see."""
    return planned(pipeline=4, micro_batch=16, schedule="1f1b", recompute="none")


def cost() -> go.Figure:
    """Draw a layer's time by micro-batch size, and the memory of a pipeline's ranks during a step."""
    plan = pipeline()
    figure = make_subplots(
        cols=2,
        horizontal_spacing=0.1,
        subplot_titles=("time of one encoder layer", f"memory, {plan.num_microbatches} micro-batches under 1F1B"),
    )
    _add_layer_time(figure, plan.cluster.device)
    _add_memory(figure, plan)
    figure.update_annotations(font_size=13)
    figure.update_layout(
        template=theme.TEMPLATE,
        height=430,
        barmode="stack",
        title=theme.title(
            f"{plan.model}, sequences of {SEQ_LEN} tokens, bf16 on {plan.cluster.device.name}: predicted",
            "a stage takes the longer of its kernels' time and its host's; its backward frees what its forward saved",
        ),
        margin={"t": 92, "b": 96},
        legend={"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "borderwidth": 0},
        legend2={"orientation": "h", "x": 1, "xanchor": "right", "y": -0.2, "yanchor": "top", "borderwidth": 0},
    )
    return figure


def _add_layer_time(figure: go.Figure, device: Device) -> None:
    """Draw forward and backward per sample as bars by family of kernels, and the host's own time as a line."""
    sizes = [1, 2, 4, 8, 16, 32]
    layer = costs().block_types[costs().blocks[1].block_type]
    for family, (words, color) in FAMILIES.items():
        times = [_family_ms(layer, family, size, device) / size for size in sizes]
        figure.add_bar(x=list(map(str, sizes)), y=times, name=words, marker_color=color, row=1, col=1)
    host_ms = 1e3 * (device.efficiency.block_forward_s + device.efficiency.block_backward_s)
    figure.add_scatter(
        x=list(map(str, sizes)),
        y=[host_ms / size for size in sizes],
        name="host",
        line={"color": theme.INK, "dash": "dot", "width": 2},
        row=1,
        col=1,
    )
    figure.update_xaxes(title="samples of a micro-batch", type="category", row=1, col=1)
    figure.update_yaxes(title="ms a sample, forward and backward", rangemode="tozero", row=1, col=1)


def _family_ms(layer: BlockTypeCost, family: str, micro_batch: int, device: Device) -> float:
    return 1e3 * sum(
        kernel.seconds(micro_batch, device, "bf16", backward=backward, compiled=True)
        for backward, kernels in ((False, layer.forward), (True, layer.backward))
        for kernel in kernels
        if kernel.family == family
    )


def _add_memory(figure: go.Figure, plan: Plan) -> None:
    """Draw each rank's state and the activations of its micro-batches in flight, at the boundaries of actions."""
    block = costs().at(plan.micro_batch, plan.cluster.device)
    for index, (stage, lane) in enumerate(zip(plan.stages, timeline(plan).lanes, strict=True)):
        blocks = slice(stage.first_block, stage.end_block)
        held = float((block.saved_bytes + block.weight_copy_bytes)[blocks].sum())
        state = stage.memory.total - stage.memory.activations
        changes = [(action.end_ms, held if action.type == "F" else -held) for action in lane]
        totals = list(accumulate((change for _, change in changes), initial=float(state)))
        figure.add_scatter(
            x=[0.0, *(at for at, _ in changes)],
            y=[total / GIB for total in totals],
            line={"shape": "hv", "color": theme.series_color(index), "width": 2},
            name=f"stage {stage.index}",
            legend="legend2",
            row=1,
            col=2,
        )
    figure.update_xaxes(title="time (ms)", row=1, col=2)
    figure.update_yaxes(title="GiB of a device", rangemode="tozero", row=1, col=2)


def planning() -> go.Figure:
    """Draw the candidates of the search for scaled BERT on four H200: simulated, or excluded by a bound."""
    plan = planned()
    rows = [row for row in plan.candidates if row.step_ms is not None]
    sizes = sorted({row.micro_batch for row in rows})
    figure = go.Figure()
    for index, stages in enumerate(sorted({row.pipeline for row in rows})):
        color = theme.series_color(index)
        for simulated in (False, True):
            shown = [row for row in rows if row.pipeline == stages and row.verdict.startswith("at least") != simulated]
            figure.add_scatter(
                x=[sizes.index(row.micro_batch) + 0.22 * (index - 1) for row in shown],
                y=[row.step_ms / 1e3 for row in shown if row.step_ms],
                mode="markers",
                marker={
                    "size": 10 if simulated else 7,
                    "color": color if simulated else "white",
                    "line": {"color": color, "width": 1.2},
                },
                name=f"PP {stages}, {'simulated' if simulated else 'lower bound'}",
                showlegend=bool(shown),
            )
    fastest, slowest = plan.prediction.step_ms / 1e3, max(row.step_ms for row in rows if row.step_ms) / 1e3
    chosen = next(row for row in rows if row.verdict == "chosen")
    figure.add_annotation(
        x=sizes.index(chosen.micro_batch) + 0.22 * (sorted({row.pipeline for row in rows}).index(chosen.pipeline) - 1),
        y=math.log10(fastest),
        text=f"<b>chosen</b>: {plan.division()}",
        ax=-30,
        ay=24,
        yanchor="top",
        arrowcolor=theme.INK,
        yshift=-6,
    )
    figure.update_layout(
        template=theme.TEMPLATE,
        height=430,
        title=theme.title(
            f"{plan.model}, {GLOBAL_BATCH} × {SEQ_LEN} tokens a step on {plan.cluster.describe()}",
            f"the {len(plan.candidates)} options that the plan keeps of its search, by the least that a step may take",
        ),
        xaxis={"title": "samples of a micro-batch", "tickvals": list(range(len(sizes))), "ticktext": sizes},
        yaxis={
            "type": "log",
            "title": "step (s)",
            "range": [math.log10(fastest) - 0.22, math.log10(slowest) + 0.08],
            "tickvals": [1, 1.5, 2, 3, 4, 5, 10, 20],
        },
    )
    return figure


def figures() -> go.Figure:
    """Draw the view of a whole plan."""
    return show_plan(pipeline())


def curves() -> go.Figure:
    """Draw the README's picture: held-out losses of all seeds, and scaled BERT's differences to BERT-Large's mean."""
    figure = make_subplots(
        cols=2,
        column_widths=[0.58, 0.42],
        horizontal_spacing=0.09,
        subplot_titles=("loss on held-out prose", "scaled BERT − BERT-Large"),
    )
    recorded = ROOT / "notebooks" / "recorded"
    for optimizer, pair in PAIRS.items():
        large, scaled = ([wb.load_run(recorded / name).evaluations() for name in names] for names in pair)
        dash = "solid" if optimizer == "Muon" else "dot"
        for runs, name, color in ((large, "BERT-Large", 0), (scaled, "BERT 54 × 1920", 1)):
            for index, run in enumerate(runs):
                line = {"color": theme.series_color(color), "width": 1.8, "dash": dash}
                style = {"line": line, "name": f"{name}, {optimizer}", "showlegend": index == 0}
                figure.add_scatter(x=run.tokens[1:] / 1e6, y=run.eval_loss[1:], row=1, col=1, **style)
        mean = np.mean([run.eval_loss for run in large], axis=0)
        if len(large) > 1:
            tokens = large[0].tokens[4:] / 1e6
            high, low = (end([run.eval_loss for run in large], axis=0)[4:] - mean[4:] for end in (np.max, np.min))
            area = {"x": [*tokens, *tokens[::-1]], "y": [*high, *low[::-1]], "fill": "toself", "mode": "none"}
            fill = theme.pale(theme.series_color(0), 0.5)
            figure.add_scatter(**area, fillcolor=fill, showlegend=False, row=1, col=2)
            place = {"x": tokens[-1], "y": float(high[-1]), "yshift": 14, "xanchor": "right"}
            figure.add_annotation(text="seeds of BERT-Large", showarrow=False, row=1, col=2, **place)
        for index, run in enumerate(scaled):
            tokens = run.tokens[1:] / 1e6
            behind = run.eval_loss[1:] - mean[1 : len(tokens) + 1]  # a run that was stopped has fewer
            line = {"color": theme.series_color(1), "width": 1.8, "dash": dash}
            figure.add_scatter(x=tokens, y=behind, line=line, showlegend=False, row=1, col=2)
            if index == 0:
                text = f"{optimizer} {behind[-1]:+.2f}".replace("-", "−")
                aside = {"xanchor": "right", "yshift": -14} if optimizer == "Muon" else {"xanchor": "left", "xshift": 4}
                figure.add_annotation(x=tokens[-1], y=behind[-1], text=text, showarrow=False, row=1, col=2, **aside)
    return figure.update_layout(
        template=theme.TEMPLATE,
        height=430,
        margin={"t": 96, "r": 24},
        title=theme.title("BERT-Large and BERT 54 × 1920 on H200", "in nats of masked words; each line is a seed"),
        legend={"x": 0.55, "y": 1, "xanchor": "right"},
        yaxis={"range": [3.9, 7.2]},
        yaxis2={"range": [-0.19, 0.18]},
    ).update_xaxes(title="tokens (M)")


def evaluation() -> go.Figure:
    """Draw training and held-out loss of one run for each rate of the sweep."""
    runs = [run for run in recorded_sweep().runs if run.experiment.seed == 0 and run.experiment.global_batch == 16]
    figure = wb.compare(runs, x="tokens", title="Two learning rates, held-out loss with markers")
    figure.layout.updatemenus = ()  # The buttons of a picture have no effect.
    return figure.update_layout(margin={"t": 64})


def samples() -> go.Figure:
    """Draw the losses of the sweep's best run beside what it wrote."""
    run = recorded_sweep().best()[0]
    history, held_out = run.history(), run.evaluations()
    figure = make_subplots(
        cols=2,
        specs=[[{}, {"type": "table"}]],
        column_widths=[0.4, 0.6],
        subplot_titles=("loss, and ◆ held-out loss", ""),
        horizontal_spacing=0.05,
    )
    color = theme.series_color(0)
    loss = go.Scatter(x=history.step, y=history.loss, line={"color": theme.pale(color, 0.5)})
    marks = {"mode": "lines+markers", "line": {"color": color}, "marker": {"symbol": "diamond"}}
    figure.add_trace(loss, row=1, col=1)
    figure.add_trace(go.Scatter(x=held_out.step, y=held_out.eval_loss, **marks), row=1, col=1)
    events = [(event["step"], answer(sample)) for event in run.samples() for sample in event["samples"]]
    written = [(f"{step}", theme.text("".join(c if c.isprintable() else "·" for c in text))) for step, text in events]
    prompt = run.samples()[0]["samples"][0]["prompt"]
    table = go.Table(
        columnwidth=[1, 9],
        header={"values": ["step", f"“{theme.text(prompt)} …”"], "align": "left", "font": {"size": 13}},
        cells={"values": [*zip(*written, strict=True)], "align": "left", "font": {"size": 13}, "height": 24},
    )
    figure.add_trace(table, row=1, col=2)
    figure.update_xaxes(title_text="step", row=1, col=1)
    return figure.update_layout(template=theme.TEMPLATE, height=360, showlegend=False, margin={"t": 36, "b": 48})


def optimizers() -> go.Figure:
    """Draw the rates of each schedule, and what the state and the update of each optimiser cost."""
    titles = ("multiple of the rate, by schedule", "BERT-Base on one H200, predicted: state, and time of an update")
    figure = make_subplots(cols=2, horizontal_spacing=0.1, subplot_titles=titles)
    steps, warmup = 1000, 100
    for index, schedule in enumerate(("linear", "cosine", "constant", "wsd", "inverse_sqrt")):
        factors = [learning_rate_factor(step, warmup, steps, schedule) for step in range(steps)]
        line = {"color": theme.series_color(index)}
        figure.add_scatter(x=list(range(steps)), y=factors, name=schedule, line=line, row=1, col=1)
    names = ("adamw", "lamb", "muon", "sgd")
    plans = [optimizer_plan(name) for name in names]
    state = [plan.stages[0].memory.optimizer / GIB for plan in plans]
    words = [f"{plan.prediction.optimizer_ms:.2f} ms" for plan in plans]
    bars = {"marker_color": theme.FORWARD, "text": words, "textposition": "outside", "showlegend": False}
    figure.add_bar(x=names, y=state, **bars, row=1, col=2)
    figure.update_xaxes(title="step", row=1, col=1)
    figure.update_yaxes(title="state (GiB)", range=[0, 1.2 * max(state)], row=1, col=2)
    figure.update_annotations(font_size=13)
    legend = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "borderwidth": 0}
    return figure.update_layout(template=theme.TEMPLATE, height=380, legend=legend, margin={"t": 40, "b": 88})


@cache
def base_bert() -> tuple[wb.Experiment, Graph, Profile]:
    """Return BERT-Base, its graph and its costs under AdamW."""
    experiment = wb.Experiment(models.bert(**SIZES["base"]), wb.data.corpus("demo"))
    captured = wb.planning.graph(experiment)
    return experiment, captured, profile_graph(captured, h200(1).device, "bf16", compiled=True)


def optimizer_plan(name: str) -> Plan:
    """Plan BERT-Base for one H200 with an optimiser."""
    experiment, captured, base = base_bert()
    return what_if(
        with_optimizer(base, experiment.replace(optimizer=name), captured),
        global_batch=experiment.global_batch,
        seq_len=experiment.seq_len,
        cluster=h200(1),
        micro_batch=32,
        offload_optimizer=False,
    )


def recorded_sweep() -> wb.sweeps.Sweep:
    """Return the sweep of templates/sweep.ipynb that was recorded on two CPU processes."""
    return wb.sweeps.load_sweep(ROOT / "benchmarks" / "results" / "gpt-sweep")


def kept_figure(notebook: str, call: str) -> go.Figure:
    """Return the figure that the cell with this call shows in a notebook of notebooks/."""
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    [cell] = [cell for cell in cells if call in "".join(cell["source"])]
    shown = cell["outputs"][0]["data"][PLOTLY_MIME]
    return go.Figure(decoded({"data": shown["data"], "layout": shown["layout"]}))


PICTURES: Mapping[str, Callable[[], go.Figure]] = {
    "cost": cost,
    "planning": planning,
    "figures": figures,
    "curves": curves,
    "evaluation": evaluation,
    "samples": samples,
    "optimizers": optimizers,
    "sweep-heat-map": lambda: wb.figures.heat_map(recorded_sweep()),
    "sweep-bands": lambda: wb.figures.seed_bands(recorded_sweep()),
    "ladder": lambda: kept_figure("scaling_ladder_4xH200", "wb.figures.ladder(law, points)"),
    "pair-difference": lambda: kept_figure("scaling_ladder_4xH200", "wb.figures.pair_difference("),
    "sparse-pareto": lambda: kept_figure("sparse_pareto_2cores", "display(wb.figures.pareto(same)."),
    "sparse-pareto-h200": lambda: kept_figure("sparse_pareto_2xH200", "display(wb.figures.pareto(same)."),
}


if __name__ == "__main__":
    main()
