"""A measurement carries the load it was made under, and is made again when it is doubtful and the machine is quiet."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plan_values import PROFILE, plan_of

from workbench.machine import available_cores
from workbench.measure.detection import detected_cluster
from workbench.measure.load import BUSY, MEASURED, OTHERS, LoadWatch, compare, in_words, is_doubtful
from workbench.planning.prediction import basis_of_times
from workbench.rundir import EventTail, RunDir, read_json, write_json, write_record
from workbench.runs.launching.supervisor import _compare_with_prediction, _Supervised

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="written for a machine without GPUs")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    return tmp_path


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_the_work_of_other_processes_counts_and_that_of_this_one_does_not() -> None:
    watch = LoadWatch()
    command = [sys.executable, "-c", "import time; end = time.time() + 1.5\nwhile time.time() < end: pass"]
    others = [subprocess.Popen(command) for _ in range(available_cores())]
    time.sleep(1.2)
    beside_others = watch.facts()  # children count as one's own only once they have ended
    for process in others:
        process.wait()
    assert beside_others[OTHERS] > BUSY
    assert is_doubtful(beside_others)
    assert f"while other processes took {beside_others[OTHERS]:.0%} of the cores" in in_words(beside_others)
    watch = LoadWatch()
    spin(0.5)
    assert watch.facts()[OTHERS] < 1


def test_what_was_measured_before_there_was_a_load_beside_it_is_doubtful() -> None:
    assert is_doubtful({"fp32": 1e9, "bandwidth": 1e9})
    assert in_words({"fp32": 1e9, "bandwidth": 1e9}) == ""


@on_cpu
def test_rates_of_a_busy_hour_are_measured_again_on_a_quiet_machine_only(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detected_cluster(2)
    [file] = (home / "devices").iterdir()
    busy = {"fp32": 1.0, "bandwidth": 1.0, OTHERS: 0.9, MEASURED: time.time()}
    write_json(file, busy)
    monkeypatch.setattr("workbench.measure.detection.is_quiet", lambda: False)
    kept = detected_cluster(2).device
    assert read_json(file) == busy
    assert "90% of the cores" in kept.measured
    monkeypatch.setattr("workbench.measure.detection.is_quiet", lambda: True)
    again = detected_cluster(2).device
    assert again.peak_flops["fp32"] > 1e6
    assert read_json(file)[MEASURED] > busy[MEASURED]


@on_cpu
def test_a_finished_run_that_took_twice_the_predicted_time_makes_measurements_doubtful() -> None:
    quiet = {OTHERS: 0.0, MEASURED: time.time()}
    compare(10.0, 18.0)
    compare(10.0, 6.0)
    assert not is_doubtful(quiet), "constants of CPUs are no better than that"
    compare(10.0, 35.0)
    assert is_doubtful(quiet)
    assert in_words(quiet).endswith("and a run that has finished since contradicts them")
    assert not is_doubtful({OTHERS: 0.0, MEASURED: time.time() + 1}), "it was measured after that run"


@on_cpu
def test_a_supervisor_compares_a_finished_run_with_its_plan_and_the_next_plan_says_so(home: Path) -> None:
    cluster = detected_cluster(2)
    assert "contradicts" not in cluster.device.measured
    plan = replace(plan_of(), cluster=cluster)
    run = RunDir(home / "run")
    run.path.mkdir()
    write_record(run.plan, plan.to_json())
    attempt = _Supervised(run, EventTail(run.events))
    _compare_with_prediction(attempt)
    assert not (home / "contradicted.json").exists(), "no step was logged"
    for _ in range(5):
        attempt.stalls.note_step(3 * plan.prediction.step_ms)
    _compare_with_prediction(attempt)
    assert read_json(home / "contradicted.json")["measured_ms"] == pytest.approx(3 * plan.prediction.step_ms)
    said = basis_of_times(PROFILE, detected_cluster(2).device)
    assert "timed on this machine on" in said
    assert "contradicts them: enough to rank plans." in said
