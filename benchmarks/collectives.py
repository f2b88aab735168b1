"""What collectives take on this node beside what the planner prices: alone, and where the next operation waits.

    torchrun --nproc_per_node 4 benchmarks/collectives.py --out collectives.json

For groups of two and of all devices, and for each size: the time of one among many in a row; what it adds to a
compiled chain of products in which every product waits for it, as a layer's does under tensor parallelism; and what it
adds to the host's time of that chain. The bytes are those of the whole tensor.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import options
import torch
import torch.distributed as dist

import workbench as wb
from workbench.cost.hardware import all_gather_s, all_reduce_s, reduce_scatter_s
from workbench.execution.blocks.tensor_parallel import leave

SIZES_MIB = (0.001, 0.0625, 1, 4, 16, 32, 64, 128, 256, 512)
IN_A_ROW = 12
CHAINED = 16
"""Products of a chain, with a collective after each."""
WIDTH = 2048
CYCLES = 200_000_000
"""The device first sleeps for so long (a tenth of a second), so that its host is ahead."""


def main() -> None:
    parser = options.parser(__doc__)
    parser.set_defaults(out=Path("collectives.json"))
    parser.add_argument("--sizes-mib", type=float, nargs="+", default=SIZES_MIB)
    arguments = options.parsed(parser)
    if arguments.tiny:
        arguments.sizes_mib = (0.001, 1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    world = dist.get_world_size()
    link = (wb.measure.local_cluster() if device.type == "cuda" else wb.Cluster.of("h200")).intra
    rows: list[dict[str, Any]] = []
    for size in dict.fromkeys((2, world)):
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world - size + 1, size)]
        mine = groups[dist.get_rank() // size]
        for mib in arguments.sizes_mib:
            row = {"group": size, "mib": mib} | _alone(int(mib * 2**20), mine, device)
            row |= {f"{name}_priced_us": 1e6 * of(mib * 2**20, size, link) for name, of in PRICES.items()}
            width = 64 if arguments.tiny else WIDTH
            rows.append(row | (_chained(int(mib * 2**20), mine, device, width) if mib >= 1 else {}))
            if dist.get_rank() == 0:
                print(_line(rows[-1]), flush=True)
                arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


PRICES = {"all_reduce": all_reduce_s, "all_gather": all_gather_s, "reduce_scatter": reduce_scatter_s}


def _alone(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """Microseconds of one among `IN_A_ROW`."""
    size = group.size()
    count = -(-num_bytes // 4 // size) * size
    whole, part = torch.ones(count, device=device), torch.ones(count // size, device=device)
    collectives: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
    }

    def in_a_row(run: Callable[[], Any]) -> None:
        for _ in range(IN_A_ROW):
            run()

    return {
        f"{name}_us": 1e6 * _seconds(partial(in_a_row, run), device)[0] / IN_A_ROW for name, run in collectives.items()
    }


def _chained(num_bytes: int, group: dist.ProcessGroup, device: torch.device, width: int) -> dict[str, float]:
    """Microseconds that an all-reduce adds where the next product waits for it, on the device and on its host."""
    rows, name = max(1, num_bytes // 2 // width), group.group_name
    value = torch.ones(rows, width, device=device, dtype=torch.bfloat16)
    weights = torch.zeros(width, width, device=device, dtype=torch.bfloat16)

    def products(value: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for _ in range(CHAINED):
            value = value @ weights
        return value

    def summed(value: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for _ in range(CHAINED):
            value = leave(value @ weights, name)
        return value

    torch._dynamo.reset()
    found = []
    for chain in (products, summed):
        run = torch.compile(chain, dynamic=False, backend="inductor" if device.type == "cuda" else "aot_eager")
        found.append(_seconds(partial(run, value, weights), device))
    (alone, host), (together, host_together) = found
    return {"chained_us": 1e6 * (together - alone) / CHAINED, "host_us": 1e6 * (host_together - host) / CHAINED}


def _seconds(run: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Of the device, and of its host, which runs ahead of it: medians of five after two."""
    devices, hosts = [], []
    on_gpu = device.type == "cuda"
    for _ in range(7):
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda._sleep(CYCLES)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
        begun = time.perf_counter()
        run()
        hosts.append(time.perf_counter() - begun)
        if on_gpu:
            last.record()
            torch.cuda.synchronize()
            devices.append(1e-3 * first.elapsed_time(last))
        else:
            devices.append(hosts[-1])
    return statistics.median(devices[2:]), statistics.median(hosts[2:])


def _line(row: dict[str, Any]) -> str:
    alone = ", ".join(f"{name} {row[f'{name}_us']:,.0f} ({row[f'{name}_priced_us']:,.0f} priced)" for name in PRICES)
    chained = f"; chained {row['chained_us']:,.0f}, host {row['host_us']:,.0f}" if "chained_us" in row else ""
    return f"{row['group']} devices, {row['mib']:g} MiB, µs: {alone}{chained}"


if __name__ == "__main__":
    main()
