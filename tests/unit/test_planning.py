"""Schedules against their theorems, the partition against brute force, the search against trying everything."""

from __future__ import annotations

import gc
import itertools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from cost_values import bert, graph_of, layered_profile, uneven_profile
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.cost import Cluster, Link, profile
from workbench.cost.cluster import FRAGMENTATION
from workbench.cost.memory import ParameterTable, Shares, activations
from workbench.cost.profiles import RECOMPUTE
from workbench.errors import PlanInfeasible, PlanMismatch, UnknownParameter
from workbench.planning import (
    Action,
    Plan,
    Request,
    bubble_fraction,
    pricing,
    search,
    simulate,
    timeline,
    weigh,
    what_if,
)
from workbench.planning.checkpointing import Mixed, Uniform
from workbench.planning.cutting import Cutter
from workbench.planning.partition import partition
from workbench.planning.plan import INTERLEAVED, SCHEDULES
from workbench.planning.planner import Search, _device_costs
from workbench.planning.plans import FASTEST_SHOWN
from workbench.planning.pricing import Degrees, DeviceCosts, Pricer
from workbench.planning.refusals import apart
from workbench.planning.requests import RUNNABLE, Runnable
from workbench.planning.schedules import Schedule, StageCosts, build_schedule, holdings, most_held, rounds, step_ms
from workbench.planning.searching import uncollected
from workbench.units import GIB

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

H200 = Cluster.of("h200", gpus=4)
PROFILE = layered_profile()
pipelines = st.integers(1, 6)
milliseconds = st.floats(0.5, 20.0)


def plan_of(profile: Any = PROFILE, **changes: Any) -> Plan:
    return search(profile, **{"global_batch": 64, "seq_len": 512, "precision": "bf16", "cluster": H200, **changes})


def with_host(block_s: float, action_s: float = 0.0, cluster: Cluster = H200) -> Cluster:
    """Its host busy for so long with each direction of a block, and of a stage."""
    quick = replace(
        cluster.device.efficiency,
        block_forward_s=block_s,
        block_backward_s=block_s,
        action_s=action_s,
        recorded_action_s=action_s / 2,
        sharded_block_s=0.0,
        collective_s=0.0,
    )
    return replace(cluster, device=replace(cluster.device, efficiency=quick))


def pricer_of(profile: Any) -> Pricer:
    return Pricer(DeviceCosts(profile, H200.device), H200, RECOMPUTE)


# Schedules

shapes = st.tuples(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4)).map(
    lambda drawn: (drawn[0], drawn[1], drawn[2] if drawn[0] in INTERLEAVED else 1, drawn[1] * drawn[3])
)
"""Name, ranks, chunks, micro-batches: as many as every schedule accepts."""


@given(stages=pipelines, more=st.integers(0, 12))
def test_1f1b_holds_at_most_p_minus_s_microbatches(stages: int, more: int) -> None:
    count = stages + more
    found = simulate(build_schedule("1f1b", stages, count), [1.0] * stages, [2.0] * stages)
    assert found.in_flight == tuple(stages - stage for stage in range(stages))
    assert [max(entry[0] for entry in rank) for rank in holdings("1f1b", stages, count, 1)] == list(found.in_flight)


@given(stages=pipelines, count=st.integers(1, 12))
def test_gpipe_holds_every_microbatch(stages: int, count: int) -> None:
    found = simulate(build_schedule("gpipe", stages, count), [1.0] * stages, [2.0] * stages)
    assert set(found.in_flight) == {count} == {rank[0][0] for rank in holdings("gpipe", stages, count, 1)}


@given(shape=shapes, rounds=st.integers(1, 6))
def test_the_most_that_a_rank_holds_is_seen_in_the_first_micro_batches(
    shape: tuple[str, int, int, int], rounds: int
) -> None:
    """`holdings` looks at few micro-batches; here at all."""
    name, ranks, chunks, count = shape
    held = holdings(name, ranks, rounds * count, chunks)
    for lane, entries in zip(build_schedule(name, ranks, rounds * count, chunks), held, strict=True):
        assert max(sum(counts) for *counts, _ in entries) == most_held(lane)


@given(name=st.sampled_from(["1f1b", "gpipe"]), stages=pipelines, more=st.integers(0, 12), forward=milliseconds)
def test_the_bubble_of_equal_stages_is_p_minus_1_over_m_plus_p_minus_1(
    name: str, stages: int, more: int, forward: float
) -> None:
    count = stages + more
    found = simulate(build_schedule(name, stages, count), [forward] * stages, [2 * forward] * stages)
    assert found.bubble_fraction == pytest.approx(bubble_fraction(stages, count), abs=1e-9)


@given(ranks=st.integers(1, 5), chunks=st.integers(1, 4), groups=st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_chunks(ranks: int, chunks: int, groups: int) -> None:
    """(p - 1) / (v m) of the ideal time (Megatron-LM, arXiv:2104.04473, section 2.2.2)."""
    count, stages = groups * ranks, ranks * chunks
    found = simulate(build_schedule("interleaved", ranks, count, chunks), [1.0] * stages, [2.0] * stages)
    assert found.step_ms == pytest.approx(3 * count * chunks + 3 * (ranks - 1))


@given(ranks=st.integers(1, 5), groups=st.integers(1, 4))
def test_a_zero_bubble_schedule_leaves_a_third_of_the_bubble(ranks: int, groups: int) -> None:
    """ZB-H1 with equal F, I and W: (p - 1)(F + I - W) (arXiv:2401.10241, table 2)."""
    count = groups * ranks
    one, two = [1.0] * ranks, [2.0] * ranks
    found = simulate(build_schedule("zero_bubble", ranks, count), one, two, 0.0, one)
    assert found.step_ms == pytest.approx(3 * count + ranks - 1)
    assert max(found.in_flight) == min(count, ranks)


def orders_of_torch(name: str, ranks: int, count: int, chunks: int) -> Schedule:
    """What torch's schedule class computes for every rank."""
    from torch.distributed.pipelining import schedules as torchs

    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    of = torchs.ScheduleInterleaved1F1B if name == "interleaved" else torchs.ScheduleInterleavedZeroBubble
    made: Any = of.__new__(of)  # its constructor wants stages with weights and a process group
    made.n_local_stages, made.pp_group_size, made._n_microbatches = chunks, ranks, count
    made.number_of_rounds = max(1, count // ranks)
    made.microbatches_per_round = count // made.number_of_rounds
    lanes = (made._calculate_single_rank_operations(rank) for rank in range(ranks))
    return tuple(
        tuple(Action(kinds[a.computation_type.name], a.stage_index, a.microbatch_index) for a in lane if a is not None)
        for lane in lanes
    )


@pytest.mark.parametrize("name", INTERLEAVED)
def test_a_rank_runs_its_actions_in_torchs_order(name: str) -> None:
    tried = 0
    for ranks, chunks, count in itertools.product((1, 2, 3, 4, 6), (1, 2, 3), range(1, 20)):
        if count % rounds(ranks, count) == 0:
            assert build_schedule(name, ranks, count, chunks) == orders_of_torch(name, ranks, count, chunks)
            tried += 1
    assert tried > 100


@given(shape=shapes, data=st.data())
def test_nothing_runs_before_what_it_needs(shape: tuple[str, int, int, int], data: st.DataObject) -> None:
    name, ranks, chunks, count = shape
    stages = ranks * chunks
    forward = data.draw(st.lists(milliseconds, min_size=stages, max_size=stages))
    backward = data.draw(st.lists(milliseconds, min_size=stages, max_size=stages))
    weight = [0.4 * ms for ms in backward]
    found = simulate(build_schedule(name, ranks, count, chunks), forward, backward, 0.7, weight)
    times = {("B" if a.kind == "I" else a.kind, a.stage, a.micro_batch): a for lane in found.lanes for a in lane}
    assert len(times) == (3 if name == "zero_bubble" else 2) * stages * count
    for (kind, stage, i), action in times.items():
        if kind == "F" and stage:
            assert action.start_ms >= times["F", stage - 1, i].end_ms + 0.7 - 1e-9
        if kind == "B":
            before = times["F", stage, i] if stage == stages - 1 else times["B", stage + 1, i]
            assert action.start_ms >= before.end_ms + (0.0 if stage == stages - 1 else 0.7) - 1e-9
        if kind == "W":
            assert action.start_ms >= times["B", stage, i].end_ms - 1e-9
    for lane in found.lanes:
        assert all(first.end_ms <= second.start_ms + 1e-9 for first, second in pairwise(lane))
    assert sum(found.busy_ms) == pytest.approx(count * (sum(forward) + sum(backward)))


@settings(max_examples=60)
@given(shape=shapes, repeats=st.integers(1, 20), data=st.data())
def test_a_long_step_is_extended_as_simulating_all_of_it_would(
    shape: tuple[str, int, int, int], repeats: int, data: st.DataObject
) -> None:
    name, ranks, chunks, count = shape
    count, stages = count * repeats, ranks * chunks
    forward = data.draw(st.lists(milliseconds, min_size=stages, max_size=stages))
    backward = data.draw(st.lists(milliseconds, min_size=stages, max_size=stages))
    send = data.draw(st.lists(st.floats(0, 5), min_size=stages, max_size=stages))
    costs = StageCosts(forward, backward, [0.4 * ms for ms in backward], send)
    queued = name in INTERLEAVED
    whole = simulate(
        build_schedule(name, ranks, count, chunks), forward, backward, send, costs.weight_ms, queued=queued
    )
    assert step_ms(name, ranks, count, costs, exact_actions=10**6)[0] == pytest.approx(whole.step_ms)
    length, bubble = step_ms(name, ranks, count, costs, exact_actions=2 * stages * 80)
    assert length == pytest.approx(whole.step_ms, rel=0.02)
    assert bubble == pytest.approx(whole.bubble_fraction, abs=0.02)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (("1f1b", 4, 3, 1), r"at least as many micro-batches as pipeline ranks, and 3 are fewer than 4.*'gpipe'"),
        (("1f1b", 4, 8, 2), r"1f1b has one stage a pipeline rank, and 2 were asked for.*'interleaved'"),
        (("interleaved", 4, 9, 2), r"in 2 equal rounds, and 9 cannot be divided so.*multiple of 4 micro-batches"),
        (("zerobubble", 4, 8, 1), r"There is no schedule 'zerobubble'. Did you mean 'zero_bubble'"),
    ],
)
def test_a_schedule_that_torch_refuses_is_refused_here(shape: tuple[str, int, int, int], sentence: str) -> None:
    with pytest.raises(PlanInfeasible, match=sentence):
        build_schedule(*shape)


# Partition


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


options = st.tuples(
    st.sampled_from([(2, 1), (2, 2), (3, 1), (4, 1), (1, 4), (1, 1)]),
    st.integers(0, 3),
    st.sampled_from(["1f1b", "gpipe", "interleaved", "interleaved"]),
    st.sampled_from([2, 1]),
    st.booleans(),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
"""Pipeline and data degrees, ZeRO stage, schedule, chunks, offload, micro-batch, and whether one is the whole step."""


def degrees_of(drawn: Any) -> Degrees:
    (pipeline, data), zero, schedule, chunks, offload, micro_batch, alone = drawn
    chunks, schedule = (1, "1f1b") if pipeline == 1 else (chunks, schedule)
    chunks = chunks if schedule == "interleaved" else 1
    zero = 0 if data == 1 else zero
    count = 1 if alone and (pipeline == 1 or schedule == "gpipe") else 4 * pipeline
    return Degrees(pipeline, data, 1, zero, schedule, chunks, offload, micro_batch, count)


@dataclass(frozen=True)
class Priced:
    """One stage at one level."""

    busy_ms: float
    state: float
    held: float
    newest: float


def kinds_of(level: int, blocks: int) -> list[str]:
    """From no block to all: one block more to the next kind, the first ones first."""
    found = [0] * blocks
    for step in range(level):
        found[step % blocks] += 1
    return [RECOMPUTE[kind] for kind in found]


def test_replicas_cast_weights_in_every_micro_batch_and_a_pipeline_once_a_step() -> None:
    pricer = pricer_of(DIVIDED)
    alone = Degrees(4, 1, 1, 0, "1f1b", 1, False, 32, 8)
    replicas, deferring = replace(alone, pipeline=2, data=2), replace(alone, schedule="zero_bubble")
    assert [pricer.shares(degrees).halves for degrees in (alone, replicas, deferring)] == [True, False, False]
    kept, cast = (pricer.whole(degrees) for degrees in (alone, replicas))
    assert kept.forward < cast.forward
    assert kept.backward < cast.backward
    assert kept.optimizer > cast.optimizer, "the copies are made with the update"


class OneByOne:
    """Stages priced block by block, each by its own kind of checkpointing; no code of levels or sums in common."""

    def __init__(self, pricer: Pricer, degrees: Degrees) -> None:
        self.degrees = degrees
        costs, table = pricer.costs(degrees), pricer.table(degrees)
        shares = pricer.shares(degrees)
        self.memory = {kind: activations(costs, table, shares, (kind,)) for kind in RECOMPUTE}
        idle = with_host(0.0, cluster=pricer.cluster)
        quick = DeviceCosts(pricer.profile, idle.device)
        self.times = {kind: Pricer(quick, idle, (kind,)) for kind in RECOMPUTE}
        self.ends = Pricer(quick, idle, RECOMPUTE)
        self.state = pricer.state(degrees).total
        self.priced: dict[tuple[int, int], list[Priced]] = {}
        tuned = pricer.cluster.device.efficiency
        hooks = tuned.sharded_block_s * (degrees.zero > 0 and degrees.data > 1)
        again = hooks / 2 if degrees.zero == 3 else 0.0
        block_ms = 1e3 * (tuned.block_forward_s + tuned.block_backward_s + 2 * hooks + again)
        launches = {kind: share * 1e3 * tuned.block_forward_s for kind, share in pricing.LAUNCHED_AGAIN.items()}
        replayed = pricer.profile.replayed(pricer.cluster.device)
        self.host_ms = {
            "none": block_ms,
            "selective": block_ms + replayed * launches["selective"],
            "full": block_ms + launches["full"],
        }
        self.action_ms = 2e3 * tuned.action_s * (degrees.stages > 1)

    def price(self, first: int, end: int, level: int) -> Priced:
        kinds = kinds_of(level, end - first)
        held = newest = more_ms = 0.0
        for block, kind in enumerate(kinds, first):
            one = (0, block, block + 1)
            newest = max(newest, held + float(self.memory[kind].newest[one]))
            held += float(self.memory[kind].held[one])
            both = [self.backward(block, block + 1, k) for k in (kind, "none")]
            more_ms += both[0] - both[1]
        plain = self.times["none"].times(self.degrees, Mixed.at(first, end, 0))
        waiting = self.times["none"]._collectives(self.degrees, Mixed.at(first, end, 0))[1]
        backward = float(plain.backward) + more_ms
        exposed = float(waiting) - 0.7 * min(float(waiting), 0.8 * backward)
        copied = float(self.times["none"]._copies(self.degrees, Mixed.at(first, end, 0))[1])
        busy = float(plain.forward + plain.forward_wait) + backward + exposed + copied
        host = self.action_ms + sum(self.host_ms[kind] for kind in kinds)
        at_end = float(self.ends.times(self.degrees, Mixed.at(first, end, level)).step_wait)
        busy += max(0.0, host - busy - at_end / self.degrees.num_microbatches)
        return Priced(busy, float(self.state[first, end]), held, newest)

    def backward(self, first: int, end: int, kind: str) -> float:
        return float(self.times[kind].times(self.degrees, Mixed.at(first, end, 0)).backward)

    def levels(self, first: int, end: int) -> list[Priced]:
        if (first, end) not in self.priced:
            self.priced[first, end] = [self.price(first, end, level) for level in range(2 * (end - first) + 1)]
        return self.priced[first, end]


def moments(degrees: Degrees, rank: int) -> set[tuple[int, ...]]:
    """What a rank holds of each of its stages, and last which of them runs: at every action of the whole schedule."""
    lane = build_schedule(degrees.schedule, degrees.pipeline, degrees.num_microbatches, degrees.chunks)[rank]
    held, found = [0] * degrees.chunks, set()
    for action in lane:
        running = action.stage // degrees.pipeline
        held[running] += action.kind == "F"
        found.add((*held, running))
        held[running] -= action.kind == "B"
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
@given(seed=st.integers(0, 10**6), layers=st.integers(3, 6), drawn=options, tightness=st.floats(0.0, 1.1))
def test_stages_and_their_recomputation_are_the_best_of_all(
    seed: int, layers: int, drawn: Any, tightness: float
) -> None:
    """Against every cut with every level of checkpointing of each stage; with ZeRO, and several stages a rank."""
    degrees, profile = degrees_of(drawn), uneven_profile(seed, layers)
    if degrees.stages > len(profile.blocks):
        return
    cluster = Cluster.of("h200", gpus=degrees.pipeline * degrees.data)
    pricer = Pricer(DeviceCosts(profile, cluster.device), cluster, RECOMPUTE)
    oracle, sends = OneByOne(pricer, degrees), pricer.send_ms(degrees)
    walked = [moments(degrees, rank) for rank in range(degrees.pipeline)]
    cuts: list[list[list[tuple[float, float]]]] = []
    """For each cut and rank: (slowest stage, bytes) for each choice of levels of the rank's stages."""
    for inner in combinations(range(1, len(profile.blocks)), degrees.stages - 1):
        spans = list(pairwise((0, *inner, len(profile.blocks))))
        cuts.append([])
        for rank in range(degrees.pipeline):
            mine = list(range(rank, degrees.stages, degrees.pipeline))
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
    cutter = Cutter(pricer, degrees)
    cut, needed = cutter.best(offered)
    assert cutter.least <= least * (1 + 1e-9)
    assert cutter.leanest() == pytest.approx(least) if degrees.chunks == 1 else cutter.leanest() >= least * (1 - 1e-9)
    fastest = min(max(min((ms for ms, b in rank if b <= offered), default=np.inf) for rank in ranks) for ranks in cuts)
    if cut is None:
        assert degrees.chunks > 1, "only what several stages of a rank may take together is found by halving"
        assert needed > offered
        return
    spans = list(pairwise(cut.cuts))
    chosen = [oracle.levels(*span)[level] for span, level in zip(spans, cut.levels, strict=True)]
    assert pricer.times(degrees, cut.stages).busy == pytest.approx([stage.busy_ms for stage in chosen])
    for rank in range(degrees.pipeline):
        assert cut.peaks[rank] == pytest.approx(rank_bytes(chosen[rank :: degrees.pipeline], walked[rank]))
    assert max(cut.peaks) == needed <= offered
    slowest = max(stage.busy_ms + sends[s][spans[s][1]] for s, stage in enumerate(chosen))
    assert slowest >= fastest * (1 - 1e-9)
    if degrees.chunks == 1:
        assert slowest <= fastest * (1 + 1e-6)


def test_every_level_recomputes_one_block_more_and_takes_no_less() -> None:
    for blocks in (1, 2, 5):
        levels = range(2 * blocks + 1)
        mixed = Mixed.at(np.full(len(levels), 3), np.full(len(levels), 3 + blocks), np.array(levels))
        for level in levels:
            first, middle, end = (int(part[level]) for part in (mixed.first, mixed.middle, mixed.end))
            kinds = [RECOMPUTE[mixed.heavier[level]]] * (middle - first)
            kinds += [RECOMPUTE[mixed.lighter[level]]] * (end - middle)
            assert kinds == kinds_of(level, blocks)
    degrees = Degrees(1, 4, 1, 2, "1f1b", 1, False, 64, 4)
    times = pricer_of(PROFILE).times(degrees, mixed_of_all(len(PROFILE.blocks)))
    for ms in (times.busy, times.busy * degrees.num_microbatches + times.ending):
        assert (np.diff(ms) >= 0).all()
        assert ms[0] < ms[len(PROFILE.blocks)] < ms[-1]


def test_fsdp_copies_parameters_as_often_as_it_gathers_them_and_gradients_as_often_as_it_reduces_them() -> None:
    def step_ms(zero: int, micro_batches: int) -> float:
        degrees = Degrees(1, 4, 1, zero, "1f1b", 1, False, 64 // micro_batches, micro_batches)
        in_forward, in_backward, at_end = pricer_of(PROFILE)._copies(degrees, Mixed.everything(len(PROFILE.blocks)))
        return float(micro_batches * (in_forward + in_backward) + at_end)

    element_ms = 1e3 * PROFILE.parameter_count / (H200.device.memory_bandwidth * pricing.SHARDING_BANDWIDTH)
    gather, reduction, later_sum = 6 / 4 + 4, 2 + 4, 12 / 4
    for bytes_each, zero, micro_batches in (
        (0, 0, 4),
        (gather + reduction, 1, 1),
        (gather + (2 + 4) + 3 * (2 + 8) + 8, 1, 4),
        (gather + 4 * reduction + 3 * later_sum, 2, 4),
        (4 * (2 * gather + reduction) + 3 * later_sum, 3, 4),
    ):
        assert step_ms(zero, micro_batches) == pytest.approx(bytes_each * element_ms)


def mixed_of_all(blocks: int) -> Mixed:
    """All blocks as one stage, at every level."""
    levels = np.arange(2 * blocks + 1)
    return Mixed.at(np.zeros_like(levels), np.full_like(levels, blocks), levels)


def test_no_more_blocks_are_recomputed_than_memory_asks_for() -> None:
    profile = layered_profile(layers=20)
    fixed = {"pipeline": 1, "zero": 2, "micro_batch": 16, "schedule": "1f1b", "offload_optimizer": False}
    none, selective, full = (plan_of(profile, **fixed, recompute=kind) for kind in RECOMPUTE)
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


def test_the_table_says_in_how_many_blocks() -> None:
    profile = layered_profile(layers=20)
    plans = weigh(profile, "bf16", Request(64, 512, H200, 14 * GIB))
    row = next(row for row in plans.rows if row.recompute == "mixed" and row.selective_blocks and not row.full_blocks)
    again = plans[plans.rows.index(row)]
    assert again.recomputed_blocks["selective"] == row.selective_blocks
    assert re.search(r"selective in \d+ of 22", repr(plans))


def test_the_fastest_rows_of_the_table_are_weighed_to_the_end() -> None:
    plans = weigh(layered_profile(layers=20), "bf16", Request(64, 512, H200, 14 * GIB))
    shown = [row for _, row in plans.shown() if row.step_ms is not None]
    assert len(shown) == FASTEST_SHOWN
    assert all(row.bubble_fraction is not None for row in shown)
    steps = [row.step_ms for row in shown]
    assert steps == sorted(steps)
    assert "≥ " not in "".join(repr(plans).splitlines()[: FASTEST_SHOWN + 2])
    for number in (1, FASTEST_SHOWN - 1):
        assert plans[number].prediction.step_ms == pytest.approx(plans.rows[number].step_ms)


# Search


def test_what_alike_options_share_is_what_each_would_have() -> None:
    search_ = Search(RECORDABLE, Request(64, 512, with_host(1e-2, action_s=3e-3)))
    options = list(search_._degrees())
    assert any(degrees.chunks > 1 and degrees.offload_optimizer and degrees.cuda_graphs for degrees in options)
    for degrees in options:
        everything = Mixed.everything(len(RECORDABLE.blocks))
        alone = Pricer(DeviceCosts(RECORDABLE, search_.request.cluster.device), search_.request.cluster, RECOMPUTE)
        expected, found = alone.times(degrees, everything), search_.pricer.whole(degrees)
        for name in ("busy", "late", "host", "ending", "optimizer"):
            assert float(getattr(found, name)) == pytest.approx(float(getattr(expected, name))), (name, degrees)
        assert np.allclose(search_.pricer.busy(degrees), alone.times(degrees, Uniform()).busy)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    gpus=st.sampled_from([1, 2, 4, 6, 8]),
    limit_gib=st.sampled_from([None, 2, 3, 4, 6, 8, 12]),
    compiled=st.booleans(),
    batch=st.sampled_from([12, 16, 24]),
)
def test_pruning_loses_nothing(seed: int, gpus: int, limit_gib: int | None, compiled: bool, batch: int) -> None:
    """The same options, every one of them cut and simulated: none is faster than the plan, nor than its own bound."""
    profile = replace(uneven_profile(seed), compiled=compiled)
    limit = None if limit_gib is None else limit_gib * GIB
    request = Request(batch, 512, Cluster.of("h200", gpus=gpus, nodes=2 if gpus == 8 else 1), limit)
    every = Search(profile, request)
    steps = []
    for degrees in every._degrees():
        option = every._option(degrees)
        cut, needed = Cutter(every.pricer, degrees).best(request.offered_bytes)
        assert option.least_bytes <= needed * (1 + 1e-9)
        if cut is not None:
            times = every.pricer.times(degrees, cut.stages)
            steps.append(every._predict(degrees, cut, times).step_ms)
            assert option.bound_ms <= steps[-1] * (1 + 1e-9)
            assert every._bound(degrees, cut, times) <= steps[-1] * (1 + 1e-9)
    try:
        chosen = Search(profile, request).plan()
    except PlanInfeasible:
        assert not steps
        return
    assert chosen.prediction.step_ms == pytest.approx(min(steps), rel=1e-9)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_choice_is_the_fastest_of_everything_that_fits(compiled: bool) -> None:
    """Force each option in turn; none that fits may be faster than the free choice, nor than its own bound."""
    profile = replace(layered_profile(layers=8), compiled=compiled)
    chosen = plan_of(profile, global_batch=32, memory_limit_bytes=12 * GIB)
    assert [row.verdict for row in chosen.candidates].count("chosen") == 1
    tried = 0
    for row in chosen.candidates:
        fixed = {name: getattr(row, name) for name in FIXED}
        try:
            forced = plan_of(profile, global_batch=32, memory_limit_bytes=12 * GIB, **fixed)
        except PlanInfeasible:
            assert row.verdict.startswith(("needs", "at least"))
            continue
        assert row.step_ms is not None, "said not to fit"
        assert forced.prediction.step_ms >= chosen.prediction.step_ms * (1 - 1e-9)
        assert forced.prediction.step_ms >= row.step_ms * (1 - 1e-9), "a bound exceeded the simulated step"
        tried += 1
    assert tried > 100


FIXED = ("pipeline", "data", "zero", "micro_batch", "schedule", "chunks", "offload_optimizer", "cuda_graphs")


@settings(max_examples=25)
@given(
    layers=st.integers(2, 20),
    elements=st.integers(1_000_000, 150_000_000),
    gpus=st.sampled_from([1, 2, 4, 8]),
    limit_gib=st.integers(4, 140),
)
def test_a_plan_stays_within_its_limit_and_survives_json(layers: int, elements: int, gpus: int, limit_gib: int) -> None:
    cluster = Cluster.of("h200", gpus=gpus)
    profile = layered_profile(layers, elements)
    try:
        plan = plan_of(profile, cluster=cluster, memory_limit_bytes=limit_gib * GIB)
    except PlanInfeasible:
        with pytest.raises(PlanInfeasible, match=r"needs .* a device, and (each H200 offers|your limit of)"):
            plan_of(profile, cluster=cluster, memory_limit_bytes=limit_gib * GIB)
        return
    assert plan.peak_bytes <= min(limit_gib * GIB, cluster.device.usable_bytes)
    assert plan.world == gpus
    assert plan.micro_batch * plan.num_microbatches * plan.data == 64
    assert [plan.stages[0].first_block, *(s.end_block for s in plan.stages)][-1] == layers + 2
    assert all(a.end_block == b.first_block for a, b in pairwise(plan.stages))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_stored_before_recompute_was_a_word_is_still_read() -> None:
    plan = plan_of(recompute="full", schedule="1f1b", offload_optimizer=False)
    old = json.loads(json.dumps(plan.to_json()))
    old["format"] = 1
    del old["offload_optimizer"], old["cuda_graphs"]
    for stage in old["stages"]:
        stage["recompute"] = True
        del stage["weight_ms"], stage["recompute_first"], stage["recompute_rest"]
    for row in old["candidates"]:
        row["recompute"] = row["recompute"] == "full"
        added = ("tensor", "schedule", "chunks", "offload_optimizer", "cuda_graphs", "selective_blocks", "full_blocks")
        for name in added:
            del row[name]
    found = Plan.from_json(old)
    assert found.stages == tuple(replace(stage, weight_ms=0.0) for stage in plan.stages)
    assert [row.recompute for row in found.candidates] == ["full"] * len(plan.candidates)
    assert found.recomputed_blocks == {"none": 0, "selective": 0, "full": len(PROFILE.blocks)}
    with pytest.raises(PlanMismatch, match=r"format 99.*Update workbench"):
        Plan.from_json({**old, "format": 99})


@pytest.mark.parametrize("changes", [{}, {"pipeline": 4}, {"pipeline": 2, "zero": 2}, {"data": 4, "zero": 3}])
def test_the_parts_of_a_prediction_sum_to_the_step(changes: dict[str, int]) -> None:
    found = plan_of(**changes).prediction
    parts = found.compute_ms + found.host_ms + found.bubble_ms + found.communication_ms + found.optimizer_ms
    assert parts == pytest.approx(found.step_ms)
    assert min(found.compute_ms, found.optimizer_ms) > 0
    assert found.bubble_ms >= -1e-6
    assert found.mfu is not None
    assert 0 < found.mfu < 1
    assert found.tokens_per_s == pytest.approx(64 * 512 / found.step_ms * 1e3)


def test_the_timeline_of_a_plan_is_its_predicted_pipeline() -> None:
    plan = plan_of(pipeline=4, micro_batch=2)
    found = timeline(plan)
    assert len(found.lanes) == 4
    assert found.bubble_fraction == pytest.approx(plan.prediction.bubble_fraction, abs=0.01)
    assert found.step_ms < plan.prediction.step_ms


def test_what_fits_one_device_is_not_pipelined_when_replicas_are_faster() -> None:
    assert plan_of(layered_profile(layers=12, elements=12_000_000)).pipeline == 1


def test_a_tight_limit_makes_the_planner_split_or_shard() -> None:
    free = plan_of(layered_profile(layers=54, elements=45_000_000), cluster=Cluster.of("h200", gpus=4))
    tight = plan_of(layered_profile(layers=54, elements=45_000_000), memory_limit_bytes=20 * GIB)
    assert free.peak_bytes > 20 * GIB
    assert tight.peak_bytes <= 20 * GIB
    assert tight.pipeline > 1 or tight.zero >= 2
    assert tight.prediction.step_ms > free.prediction.step_ms


def test_earlier_stages_of_1f1b_are_charged_for_more_microbatches() -> None:
    profile = layered_profile(layers=10)
    plan = plan_of(profile, pipeline=4, micro_batch=2, recompute="none")
    layers = [
        sum(name.startswith("layer") for name in plan.block_names[s.first_block : s.end_block]) for s in plan.stages
    ]
    per_layer = [stage.memory.activations / count for stage, count in zip(plan.stages[:3], layers, strict=False)]
    assert per_layer[0] > per_layer[1] > per_layer[2]


def test_1f1b_has_at_least_as_many_microbatches_as_stages() -> None:
    """torch's schedule refuses fewer; GPipe runs them."""
    rows = [row for row in plan_of().candidates if row.schedule == "1f1b"]
    assert rows
    assert all(r.pipeline <= 64 // (r.data * r.micro_batch) for r in rows)
    assert any(r.pipeline > 64 // (r.data * r.micro_batch) for r in plan_of(schedule="gpipe").candidates)


def test_a_tied_table_across_stages_costs_a_reduction() -> None:
    pricer = pricer_of(PROFILE)
    degrees = Degrees(2, 2, 1, 0, "1f1b", 1, False, 4, 8)
    last = len(PROFILE.blocks)
    assert pricer.tied_ms(degrees, (0, 7, last)) > 0
    assert pricer.tied_ms(replace(degrees, pipeline=1, data=4), (0, last)) == 0
    on_one_rank = replace(degrees, schedule="interleaved", chunks=2)
    assert pricer.tied_ms(on_one_rank, (0, 4, 6, 7, last)) > 0
    head_back_on_rank_0 = replace(
        PROFILE, blocks=(*PROFILE.blocks[:7], replace(PROFILE.blocks[-1], name="head"), *PROFILE.blocks[7:-1])
    )
    assert pricer_of(head_back_on_rank_0).tied_ms(on_one_rank, (0, 4, 6, 9, last)) == 0
    separate = replace(
        PROFILE,
        blocks=(*PROFILE.blocks[:-1], replace(PROFILE.blocks[-1], parameters=("head.bias",))),
    )
    assert pricer_of(separate).tied_ms(degrees, (0, 7, last)) == 0


def test_what_runs_is_weighed_and_what_does_not_is_not() -> None:
    eager = replace(PROFILE, compiled=False)
    rows = plan_of(eager).candidates
    assert {row.schedule for row in rows} == {"1f1b", "gpipe", "interleaved", "zero_bubble"}
    assert {row.zero for row in rows} == {0, 1, 2, 3}
    assert {row.offload_optimizer for row in rows} == {False, True}
    assert all(row.zero == 0 for row in rows if row.schedule == "zero_bubble")
    least = Runnable(("1f1b",), (0,), ("none",), tensor=False, offload_optimizer=False)
    rows = plan_of(eager, runnable=least).candidates
    assert {(row.schedule, row.zero, row.recompute, row.offload_optimizer) for row in rows} == {
        ("1f1b", 0, "none", False)
    }


def test_an_interleaved_plan_is_faster_than_its_1f1b_where_sends_are_free_and_holds_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pricing, "SPINNING", 0.0)
    fixed: dict[str, Any] = {"pipeline": 4, "micro_batch": 2, "recompute": "none"}
    fixed["cluster"] = replace(with_host(0.0), intra=Link(1e18, 0.0))
    plain = plan_of(**fixed, schedule="1f1b")
    interleaved = plan_of(**fixed, schedule="interleaved", chunks=2)
    assert interleaved.chunks == 2
    assert len(interleaved.stages) == 8
    assert interleaved.prediction.step_ms < plain.prediction.step_ms
    assert interleaved.peak_bytes > plain.peak_bytes
    assert interleaved.peak_bytes == max(sum(s.memory.total for s in interleaved.stages[rank::4]) for rank in range(4))
    assert timeline(interleaved).bubble_fraction == pytest.approx(interleaved.prediction.bubble_fraction, abs=0.01)


def test_earlier_stages_recompute_where_only_they_hold_too_much() -> None:
    """Of 1F1B's stages the first holds most: just below what fits without, it alone need recompute."""
    profile = layered_profile(layers=30, vocabulary=1_000_000)
    fixed = {"pipeline": 4, "schedule": "1f1b", "micro_batch": 2, "offload_optimizer": False}
    free = plan_of(profile, **fixed, recompute="none")
    mixed = plan_of(profile, **fixed, memory_limit_bytes=int(0.93 * free.peak_bytes / (1 - 0.04)))
    kinds = [stage.recompute for stage in mixed.stages]
    assert kinds[0] != "none"
    assert kinds[-1] == "none"
    assert mixed.recompute == "mixed"
    assert free.prediction.step_ms < mixed.prediction.step_ms
    full = plan_of(profile, **fixed, recompute="full")
    assert mixed.prediction.step_ms < full.prediction.step_ms


def test_selective_checkpointing_lies_between_none_and_full() -> None:
    fixed = {"pipeline": 1, "zero": 2, "micro_batch": 8, "offload_optimizer": False}
    none, selective, full = (plan_of(**fixed, recompute=kind) for kind in ("none", "selective", "full"))
    assert none.prediction.step_ms < selective.prediction.step_ms < full.prediction.step_ms
    assert none.peak_bytes > selective.peak_bytes > full.peak_bytes


def test_zero_1_shards_the_optimiser_and_nothing_else() -> None:
    fixed = {"pipeline": 1, "recompute": "none", "offload_optimizer": False, "cluster": with_host(0.0)}
    zero, one, two = (plan_of(**fixed, zero=stage, micro_batch=4) for stage in (0, 1, 2))
    assert one.stages[0].memory.optimizer == pytest.approx(zero.stages[0].memory.optimizer / 4, abs=1)
    assert one.stages[0].memory.gradients == zero.stages[0].memory.gradients / 2 == 4 * PROFILE.parameter_count
    assert two.stages[0].memory.gradients == pytest.approx(one.stages[0].memory.gradients / 4, abs=1)
    assert one.prediction.step_ms < two.prediction.step_ms, "four micro-batches, one reduction"


def test_a_step_of_one_micro_batch_reduces_gradients_as_they_come() -> None:
    """Where the head's backward is the fullest moment, no layer has any yet; ZeRO 1 holds what ZeRO 2 does."""
    fixed = {"pipeline": 1, "recompute": "none", "offload_optimizer": False, "micro_batch": 16}
    one, two = (plan_of(**fixed, zero=stage).stages[0].memory for stage in (1, 2))
    assert one == two
    table = 60_030_000
    assert one.gradients == pytest.approx(table, abs=1), "fp32, over four devices"
    kept = [PROFILE.block_types[block.block_type].saved_bytes for block in PROFILE.blocks]
    assert one.activations == pytest.approx(16 * (sum(kept) + PROFILE.block_types[2].workspace_bytes), abs=1)


def test_offloading_takes_the_optimiser_off_the_device_and_costs_its_transfer() -> None:
    fixed = {"pipeline": 4, "micro_batch": 4, "recompute": "none"}
    here, offloaded = (plan_of(**fixed, offload_optimizer=offload) for offload in (False, True))
    assert offloaded.offload_optimizer
    assert offloaded.stages[1].memory.optimizer < here.stages[1].memory.optimizer
    elements = max(stage.parameters for stage in here.stages)
    together = H200.device.shared_host_bandwidth
    assert together is not None
    assert together < 4 * H200.device.host_bandwidth
    transfer_ms = 2 * 8 * elements / (together / 4) * 1e3
    assert offloaded.prediction.step_ms == pytest.approx(here.prediction.step_ms + transfer_ms, rel=0.01)


def test_devices_of_a_node_share_the_way_to_its_host() -> None:
    """Two of them have what one has; eight share what four do."""
    costs = DeviceCosts(PROFILE, H200.device)

    def transfer_ms(gpus: int) -> float:
        cluster = replace(H200, gpus=gpus, gpus_per_node=gpus)
        pricer = Pricer(costs, cluster, RECOMPUTE)
        here, offloaded = (Degrees(1, gpus, 1, 1, "1f1b", 1, state, 4, 1) for state in (False, True))
        return gpus * float(pricer.whole(offloaded).optimizer - pricer.whole(here).optimizer)

    assert transfer_ms(2) == pytest.approx(transfer_ms(1))
    assert transfer_ms(8) == pytest.approx(2 * transfer_ms(4))
    assert transfer_ms(4) > transfer_ms(2)


def test_a_device_waits_for_its_host_where_that_takes_longer_for_both_directions_together() -> None:
    """Not for each: while the backward runs, the host gets ahead with the next forward."""
    fixed: dict[str, Any] = {"pipeline": 4, "data": 1, "micro_batch": 4, "recompute": "none", "schedule": "1f1b"}
    fast = plan_of(**fixed, cluster=with_host(0.0))
    layers = fast.stages[1]
    forward_s = 1e-3 * layers.forward_ms / (layers.end_block - layers.first_block)
    assert plan_of(**fixed, cluster=with_host(1.1 * forward_s)).prediction == fast.prediction
    slow = plan_of(**fixed, cluster=with_host(1e-2, action_s=3e-3))
    for stage in slow.stages:
        blocks = stage.end_block - stage.first_block
        assert stage.forward_ms + stage.backward_ms == pytest.approx(2 * (10.0 * blocks + 3.0))
    alone = plan_of(**(fixed | {"pipeline": 1, "data": 4}), cluster=with_host(1e-2, action_s=3e-3)).stages[0]
    assert alone.forward_ms + alone.backward_ms <= 2 * 10.0 * alone.end_block, (
        "the last reduction is the host's time too"
    )


RECORDABLE = replace(PROFILE, block_types=tuple(replace(kind, recordable=("none", "selective")) for kind in PROFILE.block_types))


def test_blocks_are_recorded_where_launching_them_would_take_the_host_long() -> None:
    late = with_host(1e-2)
    plan = plan_of(RECORDABLE, cluster=late, pipeline=1)
    launched = plan_of(RECORDABLE, cluster=late, pipeline=1, cuda_graphs=False)
    assert plan.cuda_graphs
    assert plan.zero == 0
    assert plan.prediction.host_ms == 0 < launched.prediction.host_ms
    assert plan.prediction.step_ms < launched.prediction.step_ms
    assert "CUDA graphs" in plan.describe()
    assert not launched.cuda_graphs
    assert {row.cuda_graphs for row in plan.candidates if row.zero == 0} == {True, False}
    assert not any(row.cuda_graphs for row in plan.candidates if row.zero > 0), "FSDP2 moves weights"
    assert not any(row.cuda_graphs for row in plan_of(RECORDABLE, cluster=with_host(0.0)).candidates)
    assert not any(row.cuda_graphs for row in plan_of(cluster=late).candidates), "its blocks cannot be recorded"
    unable = replace(RUNNABLE, cuda_graphs=False)
    assert not any(row.cuda_graphs for row in plan_of(RECORDABLE, cluster=late, runnable=unable).candidates)


def test_an_explanation_says_what_cuda_graphs_would_win() -> None:
    late = plan_of(RECORDABLE, cluster=with_host(1e-2), pipeline=1, cuda_graphs=False)
    assert "and CUDA graphs." in str(late.explain())
    [change] = [change for change in late.explain().changes if change.constraint == "cuda_graphs=False"]
    assert change.plan.cuda_graphs
    assert change.gain > 0.1


def test_blocks_are_recorded_where_a_host_might_fall_behind_though_it_should_not() -> None:
    """It takes from half of the device's time on: nothing is predicted to be won."""
    fixed: dict[str, Any] = {"pipeline": 4, "data": 1, "micro_batch": 4, "recompute": "none", "schedule": "1f1b"}
    layers = plan_of(**fixed, cluster=with_host(0.0)).stages[1]
    block_s = 1e-3 * (layers.forward_ms + layers.backward_ms) / (layers.end_block - layers.first_block)
    for share, recorded in ((0.7, True), (0.3, False)):
        cluster = with_host(share * block_s / 2)
        plan = plan_of(RECORDABLE, **fixed, cluster=cluster)
        assert plan.cuda_graphs is recorded
        launched = plan_of(RECORDABLE, **fixed, cluster=cluster, cuda_graphs=False)
        assert plan.prediction.step_ms == pytest.approx(launched.prediction.step_ms)


def test_graphs_take_memory_and_their_blocks_are_recomputed_as_ever() -> None:
    fixed: dict[str, Any] = {"pipeline": 4, "data": 1, "micro_batch": 4, "schedule": "1f1b", "cluster": with_host(1e-2)}
    recorded, launched = (plan_of(RECORDABLE, **fixed, recompute="none", cuda_graphs=g) for g in (True, False))
    for with_them, without in zip(recorded.stages, launched.stages, strict=True):
        graphs = 2 * recorded.num_microbatches * (with_them.end_block - with_them.first_block)
        added = with_them.memory.workspace - without.memory.workspace
        assert added == pytest.approx(graphs * pricing.GRAPH_BYTES, abs=1)
    full = [plan_of(RECORDABLE, **fixed, recompute="full", cuda_graphs=g).prediction.host_ms for g in (True, False)]
    assert full[0] == full[1] > 0, "what draws random numbers again cannot be recorded"


def test_replicas_average_beside_the_backward_what_is_a_recorded_blocks_own() -> None:
    """What several blocks share, and what is not recorded, they average behind it. `DistributedDataParallel` does not
    keep a second copy of the gradients."""
    fixed: dict[str, Any] = {"pipeline": 1, "data": 4, "zero": 0, "micro_batch": 16, "recompute": "none"}
    fixed |= {"global_batch": 128, "cluster": with_host(0.0)}
    embedding, layer, head = RECORDABLE.block_types
    heads_alone = replace(RECORDABLE, block_types=(embedding, replace(layer, recordable=()), head))
    launched, recorded = (plan_of(RECORDABLE, **fixed, cuda_graphs=g) for g in (False, True))
    behind = plan_of(heads_alone, **fixed, cuda_graphs=True)
    hidden, shared, exposed = (plan.prediction.communication_ms for plan in (launched, recorded, behind))
    elements = RECORDABLE.parameters
    of_layers = sum(size for name, size in elements.items() if name.startswith("layer"))
    assert exposed > 1.5 * hidden
    assert (shared - hidden) / (exposed - hidden) == pytest.approx(elements["table"] / (elements["table"] + of_layers))
    assert 2 * recorded.stages[0].memory.gradients == pytest.approx(launched.stages[0].memory.gradients)


def test_the_graphs_of_a_tensor_parallel_block_take_more_memory_for_each_all_reduce() -> None:
    fixed: dict[str, Any] = {"pipeline": 1, "data": 2, "tensor": 2, "zero": 0, "micro_batch": 4, "recompute": "none"}
    plans = [plan_of(DIVIDED, **fixed, cuda_graphs=graphs) for graphs in (True, False)]
    layers, in_layers, in_head = 6, 4, 2  # of Megatron's layer two in either direction; of the head one
    collectives = layers * in_layers + in_head
    each = 2 * len(DIVIDED.blocks) * pricing.GRAPH_BYTES + collectives * pricing.REDUCTION_BYTES
    added = plans[0].stages[0].memory.workspace - plans[1].stages[0].memory.workspace
    assert added == pytest.approx(plans[0].num_microbatches * each, abs=1)


def test_a_host_launches_every_all_reduce_of_the_tensor_axis() -> None:
    fixed: dict[str, Any] = {"pipeline": 1, "data": 2, "tensor": 2, "zero": 0, "micro_batch": 4, "recompute": "none"}
    fixed["cuda_graphs"] = False
    free = with_host(1e-2)
    each = replace(free.device, efficiency=replace(free.device.efficiency, collective_s=1e-3))
    plans = [plan_of(DIVIDED, **fixed, cluster=cluster) for cluster in (replace(free, device=each), free)]
    costs = DIVIDED.on_tensor_axis(2).at(4, H200.device)
    collectives = sum(map(len, (*costs.forward_reduced, *costs.backward_reduced)))
    added = [plan.stages[0].forward_ms + plan.stages[0].backward_ms for plan in plans]
    assert collectives > 0
    assert added[0] - added[1] == pytest.approx(collectives * 1.0)


def test_a_host_launches_what_checkpointing_computes_again() -> None:
    fixed: dict[str, Any] = {"pipeline": 4, "data": 1, "micro_batch": 4, "schedule": "1f1b", "cluster": with_host(1e-2)}
    none, full = (plan_of(**fixed, recompute=kind).stages[0] for kind in ("none", "full"))
    per_block = (none.forward_ms + none.backward_ms) / (none.end_block - none.first_block)
    assert (full.forward_ms + full.backward_ms) / (full.end_block - full.first_block) == pytest.approx(
        (1 + pricing.LAUNCHED_AGAIN["full"] / 2) * per_block
    )


def test_offloading_is_refused_where_the_host_has_too_little_memory() -> None:
    profile = layered_profile(layers=30, elements=100_000_000)
    fixed = {"pipeline": 4, "micro_batch": 4, "offload_optimizer": True, "schedule": "1f1b"}
    small = replace(H200, host_bytes=int(10 * GIB))  # 8 GiB of it for 8 bytes of each of 3.1 B parameters over 4 stages
    plan = plan_of(profile, **fixed, cluster=small)
    assert max(8 * stage.parameters for stage in plan.stages) <= small.host_offered_bytes == 8 * GIB
    with pytest.raises(
        PlanInfeasible, match=r"needs at least .* of the host's memory for each device, and 4.0 GiB fall"
    ):
        plan_of(profile, **fixed, cluster=replace(H200, host_bytes=5 * GIB))
    tiny = replace(with_host(0.0), host_bytes=GIB)
    rows = plan_of(profile, cluster=tiny, pipeline=1, micro_batch=1, memory_limit_bytes=16 * GIB).candidates
    refused = [row for row in rows if "host's memory" in row.verdict]
    assert refused
    assert all(row.offload_optimizer and row.step_ms is None and row.peak_bytes is None for row in refused)
    assert plan_of(profile, **fixed, cluster=replace(H200, host_bytes=None)).offload_optimizer, "unknown is not refused"


def test_a_tight_host_moves_the_cut() -> None:
    """Stages whose optimiser state fits the host are found, though others would be faster."""
    profile = layered_profile(layers=6, elements=20_000_000, vocabulary=200_000_000)
    fixed = {"pipeline": 2, "data": 1, "micro_batch": 4, "offload_optimizer": True, "schedule": "1f1b"}
    two = replace(with_host(0.0), gpus=2, gpus_per_node=2)
    free = plan_of(profile, **fixed, cluster=replace(two, host_bytes=None))
    most = max(8 * stage.parameters for stage in free.stages)
    least = 8 * 260_000_000  # the table in both stages, and three layers in each
    limit = (most + least) / 2
    assert most > limit
    tight = plan_of(profile, **fixed, cluster=replace(two, host_bytes=int(limit / 0.8)))
    assert max(8 * stage.parameters for stage in tight.stages) <= limit


def test_optimiser_state_of_a_cpu_is_on_the_host_already() -> None:
    profile = replace(PROFILE, device_type="cpu", precision="fp32")
    cluster = replace(H200, device=replace(H200.device, type="cpu", name="CPU process"))
    assert not any(row.offload_optimizer for row in plan_of(profile, cluster=cluster, precision="fp32").candidates)
    with pytest.raises(PlanInfeasible, match=r"where a CPU process has it already\. Leave it out\."):
        plan_of(profile, cluster=cluster, precision="fp32", offload_optimizer=True)


DIVIDED = profile(
    graph_of(bert(hidden_size=1024, num_layers=6, num_heads=16, max_positions=512), 2, 512),
    H200.device,
    "bf16",
    compiled=True,
)


def test_tensor_parallelism_divides_memory_and_compute_and_costs_its_all_reduces() -> None:
    fixed = {"pipeline": 1, "micro_batch": 16, "zero": 0, "recompute": "none", "offload_optimizer": False}
    plain, divided = (plan_of(DIVIDED, **fixed, tensor=degree, cluster=with_host(0.0)) for degree in (1, 2))
    assert (divided.tensor, divided.data, divided.world) == (2, 2, 4)
    assert divided.peak_bytes < 0.75 * plain.peak_bytes
    assert divided.stages[0].parameters == plain.stages[0].parameters == DIVIDED.parameter_count
    per_micro_batch = divided.prediction.compute_ms / divided.num_microbatches
    assert per_micro_batch < 0.75 * plain.prediction.compute_ms / plain.num_microbatches
    hidden_BSD = 16 * 512 * 1024
    volume = 6 * 2 * (2 + 2) * hidden_BSD  # two all-reduces of bf16 forward, and backward, a layer
    least = divided.num_microbatches * volume / H200.intra.bandwidth * 1e3
    assert divided.prediction.communication_ms > least


def test_what_is_reduced_over_the_tensor_axis_is_kept_and_reduced_again_only_where_a_whole_block_is() -> None:
    fixed = {"pipeline": 1, "micro_batch": 16, "zero": 0, "tensor": 2, "offload_optimizer": False}
    none, selective, full = (plan_of(DIVIDED, **fixed, recompute=kind) for kind in RECOMPUTE)
    assert selective.prediction.communication_ms == pytest.approx(none.prediction.communication_ms)
    assert full.prediction.communication_ms > none.prediction.communication_ms
    costs = DIVIDED.on_tensor_axis(2).at(16, H200.device)
    table, shares = ParameterTable(DIVIDED.on_tensor_axis(2)), Shares(0, 2, 2)
    held = activations(costs, table, shares, ("selective",)).held[0, 1, 2]
    assert costs.forward_reduced[1], "a layer"
    assert held == costs.input_bytes[1] + costs.products_bytes[1] + sum(costs.forward_reduced[1])


def test_tensor_parallelism_is_offered_where_the_model_can_be_divided_and_within_a_node() -> None:
    assert {row.tensor for row in plan_of(DIVIDED).candidates} == {1, 2, 4}
    sixteen = Cluster.of("h200", gpus=16, nodes=4)
    assert {row.tensor for row in plan_of(DIVIDED, cluster=sixteen).candidates} == {1, 2, 4}
    with pytest.raises(PlanInfeasible, match=r"tensor=16 does not divide most of .*Choose one of 1, 2, 4, 8"):
        plan_of(DIVIDED, cluster=sixteen, tensor=16)


def test_replicas_over_several_nodes_share_the_nodes_network_cards() -> None:
    cluster = Cluster.of("h200", gpus=32)
    assert cluster.group_link(8) == cluster.intra
    assert cluster.group_link(4, stride=2) == cluster.intra
    across = cluster.group_link(32)
    assert across.bandwidth == min(cluster.intra.bandwidth, 8 * cluster.inter.bandwidth)
    assert cluster.group_link(4, stride=8).bandwidth == cluster.inter.bandwidth
    assert cluster.hop_link(0, 4, 4) == cluster.intra
    assert cluster.hop_link(4, 8, 4) == cluster.inter


# Tables and explanations


def test_every_row_of_the_table_can_be_had_as_a_plan() -> None:
    plans = weigh(layered_profile(layers=8), "bf16", Request(32, 512, H200, 5 * GIB))
    assert plans.searched >= len(plans)
    assert plans[0] is plans.best
    first, second = itertools.islice(plans, 2)
    assert first is plans.best
    assert second.division() == plans[1].division()
    every = list(plans)
    assert len(every) <= sum(row.step_ms is not None for row in plans.rows) < len(plans)
    assert all(plan.peak_bytes <= 5 * GIB * (1 - FRAGMENTATION) for plan in every), "those that fit"
    shown = plans.shown()
    assert any(row.step_ms is None for _, row in shown)
    for number, row in shown:
        if row.step_ms is None:
            with pytest.raises(PlanInfeasible):
                plans[number]
        elif row.peak_bytes is not None:
            found = plans[number]
            assert (found.pipeline, found.data, found.zero) == (row.pipeline, row.data, row.zero)
            assert (found.schedule, found.chunks, found.micro_batch) == (row.schedule, row.chunks, row.micro_batch)
            assert found.prediction.step_ms >= row.step_ms * (1 - 1e-9)


def test_no_row_is_said_to_be_faster_than_the_chosen() -> None:
    """Also those that were never cut: on 16 GPUs, host-offloaded twins of what fits as it is."""
    for fixed in ({"pipeline": 4}, {"data": 4}, {}):
        plan = plan_of(layered_profile(layers=14), cluster=Cluster.of("h200", gpus=16), global_batch=128, **fixed)
        assert not [row for row in plan.candidates if row.verdict.startswith(("-", "at least -"))]
        steps = [row.step_ms for row in plan.candidates if row.step_ms is not None]
        assert min(steps) == plan.prediction.step_ms


def test_what_nearly_fits_is_in_the_table_however_long_it_is() -> None:
    profile, limit = layered_profile(layers=24, elements=45_000_000), 20 * GIB
    plans = weigh(profile, "bf16", Request(1440, 512, Cluster.of("h200", gpus=8), limit))
    assert plans.searched > 600
    rejected = [row for row in plans.rows if row.step_ms is None]
    assert 0 < len(rejected) <= 60
    sizes = [row.peak_bytes for row in rejected]
    assert sizes == sorted(sizes, key=lambda size: size or 0)
    assert all("needs at least" in row.verdict for row in rejected)
    assert "your limit of 20.0 GiB leaves 18.8 GiB to tensors" in repr(plans)


def test_the_table_reads_without_knowing_the_words() -> None:
    plans = weigh(replace(PROFILE, model="<b>mine</b>"), "bf16", Request(64, 512, H200))
    text, page = repr(plans), plans._repr_html_()
    assert "<b>mine</b> on 4 × H200, 64 samples of 512 tokens a step" in text
    for words in ("chosen", "% slower", "GiB", " ms"):
        assert words in text
        assert words in page
    assert "pipeline-parallel degree: the model is cut into this many parts" in page
    assert "&lt;b&gt;mine" in page
    assert "<b>mine" not in page


def lifted_ms(explanation: Any) -> float:
    found = next(change for change in explanation.changes if change.constraint == "memory limit")
    return float(found.plan.prediction.step_ms)


def test_an_explanation_names_each_kind_of_constraint() -> None:
    """Compute, memory, links, divisibility of the batch, and what was asked for."""
    starved = replace(H200, intra=replace(H200.intra, bandwidth=H200.intra.bandwidth / 400))
    uneven = plan_of(layered_profile(layers=8), global_batch=33).explain()
    assert "divisibility" in {change.constraint for change in uneven.changes}
    assert "the global batch were 32, a multiple of 4 devices" in repr(uneven)
    kinds = {change.constraint: change.kind for change in uneven.changes}
    assert (kinds["arithmetic"], kinds["memory"], kinds["links in a node"]) == ("compute", "memory", "link")
    linked = plan_of(pipeline=1, zero=0, global_batch=8, cluster=starved).explain()
    gains = {change.constraint: change.gain for change in linked.changes}
    assert gains["links in a node"] > gains["arithmetic"]
    assert "PP: the parts that the model is cut into" in repr(linked)
    whole = plan_of(pipeline=1).explain()
    assert "Bubble: 0 ms (0.0%)" in repr(whole)


def test_an_explanation_names_what_binds_and_what_would_change() -> None:
    profile = layered_profile(layers=54, elements=45_000_000)
    free = plan_of(profile).explain()
    assert sum(part.share for part in free.parts) == pytest.approx(1)
    assert {"arithmetic", "memory bandwidth", "host", "memory", "links in a node", "global batch"} == {
        change.constraint for change in free.changes
    }
    tight = plan_of(profile, memory_limit_bytes=24 * GIB).explain()
    assert tight.binding == "memory limit"
    assert "Binding constraint: your memory limit of 24.0 GiB. If the memory limit of 24.0 GiB were lifted, " in repr(
        tight
    )
    instead = f"would take {lifted_ms(tight):,.0f} ms instead of {tight.plan.prediction.step_ms:,.0f} ms."
    assert instead in repr(tight)
    lifted = next(change for change in tight.changes if change.constraint == "memory limit")
    assert lifted.plan.prediction == free.plan.prediction, "computed by planning again"
    assert f"{lifted.gain:.1%} more tokens/s, with {lifted.plan.division()}" in repr(tight)
    fixed = plan_of(profile, pipeline=4, micro_batch=1).explain()
    assert fixed.binding in ("micro_batch=1", "pipeline=4")
    two_nodes = plan_of(profile, cluster=Cluster.of("h200", gpus=16)).explain()
    assert "links between nodes" in {change.constraint for change in two_nodes.changes}


def test_a_plan_whose_device_waits_for_its_host_says_so() -> None:
    fixed: dict[str, Any] = {"pipeline": 4, "micro_batch": 2, "recompute": "none"}
    slow = plan_of(**fixed, cluster=with_host(1e-2, action_s=3e-3))
    [part] = [part for part in slow.explain().parts if part.name == "Waiting for the host"]
    assert part.ms == slow.prediction.host_ms > slow.prediction.compute_ms
    assert part.ms + slow.prediction.compute_ms <= slow.prediction.step_ms
    gains = {change.constraint: change.gain for change in slow.explain().changes}
    assert gains["host"] > 0.5 > gains["arithmetic"]
    quick = plan_of(**fixed, cluster=with_host(0.0)).explain()
    assert "Waiting for the host" not in {part.name for part in quick.parts}
    assert all(change.gain == 0.0 for change in quick.changes if change.constraint == "host")


def test_a_plan_from_a_file_is_explained_with_a_profile() -> None:
    plan = plan_of(memory_limit_bytes=12 * GIB)
    stored = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert stored.explain().changes == ()
    assert "takes the model's profile" in repr(stored.explain())
    assert stored.explain(PROFILE).changes == plan.explain().changes
    with pytest.raises(PlanMismatch, match="Make the profile of the same model"):
        stored.explain(replace(PROFILE, signature="1" * 16))


def test_a_slider_is_answered_as_a_search_would_and_once() -> None:
    settings: dict[str, Any] = {"global_batch": 64, "seq_len": 512, "gpus": 8, "memory_limit_gib": 20.0}
    found = what_if(PROFILE, H200, **settings)
    assert found == plan_of(cluster=Cluster.of("h200", gpus=8), memory_limit_bytes=20 * GIB)
    assert what_if(PROFILE, H200, **settings) is found
    assert what_if(PROFILE, H200, **{**settings, "gpus": 16}).cluster.nodes == 2
    with pytest.raises(PlanInfeasible, match="does not fit"):
        what_if(PROFILE, H200, global_batch=64, seq_len=512, memory_limit_gib=0.1)
    for wrong in (0, -3, "32", float("nan")):
        with pytest.raises(PlanInfeasible, match=r"memory_limit_gib=.* must be a number greater than 0"):
            what_if(PROFILE, H200, global_batch=64, seq_len=512, memory_limit_gib=wrong)


def test_garbage_is_collected_after_a_move_not_within_and_only_where_it_was() -> None:
    collections = 0

    def counted(phase: str, _: Any) -> None:
        nonlocal collections
        collections += phase == "start"

    assert gc.isenabled()
    gc.callbacks.append(counted)
    try:
        with uncollected(), uncollected():
            collections = 0
            kept: list[list[int]] = [[] for _ in range(20 * gc.get_threshold()[0])]
            assert collections == 0
        assert gc.isenabled()
        kept += [[] for _ in range(20 * gc.get_threshold()[0])]
        assert collections > 0
        gc.disable()
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.callbacks.remove(counted)


def test_what_earlier_moves_left_behind_changes_no_answer() -> None:
    """Prices are kept between moves of a slider; a search that starts from nothing finds the same."""
    profile, settings = layered_profile(layers=16), {"global_batch": 64, "seq_len": 512}
    moves: list[dict[str, Any]] = [{}, {"micro_batch": 2}, {"gpus": 2}, {"gpus": 8}, {"micro_batch": 8}]
    moves += [{"memory_limit_gib": float(limit)} for limit in (5, 6, 8, 12, 80)]
    warm = [what_if(profile, H200, **{**settings, **move}) for move in moves]
    for move, found in zip(moves, warm, strict=True):
        _device_costs.cache_clear()
        limit = move.get("memory_limit_gib")
        asked = {**settings, "micro_batch": move.get("micro_batch"), "cluster": H200.resized(move.get("gpus", 4))}
        cold = plan_of(profile, **asked, memory_limit_bytes=None if limit is None else int(limit * GIB))
        assert cold == found


# What is refused, and how


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pipeline": 3}, "pipeline=3 does not divide 4 devices. Choose one of 1, 2, 4."),
        ({"pipeline": 2, "data": 1}, "pipeline=2 × data=1 uses 2 of 4 devices. Give data=2"),
        ({"data": 4, "global_batch": 6}, "cannot be divided over data=4 replicas.*multiple of 4, such as 8"),
        ({"micro_batch": 5}, "cannot be divided into micro-batches of 5.*Choose one of 1, 2, 4, 8, 16, 32, 64"),
        (
            {"global_batch": 3, "schedule": "1f1b"},
            "needs at least as many micro-batches.*batch of 3 gives fewer than 4",
        ),
        (
            {"global_batch": 3, "schedule": "1f1b"},
            "Choose schedule='gpipe' or 'interleaved', or a global batch of 4, or 3 devices.",
        ),
        (
            {"pipeline": 4, "schedule": "1f1b", "micro_batch": 64},
            "Choose micro_batch=1, 2, 4, 8 or 16, or schedule='g",
        ),
        (
            {"cluster": Cluster.of("h200", gpus=31)},
            "No division of 31 devices suits.*64 samples and 14 blocks.*Choose a",
        ),
        ({"cluster": Cluster.of("h200", gpus=31)}, "Choose a global batch of 62, or 28 devices."),
        ({"zero": 4}, r"zero=4 is not a ZeRO stage that runs here. Choose one of 0 \(replicate\), 1"),
        ({"zero": 2.0}, "zero=2.0 is not a ZeRO stage"),
        (
            {"zero": 3, "pipeline": 4},
            "zero=3 shards over data-parallel replicas, and pipeline=4 on 4 devices leaves one",
        ),
        ({"zero": 2, "data": 1}, "and data=1 makes one. Leave zero out, or make room for data=2."),
        ({"zero": 2, "cluster": Cluster.of("h200", gpus=1)}, "one device holds one. Leave zero out"),
        ({"tensor": 2}, "tensor=2 does not divide most of layered: attention heads.*Choose 1"),
        (
            {"schedule": "interleaved", "pipeline": 1},
            "stages of several pipeline ranks, and these degrees make one. Le",
        ),
        ({"chunks": 2, "data": 4}, "chunks=2 interleaves the stages of several pipeline ranks, and these degrees make"),
        (
            {"chunks": 9},
            "with 9 stages a pipeline rank cuts a pipeline of 2 into 18 stages, and layered has 14 blocks.",
        ),
        ({"chunks": 9}, "Choose chunks=1, 2, 3, 4, 5, 6 or 7."),
        (
            {"schedule": "interleaved", "pipeline": 4, "micro_batch": 1, "global_batch": 9},
            "in equal rounds of as many",
        ),
        ({"schedule": "zero_bubble"}, "blocks run uncompiled. Plan with Experiment.*compile=False"),
        ({"schedule": "1f1b", "chunks": 2}, "chunks=2 needs an interleaved schedule, and 1f1b has one stage"),
        ({"recompute": True}, "recompute=True is not a kind of activation checkpointing.*Choose one of 'none'"),
        ({"schedule": "1fib"}, "There is no schedule '1fib'. Did you mean '1f1b'"),
        ({"schedule": "1F1B"}, "There is no schedule '1F1B'. Did you mean '1f1b'"),
        ({"micro_batch": 0}, "micro_batch=0 must be a whole number of at least 1: the samples of one forward on one"),
        ({"global_batch": None}, "global_batch=None must be a whole number of at least 1: the samples of one step."),
        ({"seq_len": "512"}, "seq_len='512' must be a whole number of at least 1: the tokens of one sample."),
        ({"pipeline": True}, "pipeline=True must be a whole number.*Leave it out to have it searched."),
        ({"offload_optimizer": "cpu"}, "offload_optimizer='cpu' must be True or False"),
        ({"cuda_graphs": 1}, "cuda_graphs=1 must be True or False: whether what blocks launch is recorded once"),
        ({"cuda_graphs": True, "zero": 1}, "does not run here: under zero=1 FSDP2 moves weights.*Leave it out"),
        ({"cuda_graphs": True, "schedule": "zero_bubble"}, "schedule='zero_bubble' runs blocks in halves"),
        ({"cluster": "h200"}, r"cluster='h200' is not a Cluster. Give wb.Cluster.of\(\"h200\", gpus=4\)"),
        ({"memory_limit_bytes": 64 << 20}, "does not fit 4 × H200.*your limit of 64.0 MiB leaves 60.2 MiB to tensors"),
        (
            {"memory_limit_bytes": 64 << 20},
            r"Raise the memory limit to at least [0-9.]+ GiB, or give the plan more than 4",
        ),
    ],
)
def test_bad_input_is_one_sentence_with_the_way_out(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanInfeasible, match=sentence):
        plan_of(**changes)


def test_the_way_out_of_a_contradiction_is_one() -> None:
    """What a refusal proposes plans."""
    with pytest.raises(PlanInfeasible, match="Choose micro_batch=1, 2, 4, 8 or 16, or schedule='gpipe'"):
        plan_of(pipeline=4, schedule="1f1b", micro_batch=64)
    assert plan_of(pipeline=4, schedule="1f1b", micro_batch=16).num_microbatches == 4
    assert plan_of(pipeline=4, schedule="gpipe", micro_batch=64).num_microbatches == 1
    for gpus, batch in ((31, 62), (28, 64)):
        assert plan_of(cluster=Cluster.of("h200", gpus=gpus), global_batch=batch).world == gpus


def test_the_memory_limit_that_a_refusal_asks_for_is_the_least_that_suffices() -> None:
    with pytest.raises(PlanInfeasible, match="raise the memory limit to at least") as caught:
        plan_of(pipeline=1, memory_limit_bytes=GIB // 4)
    least_gib = float(re.findall(r"to at least ([0-9.]+) GiB", str(caught.value))[0])
    assert plan_of(pipeline=1, memory_limit_bytes=int(least_gib * GIB)).peak_bytes <= least_gib * GIB
    with pytest.raises(PlanInfeasible):
        plan_of(pipeline=1, memory_limit_bytes=int((least_gib - 0.1) * GIB))


def test_an_interleaved_schedule_that_is_asked_for_may_have_stages_of_one_block() -> None:
    small = layered_profile(layers=4)
    assert all(row.chunks == 1 or row.chunks * row.pipeline <= 3 for row in plan_of(small).candidates)
    assert plan_of(small, schedule="interleaved").chunks >= 2


def test_a_zero_stage_that_is_asked_for_is_what_the_plan_has() -> None:
    for stage in (1, 2, 3):
        rows = plan_of(zero=stage).candidates
        assert {row.zero for row in rows} == {stage}
        assert min(row.data for row in rows) > 1


def test_sizes_that_differ_are_never_written_alike() -> None:
    assert apart(0.97 * GIB, 0.96 * GIB) == ("0.97 GiB", "0.96 GiB")
    assert apart(10.0 * GIB, 4.0 * GIB) == ("10.0 GiB", "4.0 GiB")
    assert apart(10.004 * GIB, 10.0 * GIB) == ("10.004 GiB", "10.000 GiB")
    assert apart(10.00004 * GIB, 10.0 * GIB) == ("just over 10.000 GiB", "10.000 GiB")


def test_more_stages_than_blocks_is_refused() -> None:
    with pytest.raises(PlanInfeasible, match=r"more stages than the 3 blocks of layered. Choose at most 3"):
        plan_of(layered_profile(layers=1), pipeline=4)


def test_what_does_not_fit_names_what_the_user_forbade() -> None:
    huge = layered_profile(layers=60, elements=600_000_000)
    with pytest.raises(PlanInfeasible, match=r"Allow activation checkpointing, or.*more than 4 devices") as caught:
        plan_of(huge, recompute="none", offload_optimizer=False)
    assert caught.value.facts["needed_bytes"] > caught.value.facts["offered_bytes"]


def test_a_profile_for_other_hardware_is_refused() -> None:
    with pytest.raises(PlanMismatch, match="is for bf16 on cuda, and the plan is for fp32 on cuda"):
        plan_of(precision="fp32")


def test_a_misspelt_parameter_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownParameter, match="Did you mean 'micro_batch'"):
        plan_of(micro_batches=4)


# Speed


def test_planning_is_fast_enough_to_drag_a_slider() -> None:
    profile = layered_profile(layers=54, elements=45_000_000)
    started = time.perf_counter()
    plan_of(profile, global_batch=256)
    assert time.perf_counter() - started < 1.0
    started = time.perf_counter()
    plan_of(profile, global_batch=4096, cluster=Cluster.of("h200", gpus=1024))
    assert time.perf_counter() - started < 10.0
