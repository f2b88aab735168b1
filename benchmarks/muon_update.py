"""Time Muon's update of a transformer's matrices on one CPU core, as it is and as it was.

    python benchmarks/muon_update.py                      24 layers of width 1024, one round
    python benchmarks/muon_update.py --width 512 --rounds 3

As it was: `torch.optim.Muon` orthogonalised one matrix after the other, in bf16. A square and a wide matrix are timed,
and counted as often as they occur. As it is: one step of `workbench.optimizers.muon` over all layers. The two take
turns, and times are those of the processor, so that other work on the machine counts little.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import options
import torch
from torch import nn

from workbench.capture.blocks.hidden_matrices import Projections
from workbench.optimizers.muon import MuonAndAdamW, orthogonalisation_flops

SIDES = {"query": (1, 1), "key": (1, 1), "value": (1, 1), "output": (1, 1), "up": (4, 1), "down": (1, 4)}
"""Outputs and inputs of each matrix of a layer, in widths."""


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    asked = options.parsed(parser)
    if asked.tiny:
        asked.width, asked.layers = 8, 1
    torch.set_num_threads(1)
    shapes = {
        f"{layer}.{name}": (outputs * asked.width, inputs * asked.width)
        for layer in range(asked.layers)
        for name, (outputs, inputs) in SIDES.items()
    }
    update, rows = ours(shapes), []
    for _ in range(asked.rounds):
        square, wide = (seconds(was((asked.width, inputs * asked.width))) for inputs in (1, 4))
        row = {"was_s": asked.layers * (4 * square + 2 * wide), "is_s": seconds(update)}
        rows.append({name: round(value, 3) for name, value in row.items()})
        print(rows[-1], flush=True)
    flops = sum(orthogonalisation_flops(shape, Projections()) for shape in shapes.values())
    ratio = statistics.median(row["was_s"] / row["is_s"] for row in rows)
    found: dict[str, Any] = {"width": asked.width, "layers": asked.layers, "tflop": round(flops / 1e12, 3)}
    found |= {"rounds": rows, "ratio": round(ratio, 1), "torch": torch.__version__}
    file = asked.out or options.RESULTS / f"muon_update_{asked.layers}x{asked.width}_1core.json"
    file.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{flops / 1e12:.3g} TFLOP: {ratio:.1f} times as fast as it was")


def ours(shapes: dict[str, tuple[int, int]]) -> Callable[[], object]:
    """Return a step of Muon over matrices of these shapes, with gradients of random numbers."""
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    group = {"params": list(parameters.values()), "names": list(parameters), "lr": 1e-3, "weight_decay": 0.0}
    projections = dict.fromkeys(shapes, Projections())
    return MuonAndAdamW([{**group, "orthogonal": True}], projections=projections, scale="spectral", lr=1e-3).step


def was(shape: tuple[int, int]) -> Callable[[], object]:
    """Return a step of torch's Muon over one matrix."""
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.randn_like(parameter)
    return torch.optim.Muon([parameter], lr=1e-3, weight_decay=0.0).step


def seconds(function: Callable[[], object]) -> float:
    """Return the processor's time of one call."""
    started = time.process_time()
    function()
    return time.process_time() - started


if __name__ == "__main__":
    main()
