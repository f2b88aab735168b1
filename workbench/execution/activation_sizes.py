"""Activation sizes of a model over its first steps, in this process: the data of a coordinate check."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from workbench.data._datasets import StreamedDataset
from workbench.data._feeder import fed_alone
from workbench.experiment import Experiment
from workbench.optimizers.building import build_optimizer

MATRIX_DIMS = 2
HIDDEN, STREAM, READ_OUT = "hidden activations", "residual stream", "logits"
CHANGE = "change of the {}"
"""Name of the change of a part's activations since before the first step."""


def activation_sizes(experiment: Experiment, steps: int) -> list[dict[str, float]]:
    """Train a model for some steps at its full rate, and return its activation sizes before each and after the last.

    A size is a mean magnitude on the first batch: of what the last block returns (`residual stream`), of the logits,
    and of what all other matrix products return, of which the geometric mean counts (`hidden activations`; products of
    the same name in different layers are one). From the first step on, the sizes of their changes stand beside them.
    Random numbers of the caller stay as they are.
    """
    dataset, batch = experiment.data.dataset(experiment), experiment.global_batch
    sizes_of_steps: list[dict[str, float]] = []
    with ExitStack() as stack:
        if isinstance(dataset, StreamedDataset):
            ring = stack.enter_context(fed_alone(dataset.stream, (steps + 1) * batch, dataset.vocabulary))
            dataset = dataset.reading(ring)
        probe: Any = dataset.__getitems__(list(range(batch)))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(experiment.seed)
        module: Any = experiment.model.build()
        optimizer = build_optimizer(dict(module.named_parameters()), experiment)
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
