"""From a captured `Graph` to a `Profile`: every kind of block is run once on the meta device and priced.

Compiled blocks fuse: neighbouring memory-bound operations become one kernel that reads what comes from outside the
group and writes what leaves it. Without compilation each operation is a kernel of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_map

from workbench.capture import Block, Graph
from workbench.cost.cluster import Device
from workbench.cost.ops import META, Casts, Ran, Settings, identity, run, storage_bytes
from workbench.cost.profiles import ATTENTION, GEMM, STREAM, BlockCost, Kernel, KindCost, Profile

FP32, BF16 = 4, 2
COMPILED_KEEPS = 0.8
"""Share of what eager autograd would save that a compiled block keeps; the rest is recomputed inside fused kernels.
Fitted to the allocator's peaks of 18 plans on 4 × H200 (docs/cost.md)."""


def profile(graph: Graph, device: Device, precision: str, *, compiled: bool) -> Profile:
    """Price a captured model for a kind of device; per-sample costs come from the captured micro-batch."""
    settings = Settings(precision, device.kind, compiled)
    kinds = {kind: index for index, kind in enumerate(graph.kinds)}
    samples = graph.micro_batch
    seen: set[str] = set()
    blocks = []
    for block in graph.blocks:
        fresh = [name for name in block.receives if name not in seen]
        seen.update(fresh)
        blocks.append(
            BlockCost(
                name=block.name,
                kind=kinds[block.kind],
                parameters=block.parameters,
                input_bytes=sum(graph.values[name].nbytes for name in fresh) / samples,
            )
        )
    first = {block.kind: block for block in reversed(graph.blocks)}
    return Profile(
        model=graph.model,
        signature=graph.signature,
        precision=precision,
        device_kind=device.kind,
        compiled=compiled,
        kinds=tuple(_priced(graph, first[kind], settings) for kind in graph.kinds),
        blocks=tuple(blocks),
        parameters={name: spec.numel for name, spec in graph.parameters.items()},
        frozen=graph.frozen & frozenset(graph.parameters),
        crossing_bytes=_crossing_bytes(graph),
    )


def _crossing_bytes(graph: Graph) -> tuple[float, ...]:
    """Per sample, sent before each block; entry 0 and the last are 0. One pass over the values' lifetimes."""
    count = len(graph.blocks)
    made = {name: block.index for block in graph.blocks for name in block.sends}
    last = {name: block.index for block in graph.blocks for name in block.receives}
    change = [0.0] * (count + 2)
    for name, end in last.items():
        size = graph.values[name].nbytes / graph.micro_batch
        change[made[name] + 1] += size
        change[end + 1] -= size
    running, found = 0.0, []
    for cut in range(count + 1):
        running += change[cut]
        found.append(max(0.0, running))
    return tuple(found)


@dataclass
class _Tally:
    """What running one block's operations adds up to, for the captured micro-batch."""

    samples: int
    forward: list[Kernel] = field(default_factory=list)
    backward: list[Kernel] = field(default_factory=list)
    flops: float = 0.0
    saved: dict[int, torch.Tensor] = field(default_factory=dict)
    largest: float = 0.0

    def add(self, kernels: list[Kernel], family: str, flops: float, moved: float, fixed: float, launches: int) -> None:
        kernels.append(Kernel(family, flops / self.samples, moved / self.samples, fixed, launches))


def _priced(graph: Graph, block: Block, settings: Settings) -> KindCost:
    arguments = _arguments(graph, block)
    weights = {identity(t) for t in arguments[: len(block.parameters)]}
    fixed = {identity(t) for t in arguments[: len(block.parameters) + len(block.buffers)]}
    differentiable = _differentiable(graph, block, arguments)
    gradients = set(differentiable)
    casts = Casts(reuse=settings.compiled)
    tally = _Tally(graph.micro_batch)
    streams: list[tuple[fx.Node, Ran]] = []
    values: dict[fx.Node, Any] = {}
    placeholders = iter(arguments)
    for node in block.code.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(placeholders)
        elif node.op == "get_attr":
            values[node] = getattr(block.code, str(node.target))
        elif node.op == "call_function":
            args, kwargs = tree_map(lambda a: values[a] if isinstance(a, fx.Node) else a, (node.args, dict(node.kwargs)))
            ran = run(node, args, kwargs, gradients=gradients, weights=weights, casts=casts, settings=settings)
            values[node] = ran.outputs
            _keep(tally, ran, fixed | set(casts.weights))
            _count(tally, ran, weights | set(casts.weights), settings)
            if ran.family == "stream":
                streams.append((node, ran))
    _count_streams(tally, streams, values, settings)
    copies = sum(storage_bytes(t) for t in casts.weights.values())
    _count_weight_traffic(tally, arguments[: len(block.parameters)], copies, settings)
    saved = sum(storage_bytes(t) for t in tally.saved.values()) * (COMPILED_KEEPS if settings.compiled else 1.0)
    return KindCost(
        kind=block.kind,
        forward=tuple(tally.forward),
        backward=tuple(tally.backward),
        model_flops=tally.flops / tally.samples,
        saved_bytes=saved / tally.samples,
        workspace_bytes=tally.largest / tally.samples,
        weight_copy_bytes=copies,
    )


def _arguments(graph: Graph, block: Block) -> list[torch.Tensor]:
    specs = [
        *(graph.parameters[name] for name in block.parameters),
        *(graph.buffers[name] for name in block.buffers),
        *(graph.values[name] for name in block.receives),
        *(graph.batch[name] for name in block.inputs),
    ]
    found = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=META) for spec in specs]
    return [*found, *(torch.empty((), device=META) for _ in block.counts)]


def _differentiable(graph: Graph, block: Block, arguments: list[torch.Tensor]) -> set[int]:
    trainable = [t for name, t in zip(block.parameters, arguments, strict=False) if name not in graph.frozen]
    start = len(block.parameters) + len(block.buffers)
    received = [t for t in arguments[start : start + len(block.receives)] if t.is_floating_point()]
    return {identity(t) for t in (*trainable, *received)}


def _keep(tally: _Tally, ran: Ran, fixed: set[int]) -> None:
    """Remember what autograd saves, each storage once; weights and their copies are counted elsewhere."""
    for tensor in ran.saved:
        if identity(tensor) not in fixed:
            tally.saved[identity(tensor)] = tensor
    outputs = [t for t in tree_flatten(ran.outputs)[0] if isinstance(t, torch.Tensor)]
    tally.largest = max(tally.largest, float(sum(storage_bytes(t) for t in outputs)) * 2)


def _count(tally: _Tally, ran: Ran, weights: set[int], settings: Settings) -> None:
    """Kernels of one matrix product or attention, and of the casts before any operation."""
    for source, copy in ran.casts:
        if identity(copy) not in weights and not settings.compiled:
            moved = storage_bytes(source) + storage_bytes(copy)
            tally.add(tally.forward, STREAM, 0, moved, 0, 1)
            tally.add(tally.backward, STREAM, 0, moved, 0, 1)
    if ran.family not in (GEMM, ATTENTION):
        return
    outputs = [t for t in tree_flatten(ran.outputs)[0] if isinstance(t, torch.Tensor)]
    moved = float(sum(_bytes(t) for t in (*ran.inputs, *outputs) if identity(t) not in weights))
    fixed = float(sum(_bytes(t) for t in ran.inputs if identity(t) in weights))
    tally.flops += ran.forward_flops
    tally.add(tally.forward, ran.family, ran.forward_flops, moved, fixed, 1)
    if ran.backward_flops:
        launches = 2 if ran.family == GEMM else 1
        tally.add(tally.backward, ran.family, ran.backward_flops, 2 * moved, 2 * fixed, launches)


def _count_streams(
    tally: _Tally, streams: list[tuple[fx.Node, Ran]], values: Mapping[fx.Node, Any], settings: Settings
) -> None:
    """Memory-bound kernels: the groups that the compiler fuses, or one for each operation."""
    for group in _groups(streams) if settings.compiled else [[item] for item in streams]:
        inside = {node for node, _ in group}
        read = {
            identity(t): _bytes(t) for node, _ in group for t in _tensors(node.all_input_nodes, values, exclude=inside)
        }
        leaving = [node for node in inside if any(user not in inside for user in node.users)]
        written = sum(_bytes(t) for t in _tensors(leaving, values))
        kept = sum(_bytes(t) for _, ran in group for t in ran.saved if t.dtype == torch.bool)
        moved = float(sum(read.values()) + written + kept)
        tally.add(tally.forward, STREAM, 0, moved, 0, 1)
        if any(any(ran.differentiable) for _, ran in group):
            tally.add(tally.backward, STREAM, 0, moved + written, 0, 1)


def _groups(streams: list[tuple[fx.Node, Ran]]) -> Iterable[list[tuple[fx.Node, Ran]]]:
    """Stream operations joined wherever one feeds another."""
    owner: dict[fx.Node, int] = {}
    members: defaultdict[int, list[tuple[fx.Node, Ran]]] = defaultdict(list)
    for number, (node, ran) in enumerate(streams):
        homes = sorted({owner[source] for source in node.all_input_nodes if source in owner})
        home = homes[0] if homes else number
        members[home].append((node, ran))
        for other in homes[1:]:
            members[home].extend(members.pop(other))
        for member, _ in members[home]:
            owner[member] = home
    return members.values()


def _count_weight_traffic(tally: _Tally, weights: list[torch.Tensor], copies: int, settings: Settings) -> None:
    """What every micro-batch does to the weights whatever its size: cast them, cast and add up their gradients."""
    elements = sum(t.numel() for t in weights if t.is_floating_point())
    if settings.precision == "bf16":
        cast = copies / BF16 * (FP32 + BF16)
        tally.add(tally.forward, STREAM, 0, 0, cast, max(1, len(weights) // 4))
        tally.add(tally.backward, STREAM, 0, 0, cast + elements * 2 * FP32, max(1, len(weights) // 2))
    else:
        tally.add(tally.backward, STREAM, 0, 0, elements * 2 * FP32, max(1, len(weights) // 2))


def _tensors(
    nodes: Iterable[fx.Node], values: Mapping[fx.Node, Any], exclude: set[fx.Node] | None = None
) -> list[torch.Tensor]:
    chosen = [node for node in nodes if exclude is None or node not in exclude]
    return [t for t in tree_flatten([values.get(node) for node in chosen])[0] if isinstance(t, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    """What reading the tensor once moves: an expanded view is read where it lies."""
    return min(tensor.numel() * tensor.element_size(), storage_bytes(tensor))
