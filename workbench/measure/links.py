"""All-reduces, products and copies of all devices at once; `wb.measure.calibrate` runs it in a process per device.

    python -m torch.distributed.run --standalone --nproc_per_node 4 -m workbench.measure.links times.json

Rank 0 writes the all-reduces, [[bytes, seconds], …] for each size: the fastest of `REPEATS` runs on GPUs, and the mean
of `CPU_REPEATS` on CPUs, where a matrix product precedes each. As in training, the process that waits has then given
its core away and must be woken. That takes many times as long as an exchange of processes that do nothing else, and
longer on a busy machine.

CPU processes share memory and caches. Beside the all-reduces stand the FLOP/s of products and the bytes per second of
copies that all of them reach at once, and the rate of a copy beside the others over its rate alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

REPEATS, CPU_REPEATS = 8, 40
"""Timed runs of each size, after two that warm up."""
PRODUCT_SIZE, COPIED_ELEMENTS = 1024, 16 << 20
"""Rows of the square products, and elements of the copies, that CPU processes compute at once."""
LARGE_ELEMENTS = 1 << 20
"""Size from which CPUs exchange `REPEATS` times, because it takes long."""


def measure(device: torch.device) -> list[tuple[int, float]]:
    """Return bytes and seconds of an all-reduce for several sizes."""
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
    """Return what CPU processes reach while all of them work, and how much of its lone rate a copy keeps."""
    matrix, source = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE), torch.ones(COPIED_ELEMENTS)
    target = torch.zeros_like(source)

    def rate(work: Callable[[], Any], amount: float) -> float:
        """Return the amount per second of the middle one of some runs, which other processes disturb least."""
        times = []
        for _ in range(REPEATS + 2):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return amount / median(times[2:])

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


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        shared = dict.fromkeys(("product_flops", "memory_bandwidth", "beside"), 1.0) if on_gpu else shared_rates()
        found = {"all_reduce": measure(device), **shared}
        if dist.get_rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
