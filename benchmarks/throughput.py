"""Our planner's choice against hand-written PyTorch, interleaved on the same GPUs: tokens/s, peak memory, ratios.

    torchrun --nproc_per_node 4 benchmarks/throughput.py --out throughput.json large scaled scaled-32gib 4.8b
    torchrun --nproc_per_node 4 benchmarks/throughput.py --out tiny.json tiny        # on CPUs, to see that it runs

Batches are for 4 GPUs; on another number they are larger or smaller with it, so that a GPU has as much to do.

Every contender of a row is built, warmed up, measured and freed in turn, and the whole round is repeated, so that a
machine that slows down slows all of them. Random tokens, dropout 0.1, AdamW and clipping included; each contender has
process groups of its own, and a row's limit of memory is enforced on all of them. The peers' compiler is PyTorch's
own, without what we change. The ratio of a row is the median of ours over the median of the best peer.
`--plan 2,1,0,16,selective,tensor=2` adds a forced plan of ours (pipeline, data, ZeRO, micro-batch, checkpointing, then
by name whatever else `wb.plan` takes), `--deterministic` the planner's choice with deterministic kernels. Results are
written after every measurement; the same command goes on where it stopped. `--profile` writes where one more step of
the first round goes, by kind of kernel, on the first and the last rank.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import by_hand
import kernels
import torch
import torch.distributed as dist
from peers import Peer, pipeline_degrees
from torch._inductor import config as inductor
from training import random_batch, trainer_for

import workbench as wb
from workbench.errors import root_exception
from workbench.execution.blocks import compiled as compiling
from workbench.execution.blocks.cuda_graphs import NCCL_SETTING, WARM_UP_STEPS
from workbench.execution.deterministic import CUBLAS_SETTING
from workbench.runs.launching.supervisor import ALLOCATOR, GROWING
from workbench.units import GIB

DETERMINISTIC = "ours, deterministic"
WARM_UP = WARM_UP_STEPS + 1
"""Steps."""
PATIENCE = datetime.timedelta(minutes=10)
"""For rank 0 to plan, blocks to be measured included."""


@dataclass(frozen=True)
class Row:
    """One line of the table: a model, a batch, and who competes."""

    model: Callable[[], Any]
    seq_len: int
    batch_of_4: int
    """Samples a step on 4 GPUs."""
    peers: tuple[tuple[str, int], ...]
    """(kind, micro-batch), tuned by hand beforehand; a pipeline runs on as many devices as its name says, only."""
    ours: Mapping[str, Any]
    """What `wb.plan` is told besides."""


def _base() -> Any:
    return wb.models.bert(hidden_size=768, num_layers=12, num_heads=12)


def _scaled() -> Any:
    return wb.models.bert(hidden_size=1920, num_layers=54, num_heads=30)


ROWS = {
    "tiny": Row(
        lambda: wb.models.bert(hidden_size=64, num_layers=4, num_heads=4, vocab_size=512, max_positions=64),
        32,
        16,
        (("ddp", 2), ("ddp+graphs", 2), ("fsdp", 4), ("fsdp3+recompute", 4), ("pp4", 2), ("pp2dp2", 2), ("pp2", 2)),
        {},
    ),
    "base": Row(_base, 128, 128, (("ddp", 32), ("fsdp", 32), ("ddp+graphs", 32)), {}),
    "large": Row(wb.models.bert_large, 512, 512, (("ddp", 32), ("fsdp", 64)), {}),
    "scaled": Row(_scaled, 512, 256, (("fsdp", 32), ("ddp", 16)), {}),
    "scaled-pp2": Row(_scaled, 512, 256, (("pp2", 8), ("pp2", 4)), {"pipeline": 2}),
    "scaled-pp4": Row(_scaled, 512, 256, (("pp4", 8), ("pp4", 4)), {"pipeline": 4}),
    "scaled-pp2dp2": Row(_scaled, 512, 256, (("pp2dp2", 8),), {"pipeline": 2}),
    "scaled-32gib": Row(_scaled, 512, 256, (("fsdp3+recompute", 32), ("pp4", 2)), {"memory_limit_gib": 32}),
    "4.8b": Row(
        lambda: wb.models.bert(hidden_size=2560, num_layers=60, num_heads=40),
        512,
        256,
        (("fsdp", 16), ("pp4", 4)),
        {},
    ),
}


class Ours:
    """A plan of ours behind the same two names as a peer."""

    def __init__(self, experiment: wb.Experiment, plan: wb.Plan, device: torch.device) -> None:
        self.trainer = trainer_for(experiment, plan, device)
        self.data, self.replica = plan.data, self.trainer.coordinate.data_rank
        self._step = 0

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        result = self.trainer.step(self._step, batch)
        self._step += 1
        return result.scalars[0]


def main() -> None:
    arguments = _arguments()
    os.environ.setdefault(ALLOCATOR[0], GROWING)  # for everybody; as our runs are launched
    os.environ.setdefault(*NCCL_SETTING)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if arguments.deterministic:
        os.environ.setdefault(*CUBLAS_SETTING)  # for everybody, since cuBLAS asks but once
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    meeting = dist.TCPStore(*address, world, is_master=False, timeout=PATIENCE)
    profile = arguments.profile and device.type == "cuda"
    found = _kept(arguments.out)
    done = [(entry["row"], entry["contender"]) for entry in found]
    for name in arguments.rows:
        plans = _plans(name, arguments.plan, meeting, rank, world)
        contenders = _contenders(name, plans, world, device, arguments.deterministic)
        for turn in range(arguments.rounds):
            for label, build in contenders.items():
                if done.count((name, label)) > turn:
                    continue
                store = dist.PrefixStore(f"{name}{turn}{label}", meeting)
                dist.init_process_group(
                    "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world
                )
                found.append({"row": name, "contender": label})
                try:
                    with _settings(label):
                        found[-1] |= _measured(name, build, arguments.steps, device, profile and turn == 0)
                except Exception as error:
                    if not isinstance(root_exception(error), torch.OutOfMemoryError):
                        raise
                    found[-1]["error"] = f"out of memory: {str(root_exception(error)).splitlines()[0]}"
                    _write(arguments, found)
                    os._exit(1)  # the other ranks wait for this one
                _forget(device)
                dist.destroy_process_group()
                if rank == 0:
                    print(
                        json.dumps({key: value for key, value in found[-1].items() if key not in {"longest", "gaps"}}),
                        flush=True,
                    )
                    _write(arguments, found)
    if rank == 0:
        print(report(found))


def _kept(out: str) -> list[dict[str, Any]]:
    """What an earlier start measured; what ran out of memory is not tried again."""
    return json.loads(Path(out).read_text()) if Path(out).exists() else []


def _write(arguments: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    beside = Path(f"{arguments.out}.{os.getpid()}")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    beside.replace(arguments.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", default="throughput.json")
    parser.add_argument("--plan", action="append", default=[], help=by_hand.SYNTAX)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("rows", nargs="+", choices=ROWS)
    return parser.parse_args()


def _plans(name: str, forced: list[str], meeting: dist.Store, rank: int, world: int) -> dict[str, wb.Plan]:
    """Ours, by label: the planner's choice, then those asked for; planned by rank 0 while the others wait."""
    key = f"plans of {name}"
    if rank == 0:
        cluster = replace(wb.local_cluster(), gpus=world, gpus_per_node=world)
        wanted = {"ours": ROWS[name].ours} | {f"ours {text}": by_hand.degrees(text) for text in forced}
        planned = {label: wb.plan(_experiment(name, world), cluster, **fixed) for label, fixed in wanted.items()}
        content = {label: replace(plan, candidates=()).to_json() for label, plan in planned.items()}
        meeting.set(key, json.dumps(content))
    return {label: wb.Plan.from_json(content) for label, content in json.loads(meeting.get(key)).items()}


def _contenders(
    name: str, plans: Mapping[str, wb.Plan], world: int, device: torch.device, deterministic: bool
) -> dict[str, Callable[[], Any]]:
    row, experiment = ROWS[name], _experiment(name, world)
    found: dict[str, Callable[[], Any]] = {}
    for label, plan in plans.items():
        found[f"{label}: {plan.describe()}"] = partial(Ours, experiment, plan, device)
    if deterministic:
        repeatable = replace(experiment, deterministic=True)
        found[f"{DETERMINISTIC}: {plans['ours'].describe()}"] = partial(Ours, repeatable, plans["ours"], device)
    for kind, micro_batch in row.peers:
        if kind.startswith("pp") and math.prod(pipeline_degrees(kind)) != world:
            continue
        found[f"{kind}, {micro_batch}"] = partial(Peer, kind, experiment.model.build, micro_batch, device)
    return found


@contextlib.contextmanager
def _settings(label: str) -> Iterator[None]:
    """Peers have the compiler as PyTorch ships it, without what `workbench.execution.blocks.compiled` changes."""
    if label.startswith(DETERMINISTIC):
        with inductor.patch(deterministic=True):
            yield
        torch.use_deterministic_algorithms(False)
    elif label.startswith("ours"):
        yield
    else:
        with mock.patch.multiple(compiling, LONGEST_ROW=0, LOW_PRECISION=()):
            yield


def _experiment(name: str, gpus: int) -> wb.Experiment:
    row = ROWS[name]
    model = row.model()
    data = wb.data.corpus("demo", vocab_size=model.vocab_size)
    batch = row.batch_of_4 * gpus // 4
    return wb.Experiment(model=model, data=data, steps=1000, global_batch=batch, seq_len=row.seq_len)


def _measured(name: str, build: Callable[[], Any], steps: int, device: torch.device, profile: bool) -> dict[str, Any]:
    """Median over `steps` after those that warm up."""
    experiment = _experiment(name, dist.get_world_size())
    _limit(device, ROWS[name].ours.get("memory_limit_gib"))
    started = time.perf_counter()
    contender = build()
    batch = random_batch(experiment, experiment.global_batch // contender.data, contender.replica, device)
    times = []
    for step in range(WARM_UP + steps):
        _wait(device)
        begun = time.perf_counter()
        loss = contender.step(batch)
        _wait(device)
        times.append(time.perf_counter() - begun)
        if step == 0:
            first_s = time.perf_counter() - started
    step_s = statistics.median(times[WARM_UP:])
    loss = loss.detach().float().clone()
    dist.all_reduce(loss, op=dist.ReduceOp.MAX)
    found = {"step_ms": step_s * 1e3, "tokens_per_s": experiment.tokens_per_step / step_s, "loss": loss.item()}
    found |= {"start_to_first_step_s": first_s, **_memory(device)}
    return found | (_profile(partial(contender.step, batch), device) if profile else {})


def _profile(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Where one more step goes, on the first and the last rank, once the profiler has been started."""
    seen: list[kernels.Kernel] = []
    if dist.get_rank() in {0, dist.get_world_size() - 1}:
        seen = kernels.profiled(step)
    else:
        step()
    _wait(device)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (kernels.summary(seen), kernels.longest(seen), kernels.gaps(seen)))
    return {"profile": [of_ranks[0][0], of_ranks[-1][0]], "longest": of_ranks[0][1], "gaps": of_ranks[0][2]}


def _limit(device: torch.device, limit_gib: float | None) -> None:
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if limit_gib is None else limit_gib * GIB / whole, device)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


def _forget(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
        torch.cuda.empty_cache()
    _wait(device)


def _memory(device: torch.device) -> dict[str, float]:
    """Of the fullest rank; `retries` counts how often the allocator had to return memory to go on."""
    if device.type != "cuda":
        return {}
    found = {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "retries": float(torch.cuda.memory_stats()["num_alloc_retries"]),
    }
    most = torch.tensor(list(found.values()), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip(found, most.tolist(), strict=True))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def report(found: list[dict[str, Any]]) -> str:
    """One line a contender, then the ratio of each row."""
    lines = []
    for row in dict.fromkeys(entry["row"] for entry in found):
        speeds: dict[str, float] = {}
        for label in dict.fromkeys(entry["contender"] for entry in found if entry["row"] == row):
            runs = [entry for entry in found if entry["row"] == row and entry["contender"] == label]
            failed = next((entry["error"] for entry in runs if "error" in entry), None)
            if failed:
                lines.append(f"{row:14} {label}: {failed}")
                continue
            speeds[label] = statistics.median(entry["tokens_per_s"] for entry in runs)
            memory = f", {runs[0]['peak_gib']:.1f} GiB" if "peak_gib" in runs[0] else ""
            lines.append(f"{row:14} {label}: {speeds[label]:,.0f} tokens/s{memory}")
        ours = max((speed for label, speed in speeds.items() if label.startswith("ours")), default=0.0)
        chosen = next((speed for label, speed in speeds.items() if label.startswith("ours:")), 0.0)
        best = max((speed for label, speed in speeds.items() if not label.startswith("ours")), default=float("nan"))
        lines.append(
            f"{row:14} planner's choice / best peer = {chosen / best:.3f}; our best / best peer = {ours / best:.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
