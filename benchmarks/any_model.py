"""Models as strangers hand them over, beside plain PyTorch: the second table of `docs/models.md`.

    python -m benchmarks.any_model measure FILE [NAME ...]
    python -m benchmarks.any_model update FILE

`measure` plans each model of `tests/distributed/handed_over.py` with the real planner for one process, 2 stages, 2
replicas and 2 shards (ZeRO 3), runs one step of each plan on real processes (gloo, fp32), and writes to FILE the
largest difference from plain PyTorch on the whole batch, of the loss or of a gradient (relative to the norm of all).
With names, it measures these and keeps the other rows of FILE. `update` puts FILE's table into `docs/models.md`.
DETR's losses need scipy. Half an hour on 2 cores.
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.pages import MODELS_PAGE, fill, read_rows, versions, write_rows
from tests.distributed.handed_over import MODELS, Batch
from tests.distributed.harness import CPU, LINK, launch, loss_of, part_of
from tests.distributed.test_every_plan import trainer_of
from workbench.base.errors import CaptureError, PlanInfeasible
from workbench.capture import Graph
from workbench.capture.captured_model import CapturedModel
from workbench.capture.torch_internals import differentiable
from workbench.cost.hardware import Cluster
from workbench.cost.profile import Profile
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.planner import analytic_profile, weigh
from workbench.planning.request import Request
from workbench.strategy import Fixed

BATCH = 8
TOLERANCE = 1e-5
DIVISIONS: dict[str, dict[str, Any]] = {
    "1 process": {"pipeline": 1, "data": 1},
    "2 stages": {"pipeline": 2, "data": 1},
    "2 replicas": {"pipeline": 1, "data": 2, "zero": 0},
    "2 shards (ZeRO 3)": {"pipeline": 1, "data": 2, "zero": 3},
}


def experiment_of(name: str) -> Experiment:
    torch.manual_seed(1)
    batch = MODELS[name].batch(2 * BATCH)
    samples = [{key: field[index] for key, field in batch.items()} for index in range(2 * BATCH)]
    return Experiment.of(
        model=MODELS[name].build, data=samples, steps=1, global_batch=BATCH, seq_len=1, precision="fp32", name=name
    )


def measured(name: str) -> dict[str, Any]:
    """Return what was found of one model: a difference for each division, or why there is none."""
    experiment = experiment_of(name)
    try:
        profile = analytic_profile(experiment, _cluster(2))
    except CaptureError as error:
        return {"name": name, "refused": str(error)}
    plans, found = {}, {}
    for title, degrees in DIVISIONS.items():
        try:
            plans[title] = _plan(profile, degrees)
        except PlanInfeasible as error:
            found[title] = str(error)
    for world in (1, 2):
        titles = [title for title, plan in plans.items() if plan.world == world]
        try:
            found |= dict(zip(titles, launch(_differences, world, name, [plans[t] for t in titles]), strict=True))
        except Exception as error:
            found |= dict.fromkeys(titles, f"failed: {str(error).strip()[-2000:]}")
    return {
        "name": name,
        "differences": {title: found[title] for title in DIVISIONS},
        "micro_batches": {title: plan.num_microbatches for title, plan in plans.items()},
        "gathers": [title for title, plan in plans.items() if plan.gathers],
        "opaque": sorted({label for block in profile.blocks for label in block.opaque}),
        "notes": list(plans["1 process"].notes),
    }


def _cluster(world: int) -> Cluster:
    return Cluster(CPU, world, world, LINK, LINK)


def _plan(profile: Profile, degrees: dict[str, Any]) -> Plan:
    """Return the best plan of the degrees with micro-batches of 2, or of any size if that leaves none."""
    cluster = _cluster(degrees["pipeline"] * degrees["data"])
    try:
        fixed = Fixed(**{**degrees, "tensor": 1, "micro_batch": 2})
        return weigh(profile, profile.precision, Request(BATCH, 1, cluster, None, fixed)).best
    except PlanInfeasible:
        fixed = Fixed(**{**degrees, "tensor": 1})
        return weigh(profile, profile.precision, Request(BATCH, 1, cluster, None, fixed)).best


def _differences(_rank: int, name: str, plans: list[Plan]) -> list[float]:
    """Return the largest relative difference of a step of each plan from plain PyTorch, of the loss or a gradient."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = MODELS[name].build().train()
    torch.manual_seed(2)
    batch = MODELS[name].batch(BATCH)
    captured = functools.cache(lambda size: CapturedModel(experiment_of(name), size, model))
    found = []
    for plan in plans:
        of_size = captured(plan.micro_batch)
        graph = of_size.gathered(BATCH) if plan.gathers else of_size.graph
        found.append(_difference(copy.deepcopy(model), graph, plan, batch))
    return found


def _difference(model: torch.nn.Module, graph: Graph, plan: Plan, batch: Batch) -> float:
    plain = copy.deepcopy(model)
    has_statistics = any(isinstance(module, _BatchNorm) and module.training for module in plain.modules())
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
    names: list[Any] = [None] * plan.world
    torch.distributed.all_gather_object(names, list(trainer.stages.model_parameters()))
    if missing := [key for key, grad in gradients.items() if key not in set().union(*names) and grad.any()]:
        raise AssertionError(f"{missing} are not trained")
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    return worst.item()


def _plainly(model: torch.nn.Module, batch: Batch, size: int) -> torch.Tensor:
    """Compute the gradients of the mean loss of parts of `size` samples, and return that loss."""
    total = torch.zeros(())
    for first in range(0, BATCH, size):
        part = {key: value[first : first + size] for key, value in batch.items()}
        with differentiable():
            loss = loss_of(model(**part)) * size / BATCH
        loss.backward()
        total += loss.detach()
    return total


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | " + " | ".join(DIVISIONS) + " | runs as written, with its share of the step |",
        "|---|" + "--:|" * len(DIVISIONS) + "---|",
    ]
    for row in rows:
        if "refused" in row:
            lines.append(f"| {row['name']} |" + " refused |" * len(DIVISIONS) + f" {_reason(row['refused'])} |")
            continue
        gathers = row.get("gathers", [])
        cells = [_cell(value) + ", gathered" * (title in gathers) for title, value in row["differences"].items()]
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {_opaque(row)} |")
    return lines


def _cell(value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:.0e}".replace("0e+00", "0") if value <= TOLERANCE else f"**{value:.0e}**"
    known = {"asks for more stages": "one block", "compares samples of one batch": "whole batch"}
    return next((cell for words, cell in known.items() if words in value), "**failed**")


def _opaque(row: dict[str, Any]) -> str:
    """Return the labels of opaque calls, without numbers of layers, and the share of the step that a note tells."""
    share = next(
        (found[1] for note in row["notes"] if (found := re.match(r"Of the predicted time .*?([\d.]+%)", note))), ""
    )
    kinds = list(dict.fromkeys(re.sub(r"\.\d+", "", label) for label in row["opaque"]))
    more = [f"{len(kinds) - 2} more"] if len(kinds) > 2 else []
    return f"{', '.join([*(f'`{kind}`' for kind in kinds[:2]), *more])}: {share}" if kinds else ""


def _reason(text: str) -> str:
    return re.sub(r" at \S+ \(`.*?`\)", "", text.split(". ")[0]).split(": ", 1)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "update"))
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; all by default")
    asked = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rows = read_rows(asked.file)
    if asked.what == "update":
        fill(MODELS_PAGE, "any_model.py", [*table(list(rows.values())), "", versions(asked.file)])
        return
    for name in asked.names or MODELS:
        rows[name] = measured(name)
        print(*table([rows[name]])[2:], flush=True)
        write_rows(asked.file, [rows[each] for each in MODELS if each in rows])


if __name__ == "__main__":
    main()
