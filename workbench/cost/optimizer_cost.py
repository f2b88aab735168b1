"""The cost of an optimiser per parameter: bytes that it keeps and moves, found by running its update on a matrix."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.capture import Graph
from workbench.capture.hidden_matrices import Projections, projections
from workbench.cost.orthogonalisation import Matrices
from workbench.cost.profile import ParameterUpdate, Profile
from workbench.experiment import Experiment
from workbench.optimizers.building import build_optimizer
from workbench.optimizers.muon import orthogonalisation_flops
from workbench.user_code import UserFunction

SIDE = 128
"""Rows and columns of the matrix that is updated: large enough for what does not grow with it to round to nothing."""


def with_optimizer(profile: Profile, experiment: Experiment, captured: Graph) -> Profile:
    """Return the profile with the cost of the experiment's optimiser; AdamW's is that of its fused kernel."""
    if experiment.optimizer.ema_decay is not None:
        profile = replace(profile, average_bytes=float(torch.float32.itemsize))
    if experiment.optimizer.algorithm == "adamw":
        by_group = isinstance(experiment.optimizer.clip_norm, Mapping)  # whose gradients are scaled before the kernel
        return replace(profile, optimizer_in_one_pass=False) if by_group else profile
    if experiment.optimizer.algorithm == "muon":
        updates = _muon_updates(experiment, captured)
        return replace(profile, optimizer_in_one_pass=False, parameter_updates=updates)
    if isinstance(experiment.optimizer.algorithm, UserFunction):
        return _with_user_defined(profile, experiment, captured)
    cost = optimizer_cost(experiment)
    return replace(
        profile,
        optimizer_state_bytes=cost.state_bytes,
        optimizer_update_bytes=cost.update_bytes,
        optimizer_in_one_pass=False,
    )


def _muon_updates(experiment: Experiment, captured: Graph) -> dict[str, ParameterUpdate]:
    """Return the cost of Muon's updates by name of the matrix; AdamW updates the other parameters."""
    cost, updates = optimizer_cost(experiment), {}
    for name, matrix in projections(captured, experiment.optimizer.fused_projections).items():
        spec = captured.parameters[name]
        flops = orthogonalisation_flops(spec.shape, matrix)
        updates[name] = replace(cost, whole_flops=flops, whole_elements=spec.numel)
    return updates


def matrices_of(captured: Graph, matrices: Mapping[str, Projections], divided: Collection[str]) -> Matrices:
    """Return the sums over some of a model's matrices; the tensor-parallel axis divides those of `divided`."""
    sizes = {name: captured.parameters[name].numel for name in matrices}
    flops = {name: orthogonalisation_flops(captured.parameters[name].shape, matrices[name]) for name in matrices}
    return Matrices(
        flops=sum(flops.values()),
        elements=sum(sizes.values()),
        divided_elements=sum(size for name, size in sizes.items() if name in divided),
        largest_flops=max(flops.values(), default=0.0),
        shapes=len({(sizes[name], flops[name]) for name in matrices}),
    )


def _with_user_defined(profile: Profile, experiment: Experiment, captured: Graph) -> Profile:
    """Return the profile with the cost of a user-defined optimiser, found on the meta device.

    An optimiser that reads values, which the meta device has not, updates small tensors in the host's memory instead.
    """
    shapes = {name: spec.shape for name, spec in captured.parameters.items() if name not in captured.frozen}
    try:
        states, traffic = _second_update(experiment, shapes, "meta")
    except RuntimeError:  # the meta device raises it where an operation needs values
        shapes = {name: tuple(min(size, SIDE) for size in shape) for name, shape in shapes.items()}
        states, traffic = _second_update(experiment, shapes, "cpu")
    update_bytes = traffic / max(1, sum(map(prod, shapes.values())))
    updates = {name: ParameterUpdate(state / prod(shapes[name]), update_bytes) for name, state in states.items()}
    return replace(profile, optimizer_in_one_pass=False, parameter_updates=updates)


def _second_update(
    experiment: Experiment, shapes: Mapping[str, Sequence[int]], device: str, least: int = 2, muon: Collection[str] = ()
) -> tuple[dict[str, int], int]:
    """Return the bytes of state by parameter, and those that the second update moves; smaller tensors do not count.

    `muon` are the parameters that Muon updates.
    """
    parameters = {name: nn.Parameter(torch.ones(tuple(shape), device=device)) for name, shape in shapes.items()}
    optimizer = build_optimizer(parameters, experiment, matrices=dict.fromkeys(muon, Projections()))
    with torch.random.fork_rng([]):
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with _Traffic(least) as traffic:
            optimizer.step()
    state = optimizer.state
    return {name: _bytes(state.get(p, {}).values(), least) for name, p in parameters.items()}, traffic.moved


def optimizer_cost(experiment: Experiment) -> ParameterUpdate:
    """Run two updates of the experiment's optimiser on a matrix in the host's memory; the second one is counted.

    Matrix products, which Muon makes, are not counted.
    """
    muon = ("weight",) if experiment.optimizer.algorithm == "muon" else ()
    states, traffic = _second_update(experiment, {"weight": (SIDE, SIDE)}, "cpu", SIDE**2, muon)
    return ParameterUpdate(states["weight"] / SIDE**2, traffic / SIDE**2)


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
        is_product = func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
        if not (is_view or is_product):
            self.moved += _bytes(tree_leaves((args, kwargs)), self._least)
            self.moved += _bytes(tree_leaves(written or result), self._least)
        return result


def _bytes(values: Iterable[Any], least: int) -> int:
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.numel() >= least)
