"""How much of a stage is recomputed: levels of activation checkpointing, from no block to all of them.

Level 0 recomputes every block of a stage by the first of some kinds (none, say). Each level more moves one block to the
next kind: the first, then the second, …; after all of them, the first again to the kind after that (selective, then
full). So a stage has at most two kinds, the heavier one in its first blocks: their own worst moment comes when the
blocks after them are freed. (Megatron-LM's `--recompute-num-layers` counts from the first layer, too.)

Blocks of one kind in a row are a stage of their own to what adds up along a stage, time and bytes: `[i, j]` recomputed
in two ways is `[i, middle]` of one kind and `[middle, j]` of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.cost.memory import Activations

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Mixed:
    """Stages by number, or arrays of one shape: blocks `first … middle - 1` of a stage are recomputed by kind
    `heavier`, and `middle … end - 1` by kind `lighter`."""

    first: Any
    middle: Any
    end: Any
    heavier: Any
    lighter: Any

    @staticmethod
    def at(first: Any, end: Any, level: Any) -> Mixed:
        """Stages `[first, end]` at their levels."""
        blocks = end - first
        lighter = np.maximum(level - 1, 0) // blocks
        middle = first + level - lighter * blocks
        return Mixed(first, middle, end, np.where(middle > first, lighter + 1, lighter), lighter)

    @staticmethod
    def everything(blocks: int) -> Mixed:
        """All blocks as one stage, by the first kind; numbers, not arrays."""
        return Mixed(0, blocks, blocks, 0, 0)

    def whole(self, matrix: Array) -> Array:
        """Of each stage, what does not depend on recomputation: from `matrix[i, j]`."""
        return np.asarray(matrix[self.first, self.end])

    def sum(self, matrices: Array) -> Array:
        """Of each stage, what its blocks add up to: from `matrices[kind, i, j]`."""
        early, late = self.places(matrices.shape[-1])
        return np.asarray(matrices.take(early) + matrices.take(late))

    def activations(self, of_kinds: Activations) -> Activations:
        return joined(of_kinds, *self.places(of_kinds.held.shape[-1]))

    def places(self, ends: int) -> tuple[Any, Any]:
        """Of the earlier blocks of each stage and of the later ones, the place in matrices `[kind, i, j]`, flat."""
        early = (self.heavier * ends + self.first) * ends + self.middle
        return early, (self.lighter * ends + self.middle) * ends + self.end


class Uniform:
    """Every stage `[i, j]`, all of its blocks by the first kind: matrices as they are."""

    def whole(self, matrix: Array) -> Array:
        return matrix

    def sum(self, matrices: Array) -> Array:
        return np.asarray(matrices[0])


def joined(of_kinds: Activations, early: Any, late: Any) -> Activations:
    """Of stages in two parts. While the later blocks run backward, the earlier ones hold what they keep; when those
    run, the later ones are freed."""
    kept = of_kinds.held.take(early)
    return Activations(
        held=kept + of_kinds.held.take(late),
        newest=np.maximum(of_kinds.newest.take(early), kept + of_kinds.newest.take(late)),
    )


class Levels:
    """Every stage of at most `longest` blocks that a cut into `stages` may have, at every level, as flat arrays: a
    stage's levels in a row, stages by their first block."""

    def __init__(self, blocks: int, kinds: int, stages: int, longest: int) -> None:
        first, end = np.triu_indices(blocks + 1, 1)
        possible = end - first <= longest
        if stages <= 2:  # there are no stages between the first and the last
            possible &= (first == 0) | (end == blocks)
        self._blocks, self._stages = blocks, stages
        self._first, self._end = first[possible], end[possible]
        self._sizes = (kinds - 1) * (self._end - self._first) + 1
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)])
        level = np.arange(self._starts[-1]) - np.repeat(self._starts[:-1], self._sizes)
        every = Mixed.at(np.repeat(self._first, self._sizes), np.repeat(self._end, self._sizes), level)
        self._places = every.places(blocks + 1)

    def whole(self, matrix: Array) -> Array:
        """As `Mixed.whole`, of every stage at every level."""
        return np.repeat(matrix[self._first, self._end], self._sizes)

    def sum(self, matrices: Array) -> Array:
        early, late = self._places
        return np.asarray(matrices.take(early) + matrices.take(late))

    def activations(self, of_kinds: Activations) -> Activations:
        return joined(of_kinds, *self._places)

    def part(self, earliest: int, latest: int) -> Part:
        """Those that can be stage `earliest` … `latest` of the cut, by where they begin."""
        last = self._blocks - self._stages + latest if latest else 0
        begin, end = np.searchsorted(self._first, [earliest, last + 1])
        starts = self._starts[begin : end + 1]
        return Part(self._blocks, self._first[begin:end], self._end[begin:end], slice(starts[0], starts[-1]), starts)


@dataclass(frozen=True)
class Part:
    """Some of the stages of `Levels`."""

    blocks: int
    first: Indices
    end: Indices
    of_all: slice
    """Their place in the flat arrays."""
    ends: Indices

    @cached_property
    def _starts(self) -> Indices:
        return np.asarray(self.ends[:-1] - self.ends[0])

    @cached_property
    def _last(self) -> Indices:
        return np.asarray(self.ends[1:] - self.ends[0] - 1)

    def least(self, values: Array) -> Array:
        """`[i, j]`: the least of each stage's flat values; infinity for others."""
        return self.matrix(np.minimum.reduceat(values, self._starts))

    def lowest(self, values: Array, cap: float) -> tuple[Indices, Array, Array]:
        """Where in the flat arrays of these stages each is at the lowest level whose value is at most `cap` (the
        highest, where none is); and as matrices `[i, j]` these levels, and their values: infinity where none is."""
        fitting = np.append(np.flatnonzero(values <= cap), len(values))
        found = fitting[np.searchsorted(fitting, self._starts)]
        place = np.minimum(found, self._last)
        at_place = np.where(found <= self._last, values[place], np.inf)
        return place, self.matrix(place - self._starts), self.matrix(at_place)

    def matrix(self, values: npt.NDArray[Any]) -> Array:
        """`[i, j]`: one value a stage; infinity for others."""
        matrix = np.full((self.blocks + 1, self.blocks + 1), np.inf)
        matrix[self.first, self.end] = values
        return matrix


@lru_cache(maxsize=32)
def levels_of(blocks: int, kinds: int, stages: int, longest: int) -> Levels:
    return Levels(blocks, kinds, stages, longest)


@lru_cache(maxsize=32)
def activations_of_levels(of_kinds: Activations, levels: Levels) -> Activations:
    """Kept, because options that differ in what they shard share it."""
    return levels.activations(of_kinds)
