"""Figures of a step as they are logged: the measured MFU, speed and totals, and what is not a finite number."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from plan_values import plan_of

from workbench.errors import NonFiniteLoss
from workbench.execution.step_log import StepLog
from workbench.execution.step_timeline import Timestamp
from workbench.execution.trainer import StepResult
from workbench.experiment import Experiment
from workbench.rundir import read_events

H200_BF16_FLOPS = 989e12
"""Dense bf16 FLOP/s of one H200 (NVIDIA's data sheet of November 2024)."""
CPU = torch.device("cpu")
ASKED = Experiment(model=torch.nn.Identity, data=[{}], steps=10, global_batch=64, seq_len=512)


def result(loss: float, norm: float = 4.0) -> StepResult:
    return StepResult(torch.tensor([loss, norm, 0.0]), 1e-3)


def test_the_measured_mfu_is_the_models_flops_over_those_that_the_devices_could_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    plan = plan_of(pipeline=2, micro_batch=2)
    assert plan.world == 4
    log = StepLog(ASKED, plan, CPU, tmp_path / "events.jsonl", seconds=0.0)
    for step in range(3):
        clock[0] += 0.25
        log.add(step, result(7.0))
    log.flush()
    steps = [event for event in read_events(tmp_path / "events.jsonl") if event["type"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3]
    for event in steps:
        assert event["step_ms"] == pytest.approx(250.0)
        assert event["mfu"] == pytest.approx(plan.flops_per_step / 0.25 / (4 * H200_BF16_FLOPS))
        assert event["tokens_per_s"] == pytest.approx(64 * 512 / 0.25)
        assert event["grad_norm"] == 2.0
    assert steps[-1]["seconds"] == pytest.approx(0.75)


def test_the_wait_for_data_is_the_share_of_a_step_before_its_batch_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    log = StepLog(ASKED, plan_of(pipeline=2, micro_batch=2), CPU, tmp_path / "events.jsonl", seconds=0.0)
    for step, (wait, compute) in enumerate([(0.3, 0.1), (0.05, 0.2), (0.0, 0.25)]):
        clock[0] += wait
        arrived = Timestamp.now(CPU)
        clock[0] += compute
        log.add(step, result(7.0), arrived)
    log.flush()
    clock[0] += 0.5
    log.add(3, result(7.0))
    log.flush()
    waits = [event["data_wait"] for event in read_events(tmp_path / "events.jsonl") if event["type"] == "step"]
    assert waits == [pytest.approx(0.75), pytest.approx(0.2), 0.0, None]


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, math.nan)])
def test_a_step_that_is_not_finite_is_logged_and_raised(tmp_path: Path, loss: float, norm: float) -> None:
    for stops in (True, False):
        events = tmp_path / f"{stops}.jsonl"
        asked = ASKED.replace(stop_on_non_finite=stops, log_every=5)
        log = StepLog(asked, plan_of(pipeline=2, micro_batch=2), CPU, events, seconds=0.0)
        log.add(2, result(loss, norm))
        if stops:
            with pytest.raises(NonFiniteLoss, match="Step 3 has loss") as raised:
                log.flush()
            assert raised.value.facts["step"] == 3
        else:
            assert log.flush() is False
        assert [event["step"] for event in read_events(events) if event["type"] == "step"] == [3]
