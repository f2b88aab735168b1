"""Who competes in `throughput.py`, and the process that builds one contender after another and times its steps.

`throughput.py` starts this file with `torch.distributed.run`, one process a device, and names a file that says what to
build. Results are written one a line, as soon as they are there; the first error of a rank goes to a file of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import kernels
import torch
import torch.distributed as dist
from peers import plain, with_deepspeed, with_megatron
from torch._inductor import config as inductor
from training import random_batch, trainer_for

import workbench as wb
from workbench.base.errors import root_exception
from workbench.base.units import GIB
from workbench.execution.blocks import compiled as compiling
from workbench.execution.blocks.cuda_graphs import WARM_UP_STEPS

WARM_UP = WARM_UP_STEPS + 1
"""Steps before those that are timed."""
PATIENCE = datetime.timedelta(minutes=10)
"""How long a rank waits for another, compilation included."""


@dataclass(frozen=True)
class Row:
    """One line of the table: a model, a batch, and who competes."""

    model: Callable[[], Any]
    seq_len: int
    batch_of_4: int
    """Samples a step on 4 GPUs."""
    peers: tuple[str, ...]
    """Bases of the peers, each of which is swept; a pipeline runs on as many devices as its name says, only."""
    micro_batches: tuple[int, ...]
    """Sizes that a sweep tries, in this order, until one does not fit."""
    ours: Mapping[str, Any]
    """What `wb.plan` is told besides."""
    trained: Mapping[str, Any] = field(default_factory=dict)
    """What the experiment is told besides: its optimiser."""
    masked_share: float | None = None
    """Share of the masked tokens; None for the data's own."""

    def at(self, gpus: int, tiny: bool) -> wb.Experiment:
        """Return the experiment on so many GPUs; a tiny one has the same family and is of no other interest."""
        model = self.model()
        if tiny:
            sizes = {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "intermediate_size": 256}
            model = replace(model, **sizes, vocab_size=512, max_positions=64)
        masked = {} if self.masked_share is None else {"masked_share": self.masked_share}
        data = wb.data.corpus("demo", vocab_size=model.vocab_size, **masked)
        batch, seq_len = (4 * gpus, 32) if tiny else (self.batch_of_4 * gpus // 4, self.seq_len)
        return wb.Experiment(model=model, data=data, steps=1000, global_batch=batch, seq_len=seq_len, **self.trained)

    def sizes(self, tiny: bool) -> tuple[int, ...]:
        return (1, 2, 4) if tiny else self.micro_batches


def _base() -> Any:
    return wb.models.bert(hidden_size=768, num_layers=12, num_heads=12)


def _scaled() -> Any:
    return wb.models.bert(hidden_size=1920, num_layers=54, num_heads=30)


def _largest() -> Any:
    return wb.models.bert(hidden_size=2560, num_layers=60, num_heads=40)


def _opt() -> Any:
    """Return the sizes of OPT-350m in the layout of its larger siblings, with LayerNorm before each part."""
    return wb.models.opt(hidden_size=1024, num_layers=24, num_heads=16, vocab_size=50304, max_positions=2048)


def _gpt3() -> Any:
    """Return GPT-3 1.3B with a vocabulary that 2, 4 and 8 devices divide, as Megatron-LM pads it."""
    return wb.models.gpt2(2048, 24, 16, vocab_size=50304, max_positions=2048)


def _gpt3_13b() -> Any:
    return wb.models.gpt2(5120, 40, 40, vocab_size=50304, max_positions=2048)


def _pair(hidden_size: int, num_layers: int, num_heads: int) -> Any:
    """Return a model of the pair that `templates/bert_scaling.ipynb` trains in full."""
    layout: dict[str, Any] = {"layout": "pre_ln", "next_sentence": False, "dropout": 0.0}
    return wb.models.bert(hidden_size, num_layers, num_heads, **layout)


MUON: Mapping[str, Any] = {
    "learning_rate": 1.2e-2,
    "optimizer": wb.Optimizer("muon", adamw_rate=4e-4, eps=1e-6, weight_decay=0.0, muon_scale="spectral"),
}
"""The template's recipe of its full preset."""
PAIR = ("ddp+muon+sdpa", "fsdp+muon+sdpa")
PIPELINED = (4, 8, 16, 32)
LIBRARIES = ("deepspeed1", "deepspeed3", "megatron", "megatron-tp2", "megatron-pp2", "megatron-tp2pp2", "megatron-tp4")
LOOPS = ("loop", "loop+masters")
"""Peers of one GPU."""
REPLICAS = ("ddp", "ddp+masters", "fsdp")
"""Hand-written peers of several GPUs."""
BERTS = (*LOOPS, *REPLICAS, "deepspeed1", "megatron")
ROWS = {
    "mini": Row(partial(wb.models.bert, 256, 4, 4), 128, 512, ("loop", "loop+graphs", "ddp", "ddp+graphs"), (128,), {}),
    "base": Row(_base, 128, 128, ("loop", "ddp", "fsdp", "ddp+graphs"), (16, 32), {}),
    "large": Row(wb.models.bert_large, 512, 512, BERTS, (32, 64, 128), {}),
    "large-128": Row(wb.models.bert_large, 128, 2048, BERTS, (128, 256, 512), {}),
    "scaled": Row(_scaled, 512, 256, BERTS, (16, 32, 64), {}),
    "scaled-128": Row(_scaled, 128, 1024, BERTS, (64, 128, 256), {}),
    "pair-large": Row(partial(_pair, 1024, 24, 16), 128, 256, PAIR, (32, 64), {}, MUON, 0.3),
    "pair-scaled": Row(partial(_pair, 1920, 54, 30), 128, 256, PAIR, (32, 64), {}, MUON, 0.3),
    "scaled-pp2": Row(_scaled, 512, 256, ("pp2",), PIPELINED, {"pipeline": 2}),
    "scaled-pp4": Row(_scaled, 512, 256, ("pp4",), PIPELINED, {"pipeline": 4}),
    "scaled-pp2dp2": Row(_scaled, 512, 256, ("pp2dp2",), PIPELINED, {"pipeline": 2}),
    "scaled-32gib": Row(_scaled, 512, 256, ("fsdp3", "pp4"), (2, 4, 8, 16, 32, 64), {"memory_limit_gib": 32}),
    "opt-125m": Row(partial(wb.models.opt, 768, 12, 12), 1024, 128, (*LOOPS, *REPLICAS), (8, 16, 32), {}),
    "opt-350m": Row(_opt, 2048, 64, (*LOOPS, *REPLICAS, "deepspeed1", "deepspeed3"), (4, 8, 16), {}),
    "opt-350m-512": Row(_opt, 512, 256, (*LOOPS, *REPLICAS, "deepspeed1", "deepspeed3"), (16, 32, 64), {}),
    "gpt3-1.3b": Row(_gpt3, 2048, 64, (*LOOPS, *REPLICAS, *LIBRARIES), (2, 4, 8, 16), {}),
    "gpt3-1.3b-512": Row(_gpt3, 512, 256, (*LOOPS, *REPLICAS, *LIBRARIES), (8, 16, 32, 64), {}),
    "gpt3-13b": Row(_gpt3_13b, 2048, 32, ("fsdp3", *LIBRARIES[1:]), (1, 2, 4, 8), {}),
    "4.8b": Row(_largest, 512, 256, ("fsdp", "fsdp3", "pp4"), (4, 8, 16, 32, 64), {}),
}


@dataclass(frozen=True)
class Turn:
    """One contender to build and time."""

    label: str
    kind: str
    """`ours`, or the kind of a peer."""
    micro_batch: int = 0
    """Samples of a peer's micro-batch; a plan of ours has its own."""
    plan: Mapping[str, Any] | None = None
    deterministic: bool = False


class Ours:
    """A plan of ours behind the same names as a peer."""

    def __init__(self, experiment: wb.Experiment, plan: wb.Plan, device: torch.device) -> None:
        self.trainer = trainer_for(experiment, plan, device)
        self.data, self.replica = plan.data, self.trainer.coordinate.data_rank
        self.tokens, self._step = 0, 0
        self._counted: tuple[Mapping[str, torch.Tensor] | None, Any] = (None, None)
        self.enter: Callable[[str], None] = lambda _phase: None
        """Called with the name of each phase of a step when its first kernel is about to be launched."""

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if batch is not self._counted[0]:  # a data loader counts while the step before runs
            self._counted = batch, self.trainer.count_labels_on_host(batch)
        self.trainer.context.action_log = self._action
        scalars = self.trainer.measure(self._step, batch, label_counts=self._counted[1])
        self.enter("update")
        result = self.trainer.update(self._step, scalars)
        self._step += 1
        self.tokens = batch["input_ids"].numel()
        return result.scalars[0]

    @contextlib.contextmanager
    def _action(self, action_type: str, _stage: int, _micro_batch: int) -> Iterator[None]:
        self.enter({"F": "forward", "B": "backward"}[action_type])
        yield
        self.enter("between")


FAMILIES: Mapping[str, Any] = {"deepspeed": with_deepspeed, "megatron": with_megatron}
"""Modules of the libraries' peers, by how the names of their peers begin; all others are hand-written."""


def family_of(kind: str) -> Any:
    """Return the module that knows a kind of peer; raise `ValueError` if none does or its library is missing."""
    family = next((module for name, module in FAMILIES.items() if kind.startswith(name)), plain)
    family.parsed(kind)
    return family


def strongest(base: str) -> str:
    """Return a peer with all options that make it fast."""
    return family_of(base).strongest(base)


def checkpointing(base: str) -> tuple[str, ...]:
    """Return the options that a sweep tries, from the fastest to the leanest; the empty one checkpoints nothing."""
    return family_of(base).CHECKPOINTING


def ablations(base: str, kind: str) -> list[str]:
    """Return a peer without one of the options that `base` has not, one after another, and without all of them."""
    options = [option for option in kind.split("+")[1:] if option not in base.split("+")]
    gains = [option for option in options if option not in checkpointing(base)]
    without = ["+".join(part for part in kind.split("+") if part != option) for option in gains]
    bare = "+".join([base, *(option for option in options if option not in gains)])
    return list(dict.fromkeys([*without, bare]))


def environment(kind: str) -> dict[str, str]:
    """Return the environment variables that a contender's processes need besides."""
    return {} if kind == "ours" else family_of(kind).ENVIRONMENT


def company(kind: str) -> str:
    """Return a name that contenders share if they may share processes: a library leaves hooks and memory behind."""
    return next((name for name in FAMILIES if kind.startswith(name)), "")


def fits(kind: str, world: int) -> bool:
    """Return whether a peer runs on so many devices."""
    return bool(family_of(kind).fits(kind, world))


def replicas_of(kind: str, world: int) -> int:
    """Return a peer's data-parallel degree on so many devices."""
    return int(family_of(kind).replicas(kind, world))


def _built(turn: Turn, experiment: wb.Experiment, device: torch.device) -> Any:
    if turn.kind == "ours":
        return Ours(experiment.replace(deterministic=turn.deterministic), wb.Plan.from_json(turn.plan), device)
    return family_of(turn.kind).Peer(turn.kind, experiment.model.build, turn.micro_batch, device)


@contextlib.contextmanager
def _settings(turn: Turn) -> Iterator[None]:
    """Give peers the compiler as PyTorch ships it, without what `workbench.execution.blocks.compiled` changes."""
    if turn.deterministic:
        with inductor.patch(deterministic=True):
            yield
        torch.use_deterministic_algorithms(False)
    elif turn.kind == "ours":
        yield
    else:
        as_shipped = mock.patch.multiple(compiling, LONGEST_ROW=0, LOW_PRECISION=())
        with as_shipped, inductor.patch(post_grad_custom_post_pass=None):
            yield


def measured(
    turn: Turn,
    experiment: wb.Experiment,
    steps: int,
    limit_gib: float | None,
    device: torch.device,
    profile: bool,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Return every step's time and loss of one contender, what it counted, and its peak of memory.

    Each of the steps is waited for, so that its host is not ahead when it begins; `host_ms` is the time until the host
    has launched it. Then as many run in a row, with one wait at their end (`in_a_row_ms`), as in training.
    """
    _limit(device, limit_gib)
    begun = time.perf_counter()
    contender = _built(turn, experiment, device)
    batch = random_batch(experiment, experiment.global_batch // contender.data, contender.replica, device)
    times, hosts, losses, started = [], list[float](), [], 0.0
    for step in range(WARM_UP + steps):
        _wait(device)
        if step == WARM_UP:
            started = time.time()
        before = time.perf_counter()
        loss = contender.step(batch)
        hosts.append((time.perf_counter() - before) * 1e3)
        _wait(device)
        times.append((time.perf_counter() - before) * 1e3)
        losses.append(loss.detach().float().clone())
        if step == 0:
            first_s = time.perf_counter() - begun
    ended = time.time()
    before = time.perf_counter()
    for _ in range(steps):
        contender.step(batch)
    _wait(device)
    in_a_row_ms = (time.perf_counter() - before) * 1e3 / steps
    seen = torch.stack(losses)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    found = {
        "warm_up_ms": times[:WARM_UP],
        "step_ms": times[WARM_UP:],
        "host_ms": hosts[WARM_UP:],
        "in_a_row_ms": in_a_row_ms,
        "losses": seen.tolist(),
        "tokens_per_step": _counted(contender, experiment, device),
        "build_to_first_step_s": first_s,
        "timed": [started, ended],
        **_memory(device),
    }
    return found | (_profile(contender, batch, folder) if profile else {})


def _counted(contender: Any, experiment: wb.Experiment, device: torch.device) -> int:
    """Return the tokens of a step over all replicas; raise `RuntimeError` unless they are all of the global batch."""
    tokens = torch.tensor(contender.tokens, device=device)
    dist.all_reduce(tokens)
    counted = int(tokens) * contender.data // dist.get_world_size()
    if counted != experiment.tokens_per_step:
        raise RuntimeError(f"A step trained on {counted:,} tokens and the batch has {experiment.tokens_per_step:,}.")
    return counted


def _profile(contender: Any, batch: Mapping[str, torch.Tensor], folder: Path | None) -> dict[str, Any]:
    """Return where a step goes on each rank: the second of three in a row, as the host runs ahead in training.

    Every kernel of that step is written to `folder`.
    """
    phases: list[str] = []

    def enter(name: str) -> None:
        phases.append(name)
        kernels.mark()

    def steps() -> None:
        for _ in range(3):
            enter("before")
            contender.step(batch)

    contender.enter = enter
    profiled = kernels.profiled(steps)
    contender.enter = lambda _phase: None
    step = kernels.marked_step(profiled, phases, 1)
    if folder is not None and step.kernels:
        kernels.write(folder / f"kernels-{dist.get_rank()}.json.gz", step)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, step)
    first = of_ranks[0].kernels
    return {
        "profile": [kernels.summary(each.kernels) for each in of_ranks],
        "phases": [kernels.phases(each) for each in of_ranks],
        "collectives": kernels.collectives(of_ranks),
        "longest": kernels.longest(first),
        "gaps": kernels.gaps(first),
    }


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
    """Return the memory of the fullest rank; `retries` counts how often the allocator had to return memory to go on."""
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


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    return device


def main(folder: Path) -> None:
    """Time the turns of `folder/turns.json` one after another; their results go to `folder/results`, one a line."""
    asked = json.loads((folder / "turns.json").read_text())
    rank, world, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), _device()
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    meeting = dist.TCPStore(*address, world, is_master=False, timeout=PATIENCE)
    experiment = ROWS[asked["row"]].at(world, asked["tiny"])
    for number, given in enumerate(asked["turns"]):
        turn = Turn(**given)
        store = dist.PrefixStore(f"turn {number}", meeting)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
        try:
            with _settings(turn):
                profile = asked["profile"]
                found = measured(turn, experiment, asked["steps"], asked["limit_gib"], device, profile, folder)
        except Exception as error:
            cause = root_exception(error)
            full = isinstance(cause, torch.OutOfMemoryError)
            lines = str(cause).splitlines() or [""]
            sentence = f"out of memory: {lines[0]}" if full else f"{type(cause).__name__}: {lines[0]}"
            (folder / f"error-{rank}").write_text(json.dumps({"out_of_memory": full, "sentence": sentence}))
            if not full:
                sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
            os._exit(1)  # the other ranks wait for this one; the launcher ends them
        if rank == 0:
            with (folder / "results").open("a") as lines_of:
                lines_of.write(json.dumps(found) + "\n")
        _forget(device)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
