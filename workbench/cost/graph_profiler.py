"""The step from a captured `Graph` to its `Profile`: each block type is traced and priced once, on the meta device."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as symbolic_sizes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.algorithms import ELEMENT
from workbench.base.display import waiting
from workbench.base.tensors import TensorSpec
from workbench.capture.blocks.hidden_matrices import Projections, projections
from workbench.capture.blocks.tensor_parallel import plan_tensor_parallel
from workbench.capture.export.opaque import opaque_calls
from workbench.capture.graph import Graph
from workbench.cost.block_type_cost import ASSUMED_SIZE, BlockTrace, RowSelection, Settings, block_type_cost
from workbench.cost.hardware import Device
from workbench.cost.profile import MUON_UPDATE, BlockCost, BlockTypeCost, DividedCosts, ParameterUpdate, Profile
from workbench.cost.sparse_matrices import SparseMatrices
from workbench.experiment import Experiment
from workbench.optimizers.building import build_optimizer
from workbench.optimizers.muon import gram_elements, orthogonalisation_flops

TENSOR_DEGREES = (2, 4, 8)
"""Tensor-parallel degrees that are priced: those within a node."""
UNDIVIDED = 0.2
"""Largest share of a model's FLOPs that may stay whole on every rank; a degree that leaves more is not offered."""


def profile_graph(
    graph: Graph,
    device: Device,
    precision: str,
    *,
    compiled: bool,
    labelled_share: float = 1.0,
    deterministic: bool = False,
    sparse: SparseMatrices | None = None,
) -> Profile:
    """Return the cost of each block of a captured model.

    `device` gives the device type, and so the kernels, not the speed: `Profile.at` prices any device of that type.
    `precision` is `fp32`, or `bf16` for autocast over fp32 weights. `compiled` says that blocks run through
    torch.compile, which fuses memory-bound operations. `labelled_share` is the average share of labels that are not
    ignored; a head that needs only their rows is priced for these. `deterministic` is noted in the profile, whose
    measurements must use deterministic kernels too. `sparse` are the sparse weights, if there are any.
    """
    settings = Settings(precision, device.type, compiled)
    dtypes = {name: getattr(torch, spec.dtype) for name, spec in graph.batch.items()}
    block_types: dict[tuple[object, ...], int] = {}
    firsts: dict[tuple[object, ...], int] = {}
    traces: list[BlockTrace] = []
    blocks = []
    received_before: set[str] = set()
    for block in graph.blocks:
        received = tuple(dtypes[name] for name in block.receives)
        positions = () if sparse is None else sparse.positions(block)
        index = block_types.setdefault((received, positions, *graph.variant(block)), len(traces))
        if index == len(traces):
            # A selection by a mask is priced as if it kept everything.
            assumed = symbolic_sizes.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
            with waiting(f"pricing {block.name}"), assumed:
                traces.append(BlockTrace(graph, block, received, settings, RowSelection.of(block, labelled_share)))
        dtypes |= dict(zip(block.sends, traces[index].sent, strict=True))
        has_backward = bool(graph.differentiated & set(block.sends))
        needed = set(block.receives) if has_backward else set()
        first_received = [graph.values[name] for name in block.receives if name in needed - received_before]
        received_before |= needed
        labels = tuple(dict.fromkeys(call.label for call in opaque_calls(block.code.graph)))
        first = firsts.setdefault(graph.variant(block), block.index)
        blocks.append(BlockCost(block.name, index, block.parameters, _per_sample(first_received, graph), labels, first))
    costs = tuple(map(block_type_cost, traces))
    cuts = range(len(graph.blocks) + 1)
    notes = list(graph.notes)
    if by_shape := list(dict.fromkeys(name for trace in traces for name in trace.priced_by_shape)):
        more = f" and {len(by_shape) - 1} more operations" if len(by_shape) > 1 else ""
        notes.append(
            f"The predicted time and memory of {by_shape[0]}{more} are rough: without values PyTorch tells no more "
            f"than the shapes of the results, and a size that depends on values counts as {ASSUMED_SIZE}."
        )
    return Profile(
        model=graph.model,
        signature=graph.signature,
        precision=precision,
        device_type=device.type,
        compiled=compiled,
        block_types=costs,
        blocks=tuple(blocks),
        parameters={name: spec.numel for name, spec in graph.parameters.items()},
        frozen=graph.frozen,
        coupled=graph.coupled,
        notes=tuple(notes),
        notes_if_divided=graph.notes_if_divided,
        notes_if_accumulated=graph.notes_if_accumulated,
        crossing_bytes=tuple(_per_sample((graph.values[name] for name in graph.crossing(cut)), graph) for cut in cuts),
        divided=_divided(graph, traces, costs),
        sparse=None if sparse is None else sparse.costs(traces),
        labelled_share=labelled_share,
        deterministic=deterministic,
        code=hashlib.sha256("".join(block.block_type for block in graph.blocks).encode()).hexdigest()[:16],
    )


def _divided(graph: Graph, traces: Sequence[BlockTrace], whole: Sequence[BlockTypeCost]) -> dict[int, DividedCosts]:
    """Return the costs of one tensor-parallel rank for each degree that divides most of the model's FLOPs."""
    blocks = Counter(block.cost_type for block in graph.blocks)
    counts = [blocks[trace.block.cost_type] for trace in traces]
    model_flops = sum(cost.model_flops * count for cost, count in zip(whole, counts, strict=True))
    divided = {}
    for degree in TENSOR_DEGREES:
        division = plan_tensor_parallel(graph, degree)
        for trace in traces:
            trace.divide(division.blocks[trace.block.index], degree)
        with waiting(f"pricing {degree} tensor-parallel devices"):
            costs = tuple(map(block_type_cost, traces))
        flops = [sum(kernel.flops for kernel in cost.forward) for cost in costs]
        rank_flops = sum(each * count for each, count in zip(flops, counts, strict=True))
        if rank_flops <= model_flops * (1 / degree + UNDIVIDED):
            sizes = {name: spec.numel for name, spec in graph.parameters.items()}
            for name, sharding in division.parameters.items():  # on the rank that holds most of it
                sizes[name] = sizes[name] // graph.parameters[name].shape[sharding.dim] * sharding.size(0)
            divided[degree] = DividedCosts(costs, sizes)
    return divided


def _per_sample(specs: Iterable[TensorSpec], graph: Graph) -> float:
    return sum(spec.nbytes for spec in specs) / graph.micro_batch


# The cost of an optimiser per parameter: bytes that it keeps and moves, found by running its update on a matrix.

SIDE = 128
"""Rows and columns of the matrix that is updated: large enough for what does not grow with it to round to nothing."""


def with_optimizer(profile: Profile, experiment: Experiment, captured: Graph) -> Profile:
    """Return the profile with the cost of the experiment's optimiser, of AdamW's fused kernel where that updates."""
    if experiment.optimizer.ema_decay is not None:
        profile = replace(profile, average_bytes=float(torch.float32.itemsize))
    by_group = isinstance(experiment.optimizer.clip_norm, Mapping)  # whose gradients are scaled before the kernel
    record = experiment.optimizer.record
    profile = replace(profile, optimizer_in_one_pass=record.has_fused_update and not by_group)
    if record.updates_matrices:
        cost, updates = optimizer_cost(experiment), {}
        if profile.device_type == "cuda":
            cost = replace(cost, update_bytes=MUON_UPDATE)
        for name, matrix in projections(captured, experiment.optimizer).items():
            spec = captured.parameters[name]
            flops = orthogonalisation_flops(spec.shape, matrix)
            gram = gram_elements(spec.shape, matrix)
            updates[name] = replace(cost, whole_flops=flops, whole_elements=spec.numel, gram_elements=gram)
        return replace(profile, parameter_updates=updates)
    if record.has_fused_update:
        return profile
    if record.reach != ELEMENT:
        # What it keeps of a tensor may depend on the tensor's shape, so that all are updated: on the meta device, or
        # small ones on the host where the update reads values, which that device has not.
        shapes = {name: spec.shape for name, spec in captured.parameters.items() if name not in captured.frozen}
        try:
            states, traffic = _second_update(experiment, shapes, "meta")
        except RuntimeError:  # the meta device raises it where an operation needs values
            shapes = {name: tuple(min(size, SIDE) for size in shape) for name, shape in shapes.items()}
            states, traffic = _second_update(experiment, shapes, "cpu")
        update_bytes = traffic / max(1, sum(map(prod, shapes.values())))
        updates = {name: ParameterUpdate(state / prod(shapes[name]), update_bytes) for name, state in states.items()}
        return replace(profile, parameter_updates=updates)
    cost = optimizer_cost(experiment)
    return replace(profile, optimizer_state_bytes=cost.state_bytes, optimizer_update_bytes=cost.update_bytes)


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
    muon = ("weight",) if experiment.optimizer.record.updates_matrices else ()
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
