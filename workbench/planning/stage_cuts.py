"""The best cut of one option: stages as fast as memory allows, each with as little recomputation as it needs to fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.base.arguments import memoised
from workbench.cost.memory import Activations, StageState, pending_gradients
from workbench.cost.profile import ADAMW
from workbench.planning.prediction import peak_holdings
from workbench.planning.stage_costs import Array, Cut, MixedStages, StrategyCosts, joined

# A row of blocks cut into stages whose largest cost is as small as can be, by dynamic programming over NumPy arrays.


SLACK = 1e-9
"""Relative difference below which two bottlenecks are the same."""


def partition(cost: Sequence[Array], memory: Sequence[Array], limit: float) -> tuple[int, ...] | None:
    """Return cut points `(0, …, n)` that minimise the largest stage cost, then the largest stage memory.

    Every stage must stay within `limit`. Both arguments have one (n + 1, n + 1) matrix per stage. The result is None
    when no cut fits. Time: O(stages · n²), twice.
    """
    # Twice, because the slowest stage alone sets the pace: many cuts are as fast as the best, and of these the one with
    # the leanest stages recomputes least.
    not_empty = _not_empty(len(cost[0]))
    within = _each(lambda c, m: np.where(not_empty & (m <= limit), c, np.inf), cost, memory)
    bottleneck, cuts = min_max(within)
    if cuts is None:
        return None
    most = bottleneck * (1 + SLACK)
    return min_max(_each(lambda c, m: np.where(c <= most, m, np.inf), within, memory))[1]


def smallest(memory: Sequence[Array]) -> float:
    """Return the largest stage memory of the cut that minimises it; infinity where every cut has an infinite stage."""
    not_empty = _not_empty(len(memory[0]))
    return min_max(_each(lambda m, _: np.where(not_empty, m, np.inf), memory, memory))[0]


def least_sum(cost: Sequence[Array]) -> float:
    """Return the least sum of stage costs of any cut."""
    not_empty = _not_empty(len(cost[0]))
    reached = np.full(len(cost[0]), np.inf)
    reached[0] = 0.0
    for stage in cost:
        reached = np.where(not_empty, reached[:, None] + stage, np.inf).min(axis=0)
    return float(reached[-1])


def _each(work: Callable[[Array, Array], Array], first: Sequence[Array], second: Sequence[Array]) -> list[Array]:
    """Return `work` for every stage, computed once for stages that share their matrices."""
    pairs = list(zip(first, second, strict=True))
    distinct = {(id(one), id(other)): (one, other) for one, other in pairs}
    done = {key: work(one, other) for key, (one, other) in distinct.items()}
    return [done[id(one), id(other)] for one, other in pairs]


@lru_cache(maxsize=16)
def _not_empty(ends: int) -> npt.NDArray[np.bool_]:
    return np.triu(np.ones((ends, ends), dtype=bool), 1)


def min_max(cost: Sequence[Array]) -> tuple[float, tuple[int, ...] | None]:
    """Return the least possible largest `cost[s][i, j]`, and the cut points that reach it; `inf` forbids a stage."""
    reached = [np.full(len(cost[0]), np.inf)]
    reached[0][0] = -np.inf
    for stage in cost:
        reached.append(np.maximum(reached[-1][:, None], stage).min(axis=0))
    best = float(reached[-1][-1])
    if not np.isfinite(best):
        return np.inf, None
    cuts = [len(cost[0]) - 1]
    for stage, before in zip(reversed(cost), reversed(reached[:-1]), strict=True):
        cuts.append(int(np.maximum(before, stage[:, cuts[-1]]).argmin()))
    return best, tuple(reversed(cuts))


Indices = npt.NDArray[np.intp]


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


CAP_STEPS = 3
"""Number of times that the cap on each of a rank's several stages is halved, where they exceed its memory together."""
LONGER_THAN_EQUAL = 1.5
"""Length of stages, relative to equal ones, up to which all levels are priced first; longer ones if they can be
faster."""


class Cutter:
    """Cuts one option. Matrices are made when they are needed, and once for stages that share them.

    A device of a stage holds what stays for the whole step (`state`: fp32 parameters, gradients, the optimiser's
    moments, copies and buffers, each divided as ZeRO and the tensor axis divide it), what the forward of each
    micro-batch in flight keeps for its backward (`held`), and for the one that runs also the largest temporary
    (`newest`): state + (count - 1) · held + newest. The number of micro-batches in flight is the schedule's.
    """

    def __init__(self, costs: StrategyCosts) -> None:
        self.costs = costs
        self.strategy = strategy = costs.strategy
        self._blocks = len(costs.profile.blocks)
        self._holdings = peak_holdings(strategy.schedule, strategy.pipeline, strategy.num_microbatches, strategy.chunks)
        self._held = [
            max(entry[stage // strategy.pipeline] for entry in self._holdings[stage % strategy.pipeline])
            for stage in range(strategy.num_stages)
        ]
        """Micro-batches that each stage holds at its own fullest moment."""
        self._host_offered = costs.cluster.host_offered_bytes
        self._sends = costs.send_ms
        self._host = (
            np.asarray(ADAMW * costs.table.trained / strategy.shard_count) if strategy.offload_optimizer else None
        )
        """`[i, j]`: optimiser state of one device in the host's memory; None where it is on the device."""

    @property
    def least_host(self) -> float:
        """Bytes of the host's memory that a device of some rank needs, whatever the cut."""
        if self._host is None:
            return 0.0
        stages = self.strategy.num_stages
        return max(smallest([self._host] * stages), float(self._host[0, -1]) / self.strategy.pipeline)

    def host_bytes(self, first: int, end: int) -> int:
        """Return the optimiser state in the host's memory of one device of the stage `[first, end]`."""
        return 0 if self._host is None else int(self._host[first, end])

    @cached_property
    def state(self) -> StageState:
        return self.costs.state()

    @cached_property
    def _fitting_state(self) -> Array:
        """`state.total`; infinite where the optimiser's state does not fit the host."""
        state = self.state.total
        return state if self._host is None else np.where(self._host <= self._host_offered, state, np.inf)

    @cached_property
    def _activations(self) -> Activations:
        return self.costs.activations()

    def best(self, offered: float) -> tuple[Cut | None, float]:
        """Return the best cut within `offered` bytes per device, and the bytes of its fullest device.

        Without one, return None and the least bytes that any cut needs: infinity, where no cut fits the host's memory.
        """
        newest = self._activations.newest[0, 0, -1]
        together = float(self.state.total[0, -1] + newest)  # no pipeline's devices hold less in all
        if together <= offered * self.strategy.pipeline:
            cut = self._fastest_cut()
            if cut is not None and max(cut.peaks) <= offered:  # where it fits as it is, no other cut is better
                return cut, max(cut.peaks)
        if self.least * (1 - SLACK) > offered:
            return None, self.least
        cut = self._cut_within(offered)
        if cut is None:
            return None, self._least_fullest_stage()
        return (cut, max(cut.peaks)) if max(cut.peaks) <= offered else self._tighter(offered, cut)

    def leanest(self) -> tuple[float, int]:
        """Return the bytes of the fullest device of a cut that needs little, and the pipeline rank of that device.

        No cut needs less where ranks have one stage each.
        """
        cut = self._cut_within(self._least_fullest_stage())
        return (np.inf, 0) if cut is None else max((peak, rank) for rank, peak in enumerate(cut.peaks))

    def fullest_moment(self, rank: int, cut: Cut) -> tuple[list[float], tuple[int, ...]]:
        """Return the bytes of each of a rank's stages at its fullest moment, and the entry of `peak_holdings` it is."""
        mine = slice(rank, None, self.strategy.pipeline)
        state = cut.stages.whole(self.state.total)[mine].tolist()
        activations = cut.stages.activations(self._activations)
        held, newest = activations.held[mine].tolist(), activations.newest[mine].tolist()
        best, moment = list[float](), self._holdings[rank][0]
        for entry in self._holdings[rank]:
            *counts, running = entry
            stages = []
            for chunk, count in enumerate(counts):
                with_newest = (count - 1) * held[chunk] + newest[chunk]
                stages.append(state[chunk] + (with_newest if chunk == running else count * held[chunk]))
            if sum(stages) > sum(best, 0.0):
                best, moment = stages, entry
        return best, moment

    def gradients_to_come(self, cut: Cut, stage: int) -> float:
        """Return the bytes of a stage's gradients that do not exist yet at its rank's fullest moment.

        They are those of the blocks yet to run backward, if the moment is in the stage's own backward, and all of them
        where another stage of the rank runs before it.
        """
        mixed = cut.stages
        blocks = np.arange(cut.cuts[stage], cut.cuts[stage + 1])
        pending = pending_gradients(self.costs.profile, self.costs.table, self.strategy)[blocks]
        chunk, rank = divmod(stage, self.strategy.pipeline)
        *counts, running = self.fullest_moment(rank, cut)[1]
        if chunk != running:
            return float(pending.sum()) if counts[chunk] else 0.0
        modes = np.where(blocks < mixed.middle[stage], mixed.heavier[stage], mixed.lighter[stage])
        each = MixedStages(blocks, blocks + 1, blocks + 1, modes, modes).activations(self._activations)
        fullest = int((each.held.cumsum() - each.held + each.newest).argmax())
        return float(pending[:fullest].sum())

    # Lower bounds of every cut

    @cached_property
    def least(self) -> float:
        """Lower bound of the fullest device of any cut: every block in the mode that holds least of it."""
        if self.strategy.chunks == 1:
            return self._least_alone
        # Each device has several stages. A weighted mean over devices is no more than their maximum, and its least is
        # found stage by stage.
        least = self._least_activations
        fullest = [max(entries, key=lambda entry: sum(entry[:-1])) for entries in self._holdings]
        weights = [sum(entry[:-1]) ** -0.5 for entry in fullest]
        stages = []
        for stage in range(self.strategy.num_stages):
            rank, chunk = stage % self.strategy.pipeline, stage // self.strategy.pipeline
            count, running = fullest[rank][chunk], fullest[rank][-1] == chunk
            held = least.of(count) if running else count * least.held
            stages.append(weights[rank] * (self._fitting_state + held))
        return max(self._least_alone, float(least_sum(stages) / sum(weights)))

    @cached_property
    def _least_activations(self) -> Activations:
        least = self._activations.least
        assert least is not None
        return least

    @cached_property
    def _least_alone(self) -> float:
        """Lower bound of the fullest stage of any cut."""
        each = {count: self._fitting_state + self._least_activations.of(count) for count in set(self._held)}
        return smallest([each[count] for count in self._held])

    # Cuts

    def _fastest_cut(self) -> Cut | None:
        """Return the cut whose slowest stage is fastest with every block in the first mode, whatever its memory."""
        first = Activations(self._activations.held[0], self._activations.newest[0])
        peaks = {count: self._fitting_state + first.of(count) for count in set(self._held)}
        cuts = self._partition(dict.fromkeys(peaks, self.costs.busy), peaks, np.inf)
        return None if cuts is None else self._cut(cuts, (0,) * self.strategy.num_stages)

    def _cut_within(self, cap: float) -> Cut | None:
        """Return the cut whose slowest stage is fastest, each stage within `cap` at the lowest level that fits."""
        if cap < self._least_alone * (1 - SLACK):
            return None
        # The best cuts have nearly equal stages. These are priced first, then stages up to twice as long, …, then all.
        most = self._blocks - self.strategy.num_stages + 1
        longest = int(LONGER_THAN_EQUAL * self._blocks / self.strategy.num_stages) + 1
        limits = [most]
        while self.strategy.num_stages > 2 and longest < most:
            limits.insert(-1, longest)
            longest *= 2
        for longest in limits:
            cut, slowest = self._cut_of(self._priced_up_to(longest), cap)
            if cut is None:
                continue
            least_longer = self.costs.busy[_longer(self._blocks, longest)].min(initial=np.inf)
            if float(least_longer) > slowest * (1 + 2 * SLACK):  # no longer stage is faster, whatever it recomputes
                break
        return cut

    def _cut_of(self, priced: _Priced, cap: float) -> tuple[Cut | None, float]:
        """Return the best cut into the stages that were priced, and the milliseconds of its slowest stage."""
        busy, levels, peaks = {}, {}, {}
        for count, stages in priced.ranges.items():
            position, levels[count], peaks[count] = stages.lowest(priced.peak(count), cap)
            busy[count] = stages.matrix(priced.busy[stages.flat][position])
        cuts = self._partition(busy, peaks, cap)
        if cuts is None:
            return None, np.inf
        spans = list(zip(self._held, self._sends, pairwise(cuts), strict=True))
        slowest = max(float(busy[count][span] + send[span[1]]) for count, send, span in spans)
        return self._cut(cuts, tuple(int(levels[count][span]) for count, _, span in spans)), slowest

    @memoised
    def _priced_up_to(self, longest: int) -> _Priced:
        levels = levelled_stages(self._blocks, len(self.costs.model.modes), self.strategy.num_stages, longest)
        last = len(self._held) - 1
        return _Priced(
            levels.whole(self._fitting_state),
            levelled_activations(self._activations, levels),
            self.costs.times(levels).busy,
            {
                count: levels.between(self._held.index(count), last - self._held[::-1].index(count))
                for count in set(self._held)
            },
        )

    def _least_fullest_stage(self) -> float:
        """Return the bytes of the fullest stage of the cut that minimises them."""
        priced = self._priced_up_to(self._blocks - self.strategy.num_stages + 1)
        least = {count: stages.least(priced.peak(count)) for count, stages in priced.ranges.items()}
        return smallest([least[count] for count in self._held])

    def _partition(self, busy: Mapping[int, Array], peaks: Mapping[int, Array], cap: float) -> tuple[int, ...] | None:
        """Return the cut points; `busy` and `peaks` are given by the micro-batches that a stage holds."""
        costs: dict[tuple[int, int], Array] = {}
        for count, send in zip(self._held, self._sends, strict=True):
            if (count, id(send)) not in costs:
                costs[count, id(send)] = busy[count] + send
        return partition(
            [costs[count, id(send)] for count, send in zip(self._held, self._sends, strict=True)],
            [peaks[count] for count in self._held],
            cap,
        )

    def _cut(self, cuts: tuple[int, ...], levels: tuple[int, ...]) -> Cut:
        """Return a cut with its peaks: infinity where the optimiser state of a rank's device does not fit the host."""
        cut, ranks, peaks = Cut(cuts, levels), self.strategy.pipeline, list[float]()
        for rank in range(ranks):
            spans, host = list(pairwise(cuts))[rank::ranks], self._host
            fits = host is None or sum(float(host[span]) for span in spans) <= self._host_offered
            peaks.append(sum(self.fullest_moment(rank, cut)[0]) if fits else np.inf)
        return replace(cut, peaks=tuple(peaks))

    def _tighter(self, offered: float, first: Cut) -> tuple[Cut | None, float]:
        """Return the cut under the largest cap on each stage with which the stages of every rank fit together."""
        low, high = offered / self.strategy.chunks, offered
        best, least = None, max(first.peaks)
        for step in range(CAP_STEPS + 1):
            cap = low if step == 0 else (low + high) / 2
            cut = self._cut_within(cap)
            fits = cut is not None and max(cut.peaks) <= offered
            least = least if cut is None else min(least, max(cut.peaks))
            best = cut if fits else best
            if fits or cut is None:
                low = cap
            else:
                high = cap
        return best, max(best.peaks) if best else least


@lru_cache(maxsize=64)
def _longer(blocks: int, longest: int) -> tuple[Indices, ...]:
    """Return the positions, in a matrix `[i, j]`, of stages of more than `longest` blocks."""
    return np.triu_indices(blocks + 1, longest + 1)


@dataclass(frozen=True, eq=False)
class _Priced:
    """Stages at every level, as flat arrays, for one option."""

    state: Array
    activations: Activations
    busy: Array
    ranges: Mapping[int, StageRange]
    """Stages that can hold each number of micro-batches."""

    @memoised
    def peak(self, count: int) -> Array:
        """Return the bytes, while they run, of the stages that can hold `count` micro-batches."""
        flat, held = self.ranges[count].flat, self.activations
        return self.state[flat] + ((count - 1) * held.held[flat] + held.newest[flat])
