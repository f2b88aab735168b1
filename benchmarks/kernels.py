"""Where a step's time goes on one GPU, by kind of kernel: what the ratios of `throughput.py` are explained with."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


MARK = "spin_kernel"
"""Part of the name of the kernel that `mark` launches."""


@dataclass(frozen=True)
class Kernel:
    name: str
    start_us: float
    end_us: float
    stream: int = 0


@dataclass(frozen=True)
class Step:
    """The kernels of one step, in order of their starts, and the moments at which its phases begin."""

    kernels: tuple[Kernel, ...] = ()
    begins_us: tuple[tuple[str, float], ...] = ()
    end_us: float = 0.0
    """Begin of the next step."""


def mark() -> None:
    """Launch a kernel that does nothing, to be found among others: what follows belongs to the next phase."""
    if torch.cuda.is_available():
        torch.cuda._sleep(1)


def profiled(step: Callable[[], object]) -> list[Kernel]:
    """Kernels and copies of this process's GPU while `step` ran; none without a GPU."""
    if not torch.cuda.is_available():
        step()
        return []
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        step()
        torch.cuda.synchronize()
    found = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_device = [event for event in found if event.device_type() == torch.autograd.DeviceType.CUDA]
    return [
        Kernel(
            event.name(),
            event.start_ns() / 1e3,
            (event.start_ns() + event.duration_ns()) / 1e3,
            event.device_resource_id(),
        )
        for event in on_device
        if not event.is_user_annotation()
    ]


def marked_step(kernels: Iterable[Kernel], names: Sequence[str], number: int) -> Step:
    """Return step `number` (0-based) of several that were profiled together; empty where there was no GPU.

    `names` are those of all phases, in the order of their marks; each step begins with the first of them. A kernel of a
    communication stream belongs to the step that runs on the computing stream when the kernel starts. A profile that
    has lost marks, or has others, is one phase that says so, of all steps.
    """
    listed = sorted(kernels, key=lambda kernel: kernel.start_us)
    if not listed:
        return Step()
    marks = [kernel.start_us for kernel in listed if MARK in kernel.name]
    if len(marks) != len(names):
        told = f"all steps, with {len(marks)} marks of {len(names)}"
        return Step(tuple(listed), ((told, listed[0].start_us),), max(kernel.end_us for kernel in listed))
    steps = [index for index, name in enumerate(names) if name == names[0]]
    first, after = steps[number], steps[number + 1]
    inside = (kernel for kernel in listed if marks[first] <= kernel.start_us < marks[after] and MARK not in kernel.name)
    begins = tuple(zip(names[first:after], marks[first:after], strict=True))
    return Step(tuple(inside), begins, marks[after])


def phases(step: Step) -> dict[str, dict[str, Any]]:
    """Return for each phase its milliseconds, its `summary`, and the collectives in it by name.

    A kernel counts in each phase as long as it runs there.
    """
    parts: dict[str, list[tuple[float, float]]] = {}
    moments = [*step.begins_us, ("", step.end_us)]
    for (name, begin), (_, end) in itertools.pairwise(moments):
        parts.setdefault(name, []).append((begin, end))
    found: dict[str, dict[str, Any]] = {}
    for name, spans in parts.items():
        inside = [
            Kernel(kernel.name, max(kernel.start_us, begin), min(kernel.end_us, end), kernel.stream)
            for begin, end in spans
            for kernel in step.kernels
            if kernel.start_us < end and kernel.end_us > begin
        ]
        ms = sum(end - begin for begin, end in spans) / 1e3
        told = summary(inside) | {"idle": ms - _covered_ms(sorted(inside, key=lambda kernel: kernel.start_us))}
        found[name] = told | {"in all": ms, "collectives": alone(inside)}
    return found


def alone(kernels: Iterable[Kernel]) -> dict[str, dict[str, float]]:
    """Return calls, milliseconds and milliseconds beside which nothing computed, of each communication kernel."""
    listed = sorted(kernels, key=lambda kernel: kernel.start_us)
    computing = [kernel for kernel in listed if kind_of(kernel.name) != "communication"]
    busy = _covered_ms(computing)
    found = {}
    for name in dict.fromkeys(kernel.name for kernel in listed if kind_of(kernel.name) == "communication"):
        same = [kernel for kernel in listed if kernel.name == name]
        together = sorted([*computing, *same], key=lambda kernel: kernel.start_us)
        ms = sum(kernel.end_us - kernel.start_us for kernel in same) / 1e3
        found[name] = {"calls": len(same), "ms": ms, "alone ms": _covered_ms(together) - busy}
    return found


def collectives(steps: Sequence[Step]) -> dict[str, dict[str, float]]:
    """Return of each communication kernel, over the ranks' steps: calls, and milliseconds with and without waiting.

    A collective runs on every rank until the last one has come. The n-th call of a name is taken for one operation of
    all ranks, and its shortest time for that without waiting; where ranks have other numbers of calls, as in a
    pipeline, nothing is told of it.
    """
    found = {}
    per_rank = [[kernel for kernel in step.kernels if kind_of(kernel.name) == "communication"] for step in steps]
    for name in dict.fromkeys(kernel.name for kernels in per_rank for kernel in kernels):
        lengths = [[k.end_us - k.start_us for k in kernels if k.name == name] for kernels in per_rank]
        told = {"calls": float(len(lengths[0])), "longest rank ms": max(map(sum, lengths)) / 1e3}
        if len(set(map(len, lengths))) == 1:
            told["without waiting ms"] = sum(map(min, *lengths) if len(lengths) > 1 else lengths[0]) / 1e3
        found[name] = told
    return found


def write(file: Path, step: Step) -> None:
    """Write every kernel of a step: names once, then name, stream, and start and end in µs from the step's begin."""
    names = {name: index for index, name in enumerate(dict.fromkeys(kernel.name for kernel in step.kernels))}
    origin = step.begins_us[0][1]
    rows = [(names[k.name], k.stream, round(k.start_us - origin, 2), round(k.end_us - origin, 2)) for k in step.kernels]
    begins = [(name, round(at - origin, 2)) for name, at in step.begins_us]
    told = {"names": list(names), "kernels": rows, "phases": begins, "end_us": round(step.end_us - origin, 2)}
    file.write_bytes(gzip.compress(json.dumps(told).encode()))


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
