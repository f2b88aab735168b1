"""The best cut of one option: its stages as fast as can be within memory, each with the recomputation it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from workbench.cost.memory import ADAMW, Activations, StageState
from workbench.planning.checkpointing import Levels, Mixed, Part, activations_of_levels, levels_of
from workbench.planning.partition import least_sum, partition, smallest
from workbench.planning.pricing import Array, Degrees, Pricer
from workbench.planning.schedules import holdings

CAP_STEPS = 3
"""Halvings of what each of a rank's several stages may take, when together they take too much."""


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
        self._holdings = holdings(degrees.schedule, degrees.pipeline, degrees.num_microbatches, degrees.chunks)
        self._held = [
            max(entry[stage // degrees.pipeline] for entry in self._holdings[stage % degrees.pipeline])
            for stage in range(degrees.stages)
        ]
        """Micro-batches that each stage holds at its own fullest moment."""
        self._host_offered = pricer.cluster.host_offered_bytes
        self._sends = pricer.send_ms(degrees)
        self._host = self._host_bytes()

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
    def _activations(self) -> Activations:
        return self._pricer.activations(self.degrees)

    def best(self, offered: float) -> tuple[Cut | None, float]:
        """The best cut within `offered` bytes a device, and the bytes of its fullest; or None, and the least that any
        needs: infinity, where it is the host's memory that none fits."""
        newest = self._activations.newest[0, 0, -1]
        together = float(self.state.total[0, -1] + newest)  # no pipeline's devices hold less in all
        if together <= offered * self.degrees.pipeline:
            cut = self._as_fast_as_can_be()
            if cut is not None and max(cut.peaks) <= offered:  # where it fits as it is, no other cut is better
                return cut, max(cut.peaks)
        cut = self._within(offered)
        if cut is not None and max(cut.peaks) <= offered:
            return cut, max(cut.peaks)
        together = self._least_together()
        if cut is not None and together <= offered:
            return self._tighter(offered, cut)
        return None, max(together, self._least_of_one())

    def leanest(self) -> float:
        """Bytes of the fullest device of a cut that needs little; no cut needs less where ranks have one stage each."""
        cut = self._within(self._least_of_one())
        return np.inf if cut is None else max(cut.peaks)

    def shares(self, rank: int, cut: Cut) -> list[float]:
        """Bytes of each of a rank's stages at the rank's fullest moment, by the schedule's own order of actions."""
        mine = slice(rank, None, self.degrees.pipeline)
        state = cut.stages.whole(self.state.total)[mine].tolist()
        activations = cut.stages.activations(self._activations)
        held, newest = activations.held[mine].tolist(), activations.newest[mine].tolist()
        best: list[float] = []
        for *counts, running in self._holdings[rank]:
            parts = []
            for chunk, count in enumerate(counts):
                of_running = (count - 1) * held[chunk] + newest[chunk]
                parts.append(state[chunk] + (of_running if chunk == running else count * held[chunk]))
            if sum(parts) > sum(best, 0.0):
                best = parts
        return best

    # Every stage at every level

    @cached_property
    def _levels(self) -> Levels:
        return levels_of(len(self.state.total) - 1, len(self._pricer.kinds), self.degrees.stages)

    @cached_property
    def _state_of_levels(self) -> Array:
        """Infinite where the optimiser's state does not fit the host."""
        return self._levels.spread(self._fitting_host(self.state.total))

    @cached_property
    def _activations_of_levels(self) -> Activations:
        return activations_of_levels(self._activations, self._levels)

    @cached_property
    def _parts(self) -> dict[int, Part]:
        """By the micro-batches that a stage holds: what can be such a stage."""
        return {
            count: self._levels.part(self._held.index(count), len(self._held) - 1 - self._held[::-1].index(count))
            for count in set(self._held)
        }

    def _fitting_host(self, bytes: Array) -> Array:
        return bytes if self._host is None else np.where(self._host <= self._host_offered, bytes, np.inf)

    def _peak(self, count: int, part: Part, running: bool = True) -> Array:
        """Of some stages at every level, while they hold `count` micro-batches and run, or another does."""
        state, held = self._state_of_levels[part.of_all], self._activations_of_levels.held[part.of_all]
        if not running:
            return state + count * held
        return state + ((count - 1) * held + self._activations_of_levels.newest[part.of_all])

    def _least_of_one(self) -> float:
        """Of all cuts, the least that the fullest stage holds."""
        least = {count: part.least(self._peak(count, part)) for count, part in self._parts.items()}
        return smallest([least[count] for count in self._held])

    def _least_together(self) -> float:
        """No cut's fullest device holds less, where each has several stages: a weighted mean over devices is no more
        than their maximum, and its least is found stage by stage."""
        if self.degrees.chunks == 1:
            return 0.0
        fullest = [max(entries, key=lambda entry: sum(entry[:-1])) for entries in self._holdings]
        weights = [sum(entry[:-1]) ** -0.5 for entry in fullest]
        every = self._levels.part(0, self.degrees.stages - 1)
        least: dict[tuple[int, bool], Array] = {}
        stages = []
        for stage in range(self.degrees.stages):
            rank, chunk = stage % self.degrees.pipeline, stage // self.degrees.pipeline
            count, running = fullest[rank][chunk], fullest[rank][-1] == chunk
            if (count, running) not in least:
                least[count, running] = every.least(self._peak(count, every, running))
            stages.append(weights[rank] * least[count, running])
        return float(least_sum(stages) / sum(weights))

    # Cuts

    def _as_fast_as_can_be(self) -> Cut | None:
        """The cut whose slowest stage is fastest, nothing recomputed that need not be, whatever memory that takes."""
        busy = self._pricer.busy(self.degrees)
        first = Activations(self._activations.held[0], self._activations.newest[0])
        peaks = {count: self._fitting_host(self.state.total) + first.of(count) for count in set(self._held)}
        cuts = self._partition(dict.fromkeys(peaks, busy), peaks, np.inf)
        return None if cuts is None else self._cut(cuts, (0,) * self.degrees.stages)

    def _within(self, cap: float) -> Cut | None:
        """The cut whose slowest stage is fastest, each stage within `cap` at the lowest level that fits."""
        busy, levels, peaks = {}, {}, {}
        for count, part in self._parts.items():
            stages, levels[count], peaks[count] = part.lowest(self._peak(count, part), cap)
            busy[count] = part.matrix(self._pricer.times(self.degrees, stages).busy)
        cuts = self._partition(busy, peaks, cap)
        if cuts is None:
            return None
        chosen = (int(levels[count][span]) for count, span in zip(self._held, pairwise(cuts), strict=True))
        return self._cut(cuts, tuple(chosen))

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
