"""The coordinate check of `wb.models.scaling`: activation sizes over the first steps at several widths or depths.

    python benchmarks/coordinate_check.py EXPERIMENT.json --to FILE.html
    python benchmarks/coordinate_check.py EXPERIMENT.json --depths 2 6 18 54 --to FILE.html

The experiment (`experiment.to_json()`, with a small `wb.models.…`) is the base of the rule. Its model is trained at
each width or depth for some steps in this process, on the CPU, at the full rate, with the rule and without it. Sizes
that grow with the width or depth mean that a rate does not carry over. The command prints the drift of each part after
the last step, and the page shows every step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plotly.colors import sample_colorscale
from torch import nn

import workbench as wb
from workbench.capture.blocks.hidden_matrices import projections
from workbench.figures import theme
from workbench.figures.figure import Figure, subplots
from workbench.optimizers.building import build_optimizer

MATRIX_DIMS = 2
HIDDEN, STREAM, READ_OUT = "hidden activations", "residual stream", "logits"
CHANGE = "change of the {}"
"""Name of the change of a part's activations since before the first step."""
WIDTHS = (64, 128, 256)
Sizes = Mapping[int, Sequence[Mapping[str, float]]]
"""Sizes of the parts' activations by width or depth, before the first step and after every further one."""


def coordinate_check(
    experiment: wb.Experiment, axis: str, values: Sequence[int], steps: int = 4, depth_rule: bool | None = None
) -> tuple[Sizes, Sizes]:
    """Return activation sizes with the rule of `wb.models.scaling` and without it, by `width` or `depth` (`axis`).

    Widths are hidden sizes, each a multiple of the model's head size; depths are numbers of layers at its own width.
    The rule is that of the experiment's optimiser, AdamW or Muon; `depth_rule` is that of `wb.models.scaling`.
    """
    base: Any = experiment.model
    with_rule, without = {}, {}
    for value in sorted(set(values)):
        model = _at_width(base, value) if axis == "width" else dataclasses.replace(base, num_layers=value)
        rule = wb.models.scaling(base, model, depth_rule=depth_rule, algorithm=experiment.optimizer.name)
        with_rule[value] = activation_sizes(experiment.replace(model=rule.model, **rule.optimizer), steps)
        without[value] = activation_sizes(experiment.replace(model=model), steps)
    return with_rule, without


def _at_width(model: Any, width: int) -> Any:
    """Return the model at another hidden size, with heads of the same size and a feed-forward in proportion."""
    heads, rest = divmod(width, model.hidden_size // model.num_heads)
    if rest or not heads:
        raise SystemExit(f"A width of {width} does not divide into heads of the size that {model.name} has.")
    return dataclasses.replace(
        model,
        name=f"{model.family}-{model.num_layers}x{width}",
        hidden_size=width,
        num_heads=heads,
        intermediate_size=max(1, model.intermediate_size * width // model.hidden_size),
    )


def drift(sizes: Sizes, part: str, step: int = -1) -> float:
    """Return the exponent with which a size after a step grows with the width or depth: 0 does not drift."""
    logs = [np.log(of_steps[step][part]) for of_steps in sizes.values()]
    return float(np.polyfit(np.log(list(sizes)), logs, 1)[0])


def parts_of(axis: str) -> tuple[str, str, str]:
    """Return the parts whose drift tells whether the rule holds over an axis."""
    activations = STREAM if axis == "depth" else HIDDEN
    return activations, CHANGE.format(activations), READ_OUT


def draw(axis: str, with_rule: Sizes, without: Sizes) -> Figure:
    """Draw sizes of activations, of their changes, and of the logits over the width or depth, a line for each step.

    With a rule under which learning does not depend on the size of the model, the lines of the upper rows are level.
    """
    columns, rows = {"With the rule": with_rule, "Without it": without}, parts_of(axis)
    titles = [f"{title}: {part}, drift {drift(sizes, part):+.2f}" for part in rows for title, sizes in columns.items()]
    figure = subplots(3, 2, subplot_titles=titles, shared_xaxes=True, shared_yaxes=True, vertical_spacing=0.08)
    steps = len(next(iter(with_rule.values())))
    colors = sample_colorscale("Viridis", np.linspace(0, 0.9, steps).tolist())
    for row, part in enumerate(rows, start=1):
        for column, sizes in enumerate(columns.values(), start=1):
            for step in range(steps):
                if part not in next(iter(sizes.values()))[step]:
                    continue  # Nothing has changed before the first step.
                y = [of_steps[step][part] for of_steps in sizes.values()]
                named = {"legendgroup": str(step), "showlegend": row == column == 1}
                trace = theme.curve(list(sizes), y, f"step {step}", colors[step], **named)
                figure.add_trace(trace.update(mode="lines+markers"), row=row, col=column)
            figure.update_xaxes(type="log", tickvals=list(sizes), row=row, col=column)
    figure.update_xaxes(title_text=axis.capitalize(), row=3)
    figure.update_yaxes(type="log", tickformat=theme.LOG_TICKS)
    figure.update_yaxes(title_text="Mean magnitude", col=1)
    subtitle = f"Drift is the exponent of the {axis} after the last step; 0 is level"
    title = theme.title(f"Coordinate check: activation sizes over the {axis}", subtitle)
    return figure.laid_out(height=860, title=title, margin={"t": 110})


def activation_sizes(experiment: wb.Experiment, steps: int) -> list[dict[str, float]]:
    """Train a model for some steps at its full rate, and return its activation sizes before each and after the last.

    A size is a mean magnitude on the first batch: of what the last block returns (`residual stream`), of the logits,
    and of what all other matrix products return, of which the geometric mean counts (`hidden activations`; products of
    the same name in different layers are one). From the first step on, the sizes of their changes stand beside them.
    Random numbers of the caller stay as they are.
    """
    dataset, batch = experiment.reading.dataset(), experiment.global_batch
    probe: Any = dataset.__getitems__(list(range(batch)))
    sizes_of_steps: list[dict[str, float]] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        module: Any = experiment.model.build()
        is_muon = experiment.optimizer.algorithm == "muon"
        matrices = projections(wb.planning.graph(experiment)) if is_muon else {}
        optimizer = build_optimizer(dict(module.named_parameters()), experiment, matrices=matrices)
        before: dict[str, torch.Tensor] = {}
        for step in range(steps + 1):
            with _recorded(module) as outputs, torch.no_grad():
                module(**probe)
            sizes = _sizes(outputs)
            if step == 0:
                before = outputs
            else:
                changes = _sizes({name: output - before[name] for name, output in outputs.items()})
                sizes |= {CHANGE.format(part): size for part, size in changes.items()}
            sizes_of_steps.append(sizes)
            if step == steps:
                break
            first = step * batch % max(1, len(dataset) - batch + 1)
            samples: Any = dataset.__getitems__(list(range(first, first + batch)))
            optimizer.zero_grad()
            module(**samples).loss.backward()
            optimizer.step()
    return sizes_of_steps


def _sizes(outputs: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the size of each part from the outputs of the last block, of matrix products, and of the read-out."""
    by_name: dict[str, list[float]] = {}
    for name, output in outputs.items():
        by_name.setdefault(re.sub(r"\d+", "*", name), []).append(output.abs().mean().item())
    means = [sum(sizes) / len(sizes) for name, sizes in by_name.items() if name != STREAM]
    *hidden, read_out = means
    geometric = math.exp(sum(math.log(size) for size in hidden) / len(hidden))
    return {HIDDEN: geometric, STREAM: by_name[STREAM][0], READ_OUT: read_out}


@contextmanager
def _recorded(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the outputs of every module that multiplies by a matrix by its name, and that of the last block."""
    outputs: dict[str, torch.Tensor] = {}

    def record(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs[name] = output[0] if isinstance(output, tuple) else output

        return hook

    blocks = max((part for part in module.modules() if isinstance(part, nn.ModuleList)), key=len)
    handles = [blocks[-1].register_forward_hook(record(STREAM))]
    handles += [
        part.register_forward_hook(record(name))
        for name, part in module.named_modules()
        if not isinstance(part, nn.Embedding)
        and isinstance(weight := getattr(part, "weight", None), torch.Tensor)
        and weight.ndim == MATRIX_DIMS
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def main() -> None:
    """Check the experiment of a file, print the drifts, and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--depths", type=int, nargs="+")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--depth-rule", action="store_true", help="that of wb.models.scaling, also for Muon")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--raw", type=Path, help="JSON file to which the drifts are added")
    asked = parser.parse_args()
    axis, values = ("depth", asked.depths) if asked.depths else ("width", asked.widths)
    experiment = wb.Experiment.from_json(json.loads(asked.experiment.read_text()))
    checked = coordinate_check(experiment, axis, values, asked.steps, asked.depth_rule or None)
    for part in parts_of(axis):
        print(f"{part}: drift {drift(checked[0], part):+.2f} with the rule, {drift(checked[1], part):+.2f} without")
    if asked.raw is not None:
        key = f"{axis} {min(values)} to {max(values)}{', depth rule' * asked.depth_rule}"
        found = {part: [round(drift(sizes, part), 3) for sizes in checked] for part in parts_of(axis)}
        earlier = json.loads(asked.raw.read_text()) if asked.raw.exists() else {}
        asked.raw.write_text(json.dumps({**earlier, key: found}, indent=1) + "\n")
    if asked.to is not None:
        print(wb.figures.save_html(draw(axis, *checked), asked.to))


if __name__ == "__main__":
    main()
