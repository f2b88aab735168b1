"""Device utilisation is measured on CPUs, asked of NVML on GPUs, recorded beside a training and read back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from tests.logs import append_event
from tests.patience import PATIENCE_S, Clock, eventually
from workbench.base.machine import available_cores
from workbench.record.event_log import LogTail, read_events
from workbench.record.history import HistoryTail
from workbench.record.rundir import RunDir
from workbench.runs.launching import device_queue, supervisor
from workbench.runs.launching.device_queue import CpuMeter, GpuMeter, Sample, sampled, write_sample
from workbench.runs.run import Run

BUSY = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"


@contextmanager
def busy_tree() -> Iterator[psutil.Process]:
    """Start a process whose child computes, and wait until that has taken some time of a core."""
    with subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) as started:
        top = psutil.Process(started.pid)
        try:
            eventually(lambda: cpu_seconds(top) > 0.1)
            yield top
        finally:
            os.killpg(started.pid, signal.SIGKILL)


def cpu_seconds(top: psutil.Process) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in (top, *top.children(recursive=True)))


def test_a_share_is_the_cpu_time_of_a_process_and_all_below_it_and_that_of_idle_ones_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(device_queue, "time", clock)
    with busy_tree() as top:
        before = cpu_seconds(top)
        meter = CpuMeter(top.pid)
        after = cpu_seconds(top)
        eventually(lambda: cpu_seconds(top) > after + 0.1)
        least = cpu_seconds(top) - after
        clock.sleep(100)
        sample = meter.sample()
        most = cpu_seconds(top) - before
        assert sample.names == ("CPU",)
        assert least - 1e-6 <= sample.shares[0] * 100 * available_cores() <= most + 1e-6
        assert sample.used_bytes[0] is not None
        assert 5e6 < sample.used_bytes[0] < 5e8
        os.killpg(top.pid, signal.SIGSTOP)
        eventually(lambda: {each.status() for each in (top, *top.children())} == {psutil.STATUS_STOPPED})
        meter.sample()
        clock.sleep(1)
        assert meter.sample().shares == (0.0,)
    clock.sleep(1)
    assert meter.sample().shares == (0.0,), "the processes are gone"


def is_sampling() -> bool:
    return any(thread.name == "devices" for thread in threading.enumerate())


def test_samples_are_recorded_while_the_processes_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_queue, "SAMPLE_S", 0.01)
    monkeypatch.setattr(device_queue, "LEAVES_S", PATIENCE_S)
    run = RunDir(tmp_path)

    def found() -> list[dict[str, Any]]:
        return read_events(run.events) if run.events.exists() else []

    with busy_tree() as top, sampled(run, "cpu", ("cpu",), top.pid):
        eventually(lambda: len(found()) > 2 and max(event["shares"][0] for event in found()) > 0, found)
    assert not is_sampling(), "nothing comes after the end"
    assert {(event["type"], event["device_type"], *event["names"]) for event in found()} == {("device", "cpu", "CPU")}


UUIDS = ("GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3")


class FakeNvml(SimpleNamespace):
    """An NVML with three GPUs; the last one does not report its utilisation, like a slice of a GPU."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__(started=False)

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's own names, here and below)
        self.started = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:  # noqa: N802
        raise self.NVMLError(f"no {name}")

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return UUIDS[handle]

    def nvmlDeviceGetIndex(self, handle: int) -> int:  # noqa: N802
        return handle

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        if handle == 2:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=90 + handle, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=2**37, free=0, used=(handle + 1) * 2**30)


def test_only_the_runs_gpus_are_asked_by_uuid_its_beginning_or_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert GpuMeter(("GPU-cccc-3", "GPU-bb")).sample() == Sample(
        ("GPU 2", "GPU 1"), (None, 0.91), (3 * 2**30, 2 * 2**30)
    )
    assert GpuMeter(("0",)).sample() == Sample(("GPU 0",), (0.9,), (2**30,))


@pytest.mark.parametrize("missing", ["package", "library"])
def test_without_nvml_nothing_is_recorded_and_nothing_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], missing: str
) -> None:
    if missing == "package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif _has_nvml():
        pytest.skip("this machine has NVML")
    with sampled(RunDir(tmp_path), "cuda", UUIDS, pid=1):
        eventually(lambda: not is_sampling())
    assert not (tmp_path / "events.jsonl").exists()
    assert "Devices are not sampled" in capfd.readouterr().out


def _has_nvml() -> bool:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def test_a_driver_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(device_queue, "open_meter", lambda *_: answers.wait(PATIENCE_S))
    monkeypatch.setattr(device_queue, "LEAVES_S", 0.1)
    with sampled(RunDir(tmp_path), "cuda", UUIDS, pid=1):
        pass
    assert is_sampling(), "the end waited for the driver's answer"
    answers.set()
    eventually(lambda: not is_sampling())


def test_a_busy_device_is_no_sign_of_life_of_the_ranks(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    attempt = supervisor._Supervised(run, LogTail(run.events))
    attempt.last_sign = 0.0
    write_sample(run, "cuda", Sample(("GPU 0",), (1.0,), (1,)))
    attempt.read()
    assert attempt.last_sign == 0.0
    append_event(run.events, "phase", name="build", seconds=1.0)
    attempt.read()
    assert attempt.last_sign > 0


def sample_at(run: RunDir, time_s: float, *shares: float | None, node: int | None = None) -> None:
    facts = {"names": [f"GPU {index}" for index in range(len(shares))], "used_bytes": [2**30] * len(shares)}
    node_fact = {} if node is None else {"node": node}
    append_event(run.events, "device", time=time_s, device_type="cuda", shares=list(shares), **facts, **node_fact)


def steps_at(run: RunDir, first: int, last: int) -> None:
    """Append one step a second, each at the second of its number."""
    for step in range(first, last + 1):
        append_event(run.events, "step", time=float(step), step=step, loss=1.0, seconds=float(step))


def test_samples_count_while_the_run_trains(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    sample_at(run, 0.1, 0.0, 0.0)  # it still builds the model
    append_event(run.events, "start", time=0.2, devices=2, resumed_from=None)
    steps_at(run, 1, 3)
    sample_at(run, 2.5, 0.5, None)
    sample_at(run, 3.5, 0.75, 1.0)
    append_event(run.events, "end", time=4.0, steps=3, seconds=3.0)
    sample_at(run, 4.5, 0.0, 0.0)
    tail = HistoryTail(run.events)
    tail.read()
    assert tail.utilization.device_type == "cuda"
    assert tail.utilization.names == ("GPU 0", "GPU 1")
    assert tail.utilization.time.tolist() == [2.5, 2.5, 3.5, 3.5]
    assert tail.utilization.device.tolist() == [0, 1, 0, 1]
    assert np.isnan(tail.utilization.share[1])
    assert np.nanmean(tail.utilization.share) == 0.75


def test_a_resumption_forgets_samples_with_the_steps_they_belong_to(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    append_event(run.events, "start", time=0.0, devices=1, resumed_from=None)
    steps_at(run, 1, 9)
    for moment in (2.5, 5.5, 8.5):
        sample_at(run, moment, 1.0)
    append_event(run.events, "start", time=100.0, devices=1, resumed_from="checkpoints/step-00000004")
    append_event(run.events, "step", time=105.0, step=5, loss=1.0)
    sample_at(run, 105.5, 0.5, node=1)
    tail = HistoryTail(run.events)
    tail.read()
    assert tail.utilization.time.tolist() == [2.5, 105.5]
    assert tail.utilization.names == ("GPU 0", "node 1, GPU 0")


def test_samples_of_a_long_run_are_read_as_a_tail_or_at_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    append_event(run.events, "start", time=0.0, devices=1, resumed_from=None)
    for step in range(1, 6000):
        steps_at(run, step, step)
        sample_at(run, step + 0.5, 0.25, 0.5)
    tail = HistoryTail(run.events)
    assert len(tail.read()) == len(HistoryTail(run.events).read()) == 5999
    first = tail.utilization
    sample_at(run, 6000.5, 1.0, 1.0)
    tail.read()
    assert len(Run(tmp_path).utilization()) == len(tail.utilization)
    assert tail.utilization.share.tolist() == [*first.share.tolist(), 1.0, 1.0]
