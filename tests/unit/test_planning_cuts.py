"""Cuts into stages and the levels of activation checkpointing, against brute force."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from cost_values import layered_profile, uneven_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_values import H200, PROFILE, costs_of, divided_profile, plan_of, strategy_of, with_host

from workbench.cost import Cluster
from workbench.cost.hardware import FRAGMENTATION
from workbench.cost.memory import activations
from workbench.planning import stage_costs
from workbench.planning.plan import Plan
from workbench.planning.stage_costs import RELAUNCHED, MixedStages, StrategyCosts
from workbench.planning.stage_cuts import Cutter, partition
from workbench.strategy import RECOMPUTE, Strategy, build_schedule

MODES = tuple(RECOMPUTE)


def brute_force(cost: Any, memory: Any, limit: float) -> tuple[float, float] | None:
    """The best (bottleneck, memory) over every cut."""
    stages, blocks = memory.shape[0], cost.shape[-1] - 1
    found = []
    for inner in combinations(range(1, blocks), stages - 1):
        spans = list(pairwise((0, *inner, blocks)))
        peaks = [memory[s, i, j] for s, (i, j) in enumerate(spans)]
        if max(peaks) <= limit:
            found.append((max(cost[s, i, j] for s, (i, j) in enumerate(spans)), max(peaks)))
    return min(found, default=None)


@settings(max_examples=200)
@given(blocks=st.integers(1, 9), data=st.data())
def test_the_partition_is_the_best_of_all_cuts(blocks: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, blocks))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    each = rng.integers(1, 6, blocks + 1).astype(float)
    total = each.cumsum() - each[0]
    cost = total[None] - total[:, None] + rng.integers(0, 3, (stages, blocks + 1, blocks + 1))
    memory = rng.integers(1, 20, (stages, blocks + 1, blocks + 1)).astype(float)
    limit = float(data.draw(st.integers(5, 25)))
    best = brute_force(cost, memory, limit)
    cuts = partition(cost, memory, limit)
    assert (cuts is None) == (best is None)
    if cuts is not None:
        spans = list(pairwise(cuts))
        assert cuts[0] == 0
        assert cuts[-1] == blocks
        assert all(i < j for i, j in spans)
        assert (
            max(cost[s, i, j] for s, (i, j) in enumerate(spans)),
            max(memory[s, i, j] for s, (i, j) in enumerate(spans)),
        ) == best


drawn_choices = st.tuples(
    st.sampled_from([(2, 1), (2, 2), (3, 1), (4, 1), (1, 4), (1, 1)]),
    st.integers(0, 3),
    st.sampled_from(["1f1b", "gpipe", "interleaved", "interleaved"]),
    st.sampled_from([2, 1]),
    st.booleans(),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
"""Pipeline and data degrees, ZeRO stage, schedule, chunks, offload, micro-batch, and whether one is the whole step."""


def drawn_strategy(drawn: Any) -> Strategy:
    (pipeline, data), zero, schedule, chunks, offload, micro_batch, alone = drawn
    chunks, schedule = (1, "1f1b") if pipeline == 1 else (chunks, schedule)
    chunks = chunks if schedule == "interleaved" else 1
    zero = 0 if data == 1 else zero
    count = 1 if alone and (pipeline == 1 or schedule == "gpipe") else 4 * pipeline
    return strategy_of(
        pipeline=pipeline,
        data=data,
        zero=zero,
        schedule=schedule,
        chunks=chunks,
        offload_optimizer=offload,
        micro_batch=micro_batch,
        num_microbatches=count,
    )


@dataclass(frozen=True)
class Priced:
    """One stage at one level."""

    busy_ms: float
    state: float
    held: float
    newest: float


def modes_of(level: int, blocks: int) -> list[str]:
    """From no block to all: one block more to the next kind, the first ones first."""
    found = [0] * blocks
    for step in range(level):
        found[step % blocks] += 1
    return [MODES[mode] for mode in found]


def test_replicas_cast_weights_in_every_micro_batch_and_a_pipeline_once_a_step() -> None:
    pricer = costs_of(divided_profile())
    alone = strategy_of(pipeline=4, data=1, micro_batch=32, num_microbatches=8)
    replicas = replace(alone, pipeline=2, data=2)
    assert [strategy.keeps_weight_copies("bf16") for strategy in (alone, replicas)] == [True, False]
    kept, cast = (pricer.of(strategy).whole for strategy in (alone, replicas))
    assert kept.forward < cast.forward
    assert kept.backward < cast.backward
    assert kept.optimizer > cast.optimizer, "the copies are made with the update"


class OneByOne:
    """Stages priced block by block, each in its own mode of checkpointing; shares no code of levels or spans."""

    def __init__(self, costs: StrategyCosts) -> None:
        self.strategy = strategy = costs.strategy
        self.memory = {
            mode: activations(costs.blocks, costs.table, strategy, costs.profile, (mode,)) for mode in RECOMPUTE
        }
        idle = with_host(0.0, cluster=costs.cluster)
        self.times = {mode: costs_of(costs.profile, idle, (mode,)).of(strategy) for mode in RECOMPUTE}
        self.ends = costs_of(costs.profile, idle).of(strategy)
        self.state = costs.state().total
        self.priced: dict[tuple[int, int], list[Priced]] = {}
        tuned = costs.cluster.device.efficiency
        count = strategy.num_microbatches
        collectives = {0: 0.0, 1: 2 / count, 2: 1 / count + 1, 3: 2.0}[strategy.zero]
        hooks = 2 * tuned.sharded_block_s + collectives * tuned.sharded_collective_s
        hooks *= strategy.zero > 0 and strategy.data > 1
        block_ms = 1e3 * (tuned.block_forward_s + tuned.block_backward_s + hooks)
        launches = {mode: share * 1e3 * tuned.block_forward_s for mode, share in RELAUNCHED.items()}
        selective = costs.profile.selective_recompute_share(costs.cluster.device)
        self.host_ms = {
            "none": block_ms,
            "selective": block_ms + selective * launches["selective"],
            "full": block_ms + launches["full"],
        }
        self.action_ms = 2e3 * tuned.action_s * (strategy.num_stages > 1)
        self.once_ms = 1e3 * tuned.step_s / strategy.chunks / count

    def price(self, first: int, end: int, level: int) -> Priced:
        modes = [*modes_of(level, end - first)]
        if end == len(self.ends.profile.blocks):
            modes[-1] = "none"  # the model's last block is not recomputed
        held = newest = more_ms = 0.0
        for block, mode in enumerate(modes, first):
            one = (0, block, block + 1)
            newest = max(newest, held + float(self.memory[mode].newest[one]))
            held += float(self.memory[mode].held[one])
            more_ms += self.backward(block, block + 1, mode) - self.backward(block, block + 1, "none")
        unchanged = MixedStages.at(first, end, 0)
        plain = self.times["none"].times(unchanged)
        waiting = self.times["none"]._collectives(unchanged)[1]
        backward = float(plain.backward) + more_ms
        exposed = float(waiting) - 0.7 * min(float(waiting), 0.8 * backward)
        copied = float(self.times["none"]._copies(unchanged)[1])
        busy = float(plain.forward + plain.forward_wait) + backward + exposed + copied
        host = self.action_ms + self.once_ms + sum(self.host_ms[mode] for mode in modes)
        at_end = float(self.ends.times(MixedStages.at(first, end, level)).step_wait)
        busy += max(0.0, host - busy - at_end / self.strategy.num_microbatches)
        return Priced(busy, float(self.state[first, end]), held, newest)

    def backward(self, first: int, end: int, mode: str) -> float:
        return float(self.times[mode].times(MixedStages.at(first, end, 0)).backward)

    def levels(self, first: int, end: int) -> list[Priced]:
        if (first, end) not in self.priced:
            self.priced[first, end] = [self.price(first, end, level) for level in range(2 * (end - first) + 1)]
        return self.priced[first, end]


def moments(strategy: Strategy, rank: int) -> set[tuple[int, ...]]:
    """What a rank holds of each of its stages, and last which of them runs: at every action of the whole schedule."""
    lane = build_schedule(strategy.schedule, strategy.pipeline, strategy.num_microbatches, strategy.chunks)[rank]
    held, found = [0] * strategy.chunks, set()
    for action in lane:
        running = action.stage // strategy.pipeline
        held[running] += action.type == "F"
        found.add((*held, running))
        held[running] -= action.type == "B"
    return found


def rank_bytes(stages: Sequence[Priced], found: set[tuple[int, ...]]) -> float:
    """Of a rank's stages, at its fullest moment."""
    return max(
        sum(stage.state + count * stage.held for stage, count in zip(stages, counts, strict=True))
        + stages[running].newest
        - stages[running].held
        for *counts, running in found
    )


@settings(max_examples=250)
@given(seed=st.integers(0, 10**6), layers=st.integers(3, 6), drawn=drawn_choices, tightness=st.floats(0.0, 1.1))
def test_stages_and_their_recomputation_are_the_best_of_all(
    seed: int, layers: int, drawn: Any, tightness: float
) -> None:
    """Against every cut with every level of checkpointing of each stage; with ZeRO, and several stages a rank."""
    strategy, profile = drawn_strategy(drawn), uneven_profile(seed, layers)
    if strategy.num_stages > len(profile.blocks):
        return
    cluster = Cluster.of("h200", gpus=strategy.pipeline * strategy.data)
    costs = costs_of(profile, cluster).of(strategy)
    oracle, sends = OneByOne(costs), costs.send_ms
    walked = [moments(strategy, rank) for rank in range(strategy.pipeline)]
    cuts: list[list[list[tuple[float, float]]]] = []
    """For each cut and rank: (slowest stage, bytes) for each choice of levels of the rank's stages."""
    for inner in combinations(range(1, len(profile.blocks)), strategy.num_stages - 1):
        spans = list(pairwise((0, *inner, len(profile.blocks))))
        cuts.append([])
        for rank in range(strategy.pipeline):
            mine = list(range(rank, strategy.num_stages, strategy.pipeline))
            cuts[-1].append(
                [
                    (
                        max(p.busy_ms + float(sends[s][spans[s][1]]) for s, p in zip(mine, chosen, strict=True)),
                        rank_bytes(chosen, walked[rank]),
                    )
                    for chosen in itertools.product(*(oracle.levels(*spans[s]) for s in mine))
                ]
            )
    least = min(max(min(b for _, b in rank) for rank in ranks) for ranks in cuts)
    most = max(b for ranks in cuts for rank in ranks for _, b in rank)
    offered = (least + tightness * (most - least) * 0.5) * (1 + 1e-9)
    cutter = Cutter(costs)
    cut, needed = cutter.best(offered)
    assert cutter.least <= least * (1 + 1e-9)
    leanest, _ = cutter.leanest()
    assert leanest == pytest.approx(least) if strategy.chunks == 1 else leanest >= least * (1 - 1e-9)
    fastest = min(max(min((ms for ms, b in rank if b <= offered), default=np.inf) for rank in ranks) for ranks in cuts)
    if cut is None:
        assert strategy.chunks > 1, "only what several stages of a rank may take together is found by halving"
        assert needed > offered
        return
    spans = list(pairwise(cut.cuts))
    chosen = [oracle.levels(*span)[level] for span, level in zip(spans, cut.levels, strict=True)]
    assert costs.times(cut.stages).busy == pytest.approx([stage.busy_ms for stage in chosen])
    for rank in range(strategy.pipeline):
        assert cut.peaks[rank] == pytest.approx(rank_bytes(chosen[rank :: strategy.pipeline], walked[rank]))
    assert max(cut.peaks) == needed <= offered
    slowest = max(stage.busy_ms + sends[s][spans[s][1]] for s, stage in enumerate(chosen))
    assert slowest >= fastest * (1 - 1e-9)
    if strategy.chunks == 1:
        assert slowest <= fastest * (1 + 1e-6)


def test_every_level_recomputes_one_block_more_and_takes_no_less() -> None:
    for blocks in (1, 2, 5):
        levels = range(2 * blocks + 1)
        mixed = MixedStages.at(np.full(len(levels), 3), np.full(len(levels), 3 + blocks), np.array(levels))
        for level in levels:
            first, middle, end = (int(part[level]) for part in (mixed.first, mixed.middle, mixed.end))
            modes = [MODES[mixed.heavier[level]]] * (middle - first)
            modes += [MODES[mixed.lighter[level]]] * (end - middle)
            assert modes == modes_of(level, blocks)
    strategy = strategy_of(pipeline=1, data=4, zero=2, micro_batch=64, num_microbatches=4)
    levels, blocks = np.arange(2 * len(PROFILE.blocks) + 1), len(PROFILE.blocks)
    all_as_one_stage = MixedStages.at(np.zeros_like(levels), np.full_like(levels, blocks), levels)
    times = costs_of(PROFILE).of(strategy).times(all_as_one_stage)
    for ms in (times.busy, times.busy * strategy.num_microbatches + times.ending):
        assert (np.diff(ms) >= 0).all()
        assert ms[0] < ms[len(PROFILE.blocks)] < ms[-1]


def test_fsdp_copies_parameters_as_often_as_it_gathers_them_and_gradients_as_often_as_it_reduces_them() -> None:
    def step_ms(zero: int, micro_batches: int) -> float:
        strategy = strategy_of(
            pipeline=1, data=4, zero=zero, micro_batch=64 // micro_batches, num_microbatches=micro_batches
        )
        in_forward, in_backward, at_end = (
            costs_of(PROFILE).of(strategy)._copies(MixedStages.whole_model(len(PROFILE.blocks)))
        )
        return float(micro_batches * (in_forward + in_backward) + at_end)

    element_ms = 1e3 * PROFILE.parameter_count / (H200.device.memory_bandwidth * stage_costs.SHARDING_BANDWIDTH)
    gather, reduction, later_sum = 6 / 4 + 4, 2 + 4, 12 / 4
    for bytes_each, zero, micro_batches in (
        (0, 0, 4),
        (gather + reduction, 1, 1),
        (gather + (2 + 4) + 3 * (2 + 8) + 8, 1, 4),
        (gather + 4 * reduction + 3 * later_sum, 2, 4),
        (4 * (2 * gather + reduction) + 3 * later_sum, 3, 4),
    ):
        assert step_ms(zero, micro_batches) == pytest.approx(bytes_each * element_ms)


def test_no_more_blocks_are_recomputed_than_memory_asks_for() -> None:
    profile = layered_profile(layers=20)
    fixed = {"pipeline": 1, "zero": 2, "micro_batch": 16, "schedule": "1f1b", "offload_optimizer": False}
    none, selective, full = (plan_of(profile, **fixed, recompute=mode) for mode in RECOMPUTE)
    for heavy, light in ((selective, none), (full, selective)):
        limit = (heavy.peak_bytes + light.peak_bytes) // 2
        some = plan_of(profile, **fixed, memory_limit_bytes=int(limit / (1 - FRAGMENTATION)))
        [stage] = some.stages
        assert (stage.recompute, stage.recompute_rest) == (heavy.recompute, light.recompute)
        assert stage.recompute_first is not None
        assert some.recompute == "mixed"
        assert light.prediction.step_ms < some.prediction.step_ms < heavy.prediction.step_ms
        assert heavy.peak_bytes < some.peak_bytes <= limit
        counts = some.recomputed_blocks
        assert counts[heavy.recompute] == stage.recompute_first
        assert sum(counts.values()) == len(profile.blocks)
        words = f"selective activation checkpointing in {counts['selective']} of 22 blocks"
        if heavy is full:
            words = f"activation checkpointing in {counts['full']} and selective in {counts['selective']} of 22 blocks"
        assert words in some.describe()
        fewer = limit - (light.peak_bytes - heavy.peak_bytes) // 8
        tighter = plan_of(profile, **fixed, memory_limit_bytes=int(fewer / (1 - FRAGMENTATION)))
        assert tighter.recomputed_blocks[heavy.recompute] > counts[heavy.recompute]
        assert Plan.from_json(json.loads(json.dumps(some.to_json()))) == some
