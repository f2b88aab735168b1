"""The cost of one block type, from the trace of a block: kernels, memory, and all-reduces over the tensor axis."""

from __future__ import annotations

import torch

from workbench.capture.operations import is_replayable
from workbench.capture.rowwise_head import find_rowwise_head
from workbench.cost.block_kernels import kernels
from workbench.cost.block_trace import BlockTrace
from workbench.cost.operations import identity, storage_bytes
from workbench.cost.profile import ATTENTION, GEMM, BlockTypeCost
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
