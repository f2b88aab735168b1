"""The bytes that an optimiser keeps and moves per parameter, found by running its update on a small tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.experiment import Experiment
from workbench.optimizers.building import build_optimizer

SIDE = 128
"""Rows and columns of the matrix that is updated: large enough for what does not grow with it to round to nothing."""


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes per trained element: of the state that stays, and read and written in one update."""

    state_bytes: float
    update_bytes: float


def optimizer_cost(experiment: Experiment) -> OptimizerCost:
    """Run two updates of the experiment's optimiser on a matrix in the host's memory; the second one is counted."""
    weight = nn.Parameter(torch.ones(SIDE, SIDE))
    optimizer = build_optimizer({"weight": weight}, experiment.replace(rate_scale=None))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.grad = torch.ones_like(weight)
    with _Traffic(least=weight.numel()) as traffic:
        optimizer.step()
    state = _bytes(tree_leaves(list(optimizer.state.values())), weight.numel())
    return OptimizerCost(state / weight.numel(), traffic.moved / weight.numel())


class _Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write in tensors of `least` elements or more."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self._least = least
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        written = [
            value
            for formal, value in zip(func._schema.arguments, args, strict=False)
            if formal.alias_info is not None and formal.alias_info.is_write
        ]
        is_view = not written and any(formal.alias_info is not None for formal in func._schema.returns)
        if not is_view:
            self.moved += _bytes(tree_leaves((args, kwargs)), self._least)
            self.moved += _bytes(tree_leaves(written or result), self._least)
        return result


def _bytes(values: Iterable[Any], least: int) -> int:
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.numel() >= least)
