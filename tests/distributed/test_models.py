"""Any unmodified model trains under a plan of the real planner: its loss and gradients are those of plain PyTorch.

A few models by default; all of `zoo.MODELS` in `make test-exhaustive`. `benchmarks/model_table.py` prints what
`differences` measures.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.distributed import zoo
from tests.distributed.harness import (
    CPU,
    LINK,
    Division,
    forced_plan,
    launch,
    part_of,
    plain_step,
    trainer_for,
    unlike_plain,
)
from tests.distributed.test_every_plan import captured_once
from tests.exhaustive import EXHAUSTIVE
from workbench.base.errors import PlanInfeasible
from workbench.capture import Graph, build_meta, capture, spec_of
from workbench.cost.graph_profiler import profile_graph
from workbench.cost.hardware import Cluster
from workbench.cost.profile import Profile
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.search import what_if

TOLERANCE = 1e-5
MICRO_BATCH, MICRO_BATCHES = 2, 4
REPRESENTATIVE = ("llama", "resnet", "tied-everywhere")
TRIED = REPRESENTATIVE if not EXHAUSTIVE else tuple(zoo.MODELS)


class Degrees(Division):
    """The request to the planner, which cuts the model itself."""

    def __str__(self) -> str:
        stages = f"{self.pipeline * self.chunks} stages" if self.pipeline > 1 else ""
        on = f"{stages} on {self.pipeline} ranks" if self.chunks > 1 else stages
        replicas = f"{self.data} {'shards' if self.zero == 3 else 'replicas'}" if self.data > 1 else ""
        tensors = f"tensors in {self.tensor}" if self.tensor > 1 else ""
        return " × ".join(filter(None, (on, replicas, tensors))) + (f" (ZeRO {self.zero})" if self.zero else "")


@dataclass(frozen=True)
class Difference:
    """Largest relative differences from plain PyTorch: of the loss, of any gradient, of any buffer."""

    loss: float
    gradient: float
    buffer: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradient, self.buffer)


def captured(name: str, model: nn.Module) -> Graph:
    batch = zoo.batch(name, MICRO_BATCH)
    return capture(model, {key: spec_of(key, value) for key, value in batch.items()}, name=name)


@functools.cache
def profiled(name: str) -> Profile:
    """Capture a model on the meta device and predict its cost, as `wb.plan` does."""
    return profile_graph(captured(name, build_meta(zoo.MODELS[name])), CPU, "fp32", compiled=False)


def planned(name: str, degrees: Degrees) -> Plan:
    """Plan as `wb.plan` does, which cuts the model."""
    interleaved = {"schedule": "interleaved", "chunks": degrees.chunks} if degrees.chunks > 1 else {"schedule": "1f1b"}
    return what_if(
        profiled(name),
        global_batch=MICRO_BATCH * MICRO_BATCHES * degrees.data,
        seq_len=zoo.SEQ,
        cluster=Cluster(CPU, degrees.world, degrees.world, LINK, LINK),
        pipeline=degrees.pipeline,
        data=degrees.data,
        tensor=degrees.tensor,
        zero=degrees.zero,
        micro_batch=MICRO_BATCH,
        **interleaved,
    )


def differences(name: str, cases: tuple[Degrees, ...]) -> dict[Degrees, Difference]:
    """Measure differences on real processes; all cases use the same number."""
    [world] = {degrees.world for degrees in cases}
    plans = {degrees: planned(name, degrees) if offers(name, degrees) else _forced(name, degrees) for degrees in cases}
    found: dict[Degrees, Difference] = launch(
        _measured, world, name, plans, ahead=functools.partial(captured_once, name)
    )
    return found


def offers(name: str, degrees: Degrees) -> bool:
    """Return all cases but tensor parallelism of a model whose blocks mostly cannot be divided."""
    try:
        planned(name, degrees)
    except PlanInfeasible:
        if degrees.tensor == 1:
            raise
        return False
    return True


def _forced(name: str, degrees: Degrees) -> Plan:
    """Plan a tensor parallelism that the planner refuses; the blocks that can be divided are."""
    graph = captured(name, build_meta(zoo.MODELS[name]))
    sizes = {"micro_batch": MICRO_BATCH, "num_microbatches": MICRO_BATCHES}
    return forced_plan(graph, pipeline=degrees.pipeline, data=degrees.data, tensor=degrees.tensor, **sizes)


def _measured(_rank: int, name: str, plans: dict[Degrees, Plan]) -> dict[Degrees, Difference]:
    model, graph = captured_once(name)
    return {degrees: _difference(name, model, graph, plan) for degrees, plan in plans.items()}


def _difference(name: str, model: nn.Module, graph: Graph, plan: Plan) -> Difference:
    assert graph.signature == plan.signature
    assert tuple(block.name for block in graph.blocks) == plan.block_names
    batch = zoo.batch(name, plan.global_batch)
    experiment = Experiment(model=zoo.MODELS[name], data=lambda: None, steps=1, global_batch=plan.global_batch)
    micro_batch = MICRO_BATCH if name in zoo.NORMALISED_BY_BATCH else None
    plain = plain_step(model, batch, micro_batch)
    trainer = trainer_for(experiment, copy.deepcopy(model), graph, plan)
    of_loss, of_gradient = unlike_plain(trainer, batch, *plain)
    _, alone = plain_step(model, part_of(trainer, batch), micro_batch)  # replicas see their own samples only, as in DDP
    buffers, worst = dict(alone.named_buffers()), torch.zeros(())
    for key, buffer in trainer.stages.model_buffers().items():
        if key in buffers:
            error = (buffer.float() - buffers[key].float()).norm() / buffers[key].float().norm().clamp_min(1e-6)
            worst = torch.maximum(worst, error)
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    return Difference(of_loss, of_gradient, worst.item())


ON_TWO = (
    Degrees(pipeline=2),
    Degrees(pipeline=2, chunks=2),
    *(Degrees(data=2, zero=zero) for zero in (0, 1, 2, 3)),
    Degrees(tensor=2),
)
ON_FOUR = (Degrees(pipeline=4), Degrees(pipeline=2, data=2), Degrees(pipeline=2, data=2, zero=3))


@pytest.mark.parametrize("name", TRIED)
def test_two_processes_equal_plain_pytorch(name: str) -> None:
    found = differences(name, ON_TWO)
    assert all(difference.largest <= TOLERANCE for difference in found.values()), found


@pytest.mark.parametrize("name", TRIED)
def test_four_processes_equal_plain_pytorch(name: str) -> None:
    found = differences(name, ON_FOUR)
    assert all(difference.largest <= TOLERANCE for difference in found.values()), found
