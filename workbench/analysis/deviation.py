"""Distances of a plan's numbers from those of a reference, and whether roundings explain them.

Of each tensor four distances are measured: its size, its largest element, its projection on the reference (a scale) and
its mean (an offset). Roundings change the first two by as much as they change those of repetitions on one device. They
hardly change the last two, where the errors of many elements cancel: by these a factor of 1.01 shows in bf16.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

START, SAMPLES, OUTPUT, PASSED, GRADIENT, UPDATE = range(6)
"""Parts of a step: the weights it begins with, batch fields that a block reads, values that it sends, gradients that it
passes back, gradients of weights, weights and optimiser state after the update."""
_ORDER = {START: 0, SAMPLES: 1, OUTPUT: 2, PASSED: 3, GRADIENT: 3, UPDATE: 4}
"""Order in which they arise: a block's gradients arise together."""
Key = tuple[int, int, int, str, int]
"""Step (from 0), part, block, name, and micro-batch of the global batch (-1 where these are summed)."""
Numbers = dict[Key, "torch.Tensor"]
LOSS, NORM, EVERY = "the loss", "the gradient norm", "all gradients"
"""Names of what `wb.parity` compares beside the gradient of each parameter: the loss of a step, the norm of its
gradients before they are clipped, and the distance of all of them as one vector."""

COARSE = 8
"""Roundings that are so many times coarser show where numbers jump, as at the kink of a ReLU or where experts are
chosen: there the noise does not grow with the size of roundings."""
MOST_NOISE = 6.0
"""Multiple of the noise up to which a size or an element counts as rounding. Of twenty right plans none exceeds 2."""
MOST_JUMPS = 1.5
"""Multiple of what roundings that are `COARSE` times coarser change, up to which a difference counts as rounding."""
MOST_SIGMAS = 6.0
"""Standard deviations up to which a scale or an offset counts as rounding. Of twenty right plans none exceeds 2.5."""
FP32_ROUNDING = 2.0**-24
"""Largest relative error of a rounding to fp32."""
LEAST_UNITS = 8.0
"""Number of such roundings up to which every distance counts as rounding."""
SUSPECT = 0.5
"""Fraction of a limit from which a block before the first fault is taken to be part of it."""


@dataclass(frozen=True)
class Distance:
    """Distances of a tensor from a reference, relative to the reference."""

    size: float
    element: float
    scale: float
    offset: float

    @staticmethod
    def of(found: torch.Tensor, reference: torch.Tensor, base: torch.Tensor) -> Distance:
        """Return the distances relative to `base`, which is the reference, or how far an update moved it.

        They are absolute if the base is zero, and infinite if one of the tensors is not finite where the other is.
        """
        found, reference, base = (value.double().reshape(-1) for value in (found, reference, base))
        same = (found == reference) | (found.isnan() & reference.isnan())  # such as the -inf of a mask
        difference = (found - reference).masked_fill(same, 0.0)
        if not bool(difference.isfinite().all()):
            return Distance(*[math.inf] * 4)
        base = base.masked_fill(~base.isfinite(), 0.0)
        norm, largest = base.norm().item() or 1.0, base.abs().max().item() or 1.0
        return Distance(
            size=difference.norm().item() / norm,
            element=difference.abs().max().item() / largest,
            scale=difference.dot(base).item() / norm**2,
            offset=difference.mean().item() * len(base) ** 0.5 / norm,
        )

    @staticmethod
    def of_each(found: torch.Tensor, reference: torch.Tensor, base: torch.Tensor, owners: torch.Tensor) -> Held:
        """Return the ranks that hold a part of the tensor, each with the distances of its part.

        `owners` has the rank that holds each element.
        """
        parts = ((rank, owners == rank) for rank in owners.unique().tolist())
        return tuple((rank, Distance.of(found[own], reference[own], base[own])) for rank, own in parts)


MISSING = Distance(*[math.inf] * 4)
SAME = Distance(0.0, 0.0, 0.0, 0.0)


Held = tuple[tuple[int, Distance], ...]
"""Ranks, each with the distance of what it holds of a tensor."""


@dataclass(frozen=True)
class Row:
    """A tensor of one rank of a plan: its distance from the reference, and those of repetitions on one device."""

    key: Key
    rank: int
    elements: int
    found: Distance
    noise: tuple[Distance, ...]
    """Distances of repetitions with roundings of the plan's precision."""
    coarse: tuple[Distance, ...]
    """Distances of repetitions with roundings that are `COARSE` times coarser."""
    held: Held = ()
    """Ranks with these numbers and their distance, or with a shard of them and the distance of that; empty for one."""


@dataclass(frozen=True)
class Deviation:
    """A tensor in which a plan differs from the reference."""

    plan: str
    step: int
    """The step, from 1."""
    part: str
    """`weights`, `samples`, `output`, `passed gradient`, `gradient` or `update`."""
    block: int
    block_name: str
    tensor: str
    micro_batch: int | None
    """Micro-batch of the global batch, from 0; None where micro-batches are summed."""
    rank: int
    """The first rank that has these numbers: of a sharded tensor, the rank whose shard differs most."""
    ranks: tuple[int, ...]
    """All ranks whose numbers, or whose shards, differ at least half as much."""
    size: float
    """Norm of the difference over that of the reference: of the tensor, or of how far the update moved a weight."""
    noise: float
    """The same for repetitions on one device in the plan's precision."""
    bound: float
    """The largest `size` that roundings explain."""
    factor: float
    """The tensor's projection on the reference: 1.01 for one that is 1 % too large."""
    excess: float
    """The difference over the largest that roundings explain, in one of the four distances."""
    distance: float
    """The difference in this one."""
    measure: str
    """The distance in which the excess is largest: `size`, `element`, `scale` or `offset`."""

    @property
    def order(self) -> tuple[int, int, int]:
        """Position in the order in which the numbers of a training arise."""
        part = _ORDER[PARTS.index(self.part)]
        return self.step, part, -self.block if part == _ORDER[GRADIENT] else self.block


PARTS = ("weights", "samples", "output", "passed gradient", "gradient", "update")


def compared(
    reference: Numbers,
    repetitions: Sequence[tuple[int, Mapping[Key, Distance]]],
    ranks: Sequence[Mapping[Key, Distance]],
    block_on_rank: Callable[[int, Key], int],
    held: Sequence[Mapping[Key, Held]] = (),
) -> list[Row]:
    """Return the rows of one step.

    Args:
        reference: the numbers of one device.
        repetitions: the coarseness of the roundings of each repetition, 0 for none, with its distances.
        ranks: the distances of each rank's numbers from it.
        block_on_rank: returns the first block of a rank that has a tensor; several stages may hold a tied weight.
        held: `Row.held` of the tensors of each rank.
    """
    rows = []
    seen = set[Key]()
    for rank, of_rank in enumerate(ranks):
        for key, found in of_rank.items():
            noise = tuple(sample[key] for coarse, sample in repetitions if coarse < COARSE)
            coarse = tuple(sample[key] for coarse, sample in repetitions if coarse == COARSE)
            place = (*key[:2], block_on_rank(rank, key), *key[3:])
            rows.append(
                Row(place, rank, reference[key].numel(), found, noise, coarse, held[rank].get(key, ()) if held else ())
            )
            seen.add(key)
    lost = (key for key in reference if key not in seen and key[1] in (OUTPUT, GRADIENT, UPDATE))
    return rows + [Row(key, 0, reference[key].numel(), MISSING, (), ()) for key in lost if reference[key].numel()]


def distances(reference: Numbers, found: Numbers, before: Mapping[str, torch.Tensor]) -> dict[Key, Distance]:
    """Return the distance of each tensor that is in the reference, too; `before` is the state before the update."""
    return distances_of_shards(reference, found, before, {})[0]


def distances_of_shards(
    reference: Numbers, found: Numbers, before: Mapping[str, torch.Tensor], owners: Mapping[str, torch.Tensor]
) -> tuple[dict[Key, Distance], dict[Key, Held]]:
    """Return what `distances` does, and the same for each shard of the tensors that ranks share.

    `owners` has the rank that holds each element of such a parameter, by name.
    """
    result: dict[Key, Distance] = {}
    shards: dict[Key, Held] = {}
    for key, value in found.items():
        if key not in reference or not reference[key].numel():
            continue
        base = expected = reference[key]
        if value.shape != expected.shape:
            result[key] = MISSING
            continue
        if key[1] == UPDATE and key[3] in before and key[3].startswith("model."):
            # Of a weight, how far the update moved it. The sum is rounded to the weight, which is far larger: where the
            # exact one lies between two numbers, the smallest change of the update chooses the other.
            base, expected = expected.double() - before[key[3]].double(), expected.double()
            difference = value.double() - expected
            is_rounding = difference.abs() <= LEAST_UNITS * FP32_ROUNDING * expected.abs()
            value = expected + difference.masked_fill(is_rounding, 0.0)
        result[key] = Distance.of(value, expected, base)
        name = parameter_of(key[3])
        if key[1] in (START, GRADIENT, UPDATE) and name in owners and owners[name].shape == value.shape:
            shards[key] = Distance.of_each(value, expected, base, owners[name])
    return result, shards


def parameter_of(name: str) -> str:
    """Return the parameter that an entry of the state of a training belongs to, such as `optim.weight.exp_avg`."""
    if name.startswith("optim."):
        return name.removeprefix("optim.").rpartition(".")[0]
    return name.removeprefix("model.").removeprefix("average.")


def judged(rows: Iterable[Row], plan: str, block_names: Sequence[str]) -> list[Deviation]:
    """Return every row with its excess over what roundings explain, in the order in which the numbers arise."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    same: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.key[:2]].append(row)  # of one part of one step, whose errors are spread over elements alike
        same[row.key[:4]].append(row)  # the micro-batches, and the ranks, of one tensor
    spreads = {key: {name: _spread(group, name) for name in ("scale", "offset")} for key, group in groups.items()}
    found = []
    for row in (row for group in groups.values() for row in group):
        # How large roundings make each distance: those of repetitions, and of a scale or an offset also what the size
        # of the errors lets expect of the sum of so many elements.
        noise = [each for other in same[row.key[:4]] for each in other.noise]
        coarse = [each for other in same[row.key[:4]] for each in other.coarse]
        floor = 0.0 if row.key[1] in (START, SAMPLES) else LEAST_UNITS * FP32_ROUNDING
        sizes = {name: max((getattr(each, name) for each in noise), default=0.0) for name in ("size", "element")}
        jumps = {name: max((getattr(each, name) for each in coarse), default=0.0) for name in sizes}
        limits = {name: max(floor, MOST_NOISE * sizes[name], MOST_JUMPS * jumps[name]) for name in sizes}
        for name, how_spread in spreads[row.key[:2]].items() if row.elements > 1 else ():  # of one, they are its size
            repeated = _rms([getattr(each, name) for each in noise])
            limits[name] = max(floor, MOST_SIGMAS * max(repeated, how_spread * sizes["size"] / row.elements**0.5))
        distances = {name: abs(getattr(row.found, name)) for name in limits}
        excess = {n: d / limits[n] if limits[n] else math.inf if d else 0.0 for n, d in distances.items()}
        measure = max(excess, key=lambda name: excess[name])
        ranks = _ranks(row, same[row.key[:4]], measure)
        step, part, block, tensor, micro_batch = row.key
        found.append(
            Deviation(
                plan=plan,
                step=step + 1,
                part=PARTS[part],
                block=block,
                block_name=block_names[block],
                tensor=tensor.removeprefix("model."),
                micro_batch=None if micro_batch < 0 else micro_batch,
                rank=ranks[0],
                ranks=tuple(sorted(ranks)),
                size=row.found.size,
                noise=sizes["size"],
                bound=limits["size"],
                factor=1 + row.found.scale,
                excess=excess[measure],
                distance=getattr(row.found, measure),
                measure=measure,
            )
        )
    return sorted(found, key=lambda each: (each.order, -each.excess))


def _ranks(row: Row, others: Sequence[Row], measure: str) -> list[int]:
    """Return the ranks on which a tensor differs, in one of the four distances, at least half as much as where most.

    The first is the row's own, or that of the shard that differs most.
    """
    alike = [other for other in others if other.key == row.key and other.rank != row.rank]
    own = row.held or ((row.rank, row.found),)
    each = [*own, *(part for other in alike for part in other.held or ((other.rank, other.found),))]
    sizes = {rank: abs(getattr(distance, measure)) for rank, distance in reversed(each)}
    first = max((rank for rank, _ in own), key=lambda rank: sizes[rank])
    return [first, *(rank for rank, size in sizes.items() if rank != first and size >= sizes[first] / 2)]


def _spread(rows: Iterable[Row], name: str) -> float:
    """Return how much larger a scale or an offset is than it would be if the errors of elements were independent."""
    found = [
        getattr(each, name) * row.elements**0.5 / each.size
        for row in rows
        for each in row.noise
        if 0 < each.size < math.inf
    ]
    return _rms(found)


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else 0.0


def first_fault(found: Sequence[Deviation]) -> Deviation | None:
    """Return where the deviations of a plan, in their order, first exceed what roundings explain; None if nowhere.

    What a block sends or passes back wrongly goes on to others, of which a large tensor shows more than a small one.
    A block just before it that comes near the limit, on a rank of the fault, is therefore part of it. First values and
    updates are wrong where they are. Of the block where the fault begins, the tensor that shows most is returned.
    """
    first = next((each for each in found if each.excess > 1), None)
    if first is None:
        return None
    worst: dict[tuple[int, int, int], Deviation] = {}
    for each in found:
        if each.order not in worst or each.excess > worst[each.order].excess:
            worst[each.order] = each
    orders = sorted(worst)
    at = orders.index(first.order)
    spreads = first.order[1] in (_ORDER[OUTPUT], _ORDER[GRADIENT])
    while at and spreads and orders[at - 1][:2] == first.order[:2]:
        before = worst[orders[at - 1]]
        if before.excess <= SUSPECT or not {*before.ranks} & {*first.ranks}:
            break
        at -= 1
    return worst[orders[at]]


def to_json(deviation: Deviation) -> dict[str, Any]:
    """Return the fields of a deviation, with infinite numbers as text."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(deviation).items()}


def from_json(value: Mapping[str, Any]) -> Deviation:
    """Return the deviation that `to_json` describes."""
    floats = {each.name for each in fields(Deviation) if each.type == "float"}
    plain: dict[str, Any] = {name: float(each) if name in floats else each for name, each in value.items()}
    plain["ranks"] = tuple(plain["ranks"])
    return Deviation(**plain)
