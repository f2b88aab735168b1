"""Schedules as data: their theorems, torch's own orders and queues, and steps that are extended."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.base.errors import PlanInfeasible
from workbench.planning import prediction
from workbench.planning.prediction import MicroBatchTimes, _in_order, most_in_flight, peak_holdings, simulate, step_ms
from workbench.strategy import SCHEDULES, Action, Schedule, build_schedule

pipelines = st.integers(1, 6)
milliseconds = st.floats(0.5, 20.0)


def equal(stages: int, forward_ms: float = 1.0) -> MicroBatchTimes:
    """Return equal stages whose backward takes twice their forward, with free sends."""
    return MicroBatchTimes([forward_ms] * stages, [2 * forward_ms] * stages, [0.0] * stages)


shapes = st.tuples(st.sampled_from(list(SCHEDULES)), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4)).map(
    lambda drawn: (drawn[0], drawn[1], drawn[2] if SCHEDULES[drawn[0]].interleaves else 1, drawn[1] * drawn[3])
)
"""Name, ranks, chunks, micro-batches: as many as every schedule accepts."""


@given(stages=pipelines, more=st.integers(0, 12))
def test_1f1b_holds_at_most_p_minus_s_microbatches(stages: int, more: int) -> None:
    count = stages + more
    found = simulate(build_schedule("1f1b", stages, count), equal(stages))
    assert found.in_flight == tuple(stages - stage for stage in range(stages))
    assert [max(entry[0] for entry in rank) for rank in peak_holdings("1f1b", stages, count, 1)] == list(
        found.in_flight
    )


@given(stages=pipelines, count=st.integers(1, 12))
def test_gpipe_holds_every_microbatch(stages: int, count: int) -> None:
    found = simulate(build_schedule("gpipe", stages, count), equal(stages))
    assert set(found.in_flight) == {count} == {rank[0][0] for rank in peak_holdings("gpipe", stages, count, 1)}


@given(shape=shapes, rounds=st.integers(1, 6))
def test_the_most_that_a_rank_holds_is_seen_in_the_first_micro_batches(
    shape: tuple[str, int, int, int], rounds: int
) -> None:
    """`holdings` looks at few micro-batches; here at all."""
    name, ranks, chunks, count = shape
    held = peak_holdings(name, ranks, rounds * count, chunks)
    for lane, entries in zip(build_schedule(name, ranks, rounds * count, chunks), held, strict=True):
        assert max(sum(counts) for *counts, _ in entries) == most_in_flight(lane)


@given(name=st.sampled_from(["1f1b", "gpipe"]), stages=pipelines, more=st.integers(0, 12), forward=milliseconds)
def test_the_bubble_of_equal_stages_is_p_minus_1_over_m_plus_p_minus_1(
    name: str, stages: int, more: int, forward: float
) -> None:
    count = stages + more
    found = simulate(build_schedule(name, stages, count), equal(stages, forward))
    # Megatron-LM (arXiv:2104.04473) quotes the bubble over ideal time instead, (p - 1) / m.
    assert found.bubble_fraction == pytest.approx((stages - 1) / (count + stages - 1), abs=1e-9)


@given(ranks=st.integers(1, 5), chunks=st.integers(1, 4), groups=st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_chunks(ranks: int, chunks: int, groups: int) -> None:
    """(p - 1) / (v m) of the ideal time (Megatron-LM, arXiv:2104.04473, section 2.2.2)."""
    count, stages = groups * ranks, ranks * chunks
    found = simulate(build_schedule("interleaved", ranks, count, chunks), equal(stages))
    assert found.step_ms == pytest.approx(3 * count * chunks + 3 * (ranks - 1))


def orders_of_torch(ranks: int, count: int, chunks: int) -> Schedule:
    """Return the actions that torch's schedule class computes for every rank."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    types = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    made: Any = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)  # its constructor wants stages with weights
    made.n_local_stages, made.pp_group_size, made._n_microbatches = chunks, ranks, count
    made.number_of_rounds = max(1, count // ranks)
    made.microbatches_per_round = count // made.number_of_rounds
    lanes = (made._calculate_single_rank_operations(rank) for rank in range(ranks))
    return tuple(
        tuple(Action(types[a.computation_type.name], a.stage_index, a.microbatch_index) for a in lane if a is not None)
        for lane in lanes
    )


def test_a_rank_runs_its_actions_in_torchs_order() -> None:
    tried = 0
    for ranks, chunks, count in itertools.product((1, 2, 3, 4, 6), (1, 2, 3), range(1, 20)):
        if SCHEDULES["interleaved"].runs(ranks, count):
            assert build_schedule("interleaved", ranks, count, chunks) == orders_of_torch(ranks, count, chunks)
            tried += 1
    assert tried > 100


@given(shape=shapes, data=st.data())
def test_nothing_runs_before_what_it_needs(shape: tuple[str, int, int, int], data: st.DataObject) -> None:
    name, ranks, chunks, count = shape
    stages = ranks * chunks
    forward = data.draw(st.lists(milliseconds, min_size=stages, max_size=stages))
    backward = data.draw(st.lists(milliseconds, min_size=stages, max_size=stages))
    found = simulate(build_schedule(name, ranks, count, chunks), MicroBatchTimes(forward, backward, [0.7] * stages))
    times = {(a.type, a.stage, a.micro_batch): a for lane in found.lanes for a in lane}
    assert len(times) == 2 * stages * count
    for (action_type, stage, i), action in times.items():
        if action_type == "F" and stage:
            assert action.start_ms >= times["F", stage - 1, i].end_ms + 0.7 - 1e-9
        if action_type == "B":
            before = times["F", stage, i] if stage == stages - 1 else times["B", stage + 1, i]
            assert action.start_ms >= before.end_ms + (0.0 if stage == stages - 1 else 0.7) - 1e-9
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
    times = MicroBatchTimes(forward, backward, send)
    whole = simulate(build_schedule(name, ranks, count, chunks), times, queued=name == "interleaved")
    with mock.patch.object(prediction, "EXACT_ACTIONS", 10**6):
        assert step_ms(name, ranks, count, times)[0] == pytest.approx(whole.step_ms)
    with mock.patch.object(prediction, "EXACT_ACTIONS", 2 * stages * 80):
        length, bubble = step_ms(name, ranks, count, times)
    assert length == pytest.approx(whole.step_ms, rel=0.02)
    assert bubble == pytest.approx(whole.bubble_fraction, abs=0.02)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (("1f1b", 4, 3, 1), r"as many micro-batches as pipeline ranks, and this step has 3 on 4 ranks.*'gpipe'"),
        (("1f1b", 4, 8, 2), r"1f1b has one stage on each pipeline rank, and chunks=2 asks for 2.*'interleaved'"),
        (("interleaved", 4, 9, 2), r"in equal rounds.*this step has 9 on 4 ranks.*multiple of the pipeline ranks"),
        (("interleave", 4, 8, 1), r"There is no schedule 'interleave'. Did you mean 'interleaved'"),
    ],
)
def test_a_schedule_that_torch_refuses_is_refused_here(shape: tuple[str, int, int, int], sentence: str) -> None:
    with pytest.raises(PlanInfeasible, match=sentence):
        build_schedule(*shape)


Transfer = tuple[str, int, int]
"""SEND or RECV of F or B, at a stage, of a micro-batch."""


def queues_of_torch(schedule: Schedule, stages: int) -> list[list[Transfer]]:
    """Return the transfers that torch's lowering puts between the actions of every rank."""
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

    types: dict[str, Any] = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}
    ranks = len(schedule)
    lanes = {r: [_Action(a.stage, types[a.type], a.micro_batch) for a in lane] for r, lane in enumerate(schedule)}
    lowered = _add_send_recv(lanes, stage_to_rank=lambda stage: stage % ranks, num_stages=stages)
    return [
        [
            (action.computation_type.name, action.stage_index, action.microbatch_index)
            for action in lowered[rank]
            if action.computation_type.name.startswith(("SEND", "RECV"))
        ]
        for rank in range(ranks)
    ]


def queues_simulated(schedule: Schedule, stages: int) -> list[list[Transfer]]:
    ranks = len(schedule)
    queues: list[list[Transfer]] = [[] for _ in schedule]
    for action in _in_order(schedule, stages, queued=True).actions:
        receiver = action.stage + {"F": 1, "B": -1}[action.type]
        if 0 <= receiver < stages and receiver % ranks != action.stage % ranks:
            queues[action.stage % ranks].append((f"SEND_{action.type}", action.stage, action.micro_batch))
            queues[receiver % ranks].append((f"RECV_{action.type}", receiver, action.micro_batch))
    return queues


@pytest.mark.parametrize(("ranks", "chunks", "count"), [(2, 1, 4), (2, 3, 8), (3, 2, 9), (4, 2, 16), (4, 4, 8)])
def test_transfers_are_queued_in_torchs_order(ranks: int, chunks: int, count: int) -> None:
    schedule = build_schedule("interleaved", ranks, count, chunks)
    assert queues_simulated(schedule, ranks * chunks) == queues_of_torch(schedule, ranks * chunks)


@pytest.mark.parametrize(("ranks", "chunks", "count"), [(2, 1, 4), (2, 3, 8), (4, 2, 16)])
def test_a_queue_never_makes_a_step_shorter(ranks: int, chunks: int, count: int) -> None:
    schedule, stages = build_schedule("interleaved", ranks, count, chunks), ranks * chunks
    times = MicroBatchTimes([1.0] * stages, [2.0] * stages, [0.1] * stages)
    assert simulate(schedule, times, queued=True).step_ms >= simulate(schedule, times).step_ms - 1e-9


def test_one_rank_has_nothing_to_wait_for() -> None:
    schedule = build_schedule("interleaved", 1, 4, 3)
    assert simulate(schedule, MicroBatchTimes([1.0] * 3, [2.0] * 3, [5.0] * 3), queued=True).step_ms == pytest.approx(
        4 * 3 * 3.0
    )


def test_a_receive_that_waits_holds_up_the_sends_behind_it() -> None:
    """Four ranks of two chunks, equal stages, free sends: without a queue the bubble is (p - 1) forwards and backwards
    of a chunk; with it, ranks also wait for transfers that were posted earlier."""
    schedule = build_schedule("interleaved", 4, 16, 2)
    times = MicroBatchTimes([1.0] * 8, [2.0] * 8, [0.0] * 8)
    ideal, queued = simulate(schedule, times), simulate(schedule, times, queued=True)
    assert ideal.step_ms == pytest.approx(16 * 6 + 9)
    assert queued.step_ms > ideal.step_ms + 1
