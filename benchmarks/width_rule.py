"""Measure whether `wb.models.scaling` carries the best learning rate of a small model to wider and deeper ones.

    python benchmarks/width_rule.py          train what the raw file lacks, then draw docs/pictures/width-rule.png
    python benchmarks/width_rule.py --draw   draw only
    python benchmarks/width_rule.py --muon   the same with Muon, whose raw file and picture are width_rule_muon

GPT-2s of width 64, 128 and 256 and depth 4 and 8 train for 100 steps on the demo corpus, in one process on one core, in
fp32. GPT-2 predicts every token and BERT one in seven, so that a few seconds of training suffice to rank two rates. The
proxy is the smallest model. Each model is trained at the proxy's best rate and at its neighbours, in steps of sqrt(2);
then the search walks on towards lower loss until the best rate has a worse one on either side. The loss is held out.

With the rule, initial weights and rates are those of `wb.models.scaling(proxy, model)`. Without it only the sizes
change: each model has the proxy's `initializer_range` and one rate for all parameters. With Muon, the rate that is
searched is that of hidden matrices, and AdamW's best rate of the proxy is that of all other parameters; without the
rule, updates have the root mean square of AdamW's.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import options
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

import workbench as wb
from workbench.base.validation import factor_of
from workbench.capture.blocks.hidden_matrices import projections
from workbench.execution.gradients import clip_factor, scale_gradients, squared_norm
from workbench.figures import theme
from workbench.models import scaling
from workbench.optimizers.building import build_optimizer
from workbench.optimizers.parameters import learning_rate_factor

HEAD_SIZE, VOCABULARY, BATCH, SEQ_LEN = 8, 300, 16, 16
RATE = 1e-2
"""Learning rate of position 0; position k is RATE * sqrt(2)**k."""
ADAMW_RATE = RATE / math.sqrt(2)
"""Best rate of the proxy under AdamW, which the other parameters have beside Muon."""
START = -1
"""Position at which the search for the proxy's best rate begins."""


@dataclass(frozen=True)
class Sweep:
    """What is trained, and where its losses are written."""

    raw: Path
    muon: bool
    widths: tuple[int, ...] = (64, 128, 256)
    depths: tuple[int, ...] = (4, 8)
    steps: int = 100
    held_out: int = 512
    lowest: int = -12
    highest: int = 6
    """Positions beyond which no search goes."""

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [(width, depth) for width in self.widths for depth in self.depths]


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--draw", action="store_true", help="draw only")
    parser.add_argument("--muon", action="store_true", help="ask it of Muon")
    asked = options.parsed(parser)
    sweep = asked_for(asked)
    torch.set_num_threads(1)
    if not asked.draw:
        proxy = best_position(sweep, sweep.sizes[0], True, START)
        for depth in sweep.depths:
            for rule in (True, False):
                for width in sweep.widths:
                    best_position(sweep, (width, depth), rule, proxy)
    print(table(sweep, read(sweep)))
    options.save_picture(draw(sweep, read(sweep)), f"width-rule{'-muon' * asked.muon}", asked, width=1000)


def asked_for(asked: argparse.Namespace) -> Sweep:
    raw = asked.out or options.RESULTS / f"width_rule{'_muon' * asked.muon}_1core.json"
    if not asked.tiny:
        return Sweep(raw, asked.muon)
    return Sweep(raw, asked.muon, (16, 32), (1,), steps=2, held_out=8, lowest=START, highest=START)


def best_position(sweep: Sweep, size: tuple[int, int], rule: bool, start: int) -> int:
    """Return the position of the best rate of a model, between two that are worse."""
    best = start
    while True:
        losses = {
            k: trained(sweep, size, rule, k) for k in (best - 1, best, best + 1) if sweep.lowest <= k <= sweep.highest
        }
        lowest = min(losses, key=losses.__getitem__)
        if lowest == best:
            return best
        best = lowest


def trained(sweep: Sweep, size: tuple[int, int], rule: bool, position: int) -> float:
    """Return the held-out loss of a model at a rate, from the raw file if it has been trained before."""
    if size == sweep.sizes[0]:
        rule = True  # The rule changes nothing at the proxy's own size.
    key = {"width": size[0], "depth": size[1], "rule": rule, "position": position}
    raw = read(sweep)
    for run in raw["runs"]:
        if all(run[name] == value for name, value in key.items()):
            return float(run["held_out_loss"])
    started = time.process_time()
    loss = train(experiment(sweep, size, rule, position))
    loss = loss if math.isfinite(loss) else 1e9
    seconds = time.process_time() - started
    raw["runs"].append({**key, "rate": rate(position), "held_out_loss": loss, "cpu_seconds": round(seconds, 1)})
    partial = sweep.raw.with_suffix(".partial")
    partial.write_text(json.dumps(raw, indent=1))
    partial.replace(sweep.raw)
    print(json.dumps(raw["runs"][-1]), flush=True)
    return loss


def read(sweep: Sweep) -> dict[str, Any]:
    if sweep.raw.exists():
        raw: dict[str, Any] = json.loads(sweep.raw.read_text())
        return raw
    settings: dict[str, Any] = {"steps": sweep.steps, "batch": BATCH, "seq_len": SEQ_LEN, "vocabulary": VOCABULARY}
    settings |= {"held_out": sweep.held_out}
    settings |= {"head_size": HEAD_SIZE, "initializer_range": 0.12, "seed": 0, "corpus": "demo", "family": "gpt2"}
    return {"settings": settings, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "runs": []}


def rate(position: int) -> float:
    return float(RATE * math.sqrt(2) ** position)


def model(size: tuple[int, int]) -> Any:
    width, depth = size
    return wb.models.gpt2(
        width, depth, width // HEAD_SIZE, vocab_size=VOCABULARY, initializer_range=0.12, dropout=0.0, max_positions=64
    )


def experiment(sweep: Sweep, size: tuple[int, int], rule: bool, position: int) -> wb.Experiment:
    scaled = scaling(model(sweep.sizes[0]), model(size), algorithm="muon" if sweep.muon else "adamw")
    chosen: dict[str, Any] = {"algorithm": "muon", "adamw_rate": ADAMW_RATE} if sweep.muon else {}
    return wb.Experiment(
        model=scaled.model if rule else model(size),
        data=wb.data.corpus("demo", vocab_size=VOCABULARY),
        steps=sweep.steps,
        global_batch=BATCH,
        seq_len=SEQ_LEN,
        learning_rate=rate(position),
        optimizer=wb.Optimizer(**chosen, **(scaled.optimizer if rule else {})),
        evaluation=wb.Evaluation(samples=sweep.held_out),
    )


def train(settings: wb.Experiment) -> float:
    """Train in this process as a run would, and return the held-out loss."""
    torch.manual_seed(settings.seed)
    module: Any = settings.model.build()
    parameters, chosen = dict(module.named_parameters()), settings.optimizer
    graph = wb.planning.graph(settings) if chosen.algorithm == "muon" else None
    matrices = projections(graph, chosen.fused_projections) if graph is not None else {}
    optimizer = build_optimizer(parameters, settings, matrices=matrices)
    peaks = [group["lr"] for group in optimizer.param_groups]
    scales = chosen.grad_norm_scale or {}
    divisors = {name: factor_of(name, scales) ** -2 for name in parameters}
    samples = settings.reading.dataset()
    for step in range(settings.steps):
        factor = learning_rate_factor(step, settings.warmup, settings.steps, "linear")
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        first = step * settings.global_batch
        loss = module(**samples.__getitems__(list(range(first, first + settings.global_batch)))).loss
        optimizer.zero_grad()
        loss.backward()
        norm = squared_norm(((p.grad, divisors[name]) for name, p in parameters.items()), loss.device).sqrt()
        scale_gradients(parameters.values(), clip_factor(norm, chosen.clip_norm))
        optimizer.step()
    held_out = settings.reading.held_out()
    with torch.no_grad():
        return float(module.eval()(**held_out.__getitems__(list(range(len(held_out))))).loss)


def lines(sweep: Sweep, raw: dict[str, Any], rule: bool) -> dict[tuple[int, int], dict[int, float]]:
    """Return the losses of each model by the position of the rate."""
    found: dict[tuple[int, int], dict[int, float]] = {size: {} for size in sweep.sizes}
    for run in raw["runs"]:
        size = (run["width"], run["depth"])
        if run["rule"] == rule or size == sweep.sizes[0]:
            found[size][run["position"]] = run["held_out_loss"]
    return found


def table(sweep: Sweep, raw: dict[str, Any]) -> str:
    """Return how many steps of sqrt(2) the best rate of each model lies from the proxy's."""
    text = ["| width × depth | best rate with the rule | steps | best rate without | steps |", "|---|--:|--:|--:|--:|"]
    proxy = lines(sweep, raw, True)[sweep.sizes[0]]
    centre = min(proxy, key=proxy.__getitem__)
    for size in sweep.sizes:
        cells = [f"{size[0]} × {size[1]}"]
        for rule in (True, False):
            losses = lines(sweep, raw, rule)[size]
            best = min(losses, key=losses.__getitem__) if losses else None
            cells += ["", ""] if best is None else [f"{rate(best):.2g}", f"{best - centre:+d}"]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text)


def draw(sweep: Sweep, raw: dict[str, Any]) -> go.Figure:
    """Draw the loss of each model over the rate, above its own best, with the rule and without it."""
    used = sorted({run["position"] for run in raw["runs"]})
    proxy = lines(sweep, raw, True)[sweep.sizes[0]]
    centre = min(proxy, key=proxy.__getitem__)
    columns = [f"{rate(k):.1e}" for k in used]
    names = [f"{width} × {depth}" for width, depth in sweep.sizes]
    figure = make_subplots(1, 2, subplot_titles=("With the rule", "Without it"), shared_yaxes=True)
    for column, rule in enumerate((True, False), start=1):
        found = lines(sweep, raw, rule)
        best = [min(found[size].values(), default=math.nan) for size in sweep.sizes]
        grid = [[found[size].get(k, math.nan) - low for k in used] for size, low in zip(sweep.sizes, best, strict=True)]
        words = [["" if math.isnan(v) else f"<b>{v:.2f}</b>" if v == 0 else f"{v:.2f}" for v in row] for row in grid]
        heat = go.Heatmap(x=columns, y=names, z=grid, text=words, texttemplate="%{text}", coloraxis="coloraxis")
        figure.add_trace(heat, row=1, col=column)
        at = used.index(centre)  # An axis of categories counts them; plotly would read their names as numbers.
        frame = {"dash": "dash", "color": "black", "width": 2}
        figure.add_vrect(x0=at - 0.5, x1=at + 0.5, line=frame, row=1, col=column)
        figure.update_xaxes(type="category", title_text="Peak learning rate", showgrid=False, row=1, col=column)
    figure.update_yaxes(showgrid=False)
    figure.update_yaxes(title_text="Width × depth", row=1, col=1)
    title = theme.title(
        "The proxy's best rate, carried to wider and deeper models",
        "Held-out loss above the model's own best (0.00, bold); the frame holds the proxy's best rate",
    )
    axis = {"colorscale": "Viridis", "reversescale": True, "cmin": 0, "cmax": 0.4, "colorbar": {"title": "nats"}}
    margin = {"t": 110, "l": 90}
    return figure.update_layout(template=theme.TEMPLATE, height=500, title=title, coloraxis=axis, margin=margin)


if __name__ == "__main__":
    main()
