"""Activation checkpointing of stages: levels, from no block recomputed to all of them.

Level 0 recomputes every block of a stage in the first mode (none, say). Each further level moves one block to the next
mode: the first block, then the second, …; after all of them, the first again to the mode after that (selective, then
full). So a stage has at most two modes, the heavier one in its first blocks: their own worst moment comes when the
blocks after them are freed. (Megatron-LM's `--recompute-num-layers` counts from the first layer, too.)

For time and bytes, which add up along a stage, consecutive blocks of one mode are a stage of their own: `[i, j]` with
two modes is `[i, middle]` in one mode and `[middle, j]` in the other.
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
class MixedStages:
    """Stages as arrays of one shape: blocks `first … middle - 1` of each are recomputed in mode `heavier`, and blocks
    `middle … end - 1` in mode `lighter`. Plain numbers make one stage."""

    first: Any
    middle: Any
    end: Any
    heavier: Any
    lighter: Any

    @staticmethod
    def at(first: Any, end: Any, level: Any) -> MixedStages:
        """Return stages `[first, end]` at their levels."""
        blocks = end - first
        lighter = np.maximum(level - 1, 0) // blocks
        middle = first + level - lighter * blocks
        return MixedStages(first, middle, end, np.where(middle > first, lighter + 1, lighter), lighter)

    @staticmethod
    def whole_model(blocks: int) -> MixedStages:
        """Return all blocks as one stage in the first mode."""
        return MixedStages(0, blocks, blocks, 0, 0)

    @staticmethod
    def every(blocks: int) -> MixedStages:
        """Return every stage `[i, j]` with all of its blocks in the first mode: matrices as they are."""
        first, end = np.indices((blocks + 1, blocks + 1))
        return MixedStages(first, end, end, 0, 0)

    def whole(self, matrix: Array) -> Array:
        """Return, for each stage, a value of `matrix[i, j]` that does not depend on recomputation."""
        return np.asarray(matrix[self.first, self.end])

    def sum(self, matrices: Array) -> Array:
        """Return, for each stage, the sum over its blocks of `matrices[mode, i, j]`."""
        early, late = self.positions(matrices.shape[-1])
        return np.asarray(matrices.take(early) + matrices.take(late))

    def activations(self, of_modes: Activations) -> Activations:
        return joined(of_modes, *self.positions(of_modes.held.shape[-1]))

    def positions(self, ends: int) -> tuple[Any, Any]:
        """Return the flat positions in matrices `[mode, i, j]` of each stage's earlier and later blocks."""
        early = (self.heavier * ends + self.first) * ends + self.middle
        return early, (self.lighter * ends + self.middle) * ends + self.end


def joined(of_modes: Activations, early: Any, late: Any) -> Activations:
    """Return the activations of stages in two modes.

    While the later blocks run backward, the earlier ones hold their activations; when those run, the later ones are
    freed.
    """
    early_held = of_modes.held.take(early)
    return Activations(
        held=early_held + of_modes.held.take(late),
        newest=np.maximum(of_modes.newest.take(early), early_held + of_modes.newest.take(late)),
    )


class LevelledStages:
    """Every stage of at most `longest` blocks that a cut into `stages` may have, at every level.

    Values are flat arrays: a stage's levels in a row, stages ordered by their first block.
    """

    def __init__(self, blocks: int, modes: int, stages: int, longest: int) -> None:
        first, end = np.triu_indices(blocks + 1, 1)
        possible = end - first <= longest
        if stages <= 2:  # there are no stages between the first and the last
            possible &= (first == 0) | (end == blocks)
        self._blocks, self._stages = blocks, stages
        self._first, self._end = first[possible], end[possible]
        self._sizes = (modes - 1) * (self._end - self._first) + 1
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)])
        level = np.arange(self._starts[-1]) - np.repeat(self._starts[:-1], self._sizes)
        every = MixedStages.at(np.repeat(self._first, self._sizes), np.repeat(self._end, self._sizes), level)
        self._positions = every.positions(blocks + 1)

    def whole(self, matrix: Array) -> Array:
        return np.repeat(matrix[self._first, self._end], self._sizes)

    def sum(self, matrices: Array) -> Array:
        early, late = self._positions
        return np.asarray(matrices.take(early) + matrices.take(late))

    def activations(self, of_modes: Activations) -> Activations:
        return joined(of_modes, *self._positions)

    def between(self, earliest: int, latest: int) -> StageRange:
        """Return those that can be stage `earliest` … `latest` of the cut, by the block that they begin with."""
        last = self._blocks - self._stages + latest if latest else 0
        begin, end = np.searchsorted(self._first, [earliest, last + 1])
        starts = self._starts[begin : end + 1]
        return StageRange(
            self._blocks, self._first[begin:end], self._end[begin:end], slice(starts[0], starts[-1]), starts
        )


Stages = MixedStages | LevelledStages


@dataclass(frozen=True)
class StageRange:
    """Some of the stages of `LevelledStages`: one slice of its flat arrays."""

    blocks: int
    first: Indices
    end: Indices
    flat: slice
    ends: Indices

    @cached_property
    def _starts(self) -> Indices:
        return np.asarray(self.ends[:-1] - self.ends[0])

    @cached_property
    def _last(self) -> Indices:
        return np.asarray(self.ends[1:] - self.ends[0] - 1)

    def least(self, values: Array) -> Array:
        """Return `[i, j]`: the least of each stage's flat values; infinity for other stages."""
        return self.matrix(np.minimum.reduceat(values, self._starts))

    def lowest(self, values: Array, cap: float) -> tuple[Indices, Array, Array]:
        """Return the lowest level of each stage at which its value is at most `cap`.

        The result is the position in this slice's flat arrays (of the highest level, where none fits), and as matrices
        `[i, j]` these levels and their values: infinity where none fits.
        """
        fitting = np.append(np.flatnonzero(values <= cap), len(values))
        nearest = fitting[np.searchsorted(fitting, self._starts)]
        position = np.minimum(nearest, self._last)
        fitted = np.where(nearest <= self._last, values[position], np.inf)
        return position, self.matrix(position - self._starts), self.matrix(fitted)

    def matrix(self, values: npt.NDArray[Any]) -> Array:
        """Return `[i, j]`: one value for each stage; infinity for other stages."""
        matrix = np.full((self.blocks + 1, self.blocks + 1), np.inf)
        matrix[self.first, self.end] = values
        return matrix


levelled_stages = lru_cache(maxsize=32)(LevelledStages)


@lru_cache(maxsize=32)
def levelled_activations(of_modes: Activations, levels: LevelledStages) -> Activations:
    """Return cached activations, which options that differ in what they shard have in common."""
    return levels.activations(of_modes)
