"""A profile corrected by blocks that were measured; `workbench.measure.block_probes` obtains the measurements.

Times: the ratio of measured to analytic time is interpolated over the logarithm of the micro-batch and applied to the
analytic time, so that one measurement serves every tensor-parallel degree; so is the share of it that captured blocks
take. The host's time hardly depends on the micro-batch, so the least measured one counts. Memory: a line through the
bytes held at each micro-batch (its slope per sample, its offset per block) replaces the bytes counted on the meta
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from workbench.cost.hardware import Device
from workbench.cost.profile import BlockTypeCost, DividedCosts, Profile, TimeRatios


@dataclass(frozen=True)
class BlockMeasurement:
    """The time and memory of one block type, run at one micro-batch."""

    first_block: int
    """Index of the first block of this type in the model."""
    micro_batch: int
    forward_ms: float
    backward_ms: float
    held_bytes: float
    """Bytes that the forward leaves for the backward."""
    workspace_bytes: float
    """Further bytes at the peak of forward or backward, without the gradients of parameters."""
    forward_host_ms: float = 0.0
    """Time that the host is busy with the forward if it does not wait for the device; 0 on a CPU."""
    backward_host_ms: float = 0.0
    clock_mhz: int | None = None
    """Clock of the device at the end, lower at its power limit; None if unknown."""
    replayed: float = 1.0
    """Ratio of the model's blocks' time when one CUDA graph launches them to their time launched kernel by kernel.

    A graph's kernels follow each other sooner. It is one figure for each micro-batch, and 1 if nothing was captured.
    """


def corrected_profile(profile: Profile, device: Device, measurements: Sequence[BlockMeasurement]) -> Profile:
    """Return `profile` with the times and bytes measured on `device`; other block types stay analytic."""
    points_of: dict[int, list[BlockMeasurement]] = {}
    for measurement in sorted(measurements, key=lambda one: one.micro_batch):
        points_of.setdefault(profile.blocks[measurement.first_block].block_type, []).append(measurement)
    whole = profile.block_types
    corrected = {index: _with_memory(whole[index], points) for index, points in points_of.items()}

    def parts(costs: Sequence[BlockTypeCost], memory: Callable[..., BlockTypeCost]) -> tuple[BlockTypeCost, ...]:
        return tuple(
            memory(whole[index], part, corrected[index]) if index in corrected else part
            for index, part in enumerate(costs)
        )

    divided = {
        degree: DividedCosts(parts(costs.block_types, partial(_divided_memory, degree)), costs.parameters)
        for degree, costs in profile.divided.items()
    }
    host_ms = {
        index: [(point.forward_host_ms, point.backward_host_ms) for point in points if point.forward_host_ms > 0]
        for index, points in points_of.items()
    }
    sparse = profile.sparse
    if sparse is not None:
        sparse = replace(sparse, block_types=parts(sparse.block_types, _sparse_memory))
    gathered = profile.gathered
    if gathered is not None:
        types = [[p.block_types[block.block_type].block_type for block in p.blocks] for p in (profile, gathered)]
        shared = [one for one in measurements if types[0][one.first_block] == types[1][one.first_block]]
        gathered = corrected_profile(gathered, device, shared)
    return replace(
        profile,
        gathered=gathered,
        block_types=tuple(corrected.get(index, cost) for index, cost in enumerate(whole)),
        divided=divided,
        sparse=sparse,
        measured_on=device.name,
        time_ratios={index: _time_ratios(profile, index, points, device) for index, points in points_of.items()},
        replayed=tuple(sorted({one.micro_batch: one.replayed for one in measurements}.items())),
        measured_host_ms={index: min(times, key=sum) for index, times in host_ms.items() if times},
    )


def _time_ratios(profile: Profile, index: int, points: Sequence[BlockMeasurement], device: Device) -> TimeRatios:
    analytic = [profile.analytic_ms(index, point.micro_batch, device) for point in points]
    return TimeRatios(
        tuple(point.micro_batch for point in points),
        tuple(_ratio(point.forward_ms, ms) for point, (ms, _) in zip(points, analytic, strict=True)),
        tuple(_ratio(point.backward_ms, ms) for point, (_, ms) in zip(points, analytic, strict=True)),
    )


def _ratio(measured: float, analytic: float) -> float:
    return measured / analytic if measured > 0 and analytic > 0 else 1.0


def _with_memory(cost: BlockTypeCost, points: Sequence[BlockMeasurement]) -> BlockTypeCost:
    """Return `cost` with measured memory, or as it is where no allocator was asked (on a CPU)."""
    if not any(point.held_bytes or point.workspace_bytes for point in points):
        return cost
    samples = np.array([point.micro_batch for point in points], dtype=np.float64)
    per_sample, offset = _line(samples, np.array([point.held_bytes for point in points]))
    largest = points[-1]
    return replace(
        cost,
        saved_bytes=per_sample,
        weight_copy_bytes=offset,
        workspace_bytes=largest.workspace_bytes / largest.micro_batch,
        products_bytes=min(cost.products_bytes, per_sample),
    )


def _line(samples: Any, values: Any) -> tuple[float, float]:
    """Return slope and offset of the best line by relative errors; a line through zero if either were negative."""
    if len(samples) == 1:
        return float(values[0] / samples[0]), 0.0
    slope, offset = np.polyfit(samples, values, 1, w=1 / samples)
    if offset < 0 or slope <= 0:
        return max(0.0, float(values[-1] / samples[-1])), 0.0
    return float(slope), float(offset)


def _divided_memory(degree: int, counted: BlockTypeCost, part: BlockTypeCost, measured: BlockTypeCost) -> BlockTypeCost:
    """Return `part`, one of `degree` tensor-parallel ranks, with its memory corrected as the whole block's was.

    Bytes change in proportion, but for saved bytes: see `_saved_by_rank`.
    """
    return replace(
        part,
        saved_bytes=_saved_by_rank(degree, counted.saved_bytes, part.saved_bytes, measured.saved_bytes),
        workspace_bytes=part.workspace_bytes * _ratio(measured.workspace_bytes, counted.workspace_bytes),
        products_bytes=part.products_bytes * _ratio(measured.products_bytes, counted.products_bytes),
        weight_copy_bytes=measured.weight_copy_bytes * _ratio(part.weight_copy_bytes, counted.weight_copy_bytes),
    )


def _sparse_memory(counted: BlockTypeCost, part: BlockTypeCost, measured: BlockTypeCost) -> BlockTypeCost:
    """Return `part`, the block with block-sparse weights, with the measured activations; they are those of a dense one.

    Weight copies change in proportion.
    """
    return replace(
        part,
        saved_bytes=measured.saved_bytes,
        workspace_bytes=measured.workspace_bytes,
        products_bytes=measured.products_bytes,
        weight_copy_bytes=measured.weight_copy_bytes * _ratio(part.weight_copy_bytes, counted.weight_copy_bytes),
    )


def _saved_by_rank(degree: int, counted: float, part: float, measured: float) -> float:
    """Return the bytes that one of `degree` ranks saves, where a whole block saves `measured` instead of `counted`.

    The values that a compiler does without lie between two products, mostly in an activation function, where tensor
    parallelism divides the block. They are therefore taken off the divided share first; the share that all ranks hold
    alike stays.
    """
    divided = (counted - part) * degree / (degree - 1)
    if divided <= 0 or not 0 < measured < counted:
        return part * _ratio(measured, counted)
    left_out = counted - measured
    return part - min(left_out, divided) / degree - max(0.0, left_out - divided)
