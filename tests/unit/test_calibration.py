"""Calibration: this machine measured for real, fits against made-up kernels and links, and files that are refused."""

from __future__ import annotations

import json
import time
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_values import PROFILE, plan_of

from tests.patience import PATIENCE_S, Clock
from workbench.base.errors import PlanInfeasible, PlanMismatch
from workbench.cost import Cluster, Link
from workbench.cost.hardware import H100, all_reduce_s
from workbench.measure import calibration, detection
from workbench.measure.calibration import FORMAT, IN_TRAINING, Calibration, cached_calibration, calibrate, local_cluster
from workbench.measure.detection import (
    MEASURED,
    OTHERS,
    LoadWatch,
    compare,
    detected_cluster,
    fit_link,
    fit_products,
    in_words,
    is_doubtful,
)
from workbench.planning.prediction import basis_of_times
from workbench.record.event_log import LogTail
from workbench.record.rundir import RunDir, read_json, write_json, write_record
from workbench.runs.launching.supervisor import _compare_with_prediction, _Supervised

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="written for a machine without GPUs")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("WORKBENCH_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def measured(home: Path) -> Calibration:
    assert not any(home.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detection, "LINK_TIMEOUT_S", PATIENCE_S)
        return calibrate()


def test_this_machine_is_measured_once_and_then_planned_with(
    measured: Calibration, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "is_quiet", lambda: False)
    [file] = (home / "calibrations").iterdir()
    assert Calibration.load(file) == measured == calibrate()
    assert measured.memory_bandwidth > 1e7, "in bytes, however busy the machine is"
    assert measured.product_flops > 1e8
    assert 0 < measured.attention_forward <= 1
    assert measured.link is not None
    assert 0 < measured.beside != 1, "two processes copied at once"
    assert 0 <= measured.circumstances["others"] <= 1
    assert measured.link.bandwidth > 1e5
    here = local_cluster()
    assert here.intra == measured.link
    assert here.device.peak_flops["fp32"] == measured.product_flops / 2, "two processes share the cores"
    assert here.device.efficiency.gemm == pytest.approx(IN_TRAINING)


def test_a_calibration_can_be_shared(measured: Calibration, tmp_path: Path) -> None:
    shared = Calibration.load(measured.save(tmp_path / "node.json"))
    assert shared == measured
    assert shared.cluster(4).gpus == 4
    assert "FLOP/s fp32" in repr(shared)


def test_a_calibration_of_other_hardware_or_another_torch_is_not_applied(
    measured: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cached_calibration() == measured
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.9.0+cu128")
        assert cached_calibration() is None
    monkeypatch.setattr("workbench.measure.calibration.cpu_model", lambda: "another processor")
    assert cached_calibration() is None


def test_a_file_that_is_not_a_calibration_is_refused(tmp_path: Path) -> None:
    for content in ("{}", "not json", json.dumps({"rates": 3})):
        file = tmp_path / "file.json"
        file.write_text(content)
        with pytest.raises(PlanMismatch, match=r"file.json is not a calibration.*Run wb.measure.calibrate"):
            Calibration.load(file)


PRODUCTS = ("bf16", 700e12, 3e9, 0.6, 0.5)
GPU = Calibration("NVIDIA H100", "cuda", "2.13.0", 8, "2026-11-21", *PRODUCTS, 3e12, 5e-6, 1e-4, 2e-4, 5e10, None)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"memory_bandwidth": -1.0}, "memory_bandwidth: "),
        ({"launch_s": float("nan")}, "launch_s: "),
        ({"block_forward_s": "fast"}, "block_forward_s: "),
        ({"devices": 0}, "devices: "),
        ({"devices": 1.5}, "devices: "),
        ({"device_type": "tpu"}, "device_type: "),
        ({"torch": None}, "torch: "),
        ({"precision": "fp8"}, "precision: "),
        ({"product_flops": float("inf")}, "product_flops: "),
        ({"link": Link(0.0, 1e-5)}, "link: .*bandwidth=0.0"),
    ],
)
def test_a_figure_that_no_measurement_gives_is_refused(damage: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert Calibration.load(GPU.save(tmp_path / "whole.json")) == GPU
    with pytest.raises(PlanMismatch, match=rf"is not a calibration \({words}.*\).*Run wb\.measure\.calibrate"):
        Calibration.load(replace(GPU, **damage).save(tmp_path / "damaged.json"))


def test_a_file_of_bytes_and_a_folder_are_no_calibrations(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    for path in (tmp_path / "bytes", tmp_path, tmp_path / "none"):
        with pytest.raises(PlanMismatch, match="is not a calibration"):
            Calibration.load(path)


def test_a_calibration_of_another_format_is_refused(tmp_path: Path) -> None:
    file = GPU.save(tmp_path / "later.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": FORMAT + 1}))
    with pytest.raises(PlanMismatch, match=f"its format is {FORMAT + 1}, and this workbench reads format {FORMAT}"):
        Calibration.load(file)


def test_cpu_processes_share_their_processors_measured_speed(measured: Calibration) -> None:
    peak = measured.product_flops
    for processes in (1, 2, 8):
        for cluster in (local_cluster(processes), measured.cluster(processes)):
            assert cluster.gpus * cluster.device.peak_flops["fp32"] == pytest.approx(peak)
            assert cluster.gpus * cluster.device.memory_bandwidth == pytest.approx(measured.memory_bandwidth)


def test_a_calibrated_cluster_needs_a_device_whose_memory_is_known() -> None:
    for none in (0, -1):
        with pytest.raises(PlanInfeasible, match="must be 1 or more"):
            GPU.cluster(none)
    with pytest.raises(PlanMismatch, match=r"on NVIDIA RTX 4090, which the hardware table lacks.*Plan on the machine"):
        replace(GPU, device="NVIDIA RTX 4090").cluster()


def test_a_gpu_keeps_its_data_sheets_peak() -> None:
    cluster = GPU.cluster(16)
    assert (cluster.gpus, cluster.nodes) == (16, 2)
    assert cluster.device.peak_flops == H100.peak_flops
    efficiency = cluster.device.efficiency
    assert efficiency.gemm * H100.peak("bf16") == pytest.approx(IN_TRAINING * 700e12)
    assert efficiency.attention_forward * H100.peak("bf16") == pytest.approx(IN_TRAINING * 0.6 * 700e12)
    assert cluster.device.memory_bandwidth * efficiency.bandwidth == 3e12
    assert cluster.intra.bandwidth > cluster.inter.bandwidth


def test_the_fit_of_products_finds_peak_and_half() -> None:
    points = [(f, f / (700e12 * f / (f + 4e9))) for f in (2.0 * n**3 for n in (512, 1024, 2048, 4096, 8192))]
    peak, half = fit_products(points)
    assert peak == pytest.approx(700e12)
    assert half == pytest.approx(4e9)


def test_the_fit_of_a_link_finds_latency_and_bandwidth() -> None:
    link = Link(150e9, 10e-6)
    points = [(size, all_reduce_s(size, 4, link)) for size in (1024, 1 << 20, 1 << 29)]
    found = fit_link(points, 4)
    assert found.bandwidth == pytest.approx(150e9, rel=0.01)
    assert found.latency_s == pytest.approx(10e-6, rel=0.01)


@pytest.mark.parametrize(("devices", "paired"), [(8, 0.8), (2, 1.0)])
def test_a_measured_link_keeps_the_share_of_two_devices_unless_these_were_measured(devices: int, paired: float) -> None:
    known, seen = Link(350e9, 1e-5, paired=0.8), Link(300e9, 2e-5)
    cluster = replace(Cluster.of("h100", gpus=8), intra=known)
    assert replace(GPU, devices=devices).applied_to(cluster).intra == known, "none was measured"
    assert replace(GPU, devices=devices, link=seen).applied_to(cluster).intra == replace(seen, paired=paired)


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="written for a machine without GPUs")


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("own_home")
def test_the_work_of_other_processes_counts_and_that_of_this_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four cores work for ten seconds: one for others, and two for this process and its children."""
    times = namedtuple("times", "user system idle iowait guest")
    clock, every, own = Clock(), times(100.0, 10.0, 1000.0, 5.0, 50.0), [7.0, 1.0, 2.0, 0.0, 99.0]
    monkeypatch.setattr(detection, "time", clock)
    monkeypatch.setattr(detection.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(detection.psutil, "cpu_times", lambda: every)
    monkeypatch.setattr(detection.os, "times", lambda: own)
    watch = LoadWatch()
    clock.sleep(10)
    every = times(120.0, 20.0, 1009.0, 6.0, 55.0)  # a user's time holds that of guests
    own = [14.0, 4.0, 8.0, 4.0, 109.0]
    facts = watch.facts()
    assert facts == {MEASURED: clock.now, OTHERS: pytest.approx(10 / 40)}
    assert is_doubtful(facts)
    assert "while other processes took 25% of the cores" in in_words(facts)
    own = [19.0, 9.0, 8.0, 4.0, 109.0]
    assert watch.facts()[OTHERS] == 0


def test_the_time_of_the_cores_and_that_of_this_process_come_from_the_system() -> None:
    _, busy, own = LoadWatch._now()
    while LoadWatch._now()[2] < own + 0.3:
        pass
    assert LoadWatch._now()[1] > busy + 0.1, "the cores are counted in ticks"


@pytest.mark.usefixtures("own_home")
def test_what_was_measured_before_there_was_a_load_beside_it_is_doubtful() -> None:
    assert is_doubtful({"fp32": 1e9, "bandwidth": 1e9})
    assert in_words({"fp32": 1e9, "bandwidth": 1e9}) == ""


@on_cpu
def test_rates_of_a_busy_hour_are_measured_again_on_a_quiet_machine_only(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detected_cluster(2)
    [file] = (own_home / "devices").iterdir()
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
@pytest.mark.usefixtures("own_home")
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
def test_a_supervisor_compares_a_finished_run_with_its_plan_and_the_next_plan_says_so(own_home: Path) -> None:
    cluster = detected_cluster(2)
    assert "contradicts" not in cluster.device.measured
    plan = replace(plan_of(), cluster=cluster)
    run = RunDir(own_home / "run")
    run.path.mkdir()
    write_record(run.plan, plan.to_json())
    attempt = _Supervised(run, LogTail(run.events))
    _compare_with_prediction(attempt)
    assert not (own_home / "contradicted.json").exists(), "no step was logged"
    for _ in range(5):
        attempt.stalls.note_step(3 * plan.prediction.step_ms)
    _compare_with_prediction(attempt)
    assert read_json(own_home / "contradicted.json")["measured_ms"] == pytest.approx(3 * plan.prediction.step_ms)
    said = basis_of_times(PROFILE, detected_cluster(2).device)
    assert "timed on this machine on" in said
    assert "contradicts them: enough to rank plans." in said
