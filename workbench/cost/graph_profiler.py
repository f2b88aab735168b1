"""The step from a captured `Graph` to its `Profile`: each block type is traced and priced once, on the meta device."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch.fx.experimental import _config as symbolic_sizes

from workbench.capture.graph import Graph
from workbench.capture.opaque import opaque_calls
from workbench.capture.tensor_parallel import plan_tensor_parallel
from workbench.cost.block_sparse import SparseMatrices
from workbench.cost.block_trace import BlockTrace, RowSelection
from workbench.cost.block_type_cost import block_type_cost
from workbench.cost.hardware import Device
from workbench.cost.operations import Settings
from workbench.cost.profile import BlockCost, BlockTypeCost, DividedCosts, Profile, TailCosts
from workbench.tensors import TensorSpec

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
    traces: list[BlockTrace] = []
    blocks = []
    received_before: set[str] = set()
    for block in graph.blocks:
        received = tuple(dtypes[name] for name in block.receives)
        positions = () if sparse is None else sparse.positions(block)
        index = block_types.setdefault((received, positions, *graph.variant(block)), len(traces))
        if index == len(traces):
            # A selection by a mask is priced as if it kept everything.
            with symbolic_sizes.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
                traces.append(BlockTrace(graph, block, received, settings, RowSelection.of(block, labelled_share)))
        dtypes |= dict(zip(block.sends, traces[index].sent, strict=True))
        has_backward = bool(graph.differentiated & set(block.sends))
        needed = set(block.receives) if has_backward else set()
        first_received = [graph.values[name] for name in block.receives if name in needed - received_before]
        received_before |= needed
        labels = tuple(dict.fromkeys(call.label for call in opaque_calls(block.code.graph)))
        blocks.append(BlockCost(block.name, index, block.parameters, _per_sample(first_received, graph), labels))
    costs = tuple(map(block_type_cost, traces))
    cuts = range(len(graph.blocks) + 1)
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
        notes=graph.notes,
        notes_if_divided=graph.notes_if_divided,
        notes_if_accumulated=graph.notes_if_accumulated,
        crossing_bytes=tuple(_per_sample((graph.values[name] for name in graph.crossing(cut)), graph) for cut in cuts),
        divided=_divided(graph, traces, costs),
        sparse=None if sparse is None else sparse.costs(traces),
        labelled_share=labelled_share,
        deterministic=deterministic,
        code=hashlib.sha256("".join(block.block_type for block in graph.blocks).encode()).hexdigest()[:16],
    )


def with_gathered(
    whole: Profile, towers: Profile, at_once: Profile, part: Graph, samples: int, is_compared: bool
) -> Profile:
    """Return a profile with the costs of gathering its loss over micro-batches and replicas.

    `towers` is the profile of `part`, whose last block is the tail of the loss, and `at_once` that of the whole batch
    of `samples` samples; `is_compared` says that numbers confirmed them.
    """
    free = BlockTypeCost(part.blocks[-1].block_type, (), (), 0.0, 0.0, 0.0, 0.0)
    last = replace(towers.blocks[-1], block_type=len(towers.block_types), input_bytes=0.0)
    gathered_bytes = samples * _per_sample((part.values[rows.name] for rows in part.gathered), part)
    gathered = replace(
        towers,
        blocks=(*towers.blocks[:-1], last),
        block_types=(*towers.block_types, free),
        coupled=(),
        divided={},
        tail=TailCosts(at_once, samples, gathered_bytes, is_compared),
    )
    return replace(whole, gathered=gathered)


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
