"""The best cut of one option: its stages as fast as can be within memory, each with the recomputation it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from workbench.cost.memory import ADAMW, StageMemory
from workbench.planning.partition import least_sum, partition, smallest
from workbench.planning.pricing import Array, Degrees, Pricer
from workbench.planning.schedules import holdings

CAP_STEPS = 3
"""Halvings of what each of a rank's several stages may take, when together they take too much."""


@dataclass(frozen=True)
class Cut:
    """Stages of one option."""

    cuts: tuple[int, ...]
    recompute: tuple[str, ...]
    """Of each stage."""
    peaks: tuple[float, ...]
    """Bytes of one device of each pipeline rank."""

    @property
    def stages(self) -> list[tuple[str, tuple[int, int]]]:
        """Kind of checkpointing and blocks of each stage."""
        return list(zip(self.recompute, pairwise(self.cuts), strict=True))


class Cutter:
    """Cuts one option. Matrices are made when they are needed, and once for stages that are alike."""

    def __init__(self, pricer: Pricer, degrees: Degrees, kinds: Sequence[str]) -> None:
        """`kinds` of activation checkpointing, fastest first."""
        self.degrees = degrees
        self.kinds = tuple(kinds)
        self._pricer = pricer
        self._holdings = holdings(degrees.schedule, degrees.pipeline, degrees.num_microbatches, degrees.chunks)
        self._held = [
            max(entry[stage // degrees.pipeline] for entry in self._holdings[stage % degrees.pipeline])
            for stage in range(degrees.stages)
        ]
        """Micro-batches that each stage holds at its own fullest moment."""
        self._host_offered = pricer.cluster.host_offered_bytes
        self._sends = pricer.send_ms(degrees)
        self._memories: dict[str, StageMemory] = {}
        self._peaks: dict[tuple[str, int], Array] = {}

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

    def best(self, offered: float) -> tuple[Cut | None, float]:
        """The best cut within `offered` bytes a device, and the bytes of its fullest; or None, and the least that any
        needs: infinity, where it is the host's memory that none fits."""
        fastest = self.kinds[0]
        together = float(self.memory(fastest).peak(1)[0, -1])  # no pipeline's devices hold less in all
        if together <= offered * self.degrees.pipeline:
            cut = self._within(np.inf, (fastest,))
            if cut is not None and max(cut.peaks) <= offered:  # where it fits as it is, no other cut is better
                return cut, max(cut.peaks)
        least = max(smallest([self._least(count) for count in self._held]), self._least_together())
        if least > offered:
            return None, least
        cut = self._within(offered, self.kinds)
        assert cut is not None
        return (cut, max(cut.peaks)) if max(cut.peaks) <= offered else self._tighter(offered, cut)

    def leanest(self) -> float:
        """Bytes of the fullest device of a cut that needs little; no cut needs less where ranks have one stage each."""
        cut = self._within(smallest([self._least(count) for count in self._held]), self.kinds)
        return np.inf if cut is None else max(cut.peaks)

    def memory(self, kind: str) -> StageMemory:
        if kind not in self._memories:
            self._memories[kind] = self._pricer.memory(self.degrees, kind)
        return self._memories[kind]

    def shares(self, rank: int, cut: Cut) -> list[float]:
        """Bytes of each of a rank's stages at the rank's fullest moment, by the schedule's own order of actions."""
        of = [(self.memory(kind), span) for kind, span in cut.stages[rank :: self.degrees.pipeline]]
        best: list[float] = []
        for *counts, running in self._holdings[rank]:
            parts = []
            for chunk, ((memory, span), count) in enumerate(zip(of, counts, strict=True)):
                extra = float(memory.newest[span] - memory.held[span]) if chunk == running else 0.0
                parts.append(float(memory.state[span]) + count * float(memory.held[span]) + extra)
            if sum(parts) > sum(best, 0.0):
                best = parts
        return best

    def _peak(self, kind: str, count: int) -> Array:
        if (kind, count) not in self._peaks:
            peak = self.memory(kind).peak(count)
            if self._host is not None:
                peak = np.where(self._host <= self._host_offered, peak, np.inf)
            self._peaks[kind, count] = peak
        return self._peaks[kind, count]

    def _least(self, count: int) -> Array:
        return np.asarray(np.minimum.reduce([self._peak(kind, count) for kind in self.kinds]))

    def _least_together(self) -> float:
        """No cut's fullest device holds less, where each has several stages: a weighted mean over devices is no more
        than their maximum, and its least is found stage by stage."""
        if self.degrees.chunks == 1:
            return 0.0
        fullest = [max(entries, key=lambda entry: sum(entry[:-1])) for entries in self._holdings]
        weights = [sum(entry[:-1]) ** -0.5 for entry in fullest]
        memories = [self.memory(kind) for kind in self.kinds]
        stages = []
        for stage in range(self.degrees.stages):
            rank, chunk = stage % self.degrees.pipeline, stage // self.degrees.pipeline
            count, running = fullest[rank][chunk], fullest[rank][-1] == chunk
            each = [m.peak(count) if running else m.state + count * m.held for m in memories]
            stages.append(weights[rank] * np.minimum.reduce(each))
        return float(least_sum(stages) / sum(weights))

    def _within(self, cap: float, kinds: Sequence[str]) -> Cut | None:
        """The cut whose slowest stage is fastest, each stage within `cap` by the fastest kind of checkpointing."""
        chosen = {count: self._fastest_that_fits(count, cap, kinds) for count in set(self._held)}
        costs: dict[tuple[int, int], Array] = {}
        for count, send in zip(self._held, self._sends, strict=True):
            if (count, id(send)) not in costs:
                costs[count, id(send)] = chosen[count][0] + send
        cuts = partition(
            [costs[count, id(send)] for count, send in zip(self._held, self._sends, strict=True)],
            [chosen[count][1] for count in self._held],
            cap,
        )
        if cuts is None:
            return None
        spans = zip(self._held, pairwise(cuts), strict=True)
        cut = Cut(cuts, tuple(self._first_that_fits(count, cap, kinds, span) for count, span in spans), ())
        peaks = tuple(self._fullest(rank, cut) for rank in range(self.degrees.pipeline))
        return Cut(cut.cuts, cut.recompute, peaks)

    def _fullest(self, rank: int, cut: Cut) -> float:
        """Bytes of a device of a rank; infinity where its optimiser state does not fit the host."""
        if self._host is not None:
            spans = list(pairwise(cut.cuts))[rank :: self.degrees.pipeline]
            if sum(float(self._host[span]) for span in spans) > self._host_offered:
                return np.inf
        return sum(self.shares(rank, cut))

    def _fastest_that_fits(self, count: int, cap: float, kinds: Sequence[str]) -> tuple[Array, Array]:
        """Milliseconds and bytes of every stage under the first of `kinds` that fits; where none does, the last."""
        cost, memory = self._pricer.times(self.degrees, kinds[-1]).busy, self._peak(kinds[-1], count)
        for kind in reversed(kinds[:-1]):
            peak = self._peak(kind, count)
            fits = peak <= cap
            cost = np.where(fits, self._pricer.times(self.degrees, kind).busy, cost)
            memory = np.where(fits, peak, memory)
        return cost, memory

    def _first_that_fits(self, count: int, cap: float, kinds: Sequence[str], span: tuple[int, int]) -> str:
        return next((kind for kind in kinds[:-1] if self._peak(kind, count)[span] <= cap), kinds[-1])

    def _tighter(self, offered: float, first: Cut) -> tuple[Cut | None, float]:
        """Where the stages of one rank together take too much: the largest cap on each stage with which they fit."""
        low, high = offered / self.degrees.chunks, offered
        found, least = None, max(first.peaks)
        for step in range(CAP_STEPS + 1):
            cap = low if step == 0 else (low + high) / 2
            cut = self._within(cap, self.kinds)
            fits = cut is not None and max(cut.peaks) <= offered
            least = least if cut is None else min(least, max(cut.peaks))
            found = cut if fits else found
            if fits or cut is None:
                low = cap
            else:
                high = cap
        return found, max(found.peaks) if found else least
