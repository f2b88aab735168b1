"""A profile corrected by blocks that were run: `execution.block_probe` measures them, `runs.probing` keeps them.

Times: the ratio of measured to priced is interpolated over the logarithm of the micro-batch and applied to what is
priced, so that one measurement serves tensor-parallel degrees too. The host's times hardly depend on the micro-batch:
the least that were seen. Memory: a line through the bytes held at each micro-batch (what grows with it, and what does
not) takes the place of what was counted on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from workbench.cost.device import Device
from workbench.cost.profile import BlockTypeCost, DividedCosts, Profile, TimeRatios


@dataclass(frozen=True)
class BlockMeasurement:
    """One kind of block, run at one micro-batch."""

    first_block: int
    """The first block of its kind."""
    micro_batch: int
    forward_ms: float
    backward_ms: float
    held_bytes: float
    """What its forward leaves for its backward."""
    workspace_bytes: float
    """What it needs besides while it runs, but for its parameters' gradients; forward or backward, the larger."""
    forward_host_ms: float = 0.0
    """For how long the host is busy with it, if it does not wait for the device; 0 on a CPU."""
    backward_host_ms: float = 0.0
    clock_mhz: int | None = None
    """Of the device at the end; under its power limit it is lower. None where it was not asked."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def corrected_profile(profile: Profile, device: Device, found: Sequence[BlockMeasurement]) -> Profile:
    """`profile` as `device` was seen to run it; kinds that were not measured stay as priced."""
    of_kind: dict[int, list[BlockMeasurement]] = {}
    for measurement in sorted(found, key=lambda one: one.micro_batch):
        of_kind.setdefault(profile.blocks[measurement.first_block].block_type, []).append(measurement)
    time_ratios = {kind: _speeds(profile, kind, points, device) for kind, points in of_kind.items()}
    kinds = {kind: _with_memory(profile.block_types[kind], points) for kind, points in of_kind.items()}
    divided = {
        degree: DividedCosts(_divided(degree, profile.block_types, costs.block_types, kinds), costs.parameters)
        for degree, costs in profile.divided.items()
    }
    return replace(
        profile,
        block_types=tuple(kinds.get(kind, cost) for kind, cost in enumerate(profile.block_types)),
        divided=divided,
        measured_on=device.name,
        time_ratios=time_ratios,
        hosts={kind: host for kind, points in of_kind.items() if (host := _host_ms(points)) is not None},
    )


def _speeds(profile: Profile, kind: int, points: Sequence[BlockMeasurement], device: Device) -> TimeRatios:
    priced = [profile.priced_ms(kind, point.micro_batch, device) for point in points]
    slower = device.efficiency.in_step
    return TimeRatios(
        tuple(point.micro_batch for point in points),
        tuple(_ratio(slower * point.forward_ms, ms) for point, (ms, _) in zip(points, priced, strict=True)),
        tuple(_ratio(slower * point.backward_ms, ms) for point, (_, ms) in zip(points, priced, strict=True)),
    )


def _host_ms(points: Sequence[BlockMeasurement]) -> tuple[float, float] | None:
    """Forward and backward, where the host's times were taken."""
    found = [(point.forward_host_ms, point.backward_host_ms) for point in points if point.forward_host_ms > 0]
    return min(found, key=sum) if found else None


def _ratio(measured: float, priced: float) -> float:
    return measured / priced if measured > 0 and priced > 0 else 1.0


def _with_memory(cost: BlockTypeCost, points: Sequence[BlockMeasurement]) -> BlockTypeCost:
    """Memory as measured, if the allocator was asked (a CPU has none to ask)."""
    if not any(point.held_bytes or point.workspace_bytes for point in points):
        return cost
    samples = np.array([point.micro_batch for point in points], dtype=np.float64)
    held = np.array([point.held_bytes for point in points])
    each, once = _line(samples, held)
    largest = points[-1]
    return replace(
        cost,
        saved_bytes=each,
        weight_copy_bytes=once,
        workspace_bytes=largest.workspace_bytes / largest.micro_batch,
        products_bytes=min(cost.products_bytes, each),
    )


def _line(samples: Any, values: Any) -> tuple[float, float]:
    """Slope and offset, neither negative: the offset from the smallest, the slope through the largest."""
    if len(samples) == 1:
        return float(values[0] / samples[0]), 0.0
    slope, offset = np.polyfit(samples, values, 1, w=1 / samples)
    if offset < 0 or slope <= 0:
        return max(0.0, float(values[-1] / samples[-1])), 0.0
    return float(slope), float(offset)


def _divided(
    degree: int, whole: Sequence[BlockTypeCost], parts: Sequence[BlockTypeCost], measured: Mapping[int, BlockTypeCost]
) -> tuple[BlockTypeCost, ...]:
    """What one tensor-parallel device holds: of activations see `_part_of`, else in the proportion in which it was
    counted."""
    found = []
    for kind, part in enumerate(parts):
        if kind in measured:
            counted, seen = whole[kind], measured[kind]
            part = replace(
                part,
                saved_bytes=_part_of(degree, counted.saved_bytes, part.saved_bytes, seen.saved_bytes),
                **{
                    name: getattr(part, name) * _ratio(getattr(seen, name), getattr(counted, name))
                    for name in ("workspace_bytes", "products_bytes")
                },
                weight_copy_bytes=seen.weight_copy_bytes * _ratio(part.weight_copy_bytes, counted.weight_copy_bytes),
            )
        found.append(part)
    return tuple(found)


def _part_of(degree: int, counted: float, part: float, seen: float) -> float:
    """Bytes that one of `degree` devices saves, where a whole block was `counted` to save more than it was `seen` to.

    What the compiler does not save after all lies between two products, mostly an activation function's steps, and so
    where the block is divided: it is taken off that share first, and what the devices hold alike stays.
    """
    divided = (counted - part) * degree / (degree - 1)
    if divided <= 0 or not 0 < seen < counted:
        return part * _ratio(seen, counted)
    left_out = counted - seen
    return part - min(left_out, divided) / degree - max(0.0, left_out - divided)
