"""The time of all-reduces over all devices of this node; `wb.measure.calibrate` runs it in one process per device.

    python -m torch.distributed.run --standalone --nproc_per_node 4 -m workbench.measure.links times.json

Rank 0 writes [[bytes, seconds], …] for each size: the fastest of `REPEATS` runs on GPUs, and the mean of `CPU_REPEATS`
on CPUs, where a matrix product precedes each. As in training, the process that waits has then given its core away and
must be woken. That takes many times as long as an exchange of processes that do nothing else, and longer on a busy
machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist

REPEATS, CPU_REPEATS = 8, 40
"""Timed runs of each size, after two that warm up."""
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


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        seconds_by_size = measure(device)
        if dist.get_rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(seconds_by_size))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
