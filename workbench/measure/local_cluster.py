"""This machine as a `Cluster`: its CUDA GPUs, or CPU processes whose speed is measured once and kept."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from workbench.cost.cluster import Cluster
from workbench.cost.device import FITTED, TIMED, Device, Efficiency, Link
from workbench.cost.hardware import CARDS, NODES, PCIE
from workbench.errors import PlanInfeasible
from workbench.home import cache_home
from workbench.machine import available_cores, cpu_model
from workbench.rundir import read_json, write_json
from workbench.units import is_count, plain

CPU_PROCESSES = 2
CPU_SHARE = 0.8
"""Of the memory that is available now, what the processes together may be planned to take."""
CPU_RESERVED_BYTES = 500 << 20
"""Of each process: the interpreter, torch and transformers."""
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of control groups, versions 2 and 1."""
LOOPBACK = Link(0.6e9, 150e-6)
"""gloo over the loopback interface."""
SAME_MEMORY = 0.05
"""Devices of one size say so nearly the same."""
GEMM_SHARE = 0.9
"""Of a large square product's speed, what a model's products are taken to reach."""
_GEMM_SIZE = 1024
_COPY_BYTES = 64 << 20


def local_cluster(processes: int | None = None, *, calibrated: bool = True) -> Cluster:
    """Return this machine as a `Cluster`: its CUDA GPUs or, without any, `processes` (2) CPU processes.

    `calibrated` applies what `wb.calibrate` measured on this machine, unless the device's constants were fitted to
    whole training steps. Raises `PlanInfeasible` when `processes` exceeds the GPUs there are.
    """
    found = _detected(processes)
    if not calibrated or found.device.basis == FITTED:
        return found
    from workbench.measure.calibration import kept

    calibration = kept()
    if calibration is None:
        return found
    link = calibration.link_instead_of(found.intra)
    return replace(found, device=calibration.applied_to(found.device, found.gpus), intra=link)


def _detected(processes: int | None) -> Cluster:
    import torch

    processes = plain(processes)
    if processes is not None and not is_count(processes):
        raise PlanInfeasible(
            f"{processes!r} processes cannot train anything. Ask for a whole number of at least one, or leave it out.",
            processes=processes,
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return _cpu_cluster(CPU_PROCESSES if processes is None else processes)
    chosen = count if processes is None else processes
    if chosen > count:
        raise PlanInfeasible(
            f"{chosen} processes were asked for and this machine shows {count} GPUs. Ask for at most {count}, or plan "
            f'for another machine with Cluster.of("h200", gpus={chosen}).',
            processes=chosen,
            gpus=count,
        )
    name = torch.cuda.get_device_name(0)
    device, intra, inter = known_gpu(name) or (_measured_gpu(name), PCIE, PCIE)
    if name.lower() in CARDS:
        device = with_measured_rates(device, _rates(name))
    device = with_memory(device, torch.cuda.get_device_properties(0).total_memory)
    return Cluster(device, chosen, chosen, intra, inter, _host_bytes() // count)


def _host_bytes() -> int:
    """Memory of this machine, or less where a container is allowed less."""
    allowed = [int(psutil.virtual_memory().total)]
    for limit in CONTAINER_LIMITS:
        try:
            allowed.append(int(limit.read_text()))
        except (OSError, ValueError):  # not a container, or one without a limit ("max")
            continue
    return min(allowed)


def local_gpu() -> str | None:
    """`Device.name` of this machine's GPUs; None without one."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        return None
    name = torch.cuda.get_device_name(0)
    known = known_gpu(name)
    return known[0].name if known else str(name).removeprefix("NVIDIA ")


def known_gpu(name: str) -> tuple[Device, Link, Link] | None:
    """The row of the hardware table that torch's device name (`NVIDIA A100-SXM4-40GB`) speaks of; none for PCIe cards
    with the chips of GPUs that NVLink joins: they are slower, and so are their links."""
    key = CARDS.get(name.lower()) or _joined_by_nvlink(name.lower().replace("-", " ").split())
    if key is None:
        return None
    device, _, intra, inter = NODES[key]
    return device, intra, inter


def _joined_by_nvlink(words: list[str]) -> str | None:
    model = next((word for word in ("h200", "h100", "a100", "v100") if word in words), None)
    if "pcie" in words or "nvl" in words:
        return None
    small = model == "a100" and any(word.startswith("40g") for word in words)
    return "a100-40gb" if small else model


def with_memory(device: Device, total_bytes: int) -> Device:
    """The table's device, where it comes with another size of memory: a V100 of 16 GB, a slice of an A100."""
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
    )


def _rates(name: str) -> dict[str, float]:
    return _remembered(name, lambda: _measure("cuda", ("fp32", "bf16")))


def with_measured_rates(listed: Device, rates: Mapping[str, float]) -> Device:
    """`listed` with the efficiency that measured FLOP/s in bf16 and bytes per second come to. Its peak stays the data
    sheet's, of which MFU is a share."""
    gemm = GEMM_SHARE * min(1.0, rates["bf16"] / listed.peak("bf16"))
    bandwidth = min(1.0, rates["bandwidth"] / listed.memory_bandwidth)
    return replace(listed, efficiency=replace(listed.efficiency, gemm=gemm, bandwidth=bandwidth), basis=TIMED)


def _cpu_cluster(processes: int) -> Cluster:
    cores = available_cores()
    rates = _remembered(f"{cpu_model()} {cores}", lambda: _measure("cpu", ("fp32",)))
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
            collective_s=0.0,  # its latency is the link's
        ),
        basis=TIMED,
    )
    return Cluster(device, processes, processes, LOOPBACK, LOOPBACK)


def _measure(device: str, precisions: tuple[str, ...]) -> dict[str, float]:
    """FLOP/s of a square product in each precision, and bytes per second of a copy (read plus written)."""
    import torch

    size = _GEMM_SIZE if device == "cpu" else 8 * _GEMM_SIZE
    rates = {}
    for precision in precisions:
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        matrix = torch.randn(size, size, device=device, dtype=dtype)
        rates[precision] = 2 * size**3 / _seconds(functools.partial(torch.mm, matrix, matrix), device)
    source = torch.randn(_COPY_BYTES // 4 * (1 if device == "cpu" else 16), device=device)
    target = torch.empty_like(source)
    rates["bandwidth"] = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    return rates


def _seconds(work: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """The fastest of a few runs after a warm-up."""
    import torch

    best = float("inf")
    for attempt in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if attempt:
            best = min(best, time.perf_counter() - started)
    return best


def _remembered(what: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Measure once per device and torch version; later calls read the file."""
    import torch

    key = hashlib.sha256(f"{what} {torch.__version__} {platform.node()}".encode()).hexdigest()[:16]
    path: Path = cache_home() / "devices" / f"{key}.json"
    try:
        rates: dict[str, float] = read_json(path)
    except (OSError, json.JSONDecodeError):
        rates = measure()
        write_json(path, rates)
    return rates
