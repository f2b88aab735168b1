"""The devices of this machine: GPUs by the name that torch reports, CPUs and unknown GPUs by a speed measured once.

Rates are cached under `$WORKBENCH_HOME/devices` for each device and torch version, with the load that they were
measured under; `workbench.measure.load` says when they are measured again.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from workbench.cost.cluster import Cluster
from workbench.cost.device import TIMED, Device, Efficiency, Link
from workbench.cost.hardware import CARDS, NODES, PCIE
from workbench.errors import PlanInfeasible
from workbench.home import cache_home
from workbench.machine import available_cores, cpu_model
from workbench.measure.load import LoadWatch, in_words, is_doubtful, is_quiet
from workbench.measure.microbenchmarks import copy_rate, product_s
from workbench.rundir import read_object, write_json
from workbench.units import plain

CPU_PROCESSES = 2
"""Processes of a machine without GPUs, unless a number is given."""
CPU_SHARE = 0.8
"""Share of the available memory that CPU processes together may be planned to take."""
CPU_RESERVED_BYTES = 500 << 20
"""Bytes of each CPU process that the interpreter, torch and transformers take."""
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files that hold a container's memory limit (control groups, versions 2 and 1)."""
LOOPBACK = Link(0.6e9, 150e-6)
"""Link of gloo over the loopback interface; assumed until `wb.measure.calibrate` measures it."""
SAME_MEMORY = 0.05
"""Relative difference in memory up to which a device is the one of the hardware table."""
GEMM_SHARE = 0.9
"""Share of a large square product's rate that a model's products are assumed to reach."""
_GEMM_SIZE = 1024
_COPY_BYTES = 64 << 20


def detected_cluster(processes: int | None) -> Cluster:
    """Return this machine as a `Cluster`, without a calibration; arguments and errors are `local_cluster`'s."""
    import torch

    processes = plain(processes)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return _cpu_cluster(CPU_PROCESSES if processes is None else processes)
    chosen = count if processes is None else processes
    if chosen > count:
        raise PlanInfeasible(
            f"{chosen} processes were asked for and this machine shows {count} GPUs. Ask for at most {count}, or plan "
            f'for another machine with Cluster.of("h200", gpus={chosen}).'
        )
    name = torch.cuda.get_device_name(0)
    device, intra, inter = known_gpu(name) or (_measured_gpu(name), PCIE, PCIE)
    if name.lower() in CARDS:
        device = with_measured_rates(device, _rates(name))
    device = with_memory(device, torch.cuda.get_device_properties(0).total_memory)
    return Cluster(device, chosen, chosen, intra, inter, _host_bytes() // count)


def _host_bytes() -> int:
    """Return the memory of this machine, or the limit of its container."""
    allowed = [int(psutil.virtual_memory().total)]
    for limit in CONTAINER_LIMITS:
        try:
            allowed.append(int(limit.read_text()))
        except (OSError, ValueError):  # not a container, or one without a limit ("max")
            continue
    return min(allowed)


def local_gpu() -> str | None:
    """Return the `Device.name` of this machine's GPUs; None without one."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        return None
    name = torch.cuda.get_device_name(0)
    data_sheet = known_gpu(name)
    return data_sheet[0].name if data_sheet else str(name).removeprefix("NVIDIA ")


def known_gpu(name: str) -> tuple[Device, Link, Link] | None:
    """Return device, inner and outer link of the hardware table for torch's device name (`NVIDIA A100-SXM4-40GB`).

    PCIe cards with the chips of NVLink GPUs are not in the table: they and their links are slower.
    """
    key = CARDS.get(name.lower()) or _joined_by_nvlink(name.lower().replace("-", " ").split())
    if key is None:
        return None
    device, _, intra, inter, _ = NODES[key]
    return device, intra, inter


def _joined_by_nvlink(words: list[str]) -> str | None:
    model = next((word for word in ("h200", "h100", "a100", "v100") if word in words), None)
    if "pcie" in words or "nvl" in words:
        return None
    size = {"a100": "40g", "v100": "16g"}.get(model or "")
    small = size is not None and any(word.startswith(size) for word in words)
    return f"{model}-{size}b" if small else model


def with_memory(device: Device, total_bytes: int) -> Device:
    """Return the device with its actual memory, where that is not the table's: a V100 of 16 GB, a slice of an A100."""
    same = abs(total_bytes / device.memory_bytes - 1) < SAME_MEMORY
    return device if same else replace(device, memory_bytes=total_bytes)


def _measured_gpu(name: str) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(0)
    rates = _rates(name)
    return Device(
        name=name.removeprefix("NVIDIA "),
        type="cuda",
        memory_bytes=properties.total_memory,
        peak_flops={key: rates[key] for key in ("fp32", "bf16")},
        memory_bandwidth=rates["bandwidth"],
        reserved_bytes=1 << 30,
        efficiency=Efficiency(gemm=GEMM_SHARE, bandwidth=1.0),
        basis=TIMED,
        measured=in_words(rates),
    )


def _rates(name: str) -> dict[str, float]:
    return _cached(name, lambda: _measure("cuda", ("fp32", "bf16")))


def with_measured_rates(listed: Device, rates: Mapping[str, float]) -> Device:
    """Return `listed` with the efficiency that follows from measured rates: FLOP/s in `bf16`, bytes/s of `bandwidth`.

    Its peak stays that of the data sheet, which defines MFU.
    """
    gemm = GEMM_SHARE * min(1.0, rates["bf16"] / listed.peak("bf16"))
    bandwidth = min(1.0, rates["bandwidth"] / listed.memory_bandwidth)
    efficiency = replace(listed.efficiency, gemm=gemm, bandwidth=bandwidth)
    return replace(listed, efficiency=efficiency, basis=TIMED, measured=in_words(rates))


def _cpu_cluster(processes: int) -> Cluster:
    cores = available_cores()
    rates = _cached(f"{cpu_model()} {cores}", lambda: _measure("cpu", ("fp32",)))
    share = 1 / max(1, processes)
    device = Device(
        name="CPU process",
        type="cpu",
        memory_bytes=int(psutil.virtual_memory().available * CPU_SHARE * share),
        peak_flops={"fp32": rates["fp32"] * share},
        memory_bandwidth=rates["bandwidth"] * share,
        reserved_bytes=CPU_RESERVED_BYTES,
        efficiency=Efficiency(
            gemm=0.8,
            gemm_half_flops=2e6,
            attention_forward=0.4,
            attention_backward=0.3,
            bandwidth=0.8,
            launch_s=12e-6,
            block_forward_s=60e-6,
            block_backward_s=60e-6,
            overlapped_link=1.0,
            sharded_block_s=2e-3,
            collective_s=0.0,  # included in the link's latency
        ),
        basis=TIMED,
        measured=in_words(rates),
    )
    return Cluster(device, processes, processes, LOOPBACK, LOOPBACK)


def _measure(device_type: str, precisions: tuple[str, ...]) -> dict[str, float]:
    """Return FLOP/s of a square product in each precision, and `bandwidth` (bytes/s, read plus written) of a copy."""
    size, copied = (_GEMM_SIZE, _COPY_BYTES) if device_type == "cpu" else (8 * _GEMM_SIZE, 16 * _COPY_BYTES)
    rates = {name: 2 * size**3 / product_s(size, device_type, name, warm_ups=1) for name in precisions}
    return {**rates, "bandwidth": copy_rate(copied, device_type, warm_ups=1)}


def _cached(what: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return rates measured once per device and torch version, or again on a quiet machine if they are doubtful."""
    import torch

    key = hashlib.sha256(f"{what} {torch.__version__} {platform.node()}".encode()).hexdigest()[:16]
    path: Path = cache_home() / "devices" / f"{key}.json"
    rates: dict[str, float] = read_object(path)
    if not rates or (is_doubtful(rates) and is_quiet()):
        watch = LoadWatch()
        rates = {**measure(), **watch.facts()}
        write_json(path, rates)
    return rates
