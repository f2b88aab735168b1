"""The time of all-reduces over all devices of this node; `wb.measure.calibrate` runs it in one process per device.

    python -m torch.distributed.run --standalone --nproc_per_node 4 -m workbench.measure.links times.json

Rank 0 writes [[bytes, seconds], …], the fastest of `REPEATS` runs for each size.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

REPEATS = 8
"""Timed runs of each size, after two that warm up."""


def measure(device: torch.device) -> list[tuple[int, float]]:
    """Return bytes and seconds of an all-reduce for several sizes."""
    on_gpu = device.type == "cuda"
    seconds_by_size = []
    for elements in (256, 1 << 14, 1 << 20, 1 << 24, *((1 << 27,) if on_gpu else ())):
        tensor = torch.ones(elements, device=device)
        best = float("inf")
        for attempt in range(REPEATS + 2):
            tensor.fill_(1.0)
            dist.barrier()
            if on_gpu:
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            dist.all_reduce(tensor)
            if on_gpu:
                torch.cuda.synchronize(device)
            if attempt >= 2:
                best = min(best, time.perf_counter() - started)
        seconds_by_size.append((tensor.nbytes, best))
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
