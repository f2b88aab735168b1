"""Execute the demo with several seeds, and write the losses of its two models to benchmarks/results/.

    python benchmarks/demo.py 0 1 2              # executes templates/bert_scaling.ipynb with each seed
    python benchmarks/demo.py 0 1 2 --read RUNS  # reads the runs of earlier demos in RUNS/0, RUNS/1 and RUNS/2
    python benchmarks/demo.py 0 1 --algorithm adamw   # the same with AdamW alone
    python benchmarks/demo.py --tuning           # trains the smaller model with other rates and initial weights

It prints a table of the last losses beside the unigram entropy of the text, which a model reaches by knowing how
frequent each token is and nothing else. The picture goes to docs/pictures/demo.png; it needs kaleido and a Chromium.
`--tuning` trains on one core, in this process, with seed 0 and AdamW; `muon_pilots.py` tunes Muon.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import options
import plotly.graph_objects as go
import torch
from width_rule import train

import workbench as wb
from workbench import notebooks
from workbench.figures import theme
from workbench.runs.run import Run

TEMPLATE = options.ROOT / "templates" / "bert_scaling.ipynb"
RESULTS = {"muon": "demo_2cores.json", "adamw": "demo_adamw_2cores.json"}
TUNING = "demo_tuning_1core.json"
TRIED = [(5e-3, 0.15), (7e-3, 0.15), (1e-2, 0.15), (7e-3, 0.1), (7e-3, 0.2)]
"""Peak rates with the deviations of the initial weights; the second is the demo's."""
LAST_STEPS = 30
"""Number of last steps over which the training loss is averaged."""


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--read", type=Path, help="folder with the runs of each seed, in a folder named for the seed")
    parser.add_argument("--algorithm", choices=list(RESULTS), default="muon", help="optimiser of both models")
    parser.add_argument("--tuning", action="store_true", help="the smaller model with other rates and initial weights")
    asked = options.parsed(parser)
    out = asked.out or options.RESULTS / (TUNING if asked.tuning else RESULTS[asked.algorithm])
    if asked.tuning:
        rows = [tuned(*tried, tiny=asked.tiny) for tried in TRIED[: 1 if asked.tiny else None]]
        out.write_text(json.dumps({"torch": torch.__version__, "seed": 0, "runs": rows}, indent=1) + "\n")
        print(*rows, sep="\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder, preset = asked.read or Path(scratch), "rehearsal" if asked.tiny else "demo"
        runs = {seed: demo(seed, asked.algorithm, folder, preset, asked.read is None) for seed in asked.seeds}
        rows = [losses(run, seed) for seed, pair in runs.items() for run in pair]
        entropy = unigram_entropy(runs[asked.seeds[0]][0])
    found = {"unigram_entropy": entropy, "cores": os.cpu_count(), "runs": rows}
    out.write_text(json.dumps(found) + "\n")
    if asked.algorithm == "muon":
        options.save_picture(picture(found), "demo", asked, width=960)
    print(table(found))


def demo(seed: int, algorithm: str, folder: Path, preset: str, execute: bool) -> list[Run]:
    """Return the runs of the demo with one seed in their order, after executing it if `execute`."""
    runs_folder = folder / str(seed)
    if execute:
        parameters = {"preset": preset, "seed": seed, "algorithm": algorithm, "runs_folder": str(runs_folder)}
        notebooks.execute(TEMPLATE, folder / f"report-{seed}", parameters)
    return list(reversed(wb.list_runs(runs_folder).runs))


def tuned(rate: float, deviation: float, tiny: bool) -> dict[str, float]:
    """Train the smaller model of the demo with a peak rate and a deviation of its initial weights."""
    names: dict[str, Any] = {}
    codes = [cell.source for cell in nbformat.read(TEMPLATE, 4).cells if cell.cell_type == "code"]
    for index, code in enumerate(codes[:3]):  # the parameters, the presets, and the smaller model's experiment
        exec(code, names)
        if index == 0:
            names["algorithm"] = "adamw"
    large = names["large"]
    model = dataclasses.replace(large.model, initializer_range=deviation)
    loss = train(large.replace(model=model, learning_rate=rate, **({"steps": 2, "warmup_steps": 1} if tiny else {})))
    return {"rate": rate, "initializer_range": deviation, "held_out_loss": round(loss, 4)}


def losses(run: Run, seed: int) -> dict[str, Any]:
    """Return the curves of one model."""
    history, held_out = run.history(), run.evaluations()
    assert run.experiment.seed == seed, f"{run.name} has another seed"
    return {
        "model": run.experiment.name,
        "seed": seed,
        "steps": int(history.step[-1]),
        "tokens": int(history.tokens[-1]),
        "training_loss": round(float(np.mean(history.loss[-LAST_STEPS:])), 4),
        "held_out_loss": round(float(held_out.eval_loss[-1]), 4),
        "loss_of_step": [round(float(loss), 4) for loss in history.loss],
        "held_out": [
            [int(step), round(float(loss), 4)] for step, loss in zip(held_out.step, held_out.eval_loss, strict=True)
        ],
    }


def unigram_entropy(run: Run) -> float:
    """Return the entropy in nats of a token of the text on which a run trains."""
    experiment = run.experiment
    store = experiment.reading.dataset().samples.store
    counts = np.bincount(store.ids[np.arange(store.tokens)])
    shares = counts[counts > 0] / counts.sum()
    return round(float(-(shares * np.log(shares)).sum()), 4)


def picture(found: dict[str, Any]) -> go.Figure:
    """Draw the held-out losses of the two models over all seeds: their mean, and a band from lowest to highest."""
    figure = go.Figure()
    for index, model in enumerate(dict.fromkeys(run["model"] for run in found["runs"])):
        runs = [run for run in found["runs"] if run["model"] == model]
        step, losses = zip(*(zip(*run["held_out"], strict=True) for run in runs), strict=True)
        tokens = np.array(step[0]) * runs[0]["tokens"] / runs[0]["steps"] / 1e3
        low, high, color = np.min(losses, axis=0), np.max(losses, axis=0), theme.series_color(index)
        x, y = np.concatenate([tokens, tokens[::-1]]), np.concatenate([low, high[::-1]])
        fill = f"rgba({', '.join(map(str, theme.rgb(color)))}, 0.2)"
        figure.add_scatter(x=x, y=y, fill="toself", fillcolor=fill, line={"width": 0}, showlegend=False)
        mean, line = np.mean(losses, axis=0), {"color": color, "width": 2.5}
        name = f"{model}, {mean[-1]:.2f} after all steps"
        figure.add_scatter(
            x=tokens, y=mean, name=name, line=line, marker={"size": 6, "color": color}, mode="lines+markers"
        )
    entropy, words = found["unigram_entropy"], {"font": {"color": theme.MUTED}}
    figure.add_hline(entropy, line={"dash": "dash", "color": theme.MUTED, "width": 1.5}).add_annotation(
        x=1,
        xref="x domain",
        y=entropy,
        xanchor="right",
        yanchor="bottom",
        text=f"unigram entropy {entropy:.2f}",
        showarrow=False,
        **words,
    )
    seeds = len({run["seed"] for run in found["runs"]})
    title = theme.title("What make demo learns on two CPU cores", f"held-out loss: mean and range of {seeds} seeds")
    figure.update_layout(template=theme.TEMPLATE, height=440, title=title, legend={"x": 0.99, "xanchor": "right"})
    figure.update_xaxes(title_text="Tokens (k)", rangemode="tozero")
    return figure.update_yaxes(title_text="Held-out loss (nats)")


def table(found: dict[str, Any]) -> str:
    """Return the last losses as a table in Markdown."""
    entropy = found["unigram_entropy"]
    lines = ["| seed | model | training loss | held-out loss | below the unigram entropy |", "|---|---|---|---|---|"]
    for entry in found["runs"]:
        figures = f"{entry['training_loss']:.2f} | {entry['held_out_loss']:.2f}"
        lines.append(f"| {entry['seed']} | {entry['model']} | {figures} | {entropy - entry['held_out_loss']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
