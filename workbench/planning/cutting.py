"""The best cut of one option: its stages as fast as can be within memory, each with the recomputation it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from workbench.cost.memory import ADAMW, Activations, StageState
from workbench.planning.checkpointing import Indices, Mixed, Part, activations_of_levels, levels_of
from workbench.planning.partition import SLACK, least_sum, partition, smallest
from workbench.planning.pricing import Array, Degrees, Pricer
from workbench.planning.schedules import holdings

CAP_STEPS = 3
"""Halvings of what each of a rank's several stages may take, when together they take too much."""
LONGER_THAN_EQUAL = 1.5
"""Stages up to so much longer than equal ones are priced at every level first; longer ones if they can be faster."""


@dataclass(frozen=True)
class Cut:
    """Stages of one option."""

    cuts: tuple[int, ...]
    levels: tuple[int, ...]
    """Of activation checkpointing, of each stage: see `workbench.planning.checkpointing`."""
    peaks: tuple[float, ...] = ()
    """Bytes of one device of each pipeline rank."""

    @cached_property
    def stages(self) -> Mixed:
        return Mixed.at(np.array(self.cuts[:-1]), np.array(self.cuts[1:]), np.array(self.levels))


class Cutter:
    """Cuts one option. Matrices are made when they are needed, and once for stages that are alike."""

    def __init__(self, pricer: Pricer, degrees: Degrees) -> None:
        self.degrees = degrees
        self._pricer = pricer
        self._blocks = len(pricer.profile.blocks)
        self._holdings = holdings(degrees.schedule, degrees.pipeline, degrees.num_microbatches, degrees.chunks)
        self._held = [
            max(entry[stage // degrees.pipeline] for entry in self._holdings[stage % degrees.pipeline])
            for stage in range(degrees.stages)
        ]
        """Micro-batches that each stage holds at its own fullest moment."""
        self._host_offered = pricer.cluster.host_offered_bytes
        self._sends = pricer.send_ms(degrees)
        self._host = self._host_bytes()
        self._priced: dict[int, _Priced] = {}

    def _host_bytes(self) -> Array | None:
        """Of every stage, optimiser state of one device in the host's memory; None where it is on the device."""
        if not self.degrees.offload_optimizer:
            return None
        shard = self.degrees.data if self.degrees.zero >= 1 else 1
        return np.asarray(ADAMW * self._pricer.table(self.degrees).trained / shard)

    @property
    def least_host(self) -> float:
        """Bytes of the host's memory that a device of some rank needs, whatever the cut."""
        if self._host is None:
            return 0.0
        return max(smallest([self._host] * self.degrees.stages), float(self._host[0, -1]) / self.degrees.pipeline)

    @cached_property
    def state(self) -> StageState:
        return self._pricer.state(self.degrees)

    @cached_property
    def _fitting_state(self) -> Array:
        """`state.total`; infinite where the optimiser's state does not fit the host."""
        state = self.state.total
        return state if self._host is None else np.where(self._host <= self._host_offered, state, np.inf)

    @cached_property
    def _activations(self) -> Activations:
        return self._pricer.activations(self.degrees)

    @cached_property
    def _busy(self) -> Array:
        """Of every stage, nothing recomputed that need not be."""
        return self._pricer.busy(self.degrees)

    def best(self, offered: float) -> tuple[Cut | None, float]:
        """The best cut within `offered` bytes a device, and the bytes of its fullest; or None, and the least that any
        needs: infinity, where it is the host's memory that none fits."""
        newest = self._activations.newest[0, 0, -1]
        together = float(self.state.total[0, -1] + newest)  # no pipeline's devices hold less in all
        if together <= offered * self.degrees.pipeline:
            cut = self._as_fast_as_can_be()
            if cut is not None and max(cut.peaks) <= offered:  # where it fits as it is, no other cut is better
                return cut, max(cut.peaks)
        if self.least * (1 - SLACK) > offered:
            return None, self.least
        cut = self._within(offered)
        if cut is None:
            return None, self._least_of_one()
        return (cut, max(cut.peaks)) if max(cut.peaks) <= offered else self._tighter(offered, cut)

    def leanest(self) -> float:
        """Bytes of the fullest device of a cut that needs little; no cut needs less where ranks have one stage each."""
        cut = self._within(self._least_of_one())
        return np.inf if cut is None else max(cut.peaks)

    def shares(self, rank: int, cut: Cut) -> list[float]:
        """Bytes of each of a rank's stages at the rank's fullest moment, by the schedule's own order of actions."""
        return self._fullest_moment(rank, cut)[0]

    def _fullest_moment(self, rank: int, cut: Cut) -> tuple[list[float], tuple[int, ...]]:
        """See `shares`; and which of `holdings` that moment is."""
        mine = slice(rank, None, self.degrees.pipeline)
        state = cut.stages.whole(self.state.total)[mine].tolist()
        activations = cut.stages.activations(self._activations)
        held, newest = activations.held[mine].tolist(), activations.newest[mine].tolist()
        best, moment = list[float](), self._holdings[rank][0]
        for entry in self._holdings[rank]:
            *counts, running = entry
            parts = []
            for chunk, count in enumerate(counts):
                of_running = (count - 1) * held[chunk] + newest[chunk]
                parts.append(state[chunk] + (of_running if chunk == running else count * held[chunk]))
            if sum(parts) > sum(best, 0.0):
                best, moment = parts, entry
        return best, moment

    def gradients_to_come(self, cut: Cut, stage: int) -> float:
        """Bytes of a stage's gradients that are not there yet at its rank's fullest moment: of the blocks yet to
        run backward, if it is its own backward; of all, where another stage of the rank runs before it."""
        shares, mixed = self._pricer.shares(self.degrees), cut.stages
        blocks = np.arange(cut.cuts[stage], cut.cuts[stage + 1])
        own_trained = self._pricer.table(self.degrees).own_trained[blocks]
        chunk, rank = divmod(stage, self.degrees.pipeline)
        *counts, running = self._fullest_moment(rank, cut)[1]
        if chunk != running:
            return shares.coming_bytes * float(own_trained.sum()) if counts[chunk] else 0.0
        kinds = np.where(blocks < mixed.middle[stage], mixed.heavier[stage], mixed.lighter[stage])
        each = Mixed(blocks, blocks + 1, blocks + 1, kinds, kinds).activations(self._activations)
        fullest = int((each.held.cumsum() - each.held + each.newest).argmax())
        return shares.coming_bytes * float(own_trained[:fullest].sum())

    # What no cut is below

    @property
    def least(self) -> float:
        """No cut's fullest device holds less: every block by the kind that keeps least of it, whatever the mixture."""
        return max(self._least_alone, self._least_together)

    @cached_property
    def _least_activations(self) -> Activations:
        least = self._activations.least
        assert least is not None
        return least

    @cached_property
    def _least_alone(self) -> float:
        """No cut's fullest stage holds less."""
        each = {count: self._fitting_state + self._least_activations.of(count) for count in set(self._held)}
        return smallest([each[count] for count in self._held])

    @cached_property
    def _least_together(self) -> float:
        """Where each device has several stages: a weighted mean over devices is no more than their maximum, and its
        least is found stage by stage."""
        if self.degrees.chunks == 1:
            return 0.0
        found = self._least_activations
        fullest = [max(entries, key=lambda entry: sum(entry[:-1])) for entries in self._holdings]
        weights = [sum(entry[:-1]) ** -0.5 for entry in fullest]
        stages = []
        for stage in range(self.degrees.stages):
            rank, chunk = stage % self.degrees.pipeline, stage // self.degrees.pipeline
            count, running = fullest[rank][chunk], fullest[rank][-1] == chunk
            held = found.of(count) if running else count * found.held
            stages.append(weights[rank] * (self._fitting_state + held))
        return float(least_sum(stages) / sum(weights))

    # Cuts

    def _as_fast_as_can_be(self) -> Cut | None:
        """The cut whose slowest stage is fastest, nothing recomputed that need not be, whatever memory that takes."""
        first = Activations(self._activations.held[0], self._activations.newest[0])
        peaks = {count: self._fitting_state + first.of(count) for count in set(self._held)}
        cuts = self._partition(dict.fromkeys(peaks, self._busy), peaks, np.inf)
        return None if cuts is None else self._cut(cuts, (0,) * self.degrees.stages)

    def _within(self, cap: float) -> Cut | None:
        """The cut whose slowest stage is fastest, each stage within `cap` at the lowest level that fits."""
        if cap < self._least_alone * (1 - SLACK):
            return None
        for longest in self._lengths():
            cut, slowest = self._within_of(self._priced_up_to(longest), cap)
            if cut is not None and self._least_busy_of_longer(longest) > slowest * (1 + 2 * SLACK):
                break
        return cut

    def _lengths(self) -> Iterator[int]:
        """Most blocks of a stage: first a few more than of equal stages, then twice as many, …, then what there is."""
        most = self._blocks - self.degrees.stages + 1
        longest = int(LONGER_THAN_EQUAL * self._blocks / self.degrees.stages) + 1
        while self.degrees.stages > 2 and longest < most:
            yield longest
            longest *= 2
        yield most

    def _least_busy_of_longer(self, longest: int) -> float:
        """No stage of more blocks is faster, whatever it recomputes."""
        return float(self._busy[_longer(self._blocks, longest)].min(initial=np.inf))

    def _within_of(self, priced: _Priced, cap: float) -> tuple[Cut | None, float]:
        """Of the stages priced; with the milliseconds of its slowest."""
        busy, levels, peaks = {}, {}, {}
        for count, part in priced.parts.items():
            place, levels[count], peaks[count] = part.lowest(priced.peak(count), cap)
            busy[count] = part.matrix(priced.busy[part.of_all][place])
        cuts = self._partition(busy, peaks, cap)
        if cuts is None:
            return None, np.inf
        stages = list(zip(self._held, self._sends, pairwise(cuts), strict=True))
        slowest = max(float(busy[count][span] + send[span[1]]) for count, send, span in stages)
        return self._cut(cuts, tuple(int(levels[count][span]) for count, _, span in stages)), slowest

    def _priced_up_to(self, longest: int) -> _Priced:
        if longest not in self._priced:
            levels = levels_of(self._blocks, len(self._pricer.kinds), self.degrees.stages, longest)
            self._priced[longest] = _Priced(
                levels.whole(self._fitting_state),
                activations_of_levels(self._activations, levels),
                self._pricer.times(self.degrees, levels).busy,
                {
                    count: levels.part(self._held.index(count), len(self._held) - 1 - self._held[::-1].index(count))
                    for count in set(self._held)
                },
            )
        return self._priced[longest]

    def _least_of_one(self) -> float:
        """Of all cuts, the least that the fullest stage holds."""
        priced = self._priced_up_to(self._blocks - self.degrees.stages + 1)
        least = {count: part.least(priced.peak(count)) for count, part in priced.parts.items()}
        return smallest([least[count] for count in self._held])

    def _partition(self, busy: Mapping[int, Array], peaks: Mapping[int, Array], cap: float) -> tuple[int, ...] | None:
        """Both by the micro-batches that a stage holds."""
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
        cut = Cut(cuts, levels)
        return replace(cut, peaks=tuple(self._fullest(rank, cut) for rank in range(self.degrees.pipeline)))

    def _fullest(self, rank: int, cut: Cut) -> float:
        """Bytes of a device of a rank; infinity where its optimiser state does not fit the host."""
        if self._host is not None:
            spans = list(pairwise(cut.cuts))[rank :: self.degrees.pipeline]
            if sum(float(self._host[span]) for span in spans) > self._host_offered:
                return np.inf
        return sum(self.shares(rank, cut))

    def _tighter(self, offered: float, first: Cut) -> tuple[Cut | None, float]:
        """Where the stages of one rank together take too much: the largest cap on each stage with which they fit."""
        low, high = offered / self.degrees.chunks, offered
        found, least = None, max(first.peaks)
        for step in range(CAP_STEPS + 1):
            cap = low if step == 0 else (low + high) / 2
            cut = self._within(cap)
            fits = cut is not None and max(cut.peaks) <= offered
            least = least if cut is None else min(least, max(cut.peaks))
            found = cut if fits else found
            if fits or cut is None:
                low = cap
            else:
                high = cap
        return found, max(found.peaks) if found else least


@lru_cache(maxsize=64)
def _longer(blocks: int, longest: int) -> tuple[Indices, ...]:
    """Where in a matrix `[i, j]` stages of more blocks are."""
    return np.triu_indices(blocks + 1, longest + 1)


class _Priced:
    """Stages at every level, as flat arrays, for one option."""

    def __init__(self, state: Array, activations: Activations, busy: Array, parts: Mapping[int, Part]) -> None:
        self.busy = busy
        self.parts = parts
        """By the micro-batches that a stage holds: what can be such a stage."""
        self._state = state
        self._activations = activations
        self._peaks: dict[int, Array] = {}

    def peak(self, count: int) -> Array:
        """Bytes of what can be a stage that holds `count` micro-batches, while it runs."""
        if count not in self._peaks:
            part, of = self.parts[count].of_all, self._activations
            self._peaks[count] = self._state[part] + ((count - 1) * of.held[part] + of.newest[part])
        return self._peaks[count]
