"""Kernels, copies, launches and all-reduces timed alone on this machine; torch is loaded when a function is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from workbench.cost.device import Link
from workbench.machine import available_cores

LINK_BENCHMARK = "workbench.measure.links"
"""Module that each process of the all-reduce benchmark runs."""
LINK_TIMEOUT_S = 120.0
"""Seconds after which the all-reduce benchmark is given up."""


def fastest_s(work: Callable[[], Any], device_type: str, *, repeats: int = 5, warm_ups: int = 2) -> float:
    """Return the seconds of the fastest of `repeats` runs, after some that warm up."""
    import torch

    best = float("inf")
    for attempt in range(warm_ups + repeats):
        if device_type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device_type == "cuda":
            torch.cuda.synchronize()
        if attempt >= warm_ups:
            best = min(best, time.perf_counter() - started)
    return best


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
    return fastest_s(lambda: [value.add_(1.0) for _ in range(launches)], device_type) / launches


def block_host_seconds(device_type: str) -> tuple[float, float]:
    """Return the host's seconds for forward and backward of a transformer layer that takes the device no time.

    The layer is compiled on a GPU, because blocks run compiled there.
    """
    import torch
    from torch import nn

    layer: Any = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, device=device_type)
    run = torch.compile(layer) if device_type == "cuda" else layer
    value = torch.randn(1, 8, 32, device=device_type, requires_grad=True)
    forward = fastest_s(lambda: run(value), device_type, repeats=20)
    both = fastest_s(lambda: run(value).sum().backward(), device_type, repeats=20)
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
        command += ["-m", LINK_BENCHMARK, str(result)]
        package = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(path for path in (package, os.environ.get("PYTHONPATH", "")) if path)
        threads = str(max(1, available_cores() // devices))  # as the ranks of a run have
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": threads}
        try:
            subprocess.run(command, env=environment, capture_output=True, timeout=LINK_TIMEOUT_S, check=True)
            found = json.loads(result.read_text())
            return {"link": fit_link(found.pop("all_reduce"), devices), **found}
        except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
            return {}


def fit_link(points: Sequence[tuple[float, float]], group: int) -> Link:
    """Return latency and bus bandwidth from (bytes, seconds) of all-reduces over `group` devices.

    The model is that of `workbench.cost.communication`: t = 2 · steps · α + 2 (g - 1) / g · bytes / β. The smallest
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
