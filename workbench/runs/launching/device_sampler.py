"""Samples of how busy a run's devices are, written as `device` events every two seconds beside the training.

The supervisor (on further nodes, the process that started the ranks there) asks NVML for the GPUs that the run was
given, or the kernel for the CPU time of its processes. It does so in a daemon thread, so that a driver that does not
answer delays nothing. The ranks take no part in it. Without NVML there are no samples.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from workbench.errors import in_words
from workbench.machine import available_cores
from workbench.rundir import RunDir, log_event

SAMPLE_S = 2.0
LEAVES_S = 1.0
"""Seconds to wait for the sampling thread when the ranks have left; one that hangs in the driver is abandoned."""


@dataclass(frozen=True)
class Sample:
    """One sample of some devices; None where a device did not answer."""

    names: tuple[str, ...]
    shares: tuple[float | None, ...]
    """Utilisation of each device, from 0 to 1."""
    used_bytes: tuple[int | None, ...]


def _handle(nvml: Any, device: str) -> Any:
    """Return NVML's handle of a GPU by its name in `CUDA_VISIBLE_DEVICES`: UUID, beginning of the UUID, or index."""
    if device.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(device))
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if nvml.nvmlDeviceGetUUID(handle).startswith(device):
            return handle
    return nvml.nvmlDeviceGetHandleByUUID(device)


class GpuMeter:
    """The GPUs of these names in `CUDA_VISIBLE_DEVICES`: UUIDs, their beginnings, or indices.

    A share is the part of the driver's last sampling period (up to a second) in which a kernel ran. Memory counts the
    use by any process. Raises `ImportError` or `pynvml.NVMLError` where NVML cannot be asked.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handles = [_handle(pynvml, name) for name in devices]
        self._names = tuple(f"GPU {pynvml.nvmlDeviceGetIndex(handle)}" for handle in self._handles)

    def sample(self) -> Sample:
        shares, used = [], []
        for handle in self._handles:
            share = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
            memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
            shares.append(None if share is None else share.gpu / 100)
            used.append(None if memory is None else int(memory.used))
        return Sample(self._names, tuple(shares), tuple(used))

    def _ask(self, question: Any, handle: Any) -> Any:
        try:
            return question(handle)
        except self._nvml.NVMLError:  # not supported (a slice of a GPU), or the GPU has fallen off the bus
            return None


class CpuMeter:
    """The node's cores: the share of them that a process and all below it have used since the last sample."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cores = available_cores()
        self._spent, self._at = self._look()[0], time.monotonic()

    def sample(self) -> Sample:
        spent, resident = self._look()
        now = time.monotonic()
        busy = sum(seconds - self._spent.get(process, 0.0) for process, seconds in spent.items())
        share = busy / (self._cores * max(1e-3, now - self._at))
        self._spent, self._at = spent, now
        return Sample(("CPU",), (min(1.0, share),), (resident,))

    def _look(self) -> tuple[dict[tuple[int, float], float], int]:
        """Return the CPU seconds of each process so far, and the resident bytes of all."""
        spent, resident = {}, 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.Error), process.oneshot():
                    times = process.cpu_times()
                    spent[process.pid, process.create_time()] = times.user + times.system
                    resident += process.memory_info().rss
        return spent, resident


def open_meter(device_type: str, devices: Sequence[str], pid: int) -> CpuMeter | GpuMeter:
    """Return a meter for the devices of a run whose launcher has this pid; `device_type` is `cpu` or `cuda`."""
    return CpuMeter(pid) if device_type == "cpu" else GpuMeter(devices)


@contextlib.contextmanager
def sampled(run: RunDir, device_type: str, devices: Sequence[str], pid: int, node: int | None = None) -> Iterator[None]:
    """Record how busy the devices are for as long as the block runs; an error of the sampling is only printed."""
    over = threading.Event()

    def record() -> None:
        try:
            meter = open_meter(device_type, devices, pid)
            while not over.wait(SAMPLE_S):
                write_sample(run, device_type, meter.sample(), node)
        except Exception as error:  # no NVML, a driver of another version, a full disk
            print(f"Devices are not sampled: {in_words(error)}", flush=True)

    thread = threading.Thread(target=record, name="devices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LEAVES_S)


def write_sample(run: RunDir, device_type: str, sample: Sample, node: int | None = None) -> None:
    """Append one `device` event."""
    shares = [None if share is None else round(share, 3) for share in sample.shares]
    columns = {"names": list(sample.names), "shares": shares, "used_bytes": list(sample.used_bytes)}
    log_event(run.events, "device", device_type=device_type, **({} if node is None else {"node": node}), **columns)
