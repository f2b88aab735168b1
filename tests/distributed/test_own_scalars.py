"""Scalars that a model logs: the same figures as in a plain loop, under every division of a step."""

from __future__ import annotations

import functools
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from tests.distributed.harness import Division, launch, part_of, trainer_of
from tests.distributed.real_worker import plan, trained
from workbench.base.errors import InvalidExperiment
from workbench.base.tensors import TensorSpec
from workbench.capture import Graph, spec_of
from workbench.capture.blocks.tensor_parallel import plan_tensor_parallel
from workbench.capture.captured_model import capture_for_evaluation, require_same_stages
from workbench.capture.coupling.gathering import with_tail_of
from workbench.capture.model import capture
from workbench.execution.trainer import Trainer
from workbench.record.columns import REDUCTIONS, WEIGHTS, logging_scalars
from workbench.runs.run import Run

GLOBAL, MICRO, SEQ, VOCAB = 8, 2, 6, 40


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = functional.gelu(self.up(self.norm(hidden)))
        wb.log_scalar("inner", inner.norm())
        for reduce in REDUCTIONS:
            wb.log_scalar(f"{reduce}_of_layers", inner.square().mean(), reduce)
        wb.log_scalar("weight", self.up.weight.norm(), "last")
        return hidden + self.down(inner)


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        wb.log_scalar("fields", (labels != -100).sum(), "sum")
        hidden = self.embedding(input_ids)
        inputs = []
        for layer in self.layers:
            inputs.append(hidden)
            hidden = layer(hidden)
        for index, value in enumerate(inputs):  # a list of what layers were given, read at the end
            wb.log_scalar(f"input_{index}", value.abs().mean())
        wb.log_scalar("moved", (hidden - inputs[0]).norm())
        logits = self.head(hidden).flatten(0, 1)
        loss = functional.cross_entropy(logits, labels.flatten())
        wb.log_scalar("perplexity_of_step", loss.exp())
        wb.log_scalar("perplexity_by_length", loss.exp(), weight=(labels != -100).sum(1).max())
        kept = labels.flatten() != -100
        right = ((logits.argmax(-1) >= labels.flatten()) & kept).sum() / kept.sum()
        total = hidden.detach().mean()
        wb.log_scalar("total", total)
        total.mul_(2.0)  # a scalar keeps the value that it had
        return loss + 1e-3 * logits.square().mean(), {"accuracy": right, "cross_entropy": loss, "logits": logits}


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(0, VOCAB, (GLOBAL, SEQ))
    labels = ids.roll(1, 1).masked_fill(torch.rand(GLOBAL, SEQ) < torch.linspace(0.1, 0.8, GLOBAL)[:, None], -100)
    labels[:, 0] = 1
    return {"input_ids": ids, "labels": labels}


def model() -> Logging:
    torch.manual_seed(1)
    return Logging()


def expected() -> dict[str, float]:
    """Return the scalars of a plain loop: means over the samples or the labels that they are means over."""
    whole, values, weights, long = batch(), defaultdict(list), [], []
    how = {}
    for first in range(0, GLOBAL, MICRO):
        part = {name: value[first : first + MICRO] for name, value in whole.items()}
        with logging_scalars() as logged, torch.no_grad():
            _, beside = model()(**part)
        for scalar in logged:
            how[scalar.name] = scalar.reduce
            if scalar.reduce == WEIGHTS:  # of a product with this weight
                values[scalar.name][-1] = values[scalar.name][-1] / scalar.value
            else:
                values[scalar.name].append(scalar.value)
        for name in ("accuracy", "cross_entropy"):
            values[name].append(beside[name])
        weights.append(float((part["labels"] != -100).sum()))
        long.append(float((part["labels"] != -100).sum(1).max()))
    found = {}
    by_labels = torch.tensor(weights) / sum(weights)
    by_length = torch.tensor(long) / sum(long)
    del how["perplexity_by_length"]
    for name, each in values.items():
        calls = torch.stack(each).reshape(len(weights), -1)
        figures = {"sum": calls.sum(), "max": calls.max(), "min": calls.min(), "last": calls[-1, -1]}
        weight = by_length if name == "perplexity_by_length" else by_labels
        is_by_samples = name not in ("perplexity_by_length", "accuracy", "cross_entropy", "perplexity_of_step")
        mean = calls.mean() if is_by_samples else (calls[:, 0] * weight).sum()
        found[name] = float(figures.get(how.get(name, "mean"), mean))
    return found


SPECS = {name: TensorSpec(name, (MICRO, SEQ), "int64") for name in ("input_ids", "labels")}


@functools.cache
def graph() -> Graph:
    return capture(model(), SPECS, logs=True)


def experiment() -> wb.Experiment:
    return wb.Experiment(model=Logging, data=[batch()], steps=3, global_batch=GLOBAL, seq_len=SEQ)


def scalars(trainer: Trainer) -> dict[str, float]:
    result = trainer.measure(0, part_of(trainer, batch())).tolist()
    return dict(zip(trainer.scalar_names, result[-len(trainer.scalar_names) :], strict=True))


DIVISIONS = [
    Division(pipeline=2),
    Division(data=2),
    Division(tensor=2),
    Division(data=2, zero=3),
    Division(pipeline=2, chunks=2),
]


def twice_under_each(_rank: int) -> list[list[dict[str, float]]]:
    """Return the scalars of a step and of its repetition under each division, with activations recomputed."""
    trainers = (trainer_of(experiment(), model(), graph(), each, MICRO, recompute="full") for each in DIVISIONS)
    return [[scalars(trainer), scalars(trainer)] for trainer in trainers]


def test_scalars_that_a_model_logs_are_those_of_a_plain_loop() -> None:
    for division, found in zip(DIVISIONS, launch(twice_under_each, 2, ahead=graph), strict=True):
        for each in found:
            assert each == pytest.approx(expected(), rel=1e-6), division


def test_scalars_change_neither_what_stages_exchange_nor_what_tensor_parallelism_divides() -> None:
    silent, evaluated = capture(model(), SPECS), capture_for_evaluation(model(), graph())
    further = [set(graph().crossing(cut)) - set(silent.crossing(cut)) for cut in range(1, len(silent.blocks))]
    assert further == [set(), *[{"embedding"}] * 3, set()], (
        "all but `moved` are computed where their last operand is made"
    )
    require_same_stages(graph(), evaluated, range(1, len(evaluated.blocks)), tensor=2)
    assert plan_tensor_parallel(graph(), 2).parameters == plan_tensor_parallel(silent, 2).parameters != {}


class Items:
    """The samples of a batch, as a dataset."""

    def __len__(self) -> int:
        return GLOBAL

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[index] for name, value in batch().items()}


def test_a_run_in_two_stages_has_a_column_for_each_scalar_and_evaluates(tmp_path: Path) -> None:
    lengths = {"steps": 1, "global_batch": GLOBAL, "seq_len": SEQ}
    held_out = wb.Evaluation(data=Items())
    asked = wb.Experiment(model=model, data=Items(), **lengths, evaluation=held_out, tracking=wb.Tracking(project=""))
    run = Run(trained(tmp_path / "run", asked, plan(asked, pipeline=2, micro_batch=MICRO)).path)
    history = run.history()  # of one step with all samples, in whatever order
    for name in ("max_of_layers", "fields", "accuracy", "cross_entropy"):
        assert history[name][0] == pytest.approx(expected()[name], rel=1e-5), name
    assert set(history.scalars) == set(expected())
    assert history.loss[0] == pytest.approx(run.evaluations().eval_loss[0], rel=1e-5)


class Opaque(nn.Module):
    """A model whose layer runs as written, because it reads a number of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(VOCAB, 16), Reading(), nn.Linear(16, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layer(self.embedding(input_ids))).flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten())


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self.linear(hidden)
        wb.log_scalar("inside", found.norm(), "sum")
        return found.tanh() if float(hidden.norm()) > 0 else found


def inside_an_opaque_module(_rank: int) -> tuple[dict[str, float], float]:
    torch.manual_seed(1)
    model = Opaque()
    expected = 0.0
    for first in range(0, GLOBAL, MICRO):
        with logging_scalars() as logged:
            model(**{name: value[first : first + MICRO] for name, value in batch().items()})
        expected += float(logged[0].value)
    graph = capture(model, SPECS, logs=True)
    assert any("aten" not in str(node.target) for node in graph.blocks[0].code.graph.nodes if node.op != "placeholder")
    trainer = trainer_of(experiment(), model, graph, Division(), MICRO, recompute="full")
    return scalars(trainer), expected


def test_a_module_that_runs_as_written_logs_each_micro_batch_once() -> None:
    found, expected = launch(inside_an_opaque_module, 1)
    assert found == {"inside": pytest.approx(expected, rel=1e-6)}


def test_wrong_names_values_and_reductions_are_refused_in_a_sentence() -> None:
    for arguments, said in [
        (("loss", 1.0), "'loss' cannot be the name of a scalar"),
        (("two words", 1.0), "Choose a word of letters"),
        (("norms", torch.ones(3)), r"a value of shape \[3\]"),
        (("text", "1.0"), "a str"),
        (("norm", 1.0, "median"), "mean"),
        (("norm", 1.0, "sum", 2.0), "only a mean takes one"),
        (("norm", 1.0, "mean", torch.ones(2)), r"was given the weight a value of shape \[2\]"),
        (("norm", 1.0, "mean", -1.0), "a finite number of at least 0"),
    ]:
        with pytest.raises(InvalidExperiment, match=said):
            wb.log_scalar(*arguments)


class Twice(nn.Module):
    def __init__(self, second: str) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(SEQ, 1), second

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        found = self.linear(input_ids.float()).sub(labels.float().mean(1, keepdim=True))
        wb.log_scalar("size", found.abs().max(), "max")
        return found.square().mean(), {self.second: found.abs().mean()}


@pytest.mark.parametrize(
    ("name", "said"), [("size", "with reduce='max' and with reduce='mean'"), ("tokens", "'tokens'")]
)
def test_a_model_that_logs_what_it_cannot_is_refused_where_it_is_captured(name: str, said: str) -> None:
    with pytest.raises(InvalidExperiment, match=said):
        capture(Twice(name), SPECS, logs=True)


class Towers(nn.Module):
    """Two towers whose loss compares all samples of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Sequential(nn.Linear(SEQ, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        values = (field.float() / VOCAB for field in (input_ids, labels))
        one, other = (functional.normalize(tower(v), dim=1) for tower, v in zip(self.towers, values, strict=True))
        wb.log_scalar("of_tower", one.abs().mean())
        similarities = 3.0 * one @ other.T
        target = torch.arange(len(one), device=one.device)
        loss = functional.cross_entropy(similarities, target)
        wb.log_scalar("compared", torch.ones_like(target).sum(), "sum")
        return loss, {"accuracy": (similarities.argmax(1) == target).float().mean(), "contrast": loss.exp()}


def towers() -> Towers:
    torch.manual_seed(1)
    return Towers()


def of_gathered_losses(_rank: int) -> list[dict[str, float]]:
    parts = [{key: spec_of(key, value[:size]) for key, value in batch().items()} for size in (MICRO, GLOBAL)]
    graph = with_tail_of(*(capture(towers(), specs, gathers=True, logs=True) for specs in parts))
    asked, divisions = experiment(), (Division(pipeline=2), Division(data=2))
    return [scalars(trainer_of(asked, towers(), graph, each, MICRO, gathers=True)) for each in divisions]


def test_scalars_beside_a_loss_over_all_samples_are_those_of_all_samples() -> None:
    whole, model = batch(), towers()
    with logging_scalars() as logged, torch.no_grad():
        loss, beside = model(**whole)
    expected = {scalar.name: float(scalar.value) for scalar in logged}
    expected |= {"accuracy": float(beside["accuracy"]), "contrast": float(loss.exp())}
    for found in launch(of_gathered_losses, 2):
        assert found == pytest.approx(expected, rel=1e-6)
