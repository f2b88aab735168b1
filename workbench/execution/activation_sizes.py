"""Activation sizes of a model over its first steps, in this process: the data of a coordinate check."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from workbench.data._datasets import StreamedDataset
from workbench.data._feeder import fed_alone
from workbench.experiment import Experiment
from workbench.optimizers.building import build_optimizer

MATRIX_DIMS = 2


def activation_sizes(experiment: Experiment, steps: int) -> list[dict[str, float]]:
    """Train a model for some steps at its full rate, and return its activation sizes before each and after the last.

    A size is the mean magnitude of what a matrix product returns, on the first batch. Products of the same name in
    different layers count as one, and the last entry is that of the read-out. Random numbers of the caller stay as
    they are.
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
        for step in range(steps + 1):
            with _recorded(module) as sizes, torch.no_grad():
                module(**probe)
            sizes_of_steps.append({name: sum(values) / len(values) for name, values in sizes.items()})
            if step == steps:
                break
            first = step * batch % max(1, len(dataset) - batch + 1)
            samples: Any = dataset.__getitems__(list(range(first, first + batch)))
            optimizer.zero_grad()
            module(**samples).loss.backward()
            optimizer.step()
    return sizes_of_steps


@contextmanager
def _recorded(module: nn.Module) -> Iterator[dict[str, list[float]]]:
    """Collect the mean magnitude of the output of every module that multiplies by a matrix."""
    sizes: dict[str, list[float]] = {}

    def record(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            sizes.setdefault(name, []).append(output.abs().mean().item())

        return hook

    handles = [
        part.register_forward_hook(record(re.sub(r"\d+", "*", name)))
        for name, part in module.named_modules()
        if not isinstance(part, nn.Embedding)
        and isinstance(weight := getattr(part, "weight", None), torch.Tensor)
        and weight.ndim == MATRIX_DIMS
    ]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()
