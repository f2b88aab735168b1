"""Models as strangers hand them over, beside plain PyTorch: the second table of `docs/models.md`.

    python -m benchmarks.any_model measure FILE [NAME …]
    python -m benchmarks.any_model update FILE

`measure` plans each model of `tests/distributed/handed_over.py` with the real planner for one process, 2 stages, 2
replicas and 2 shards (ZeRO 3), runs one step of each plan on real processes (gloo, fp32), and writes the largest
difference of the loss and of any gradient (relative to the norm of all) from plain PyTorch on the whole batch to
FILE. Names leave other rows of FILE as they are. `update` puts FILE's table into `docs/models.md`. DETR's losses need
scipy. Ten minutes on 2 cores.
"""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import torch

import workbench as wb
from tests.distributed.handed_over import MODELS, Batch
from tests.distributed.harness import CPU, LINK, launch
from tests.distributed.test_every_plan import loss_of, part_of, trainer_of
from workbench.capture import Graph
from workbench.capture.captured_model import CapturedModel
from workbench.capture.opaque import is_opaque
from workbench.cost.cluster import Cluster
from workbench.errors import CaptureError, PlanInfeasible
from workbench.experiment import Experiment
from workbench.planning.plan import Plan

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- made by benchmarks/any_model.py -->", "<!-- end of any_model.py -->"
BATCH = 8
DIVISIONS: dict[str, dict[str, Any]] = {
    "1 process": {"pipeline": 1, "data": 1},
    "2 stages": {"pipeline": 2, "data": 1},
    "2 replicas": {"pipeline": 1, "data": 2, "zero": 0},
    "2 shards (ZeRO 3)": {"pipeline": 1, "data": 2, "zero": 3},
}
TOLERANCE = 1e-5


def experiment_of(name: str) -> Experiment:
    torch.manual_seed(1)
    batch = MODELS[name].batch(2 * BATCH)
    samples = [{key: field[index] for key, field in batch.items()} for index in range(2 * BATCH)]
    return Experiment.of(
        model=functools.partial(built, name), data=samples, steps=1, global_batch=BATCH, seq_len=1, precision="fp32"
    )


def built(name: str) -> torch.nn.Module:
    return MODELS[name].build()


def measure(name: str) -> dict[str, Any]:
    """Return what was found of one model: the differences by division, or why there are none."""
    experiment = experiment_of(name)
    row: dict[str, Any] = {"name": name}
    plans: dict[str, Plan] = {}
    for title, degrees in DIVISIONS.items():
        try:
            plans[title] = _plan(experiment, degrees)
        except CaptureError as error:
            return row | {"refused": str(error)}
        except PlanInfeasible as error:
            row[title] = f"not planned: {error}"
    graph = CapturedModel(experiment, 2)
    row["coupled"] = list(graph.division.coupled)
    row["opaque"] = [block.name for block in graph.graph.blocks if is_opaque(block.code)]
    row["blocks"] = len(graph.graph.blocks)
    row["notes"] = list(next(iter(plans.values())).notes)
    for world in (1, 2):
        titles = [title for title, plan in plans.items() if plan.world == world]
        try:
            row |= dict(zip(titles, launch(_differences, world, name, [plans[title] for title in titles]), strict=True))
        except Exception as error:
            row |= dict.fromkeys(titles, f"failed: {str(error).strip()[-3000:]}")
    return row


def _plan(experiment: Experiment, degrees: dict[str, Any]) -> Plan:
    world = degrees["pipeline"] * degrees["data"]
    cluster = Cluster(CPU, world, world, LINK, LINK)
    try:
        return wb.plan(experiment, cluster, **degrees, tensor=1, micro_batch=2)
    except PlanInfeasible:  # a batch that stays whole
        return wb.plan(experiment, cluster, **degrees, tensor=1)


def _differences(_rank: int, name: str, plans: list[Plan]) -> list[float]:
    """Return the largest relative difference of a step of each plan from plain PyTorch, of the loss or a gradient."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = MODELS[name].build().train()
    torch.manual_seed(2)
    batch = MODELS[name].batch(BATCH)
    graph = functools.cache(lambda size: CapturedModel(experiment_of(name), size, model).graph)
    return [_difference(copy.deepcopy(model), graph(plan.micro_batch), plan, batch) for plan in plans]


def _difference(model: torch.nn.Module, graph: Graph, plan: Plan, batch: Batch) -> float:
    plain = copy.deepcopy(model)
    has_statistics = any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in plain.modules())
    expected = _plainly(plain, batch, plan.micro_batch if has_statistics else BATCH)
    trainer = trainer_of(model, graph, plan)
    loss = trainer.gradients(0, part_of(trainer, batch))
    torch.distributed.all_reduce(loss)
    worst = abs(loss - expected) / abs(expected)
    gradients = {key: p.grad.to_dense() for key, p in plain.named_parameters() if p.grad is not None}
    scale = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for key in trainer.stages.model_parameters():
        found = trainer.full_gradient(key)
        if found is not None or key in gradients:
            zero = torch.zeros(())
            difference = (zero if found is None else found) - gradients.get(key, zero)
            worst = torch.maximum(worst, difference.norm() / scale)
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    return worst.item()


def _plainly(model: torch.nn.Module, batch: Batch, size: int) -> torch.Tensor:
    """Compute the gradients of the mean loss of parts of `size` samples, and return that loss."""
    count = len(next(iter(batch.values())))
    total = torch.zeros(())
    for first in range(0, count, size):
        loss = loss_of(model(**{key: value[first : first + size] for key, value in batch.items()})) * size / count
        loss.backward()
        total += loss.detach()
    return total
