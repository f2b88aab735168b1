"""Where a step's time goes on one GPU, by kind of kernel: what the ratios of `throughput.py` are explained with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = (
    ("communication", r"nccl"),
    ("copies", r"memcpy|memset|cat_copy|copy_kernel|CatArray|split_with_sizes|chunk_cat"),
    ("optimiser", r"multi_tensor|adam"),
    ("attention", r"flash|fmha|sdpa|attention"),
    ("matrix products", r"nvjet|gemm|xmma|cublas|cutlass|splitKreduce"),
)
"""The first that matches a kernel's name; what none does is "the rest": what was fused, normalisation, dropout. Where
weights are sharded anew for every micro-batch, FSDP2's copies of lists count as the optimiser's."""
REST = "the rest"


@dataclass(frozen=True)
class Kernel:
    name: str
    start_us: float
    end_us: float


def profiled(step: Callable[[], object]) -> list[Kernel]:
    """Kernels and copies of this process's GPU while `step` ran."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        step()
        torch.cuda.synchronize()
    found = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_device = [event for event in found if event.device_type() == torch.autograd.DeviceType.CUDA]
    return [
        Kernel(event.name(), event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3)
        for event in on_device
        if not event.is_user_annotation()
    ]


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), REST)


def summary(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Milliseconds of every kind; of communication, those beside which nothing else ran; and those of no kernel."""
    listed = sorted(kernels, key=lambda kernel: kernel.start_us)
    if not listed:
        return {}
    computing = [kernel for kernel in listed if kind_of(kernel.name) != "communication"]
    found = {kind: 0.0 for kind, _ in KINDS} | {REST: 0.0}
    for kernel in listed:
        found[kind_of(kernel.name)] += (kernel.end_us - kernel.start_us) / 1e3
    everything, busy = _covered_ms(listed), _covered_ms(computing)
    span = (max(kernel.end_us for kernel in listed) - listed[0].start_us) / 1e3
    return found | {"communication alone": everything - busy, "idle": span - everything, "in all": span}


def longest(kernels: Iterable[Kernel], count: int = 25) -> list[tuple[str, int, float]]:
    """Name, calls and milliseconds of the kernels that took most."""
    total: dict[str, tuple[int, float]] = {}
    for kernel in kernels:
        calls, ms = total.get(kernel.name, (0, 0.0))
        total[kernel.name] = (calls + 1, ms + (kernel.end_us - kernel.start_us) / 1e3)
    ranked = sorted(total.items(), key=lambda item: -item[1][1])[:count]
    return [(name[:160], calls, round(ms, 3)) for name, (calls, ms) in ranked]


def gaps(kernels: Iterable[Kernel], count: int = 8) -> list[tuple[float, str, str]]:
    """The longest times in which no kernel ran, in milliseconds, with the kernels before and after."""
    found = []
    before: Kernel | None = None
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        if before is not None and kernel.start_us > before.end_us:
            found.append((round((kernel.start_us - before.end_us) / 1e3, 3), before.name[:80], kernel.name[:80]))
        if before is None or kernel.end_us > before.end_us:
            before = kernel
    return sorted(found, reverse=True)[:count]


def _covered_ms(kernels: Iterable[Kernel]) -> float:
    """Time in which at least one ran; they are sorted by start."""
    covered, until = 0.0, float("-inf")
    for kernel in kernels:
        covered += max(0.0, kernel.end_us - max(kernel.start_us, until))
        until = max(until, kernel.end_us)
    return covered / 1e3
