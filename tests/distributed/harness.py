"""Real processes: `launch(function, world, …)` runs `function(rank, …)` in each and returns rank 0's result.

On gloo, or with `device="cuda"` on NCCL, one GPU each.
"""

from __future__ import annotations

import copy
import dataclasses
import faulthandler
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests import worlds
from tests.patience import GATE, PATIENCE_S, wait_for_gate
from workbench.capture import Graph
from workbench.cost.hardware import Cluster, Device, Link
from workbench.execution.blocks.step_context import StepContext
from workbench.execution.build import block_sparse_parameters, build_stage
from workbench.execution.heartbeat import STACK_SIGNAL
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.step_log import StepView
from workbench.execution.trainer import Trainer
from workbench.experiment import Experiment
from workbench.planning.plan import Memory, Plan, Prediction, Stage
from workbench.record.rundir import process_record
from workbench.runs.launching import processes

worlds.preload()

Tensors = dict[str, torch.Tensor]
NOTHING = Memory(0, 0, 0, 0, 0)
CPU = Device("CPU", "cpu", 4 << 30, {"fp32": 5e10}, 1e10)
LINK = Link(1e9, 1e-5)
HALF = functools.partial(torch.autocast, "cpu", torch.bfloat16)
FREE = Prediction(0, 0, 0, 0, 0, 0, 0, None)
FAILED = ".failed"
"""End of the name of the file that the first rank to fail writes: the others fail because they have lost it."""
STACKS = ".stacks"
"""End of the names of the files into which ranks write their stacks when they are asked."""


def meeting() -> dist.TCPStore:
    """A store through which processes find each other. It keeps its port while it lives: a port that was merely free
    might be taken by another test before the processes use it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def environment(store: dist.TCPStore) -> dict[str, str]:
    """Return the environment variables that lead a process to the store."""
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo", **agent}


def launch(
    function: Callable[..., Any], world: int, *args: Any, device: str = "cpu", ahead: Callable[[], object] | None = None
) -> Any:
    """Run a function on `world` processes; raise the first failure of any rank.

    On CPUs they are forked from a process that has called `ahead`: what that captures and caches is captured once.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, store = Path(folder) / "result.pt", meeting()
        arguments = (world, environment(store), str(result), device, function, args)
        if device == "cpu":
            _forker().fork(ahead, arguments)
        else:
            run_ranks(arguments, start_method(device))
        return torch.load(result, weights_only=False)


def run_ranks(arguments: tuple[Any, ...], method: str) -> None:
    """Start the ranks of a world, whose arguments are those of `_entry`, and wait; raise the first failure of any.

    Where the wait is interrupted, as by a test's time limit, print the stacks of the ranks and kill them. They would
    stay on GPUs that other tests use.
    """
    world, _, result, *_ = arguments
    ranks = mp.start_processes(_entry, arguments, nprocs=world, join=False, start_method=method)
    try:
        while not ranks.join():
            pass
    except BaseException:
        alive = [process_record(process.pid) for process in ranks.processes if process.is_alive()]
        if alive:
            processes.send_signal(alive, STACK_SIGNAL)
            files, sizes = sorted(Path(result).parent.glob(f"*{STACKS}")), list[int]()
            for _ in range(150):  # 30 s at most: a rank that is stopped writes none
                before, sizes = sizes, [each.stat().st_size for each in files]
                if 0 not in sizes and sizes == before:
                    break
                time.sleep(0.2)  # clock: they are whole when they no longer grow
            for file in files:
                print(f"{file.name}:\n{file.read_text()}")
            processes.kill_trees(alive)
        raise


class Forker:
    """A process from which all worlds of this process are forked, one after another.

    It keeps what it captures and caches for the worlds that come later. What ranks do is gone with them.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_fork_worlds, args=(theirs,))
        self._process.start()
        self._record = process_record(self._process.pid)
        theirs.close()
        Finalize(None, self._connection.close, exitpriority=0)  # before `multiprocessing` waits for its children

    def fork(self, ahead: Callable[[], object] | None, arguments: tuple[int, Any]) -> None:
        """Call `ahead` in that process and fork a world; raise what one of its ranks, or `ahead`, has raised."""
        try:
            self._connection.send((list(sys.path), os.getcwd(), f"{arguments[2]}{FAILED}"))
            self._connection.send_bytes(pickle.dumps((ahead, arguments)))
            failure = self._connection.recv()
        except BaseException:  # it has ended, or is at work for a test that was interrupted
            _forker.cache_clear()
            processes.kill_trees([self._record])
            raise
        if failure:
            raise mp.ProcessRaisedException(failure, 0, self._record["pid"])


@functools.cache
def _forker() -> Forker:
    return Forker()


def _fork_worlds(connection: Connection) -> None:
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=connection.close)
    with suppress(EOFError):
        while True:
            sys.path[:], folder, failed = connection.recv()
            os.chdir(folder)
            failure, request = "", connection.recv_bytes()
            try:
                ahead, arguments = pickle.loads(request)
                torch.manual_seed(0)  # whatever has been captured before
                if ahead is not None:
                    ahead()
                torch.manual_seed(0)
                gc.freeze()  # otherwise the first collection of a rank would copy the pages of every shared object
                # A torch for CUDA starts threads for a backward, and no fork may run another: `ahead` may have run one.
                method = "forkserver" if _has_autograd_threads() else "fork"
                mp.start_processes(_entry, arguments, nprocs=arguments[0], join=True, start_method=method)
            except Exception:
                failure = Path(failed).read_text() if Path(failed).exists() else traceback.format_exc()
            connection.send(failure)


def _has_autograd_threads() -> bool:
    return any(name.read_text().startswith("pt_autograd") for name in Path("/proc/self/task").glob("*/comm"))


def _entry(
    rank: int,
    world: int,
    meets: dict[str, str],
    result: str,
    device: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ |= meets
    faulthandler.register(STACK_SIGNAL, Path(f"{result}.{rank}{STACKS}").open("w"))  # noqa: SIM115  # until it ends
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE_S))
    try:
        value = function(rank, *args)
        if rank == 0:
            torch.save(value, result)
        dist.barrier()
    except BaseException:
        with suppress(FileExistsError), Path(f"{result}{FAILED}").open("x") as file:
            file.write(f"Rank {rank} failed:\n{traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()


@functools.cache
def start_method(device: str) -> str:
    """Return `forkserver`, which starts processes in milliseconds, unless its imports bar them from GPUs."""
    if device == "cpu":
        return "forkserver"
    probe = multiprocessing.get_context("forkserver").Process(target=_touch_gpu)
    probe.start()
    probe.join()
    return "forkserver" if probe.exitcode == 0 else "spawn"


def _touch_gpu() -> None:
    torch.zeros(1, device="cuda").item()


@dataclass(frozen=True)
class AtGate:
    """A callback of an experiment, which waits after each step until the gate in `file` is open to that step."""

    file: Path

    def __call__(self, state: StepView) -> None:
        os.environ[GATE] = str(self.file)
        wait_for_gate(state.step)


@dataclass(frozen=True)
class Division:
    """The part of a plan that a test chooses."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    zero: int = 0
    chunks: int = 1
    """Number of stages per rank, under an interleaved schedule."""

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor


@functools.cache  # communicators of NCCL take seconds and memory
def coordinate(pipeline: int, data: int, tensor: int = 1, device: str = "cpu") -> MeshCoordinate:
    return MeshCoordinate.from_mesh(
        init_device_mesh(device, (pipeline, data, tensor), mesh_dim_names=("pp", "dp", "tp"))
    )


def forced_plan(
    graph: Graph,
    *,
    pipeline: int,
    data: int = 1,
    tensor: int = 1,
    chunks: int = 1,
    zero: int = 0,
    micro_batch: int,
    num_microbatches: int,
    recompute: str = "none",
    recompute_first: int | None = None,
    recompute_rest: str = "none",
    schedule: str = "1f1b",
    seq_len: int = 16,
    offload_optimizer: bool = False,
    cuda_graphs: bool = False,
    block_sparse: bool = False,
    gathers: bool = False,
    shares_matrices: bool = False,
) -> Plan:
    """Return a plan with equally many blocks per stage and no prediction, which can only be run.

    `recompute` applies to the first `recompute_first` blocks of every stage, or to all of them if that is None.
    """
    count, num_stages, world = len(graph.blocks), pipeline * chunks, pipeline * data * tensor
    cuts = [count * index // num_stages for index in range(num_stages + 1)]
    stages = tuple(
        Stage(
            index,
            first,
            end,
            sum(spec.numel for spec in graph.block_parameters(first, end).values()),
            0.0,
            0.0,
            0,
            recompute,
            NOTHING,
            recompute_first=recompute_first,
            recompute_rest=recompute_rest,
        )
        for index, (first, end) in enumerate(itertools.pairwise(cuts))
    )
    return Plan(
        model=graph.model,
        signature=graph.signature,
        cluster=Cluster(CPU, world, world, LINK, LINK),
        global_batch=data * micro_batch * num_microbatches,
        seq_len=seq_len,
        precision="fp32",
        pipeline=pipeline,
        data=data,
        tensor=tensor,
        zero=zero,
        schedule=schedule,
        micro_batch=micro_batch,
        num_microbatches=num_microbatches,
        block_names=tuple(block.name for block in graph.blocks),
        stages=stages,
        memory_limit_bytes=None,
        shares_matrices=(shares_matrices,) * pipeline,
        flops_per_step=0,
        prediction=FREE,
        offload_optimizer=offload_optimizer,
        cuda_graphs=cuda_graphs,
        block_sparse=block_sparse,
        gathers=gathers,
    )


def trainer_of(
    experiment: Experiment,
    model: nn.Module,
    graph: Graph,
    division: Division,
    micro_batch: int,
    device: str = "cpu",
    **choices: Any,
) -> Trainer:
    """Return the trainer of this rank for a division of the experiment's global batch; `model` gives its weights away.

    `choices` are further arguments of `forced_plan`.
    """
    plan = forced_plan(
        graph,
        **dataclasses.asdict(division),
        micro_batch=micro_batch,
        num_microbatches=max(division.pipeline, experiment.global_batch // micro_batch // division.data),
        schedule="interleaved" if division.chunks > 1 else "1f1b",
        **choices,
    )
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    return trainer_for(experiment, model, graph, plan, place, seed=7)


def trainer_for(
    experiment: Experiment,
    model: nn.Module,
    graph: Graph,
    plan: Plan,
    device: torch.device | None = None,
    *,
    seed: int = 0,
    compiles: bool = False,
) -> Trainer:
    """Return the trainer of this rank for a plan, on the device where the model is by default."""
    device = device or next(model.parameters()).device
    here = coordinate(plan.pipeline, plan.data, plan.tensor, device.type)
    context = StepContext(seed=seed, device=device)
    compact = block_sparse_parameters(experiment, plan, here, graph, device)
    half = functools.partial(torch.autocast, device.type, torch.bfloat16)
    autocast = half if plan.precision == "bf16" else nullcontext
    stages = build_stage(plan, here, model, graph, context, compile=compiles, autocast=autocast, compact=compact)
    return Trainer(experiment, plan, graph, stages, context, here)


def plain_step(model: nn.Module, batch: Tensors, micro_batch: int | None = None) -> tuple[float, nn.Module]:
    """Return the loss of one step of plain PyTorch, and a copy of the model with its gradients and buffers.

    With BatchNorm, whose statistics are those of a micro-batch, gradients of micro-batches accumulate.
    """
    model, batch = copy.deepcopy((model, batch))  # a forward may write into a field
    size = len(next(iter(batch.values())))
    step, total = micro_batch or size, 0.0
    for first in range(0, size, step):
        loss = loss_of(model(**{key: value[first : first + step] for key, value in batch.items()})) * step / size
        loss.backward()
        total += loss.item()
    return total, model


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss among what a model returned: the only scalar of a tuple."""
    if isinstance(output, tuple):
        return next(value for value in output if value.ndim == 0)
    if isinstance(output, torch.Tensor):
        return output
    return output["loss"] if isinstance(output, dict) else output.loss


def unlike_plain(
    trainer: Trainer, batch: Tensors, loss: float, plain: nn.Module, floor: float = 1e-4
) -> tuple[float, float]:
    """Return the largest relative differences of a step's loss, and of a gradient, from those of `plain_step`.

    The norm of a gradient counts as at least `floor` of the largest element of all gradients.
    """
    found = trainer.gradients(0, part_of(trainer, batch))
    dist.all_reduce(found)
    expected = {
        name: parameter.grad.to_dense() for name, parameter in plain.named_parameters() if parameter.grad is not None
    }
    least = floor * max(gradient.abs().max().item() for gradient in expected.values())
    worst = torch.zeros((), device=found.device)
    for name in trainer.stages.model_parameters():
        gradient, right = trainer.full_gradient(name), expected.get(name)
        assert (gradient is None) == (right is None), f"{trainer.plan}: {name} is {gradient}, and {right} in PyTorch"
        if gradient is not None and right is not None:
            worst = torch.maximum(worst, (gradient - right).norm() / max(right.norm().item(), least))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return abs(found.item() - loss) / abs(loss), worst.item()


def part_of(trainer: Trainer, batch: Tensors) -> Tensors:
    """Return the replica's share of a global batch."""
    first = trainer.coordinate.data_rank * trainer.samples
    return {key: value[first : first + trainer.samples] for key, value in batch.items()}


def everywhere(own: Tensors) -> Tensors:
    """Return the tensors of all ranks, which must be the same to the last bit where several ranks hold one."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    found: Tensors = {}
    for part in parts:
        for name, value in part.items():
            assert torch.equal(found.setdefault(name, value), value), f"{name} differs between ranks"
    return found


def whole_parameters(trainer: Trainer) -> Tensors:
    """Return every parameter of the model, gathered from all ranks."""
    return everywhere({name: trainer.full(name, p) for name, p in trainer.stages.model_parameters().items()})


def worst(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor] | None = None,
) -> float:
    """Return the largest difference of a tensor relative to its norm, or to how far it moved from `start`.

    The least norm that counts is a thousandth of the largest.
    """
    assert found.keys() == expected.keys()
    norms = {
        key: (value.float() - (0 if start is None else start[key])).norm().item() for key, value in expected.items()
    }
    floor = 1e-3 * max(norms.values())
    return max(
        ((found[name].float() - value.float()).norm() / max(norms[name], floor)).item()
        for name, value in expected.items()
    )
