"""The cost of one block type, from the trace of a block: kernels, memory, and all-reduces over the tensor axis.

Kernels are matrix products and attention as they are, and memory-bound operations fused. A compiler fuses those that
lie between the same matrix products. A fused kernel reads what enters the group and writes what leaves it or is saved
for the backward; without a compiler each operation is a group of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from workbench.capture.losses import find_rowwise_head
from workbench.capture.operations import is_replayable
from workbench.cost.block_trace import BlockTrace
from workbench.cost.operations import Operation, identity, storage_bytes
from workbench.cost.profile import ACCUMULATE_BYTES, ATTENTION, GEMM, STREAM, BlockTypeCost, Kernel
from workbench.sparsity.kernels.speed import Products
from workbench.strategy import RECOMPUTE


def block_type_cost(trace: BlockTrace) -> BlockTypeCost:
    """Return the cost of the traced block on one of the tensor-parallel ranks that it was divided over."""
    samples, values = trace.samples, trace.values
    forward, backward = kernels(trace)
    saved = [value for value in values.values() if value.first_saved is not None and not value.weight]
    saved_bytes = sum(value.nbytes for value in saved)
    copies = [v for key, v in values.items() if v.first_saved is not None and key in trace.runner.weight_copies]
    cast = [values[identity(source)] for ran in trace.operations for source, _ in ran.casts]
    reduced = _forward_reduced(trace)
    modes = tuple(mode for mode in RECOMPUTE if is_replayable(trace.block.code, mode))
    # A head that runs over labelled rows has another length in every batch and cannot be captured as a CUDA graph.
    has_labelled_rows = find_rowwise_head(trace.block) is not None and not trace.division.divided
    return BlockTypeCost(
        block_type=trace.block.block_type,
        forward=tuple(forward),
        backward=tuple(backward),
        model_flops=sum(ran.forward_flops for ran in trace.operations) / samples,
        model_backward_flops=sum(ran.needed_backward_flops for ran in trace.operations) / samples,
        saved_bytes=saved_bytes / samples,
        workspace_bytes=max(0, _peak_bytes(trace) - saved_bytes) / samples,
        weight_copy_bytes=sum(value.nbytes for value in copies),
        cast_elements=sum(value.elements for value in cast if value.weight),
        products_bytes=_products_bytes(trace) / samples,
        forward_reduced_bytes=tuple(nbytes for nbytes, _ in reduced),
        recompute_reduced_bytes=tuple(nbytes for nbytes, recomputed in reduced if recomputed),
        backward_reduced_bytes=_backward_reduced(trace),
        capturable=() if has_labelled_rows else modes,
    )


def _peak_bytes(trace: BlockTrace) -> float:
    """Return the most bytes that exist at any step of the block's forward, or of its backward."""
    values = [value for value in trace.values.values() if not value.weight]
    peak = 0.0
    for step in range(len(trace.operations) + 1):
        saved = sum(v.nbytes for v in values if v.first_saved is not None and v.first_saved <= step)
        forward = sum(
            v.nbytes
            for v in values
            if v.born <= step and (step <= v.last_use or (v.first_saved is not None and v.first_saved <= step))
        )
        gradients = sum(v.nbytes for v in values if v.gradient and v.born <= step <= v.last_use)
        recomputed = trace.operations[step].recomputed_bytes if step < len(trace.operations) else 0
        peak = max(peak, forward, saved + gradients + recomputed)
    return peak


def _products_bytes(trace: BlockTrace) -> float:
    """Return the bytes of results of products and attention that the backward needs."""
    results: dict[int, float] = {}
    for step in sorted(trace.recomputed):
        ran = trace.operations[step]
        if ran.family in (GEMM, ATTENTION):
            results |= {identity(t): trace.values[identity(t)].nbytes for t in ran.output_tensors}
        if ran.family == ATTENTION:
            results |= {identity(t): storage_bytes(t) * ran.share for t in ran.own_results}
    return sum(results.values())


def _forward_reduced(trace: BlockTrace) -> list[tuple[float, bool]]:
    """Return bytes per sample of each all-reduce of a forward, and True where recomputation repeats it."""
    steps = [step for step, ran in enumerate(trace.operations) if ran.node in trace.division.reduced]
    reduced = []
    for step, elements in zip(steps, trace.division.forward_elements, strict=True):
        result = trace.operations[step].output_tensors[0]
        # The trace keeps every row of a selection by values, whose own number of rows is not known.
        count = elements if isinstance(elements, int) else result.numel()
        reduced.append((count * result.element_size() / trace.samples, step in trace.recomputed))
    return reduced


def _backward_reduced(trace: BlockTrace) -> tuple[float, ...]:
    """Return bytes per sample of each all-reduce of a backward, in the dtype in which gradients are summed."""
    reduced = []
    for name in dict.fromkeys(name for names in trace.division.entering.values() for name in names):
        tensor = trace.of_node[name][0]
        if identity(tensor) not in trace.runner.gradients:
            continue
        is_cast = trace.settings.precision == "bf16" and tensor.dtype == torch.float32
        is_cast = is_cast and name in trace.division.multiplied
        size = torch.bfloat16.itemsize if is_cast else tensor.element_size()
        reduced.append(tensor.numel() * size / trace.samples)
    return tuple(reduced)


CAST_BYTES = 6
"""Bytes read and written per weight element to cast it from fp32 to bf16, or its gradient back."""


@dataclass
class _FusionGroup:
    """Memory-bound operations that run as one kernel."""

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, torch.Tensor] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    differentiable: bool = False
    embedding_elements: float = 0.0
    """Elements of embedding tables of which rows are read; their gradients are dense."""

    def absorb(self, other: _FusionGroup) -> None:
        self.inputs |= other.inputs
        self.outputs |= other.outputs
        self.saved |= other.saved
        self.steps |= other.steps
        self.differentiable |= other.differentiable
        self.embedding_elements += other.embedding_elements


def kernels(trace: BlockTrace) -> tuple[list[Kernel], list[Kernel]]:
    """Return the kernels of the block's forward and of its backward, for the division that the trace has."""
    builder = _KernelBuilder(trace)
    for step, ran in enumerate(trace.operations):
        if ran.family in (GEMM, ATTENTION):
            builder.add_product(ran, recomputed=step in trace.recomputed)
        builder.add_weight_casts(ran)
    for group in _fusion_groups(trace):
        builder.add_stream(group)
    trained = [value for key, value in trace.values.items() if key in trace.runner.weights and value.gradient]
    elements = sum(value.elements for value in trained)
    if elements:
        builder.backward.append(Kernel(STREAM, 0, 0, ACCUMULATE_BYTES * elements, len(trained)))
    return builder.forward, builder.backward


class _KernelBuilder:
    """The kernels found so far, and the memory traffic of those to come."""

    def __init__(self, trace: BlockTrace) -> None:
        self._trace = trace
        self.forward: list[Kernel] = []
        self.backward: list[Kernel] = []

    def add_product(self, ran: Operation, *, recomputed: bool) -> None:
        samples, values = self._trace.samples, self._trace.values
        batched, fixed = self._traffic([*ran.inputs, *ran.output_tensors])
        flops = ran.share * ran.forward_flops / samples
        relative = self._trace.relative.get(ran.node, Products(1.0, 1.0, 1.0))
        self.forward.append(Kernel(ran.family, flops, batched, fixed, recomputed=recomputed, relative=relative.forward))
        if not ran.backward_flops:
            return
        launches = max(1, round(ran.backward_flops / ran.forward_flops)) if ran.family == GEMM else 1
        flops = ran.share * ran.backward_flops / samples
        inputs = [values[identity(tensor)] for tensor in ran.inputs]
        for_weights = 1 if ran.family == GEMM and any(value.weight and value.gradient for value in inputs) else 0
        for count, times in ((launches - for_weights, relative.to_input), (for_weights, relative.to_weight)):
            if count:
                each = count / launches * flops
                self.backward.append(Kernel(ran.family, each, batched * count, fixed * count, count, relative=times))

    def add_weight_casts(self, ran: Operation) -> None:
        sources = [self._trace.values[identity(source)] for source, _ in ran.casts]
        weights = [value for value in sources if value.weight]
        trained = [value for value in weights if value.gradient]
        for values, kernels in ((weights, self.forward), (trained, self.backward)):
            if values:
                traffic = CAST_BYTES * sum(value.elements for value in values)
                kernels.append(Kernel(STREAM, 0, 0, traffic, 1 if self._trace.settings.compiled else len(values)))

    def add_stream(self, group: _FusionGroup) -> None:
        values, recomputed = self._trace.values, bool(group.steps & self._trace.recomputed)
        reads = [tensor for key, tensor in group.inputs.items() if key not in group.outputs]
        # An output that only the group itself reads stays in registers.
        writes = [
            tensor
            for key, tensor in group.outputs.items()
            if values[key].first_saved is not None or values[key].uses - group.steps
        ]
        batched, fixed = self._traffic(reads + writes)
        if group.embedding_elements:
            batched += sum(t.numel() * t.element_size() for t in writes) / self._trace.samples
        self.forward.append(Kernel(STREAM, 0, batched, fixed, recomputed=recomputed))
        gradients = [t for t in [*reads, *writes] if values[identity(t)].gradient]
        if group.differentiable or gradients:
            saved = [tensor for key, tensor in group.saved.items() if not values[key].weight]
            batched, fixed = self._traffic([*gradients, *saved])
            reduces = any(values[identity(t)].weight for t in gradients)
            self.backward.append(Kernel(STREAM, 0, batched, fixed + 4 * group.embedding_elements, 2 if reduces else 1))

    def _traffic(self, tensors: Iterable[torch.Tensor]) -> tuple[float, float]:
        """Return bytes per sample of batched tensors, and bytes of the others; a broadcast tensor counts once."""
        batched = fixed = 0.0
        for tensor in tensors:
            value = self._trace.values[identity(tensor)]
            nbytes = value.share * min(tensor.numel() * tensor.element_size(), storage_bytes(tensor))
            if value.batched:
                batched += nbytes / self._trace.samples
            else:
                fixed += nbytes
        return batched, fixed


def _fusion_groups(trace: BlockTrace) -> list[_FusionGroup]:
    """Return the memory-bound operations in groups: those at the same depth of products that feed each other."""
    made_by: dict[int, _FusionGroup] = {}
    depth: dict[int, int] = defaultdict(int)
    groups: list[_FusionGroup] = []

    def group_for(inputs: list[torch.Tensor], level: int) -> _FusionGroup:
        """Return the group that the operation joins, with other groups that it connects merged into it."""
        near = [made_by[identity(t)] for t in inputs if identity(t) in made_by and depth[identity(t)] == level]
        if not (trace.settings.compiled and near):
            groups.append(_FusionGroup())
            return groups[-1]
        group = near[0]
        for other in near[1:]:
            if other is not group:
                group.absorb(other)
                made_by.update(dict.fromkeys(other.outputs, group))
                groups[:] = [each for each in groups if each is not other]
        return group

    def join(inputs: list[torch.Tensor], outputs: list[torch.Tensor], step: int, level: int) -> _FusionGroup:
        group = group_for(inputs, level)
        group.inputs |= {identity(t): t for t in inputs}
        group.outputs |= {identity(t): t for t in outputs}
        group.steps.add(step)
        for tensor in outputs:
            made_by[identity(tensor)] = group
            depth[identity(tensor)] = level
        return group

    for step, ran in enumerate(trace.operations):
        level = max((depth[identity(t)] for t in ran.sources), default=0)
        for source, copy in ran.casts:
            if not trace.values[identity(source)].weight:
                join([source], [copy], step, depth[identity(source)])
        if ran.family == STREAM:
            looks_up = ran.name == "embedding"
            group = join(ran.inputs[1:] if looks_up else ran.inputs, ran.output_tensors, step, level)
            group.saved |= {identity(t): t for t in ran.saved}
            group.differentiable |= bool(ran.backward_flops) or any(ran.differentiable)
            group.embedding_elements += ran.inputs[0].numel() * ran.share if looks_up else 0
        elif ran.family != "view":
            for tensor in ran.output_tensors:
                depth[identity(tensor)] = level + 1
    return groups
