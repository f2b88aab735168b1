"""The devices of this machine: GPUs by the name that torch reports, CPUs and unknown GPUs by a speed measured once.

All devices are measured at once in a process each, which runs this module: `python -m workbench.measure.detection`.

Rates are cached under `$WORKBENCH_HOME/devices` for each device and torch version, with the load that they were
measured under; `workbench.measure.detection` says when they are measured again.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from workbench.base.errors import PlanInfeasible
from workbench.base.machine import available_cores, cache_home, cpu_model, end_elastic_launch
from workbench.base.units import plain
from workbench.cost.hardware import PCIE, TIMED, Cluster, Device, Efficiency, Link, Node
from workbench.record.rundir import read_json, read_object, write_json

if TYPE_CHECKING:
    import torch

# The load of other processes while something was measured, and whether it should be measured again.

BUSY = 0.2
"""Share of the cores from which other work makes a measurement doubtful, and that a quiet machine stays below."""
DISAGREEMENT = 2.0
"""Ratio of a finished run's step to its prediction, either way, that contradicts what the prediction came from.

Constants of CPUs are right to a factor of 1.5 on an idle machine.
"""
MEASURED, OTHERS = "measured_at", "others"
"""Keys of a cached measurement: seconds since 1970, and the share of the cores that other processes took."""


class LoadWatch:
    """Counts, from its creation on, the processor time that other processes took."""

    def __init__(self) -> None:
        self._began = self._now()

    def facts(self) -> dict[str, float]:
        """Return when this was, and the share of the cores that other processes took, to be cached beside a result."""
        began, now = self._began, self._now()
        seconds, busy, own = (after - before for before, after in zip(began, now, strict=True))
        others = max(0.0, busy - own) / max(seconds * (psutil.cpu_count() or 1), 1e-9)
        return {MEASURED: time.time(), OTHERS: min(1.0, others)}

    @staticmethod
    def _now() -> tuple[float, float, float]:
        every, own = psutil.cpu_times(), os.times()
        idle = every.idle + getattr(every, "iowait", 0.0)
        return time.monotonic(), sum(every) - idle - getattr(every, "guest", 0.0), sum(own[:4])


def is_quiet() -> bool:
    """Return True if fewer processes want a core than there are cores to spare for a measurement."""
    return os.getloadavg()[0] < max(BUSY * available_cores(), 0.5)


def is_doubtful(facts: Mapping[str, Any]) -> bool:
    """Return True for a measurement that was made beside much other work, or before a run that contradicted it."""
    return float(facts.get(OTHERS, 1.0)) > BUSY or float(facts.get(MEASURED, 0.0)) < contradicted_at()


def in_words(facts: Mapping[str, Any]) -> str:
    """Return when something was measured and beside how much other work; "" where that is not known."""
    if MEASURED not in facts:
        return ""
    when = datetime.datetime.fromtimestamp(facts[MEASURED], datetime.UTC)
    said = f" on {when.day} {when:%B %Y}"
    said += f" while other processes took {facts[OTHERS]:.0%} of the cores" if facts[OTHERS] > BUSY else ""
    contradicted = facts[MEASURED] < contradicted_at()
    return said + (", and a run that has finished since contradicts them" if contradicted else "")


def contradicted_at() -> float:
    """Return when a finished run last contradicted its prediction, in seconds since 1970; 0 if none did."""
    try:
        return float(read_json(_path())["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def compare(predicted_ms: float, measured_ms: float) -> None:
    """Note that a run has finished whose steps its prediction missed by far; others leave no trace."""
    ratio = measured_ms / predicted_ms
    if not 1 / DISAGREEMENT <= ratio <= DISAGREEMENT:
        write_json(_path(), {"time": time.time(), "predicted_ms": predicted_ms, "measured_ms": measured_ms})


def _path() -> Path:
    return cache_home() / "contradicted.json"


# Kernels, copies, launches and all-reduces timed alone on this machine; torch is loaded when a function is called.

LINK_TIMEOUT_S = 120.0
"""Seconds after which the all-reduce benchmark is given up."""
REPEATS, CPU_REPEATS = 8, 40
"""Timed runs of each size, after two that warm up."""
PRODUCT_SIZE, COPIED_ELEMENTS = 1024, 16 << 20
"""Rows of the square products, and elements of the copies, that CPU processes compute at once."""
LARGE_ELEMENTS = 1 << 20
"""Size from which CPUs exchange `REPEATS` times, because it takes long."""


def fastest_s(
    work: Callable[[], Any],
    device_type: str,
    *,
    repeats: int = 5,
    warm_ups: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of the fastest of `repeats` runs by a clock, after some that warm up."""
    import torch

    best = float("inf")  # other work can only make a run longer, so that the fastest is the least disturbed
    for attempt in range(warm_ups + repeats):
        if device_type == "cuda":
            torch.cuda.synchronize()
        started = clock()
        work()
        if device_type == "cuda":
            torch.cuda.synchronize()
        if attempt >= warm_ups:
            best = min(best, clock() - started)
    return best


def _clock_of_one_thread(device_type: str) -> Callable[[], float]:
    """Return what times work of one thread: on a CPU its processor time, which other processes do not stretch."""
    return time.thread_time if device_type == "cpu" else time.perf_counter


def product_s(size: int, device_type: str, precision: str, *, warm_ups: int = 2) -> float:
    """Return the seconds of a product of two square matrices with `size` rows."""
    import torch

    matrix = torch.randn(size, size, device=device_type, dtype=_dtype(precision))
    return fastest_s(partial(torch.mm, matrix, matrix), device_type, warm_ups=warm_ups)


def copy_rate(num_bytes: int, device_type: str, *, warm_ups: int = 2) -> float:
    """Return the bytes per second, read plus written, of a copy in the device's memory."""
    import torch

    source = torch.ones(num_bytes // 4, device=device_type)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / fastest_s(lambda: target.copy_(source), device_type, warm_ups=warm_ups)


def product_rates(device_type: str, precision: str) -> tuple[float, float]:
    """Return the peak FLOP/s of matrix products and the FLOPs of a product that reaches half of it."""
    sizes = (512, 1024, 2048, 4096, 8192) if device_type == "cuda" else (64, 128, 256, 512, 1024)
    return fit_products([(2.0 * size**3, product_s(size, device_type, precision)) for size in sizes])


def fit_products(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the peak FLOP/s and the FLOPs that reach half of it, from (FLOPs, seconds) of products.

    rate = peak · f / (f + half) means seconds = f / peak + half / peak: a line, fitted by relative errors.
    """
    # Relative errors: the largest product has 4,096 times the FLOPs of the smallest, and would decide alone.
    flops, seconds = np.array(points).T
    slope, offset = np.polyfit(flops, seconds, 1, w=1 / seconds)
    if slope <= 0 or offset < 0:  # noise hides the offset
        return float((flops / seconds).max()), float(flops.min()) / 100
    return float(1 / slope), float(offset / slope)


def attention_rates(device_type: str, precision: str) -> tuple[float, float]:
    """Return the FLOP/s of fused attention, forward and backward, at the shape of a large transformer."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    batch, heads, tokens, width = (8, 16, 1024, 64) if device_type == "cuda" else (1, 4, 256, 64)
    make = partial(torch.randn, (batch, heads, tokens, width), device=device_type, dtype=_dtype(precision))
    query, key, value = (make(requires_grad=True) for _ in range(3))
    gradient = make()
    flops = 4.0 * batch * heads * tokens * tokens * width

    def both() -> None:
        torch.autograd.grad(scaled_dot_product_attention(query, key, value), (query, key, value), gradient)

    # The backward of fused attention computes the scores again: five products in place of the forward's two.
    with torch.no_grad():
        forward = fastest_s(lambda: scaled_dot_product_attention(query, key, value), device_type)
    backward = max(fastest_s(both, device_type) - forward, forward)
    return flops / forward, 2.5 * flops / backward


def host_rate() -> float:
    """Return the bytes per second from pinned host memory to the GPU."""
    import torch

    source = torch.ones(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    return source.nbytes / fastest_s(lambda: target.copy_(source, non_blocking=True), "cuda")


def launch_seconds(device_type: str) -> float:
    """Return the seconds between two small operations that Python launches."""
    import torch

    value, launches = torch.zeros(8, device=device_type), 200
    clock = _clock_of_one_thread(device_type)
    return fastest_s(lambda: [value.add_(1.0) for _ in range(launches)], device_type, clock=clock) / launches


def block_host_seconds(device_type: str) -> tuple[float, float]:
    """Return the host's seconds for forward and backward of a transformer layer that takes the device no time.

    The layer is compiled on a GPU, because blocks run compiled there.
    """
    import torch
    from torch import nn

    layer: Any = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, device=device_type)
    run = torch.compile(layer) if device_type == "cuda" else layer
    value = torch.randn(1, 8, 32, device=device_type, requires_grad=True)
    clock = _clock_of_one_thread(device_type)
    forward = fastest_s(lambda: run(value), device_type, repeats=20, clock=clock)
    both = fastest_s(lambda: run(value).sum().backward(), device_type, repeats=20, clock=clock)
    return forward, max(both - forward, 0.5 * forward)


def measured_together(devices: int) -> dict[str, Any]:
    """Return what all devices, run in one process each, reach together; nothing for one device or on failure.

    The entries are `link`, the sums over CPU processes of `product_flops` and `memory_bandwidth`, and `beside`, the
    rate of one process's copy while the others copy too, over its rate alone.
    """
    if devices < 2:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={devices}"]
        command += ["-m", "workbench.measure.detection", str(result)]
        package = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(path for path in (package, os.environ.get("PYTHONPATH", "")) if path)
        threads = str(max(1, available_cores() // devices))  # as the ranks of a run have
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": threads}
        try:
            launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                if launcher.wait(LINK_TIMEOUT_S):
                    return {}
            finally:
                end_elastic_launch(launcher)
            found = json.loads(result.read_text())
            return {"link": fit_link(found.pop("all_reduce"), devices), **found}
        except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
            return {}


def all_reduce_times(device: torch.device) -> list[tuple[int, float]]:
    """Return bytes and seconds of an all-reduce for several sizes: the fastest run on GPUs, the mean of those on CPUs.

    On CPUs a matrix product precedes each, as in training: the process that waits has then given its core away and must
    be woken. That takes many times as long as an exchange of processes that do nothing else, and longer on a busy
    machine.
    """
    import torch
    import torch.distributed as dist

    on_gpu = device.type == "cuda"
    seconds_by_size = []
    factor = torch.ones(256, 256, device=device)
    for elements in (256, 1 << 14, 1 << 20, 1 << 24, *((1 << 27,) if on_gpu else ())):
        tensor = torch.ones(elements, device=device)
        times = []
        for _ in range((REPEATS if on_gpu or elements >= LARGE_ELEMENTS else CPU_REPEATS) + 2):
            tensor.fill_(1.0)
            if on_gpu:
                dist.barrier()
                torch.cuda.synchronize(device)
            else:
                factor @ factor
            started = time.perf_counter()
            dist.all_reduce(tensor)
            if on_gpu:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
        seconds_by_size.append((tensor.nbytes, min(times[2:]) if on_gpu else fmean(times[2:])))
    return seconds_by_size


def shared_rates() -> dict[str, float]:
    """Return what CPU processes reach while all of them work, and how much of its lone rate a copy keeps.

    They share memory and caches. `product_flops` and `memory_bandwidth` are sums over all processes, and `beside` is
    the rate of a copy beside the others over its rate alone. Seconds are those in which the cores of a process worked
    for it, so that other work on the machine makes no rate lower than it is on cores of one's own.
    """
    import torch
    import torch.distributed as dist

    threads = torch.get_num_threads()  # which wait actively for one another
    matrix, source = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE), torch.ones(COPIED_ELEMENTS)
    target = torch.zeros_like(source)

    def rate(work: Callable[[], Any], amount: float) -> float:
        """Return the amount per second of the middle one of some runs."""
        times = []
        for _ in range(REPEATS + 2):
            started = time.process_time()
            work()
            times.append(time.process_time() - started)
        return amount * threads / median(times[2:])

    def copy_rate() -> float:
        return rate(lambda: target.copy_(source), 2 * source.nbytes)

    alone = copy_rate() if dist.get_rank() == 0 else 0.0  # the others wait at the barrier
    dist.barrier()
    copied = copy_rate()
    dist.barrier()
    product = rate(lambda: matrix @ matrix, 2 * PRODUCT_SIZE**3)
    sums = torch.tensor([product, copied], dtype=torch.float64)
    dist.all_reduce(sums)
    return {"product_flops": float(sums[0]), "memory_bandwidth": float(sums[1]), "beside": copied / (alone or copied)}


def measure_all_devices(result: Path) -> None:
    """Write what all devices reach at once, in one of the processes that `torch.distributed.run` starts for them."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        shared = dict.fromkeys(("product_flops", "memory_bandwidth", "beside"), 1.0) if on_gpu else shared_rates()
        found = {"all_reduce": all_reduce_times(device), **shared}
        if dist.get_rank() == 0:
            result.write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def fit_link(points: Sequence[tuple[float, float]], group: int) -> Link:
    """Return latency and bus bandwidth from (bytes, seconds) of all-reduces over `group` devices.

    The model is that of `workbench.cost.hardware`: t = 2 · steps · α + 2 (g - 1) / g · bytes / β. The smallest
    message gives α, the largest β.
    """
    ordered = sorted(points)
    steps = 2 * (group - 1).bit_length()
    latency = ordered[0][1] / steps
    size, seconds = ordered[-1]
    moving = max(seconds - steps * latency, 0.5 * seconds)
    return Link(2 * (group - 1) / group * size / moving, latency)


def _dtype(precision: str) -> Any:
    import torch

    return torch.bfloat16 if precision == "bf16" else torch.float32


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


def num_gpus() -> int:
    """Return the number of GPUs that this machine shows; unlike what they are, it is known without CUDA's memory."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def detected_cluster(processes: int | None) -> Cluster:
    """Return this machine as a `Cluster`, without a calibration; arguments and errors are `local_cluster`'s."""
    import torch

    processes = plain(processes)
    count = num_gpus()
    if count == 0:
        return cpu_cluster(CPU_PROCESSES if processes is None else processes)
    chosen = count if processes is None else processes
    if chosen > count:
        raise PlanInfeasible(
            f"{chosen} processes were asked for and this machine shows {count} GPUs. Ask for at most {count}, or plan "
            f'for another machine with Cluster.of("h200", gpus={chosen}).'
        )
    name = torch.cuda.get_device_name(0)
    node = Node.of_card(name)
    device, intra, inter = (node.device, node.intra, node.inter) if node else (_measured_gpu(name), PCIE, PCIE)
    if node and node.is_timed:
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


def local_gpu_name() -> str | None:
    """Return the `Device.name` of this machine's GPUs; None without one."""
    import torch

    if not num_gpus():
        return None
    name = torch.cuda.get_device_name(0)
    node = Node.of_card(name)
    return node.device.name if node else str(name).removeprefix("NVIDIA ")


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
        measured=f"{in_words(rates)}; its links are taken for those of PCIe until wb.measure.calibrate() measures them",
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


def cpu_cluster(processes: int) -> Cluster:
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
            sharded_collective_s=0.0,
            matrix_s=0.0,
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
        with contextlib.suppress(OSError):  # in a home that cannot be written, the next process measures again
            write_json(path, rates)
    return rates


if __name__ == "__main__":
    measure_all_devices(Path(sys.argv[1]))
