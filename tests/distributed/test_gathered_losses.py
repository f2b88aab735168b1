"""A loss that compares samples over micro-batches and replicas is plain PyTorch's of the whole batch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

import workbench as wb
from tests.distributed.harness import forced_plan, launch, part_of, plain_step, unlike_plain
from tests.distributed.test_every_plan import trainer_of
from tests.patience import PATIENCE_S
from tests.unit.coupled_models import GATHERED, WIDTH, SupCon, TwoTower, samples_for
from workbench.base.errors import DataError, WorkbenchError
from workbench.capture import Graph, capture, spec_of
from workbench.capture.captured_model import CapturedModel, require_same_stages
from workbench.capture.coupling.gathering import with_tail_of
from workbench.data.datasets import UserDataset
from workbench.execution.between_steps import Evaluator
from workbench.execution.build import evaluation_programs
from workbench.experiment import Experiment
from workbench.planning.plan import Plan

TOLERANCE = 1e-5
BATCH = 8
ALONE: tuple[dict[str, Any], ...] = ({"num_microbatches": 4}, {"num_microbatches": 4, "recompute": "full"})
REPLICAS: tuple[dict[str, Any], ...] = (
    {"data": 2, "num_microbatches": 1},
    *({"data": 2, "num_microbatches": 2, "zero": zero} for zero in range(4)),
)
STAGES: tuple[dict[str, Any], ...] = (
    {"pipeline": 2, "num_microbatches": 4},
    {"pipeline": 2, "num_microbatches": 2, "schedule": "gpipe", "recompute": "full"},
)
STAGES_OF_REPLICAS: tuple[dict[str, Any], ...] = (
    {"pipeline": 2, "data": 2, "num_microbatches": 1, "schedule": "gpipe"},
    *({"pipeline": 2, "data": 2, "num_microbatches": 2, "zero": zero} for zero in (0, 2, 3)),
)


def compared(
    _rank: int,
    cases: tuple[dict[str, Any], ...],
    device: str | torch.device = "cpu",
    names: tuple[str, ...] = tuple(GATHERED),
) -> dict[str, float]:
    """Largest relative difference of a loss or a gradient from plain PyTorch's, for every model and division."""
    return {f"{name}, {choices}": error for name in names for choices, error in _differences(name, cases, device)}


def size_of(choices: dict[str, Any]) -> int:
    """Return the number of samples of a micro-batch."""
    return int(BATCH // choices["num_microbatches"] // choices.get("data", 1))


@functools.cache
def built(name: str, device: str | torch.device) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = GATHERED[name]().to(device).train()
    return model, {key: field.to(device) for key, field in default_collate(samples_for(name, BATCH)).items()}


@functools.cache
def captured(name: str, size: int, device: str | torch.device) -> Graph:
    model, batch = built(name, device)
    specs = {key: spec_of(key, field[:size]) for key, field in batch.items()}
    return capture(model, specs, name=name, gathers=True)


def wrong_in(world: int, cases: tuple[dict[str, Any], ...], *some: str) -> dict[str, float]:
    """Return the differences that are too large, measured on so many processes; of all models by default."""
    names = some or tuple(GATHERED)
    ahead = functools.partial(capture_each, cases, names)
    found = launch(compared, world, cases, "cpu", names, ahead=ahead)
    return {case: error for case, error in found.items() if not error <= TOLERANCE}


def capture_each(cases: tuple[dict[str, Any], ...], names: tuple[str, ...]) -> None:
    for name in names:
        for size in {BATCH, *map(size_of, cases)}:
            captured(name, size, "cpu")


def _differences(
    name: str, cases: tuple[dict[str, Any], ...], device: str | torch.device
) -> Iterator[tuple[dict[str, Any], float]]:
    model, batch = built(name, device)
    for choices in cases:
        size = size_of(choices)
        graph = with_tail_of(captured(name, size, device), captured(name, BATCH, device))
        plan = forced_plan(graph, micro_batch=size, gathers=True, **{"pipeline": 1, **choices})
        yield choices, _difference(model, graph, plan, batch)


def _difference(model: nn.Module, graph: Graph, plan: Plan, batch: dict[str, torch.Tensor]) -> float:
    trainer = trainer_of(copy.deepcopy(model), graph, plan)
    worst = 0.0
    for _step in range(2):  # no gradient of the first stays
        loss, model = plain_step(model, batch)
        worst = max(worst, *unlike_plain(trainer, batch, loss, model, floor=1.0))
    buffers = dict(model.named_buffers())
    for key, buffer in trainer.stages.model_buffers().items():
        if key in buffers:
            torch.testing.assert_close(buffer, buffers[key])
    return worst


class _TwoDropouts(TwoTower):
    """Two towers whose outputs dropout thins out."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.dropout(x, 0.5), functional.dropout(y, 0.5))


def _outputs_of_both_forwards(_rank: int) -> list[list[torch.Tensor]]:
    model = _TwoDropouts().train()
    batch = default_collate(samples_for("two towers", BATCH))
    graphs = [
        capture(model, {key: spec_of(key, field[:size]) for key, field in batch.items()}, gathers=True)
        for size in (2, BATCH)
    ]
    graph = with_tail_of(*graphs)
    trainer = trainer_of(model, graph, forced_plan(graph, pipeline=1, micro_batch=2, num_microbatches=4, gathers=True))
    *_, towers, _tail = trainer.stages.stages[0].block_modules()
    sent = []
    towers.register_forward_hook(lambda _module, _given, values: sent.append([value.detach() for value in values]))
    trainer.gradients(0, batch)
    return sent


def test_dropout_draws_the_same_numbers_in_both_forwards_of_a_micro_batch() -> None:
    sent = launch(_outputs_of_both_forwards, 1)
    assert len(sent) == 8
    torch.testing.assert_close(sent[:4], sent[4:], rtol=0, atol=0)
    assert all(not torch.equal(one, other) for one, other in zip(sent[0], sent[1], strict=True))


class _Returning(nn.Module):
    """Two towers that return their loss with a value of each sample, one of each pair, and how sure they are.

    In training, dropout thins the towers' inputs out, and BatchNorm normalises over the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        one, other = (
            functional.dropout(layer(value).tanh(), 0.3, self.training).mean(1)
            for layer, value in zip(self.layers, (x, y), strict=True)
        )
        scores = self.norm(one) @ functional.normalize(other).T
        loss = functional.cross_entropy(scores, torch.arange(len(x)))
        return {"loss": loss, "one": one, "scores": scores, "sure": scores.softmax(-1).amax(-1)}


def _mean_of_one(outputs: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> tuple[Any, int]:
    return (outputs["one"] * batch["x"].mean(1)).sum(), len(batch["x"])


def _surest(outputs: dict[str, torch.Tensor], _batch: dict[str, torch.Tensor]) -> tuple[Any, int]:
    return outputs["sure"].sum(), len(outputs["sure"])


HELD_OUT = 2 * BATCH + 3
"""The last three samples fill no batch."""
MODELS = {
    **{name: GATHERED[name] for name in ("Barlow Twins", "Hugging Face's CLIP", "SupCon", "RMSE")},
    "two towers that return more": _Returning,
}
WHOLE = {"num_microbatches": 1, "gathers": False}


@functools.cache
def evaluated_model(name: str) -> tuple[nn.Module, list[Any], Experiment]:
    """Return a model, its held-out samples and an experiment that evaluates it on them."""
    torch.manual_seed(0)
    build, samples = MODELS[name], samples_for(name, HELD_OUT)
    metrics = {"one": _mean_of_one, "sure": _surest} if build is _Returning else {}
    specs = {"model": build, "data": samples[:BATCH], "eval_data": samples, "metrics": metrics}
    return build().train(), samples, Experiment.of(**specs, steps=1, global_batch=BATCH, seq_len=1, name=name)


@functools.cache
def captured_model(name: str, size: int) -> CapturedModel:
    model, _, experiment = evaluated_model(name)
    return CapturedModel(experiment, size, copy.deepcopy(model))


def graphs_of(name: str, choices: dict[str, Any]) -> tuple[Graph, Graph]:
    """Return the graphs of a step and of an evaluation."""
    gathered = BATCH if choices.get("gathers", True) else None
    kept, (_, _, experiment) = captured_model(name, size_of(choices)), evaluated_model(name)
    return kept.graph if gathered is None else kept.gathered(gathered), kept.evaluation(experiment, gathered)


def evaluations(world: int, *cases: dict[str, Any]) -> dict[str, float]:
    """Return the differences that are too large, measured on so many processes."""
    found = launch(_evaluations, world, cases, ahead=functools.partial(capture_evaluations, cases))
    return {case: error for case, error in found.items() if not error <= TOLERANCE}


def capture_evaluations(cases: tuple[dict[str, Any], ...]) -> None:
    for name in MODELS:
        for choices in cases:
            graphs_of(name, choices)


def _evaluations(_rank: int, cases: tuple[dict[str, Any], ...]) -> dict[str, float]:
    """Largest relative difference of a held-out loss or metric from plain PyTorch's, for every model and division."""
    worst = {}
    for name in MODELS:
        model, samples, experiment = evaluated_model(name)
        metrics = experiment.metrics
        for choices in cases:
            graph, evaluated = graphs_of(name, choices)
            plan = forced_plan(graph, micro_batch=size_of(choices), **{"pipeline": 1, "gathers": True, **choices})
            plan = replace(plan, coupled=True)
            require_same_stages(graph, evaluated, [stage.first_block for stage in plan.stages[1:]], 1)
            trainer = trainer_of(copy.deepcopy(model), graph, plan)
            programs = evaluation_programs(plan, trainer.coordinate, evaluated, trainer.context)
            evaluator = Evaluator(trainer, evaluated, programs, UserDataset(samples, HELD_OUT, seed=None), metrics)
            loss, values = evaluator.evaluate()
            assert (evaluator.samples, evaluator.evaluate()[0]) == (2 * BATCH, loss)
            found = torch.tensor([loss, *values.values()], dtype=torch.float64)
            expected = _plain_evaluation(copy.deepcopy(model), samples, metrics)
            worst[f"{name}, {choices}"] = float(((found - expected) / expected).abs().max())
            trainer.gradients(0, part_of(trainer, default_collate(samples[:BATCH])))  # training goes on
    return worst


def _plain_evaluation(model: nn.Module, samples: list[Any], metrics: dict[str, Any]) -> torch.Tensor:
    """Return the mean loss of the first two batches in eval mode, and the metrics over both."""
    model.eval()
    losses, sums = [], {name: torch.zeros(2, dtype=torch.float64) for name in metrics}
    with torch.no_grad():
        for first in (0, BATCH):
            batch = default_collate(samples[first : first + BATCH])
            outputs = model(**batch)
            losses.append(outputs["loss"] if isinstance(outputs, dict) else outputs)
            for name, metric in metrics.items():
                sums[name] += torch.tensor([float(value) for value in metric(outputs, batch)])
    return torch.stack([torch.stack(losses).mean().double(), *(total / count for total, count in sums.values())])


def test_held_out_losses_of_a_process_equal_plain_pytorch_of_each_global_batch() -> None:
    assert not (wrong := evaluations(1, ALONE[0], WHOLE)), wrong


def test_held_out_losses_of_replicas_and_stages_equal_plain_pytorch_of_each_global_batch() -> None:
    assert not (wrong := evaluations(2, REPLICAS[0], REPLICAS[-1], STAGES[0])), wrong


def test_a_gathered_run_records_its_held_out_losses_and_is_evaluated_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    samples, others = samples_for("SupCon", HELD_OUT), samples_for("SupCon", 4 * BATCH)[HELD_OUT:]
    experiment = Experiment.of(
        model=SupCon,
        data=samples_for("SupCon", 2 * BATCH),
        eval_data=samples,
        evaluation=wb.Evaluation(every=2),
        steps=4,
        global_batch=BATCH,
        checkpoint_every=2,
        seq_len=1,
    )
    plan = wb.plan(experiment, data=2, micro_batch=2)
    assert plan.gathers
    run = wb.launch(experiment, plan)
    run.wait(PATIENCE_S)
    found = run.evaluations()
    assert found.step.tolist() == [0, 2, 4], run.logs()
    torch.manual_seed(experiment.seed)
    plain = _plain_evaluation(SupCon(), samples, {})
    assert found.eval_loss[0] == pytest.approx(float(plain), rel=TOLERANCE)
    again = run.evaluate(step=2)
    assert (again.loss, again.count) == (found.eval_loss[1], 2 * BATCH)
    other = run.evaluate(others)  # a set of the class of the run's own, which has the name of the class
    assert (other.count, other.data) == (BATCH, "list")
    assert other.loss != found.eval_loss[-1]
    with pytest.raises(DataError, match=r"7 held-out samples, fewer than the 8 of the global batch"):
        run.evaluate(samples[: BATCH - 1])


REPLICATED = {"data": 2, "num_microbatches": 2}


def _messages_of_first_step(rank: int) -> list[str]:
    return [_message_of_first_step(rank, planted) for planted in ("order", "rule")]


def _message_of_first_step(rank: int, planted: str) -> str:
    """Return what the first step says of values that are gathered wrongly on one replica."""
    gather, (model, batch) = dist.all_gather, built("SupCon", "cpu")
    graph = with_tail_of(captured("SupCon", 2, "cpu"), captured("SupCon", BATCH, "cpu"))
    plan = forced_plan(graph, pipeline=1, micro_batch=2, gathers=True, **REPLICATED)
    trainer = trainer_of(copy.deepcopy(model), graph, plan)
    with pytest.MonkeyPatch.context() as patch:
        if planted == "order" and rank == 1:
            patch.setattr(dist, "all_gather", lambda values, own, group: gather(values[::-1], own, group=group))
        if planted == "rule":
            patch.setattr(
                "workbench.execution.blocks.loss_runners.join_rows",
                lambda rows, parts: torch.cat(list(parts), rows.dim),
            )
        try:
            trainer.step(0, part_of(trainer, batch))
        except WorkbenchError as error:
            return str(error)
    return ""


def test_values_gathered_in_a_wrong_order_are_caught_before_the_first_update() -> None:
    ahead = functools.partial(capture_each, (REPLICATED,), ("SupCon",))
    for said in launch(_messages_of_first_step, 2, ahead=ahead):
        assert "were gathered in another order on one of 2 replicas" in said
        assert "Nothing was updated" in said


def test_micro_batches_in_one_process_equal_plain_pytorch_of_the_whole_batch() -> None:
    assert not (wrong := wrong_in(1, ALONE)), wrong


def test_replicas_under_every_zero_stage_and_stages_equal_plain_pytorch_of_the_whole_batch() -> None:
    assert not (wrong := wrong_in(2, REPLICAS + STAGES)), wrong


def test_stages_of_replicas_equal_plain_pytorch_of_the_whole_batch() -> None:
    assert not (wrong := wrong_in(4, STAGES_OF_REPLICAS, "Hugging Face's CLIP", "SupCon")), wrong
