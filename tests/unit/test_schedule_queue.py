"""Sends and receives of the interleaved schedule go through one queue per rank, in torch's order."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.pipeline_schedules import Schedule, build_schedule
from workbench.planning.simulation import MicroBatchTimes, _in_order, simulate

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
