"""The held-out loss equals plain PyTorch's in eval mode under every plan, and computing it leaves training alone."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from tests.distributed import zoo
from tests.distributed.harness import AtGate, Division, Tensors, launch, part_of, trainer_of, whole_parameters
from tests.exhaustive import EXHAUSTIVE
from tests.patience import PATIENCE_S, Gate
from workbench.base.errors import CheckpointError, DataError, RunExists
from workbench.capture import Graph, capture, spec_of
from workbench.capture.captured_model import capture_for_evaluation, require_same_stages
from workbench.data import held_out as held_out_of
from workbench.data.datasets import UserDataset
from workbench.execution.between_steps import Evaluator, micro_batches
from workbench.execution.build import evaluation_programs
from workbench.execution.trainer import Trainer
from workbench.experiment import Experiment

MICRO_BATCH, GLOBAL_BATCH, HELD_OUT, STEPS = 2, 8, 11, 4
"""Held-out samples fill neither whole micro-batches nor replicas."""


class Normalised(nn.Module):
    """A model whose eval mode differs: BatchNorm reads its running statistics, and a head for training is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3)) for _ in range(4)
        )
        self.auxiliary, self.head = nn.Linear(16, 5), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        loss = functional.cross_entropy(self.head(x), labels)
        return loss + 0.3 * functional.mse_loss(self.auxiliary(x), self.head(x)) if self.training else loss


class Squared(nn.Module):
    """A loss that is a mean over elements, with no label to count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.layers(x), x)


MODELS: dict[str, Any] = {"bert": lambda: zoo.bert_pretraining(0.1), "normalised": Normalised, "squared": Squared}


def batch_of(name: str, size: int, seed: int) -> Tensors:
    if name == "bert":
        return zoo.batch("bert", size, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    fields = {"x": torch.randn(size, 8, generator=generator), "labels": torch.arange(size) % 5}
    return fields if name == "normalised" else {"x": fields["x"]}


def held_out(name: str) -> list[Tensors]:
    batch = batch_of(name, HELD_OUT, seed=99)
    return [{key: value[index] for key, value in batch.items()} for index in range(HELD_OUT)]


class Counted(list[Tensors]):
    """Items that count how often one of them is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def accuracy(outputs: Any, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    labelled = batch["labels"] != -100
    return ((outputs.prediction_logits.argmax(-1) == batch["labels"]) & labelled).sum(), labelled.sum()


def margin(outputs: Any, batch: Tensors) -> tuple[float, int]:
    """Return the mean logit of the first token, which one tensor-parallel device holds, above that of the last."""
    difference = outputs["prediction_logits"][..., 0] - outputs["prediction_logits"][..., -1]
    return difference.double().sum().item() + outputs[2].sum().item(), len(batch["input_ids"])


METRICS: dict[str, dict[str, Any]] = {"bert": {"accuracy": accuracy, "margin": margin}}


@functools.cache
def captured(name: str, with_metrics: bool) -> tuple[nn.Module, Graph, Graph]:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    specs = {key: spec_of(key, value[:MICRO_BATCH]) for key, value in batch_of(name, GLOBAL_BATCH, 0).items()}
    graph = capture(model, specs, name=name)
    evaluated = capture_for_evaluation(model, graph, METRICS[name] if with_metrics else {})
    assert model.training
    return model, graph, evaluated


def train(
    name: str, division: Division, every: int, with_metrics: bool
) -> tuple[list[float], list[Any], list[Any], Tensors]:
    """Train; return the losses of steps, the evaluations by Workbench and by plain PyTorch, and the parameters."""
    model, graph, evaluated = captured(name, with_metrics)
    metrics = METRICS[name] if with_metrics else {}
    experiment = Experiment(
        model=MODELS[name], data=lambda: None, global_batch=GLOBAL_BATCH, steps=STEPS, learning_rate=3e-3, name=name
    )
    trainer = trainer_of(experiment, copy.deepcopy(model), graph, division, MICRO_BATCH)
    plan = trainer.plan
    require_same_stages(graph, evaluated, [stage.first_block for stage in plan.stages[1:]], plan.tensor)
    programs = evaluation_programs(plan, trainer.coordinate, evaluated, trainer.context)
    held = Counted(held_out(name))
    evaluator = Evaluator(trainer, evaluated, programs, UserDataset(held, HELD_OUT, seed=None), metrics)
    reads: set[int] = set()
    losses: list[float] = []
    found: list[Any] = []
    expected: list[Any] = []
    for step in range(STEPS):
        if step % every == 0:
            state = torch.get_rng_state()
            loss, values = evaluator.evaluate()
            found += [loss, *values.values()]
            reads.add(held.reads)
            assert torch.equal(state, torch.get_rng_state())
            expected += plain_evaluation(name, trainer, metrics)
        part = part_of(trainer, batch_of(name, GLOBAL_BATCH, seed=step))
        losses.append(trainer.step(step, part).scalars[0].item())
    assert len(reads) == 1  # a set that fits into memory is read once
    return losses, found, expected, whole_tensors(trainer)


def whole_tensors(trainer: Trainer) -> Tensors:
    """Return every parameter and buffer of the model, gathered from all ranks."""
    buffers = {key: value.clone() for key, value in trainer.stages.model_buffers().items()}
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, buffers)
    return whole_parameters(trainer) | {key: value for part in parts for key, value in part.items()}


def plain_evaluation(name: str, trainer: Trainer, metrics: dict[str, Any]) -> list[float]:
    """Return loss and metrics of the unmodified model in eval mode, over the whole set in one batch."""
    state = whole_tensors(trainer)
    with torch.random.fork_rng([]):
        model = MODELS[name]().eval()
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        output = model(**batch_of(name, HELD_OUT, seed=99))
    pairs = [metric(output, batch_of(name, HELD_OUT, seed=99)) for metric in metrics.values()]
    values = [float(total / count) for total, count in pairs]
    if isinstance(output, torch.Tensor):
        return [float(output), *values]
    return [float(output[0] if isinstance(output, tuple) else output.loss), *values]


DIVISIONS = {
    "one process": Division(),
    "PP 2": Division(pipeline=2),
    "DP 2": Division(data=2),
    "ZeRO 3": Division(data=2, zero=3),
    "TP 2": Division(tensor=2),
    "PP 2 × DP 2": Division(pipeline=2, data=2, zero=1),
    "interleaved": Division(pipeline=2, chunks=2),
}


TRIED = list(DIVISIONS) if EXHAUSTIVE else ["TP 2", "ZeRO 3", "PP 2 × DP 2", "interleaved"]
"""Divisions that are tested; the others, which are parts of these, only in `make test-exhaustive`."""


OTHERS = [("normalised", DIVISIONS["PP 2"]), ("squared", DIVISIONS["PP 2"])]
UNTOUCHED = {
    "bert under ZeRO 3": ("bert", DIVISIONS["ZeRO 3"]),
    "BatchNorm in one process": ("normalised", Division()),
    "BatchNorm under PP 2": ("normalised", DIVISIONS["PP 2"]),
    **({f"bert under {name}": ("bert", division) for name, division in DIVISIONS.items()} if EXHAUSTIVE else {}),
}
SELDOM = 10**9
RUNS: list[tuple[str, Division, int, bool]] = [
    *(("bert", DIVISIONS[name], 2, True) for name in TRIED),
    *((name, division, 1, name in METRICS) for name, division in dict.fromkeys([*OTHERS, *UNTOUCHED.values()])),
    *((name, division, SELDOM, False) for name, division in dict.fromkeys(UNTOUCHED.values())),
]
"""Model and division of each training, the steps between two evaluations, and whether they have metrics."""


def capture_each(runs: list[tuple[str, Division, int, bool]]) -> None:
    for name, _, _, with_metrics in runs:
        captured(name, with_metrics)


def train_each(_rank: int, runs: list[tuple[str, Division, int, bool]]) -> list[Any]:
    return [train(*each) for each in runs]


@functools.cache
def outcomes(world: int) -> dict[tuple[str, Division, int, bool], Any]:
    """Train all runs on so many processes, which start once."""
    runs = [each for each in RUNS if each[1].world == world]
    return dict(zip(runs, launch(train_each, world, runs, ahead=functools.partial(capture_each, runs)), strict=True))


@pytest.mark.parametrize("division", [DIVISIONS[name] for name in TRIED], ids=TRIED)
def test_the_held_out_loss_and_metrics_equal_plain_pytorch_in_eval_mode(division: Division) -> None:
    _, found, expected, _ = outcomes(division.world)["bert", division, 2, True]
    assert len(found) == 6
    assert found == pytest.approx(expected, rel=1e-5)
    assert abs(found[3] - found[0]) > 1e-4
    assert abs(found[5] - found[2]) > 1e-4


@pytest.mark.parametrize(("name", "division"), OTHERS, ids=["normalised", "squared"])
def test_models_that_differ_in_eval_mode_equal_plain_pytorch(name: str, division: Division) -> None:
    _, found, expected, _ = outcomes(division.world)[name, division, 1, False]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("name", "division"), UNTOUCHED.values(), ids=UNTOUCHED)
def test_training_with_evaluation_is_bitwise_the_training_without(name: str, division: Division) -> None:
    often, found, _, parameters = outcomes(division.world)[name, division, 1, name in METRICS]
    seldom, once, _, others = outcomes(division.world)[name, division, SELDOM, False]
    assert len(found) >= STEPS > len(once) > 0
    assert often == seldom
    assert parameters.keys() == others.keys()
    assert all(torch.equal(parameters[key], others[key]) for key in parameters)


@pytest.mark.parametrize(("samples", "size", "replicas"), [(11, 2, 2), (8, 2, 2), (3, 4, 1), (13, 4, 3)])
def test_weighted_micro_batches_count_every_sample_once(samples: int, size: int, replicas: int) -> None:
    divided = micro_batches(samples, size, replicas)
    counted = [0.0] * samples
    for item in divided:
        assert len(item.samples) == size
        for sample in item.samples:
            counted[sample] += item.weight
    assert counted == pytest.approx([1.0] * samples)
    assert len(divided) % replicas == 0


@pytest.mark.representative
def test_a_run_records_its_held_out_losses_and_a_resumption_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(40):
        (folder / f"{index}.txt").write_text(
            f"Document {index} says that {index} birds sing in tree {index % 7}.\n" * 20
        )
    (tmp_path / "other.txt").write_text("Birds sing in tree 5. Document 3 says so.\n\n" * 40)
    other, gate = wb.data.corpus(tmp_path / "other.txt"), Gate(tmp_path / "gate")
    experiment = wb.Experiment.of(
        model=wb.models.bert(vocab_size=200, hidden_size=16, num_layers=2, num_heads=2, max_positions=32),
        data=wb.data.corpus(folder, vocab_size=200),
        steps=4,
        global_batch=4,
        seq_len=32,
        checkpoint_every=2,
        evaluation=wb.Evaluation(every=2, samples=9, also={"masked_40": 0.4, "other": other}),
        callbacks=[AtGate(gate.file)],
        metrics={"known": lambda outputs, batch: ((batch["labels"] >= 0).sum(), outputs.prediction_logits.shape[0])},
    )
    plan = wb.plan(experiment, pipeline=2, data=1, micro_batch=2)
    assert plan.prediction.evaluation_s > 0
    run = wb.launch(experiment, plan)
    with pytest.raises(RunExists, match=r"Wait for it, run\.wait\(\)"):
        run.evaluate()
    gate.open()
    run.wait(PATIENCE_S)
    assert run.evaluations().step.tolist() == [0, 2, 4], run.logs()
    assert run.evaluations().eval_loss[0] == pytest.approx(math.log(200) + math.log(2), rel=0.2)
    assert run.history().step.tolist() == [1, 2, 3, 4]
    figure = wb.compare(run)
    [markers] = [trace for trace in figure.data if trace.meta == "evaluation"]
    assert markers.y == pytest.approx(run.evaluations().eval_loss)
    assert "◆ held-out loss" in figure.layout.title.subtitle.text
    perplexities = [trace for trace in wb.compare(run, y="perplexity").data if trace.meta == "line"]
    assert perplexities[0].y == pytest.approx(run.evaluations().perplexity)
    assert "held-out loss" in repr(wb.runs.summary(run))
    assert run.evaluations()["known"].tolist() == [5.0, 5.0, 5.0]  # round(0.15 * 32) labels in each sample
    [points] = [trace for trace in wb.compare(run, y="known").data if trace.meta == "line"]
    assert points.y.tolist() == [5.0, 5.0, 5.0]
    assert "known" in wb.runs.summary(run).columns
    run.resume(steps=6)
    run.wait(PATIENCE_S)
    assert run.evaluations().step.tolist() == [0, 2, 4, 6]
    _check_evaluation_of_checkpoints(run, experiment)


def _check_evaluation_of_checkpoints(run: wb.Run, experiment: wb.Experiment) -> None:
    """A checkpoint has the loss that the run computed, on its held-out samples and on equal samples that are given."""
    before = run.evaluations()
    again = run.evaluate(step=2)
    further = {name: before[name][1] for name in ("known", "masked_40", "other")}
    assert (again.loss, again.count, again.step, again.metrics) == (before.eval_loss[1], 9, 2, further)
    assert run.evaluations().eval_loss.tolist() == before.eval_loss.tolist()
    samples = held_out_of(experiment)
    given = run.evaluate([samples[index] for index in range(5)])
    assert (given.count, given.step, given.data) == (5, 6, "list")
    assert abs(given.loss - before.eval_loss[3]) < 0.5
    assert run.evaluations("list").eval_loss.tolist() == [given.loss]
    alone = {name: held_out_of(each) for name, each in experiment.held_out_sets.items()}
    shown = {name: {int((each[index]["labels"] >= 0).sum()) for index in range(9)} for name, each in alone.items()}
    assert shown == {"masked_40": {13}, "other": {5}}  # round(0.4 * 32) and round(0.15 * 32)
    assert len({before[name][3] for name in ("eval_loss", "masked_40", "other")}) == 3
    other = run.evaluate([alone["other"][index] for index in range(9)])
    assert other.loss == pytest.approx(before["other"][3], abs=1e-6)
    assert run.evaluations().step.tolist() == [0, 2, 4, 6]
    assert run.status.state == "finished"
    assert not list((run.path / "evaluations").iterdir())
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3\. It has those of the steps 2, 4, 6"):
        run.evaluate(step=3)
    with pytest.raises(DataError, match="eval_data has the fields"):
        run.evaluate([{"x": torch.zeros(3)}] * 4)
    with pytest.raises(DataError, match="There are 1 held-out samples, fewer than the 2 of one micro-batch"):
        run.evaluate([samples[0]])
