"""Metrics of one's own: what is refused before any process starts, and what figures make of their values."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from workbench.analysis.curve import Curve
from workbench.capture import capture, spec_of
from workbench.capture.evaluation import capture_for_evaluation
from workbench.capture.outputs import flattened
from workbench.errors import InvalidExperiment
from workbench.figures.curves_view import loss_curves
from workbench.figures.panels_view import panel_names, panels
from workbench.rundir import append_event
from workbench.runs.records.history import HistoryTail


@dataclasses.dataclass
class Returned:
    loss: torch.Tensor
    logits: torch.Tensor
    details: dict


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Returned:
        hidden = self.first(x).tanh()
        logits = self.second(hidden)
        details = {"hidden": [hidden], "seen": labels, "cache": object(), "twice": 2 * labels}
        return Returned(functional.cross_entropy(logits, labels), logits, details)


BATCH = {"x": torch.zeros(4, 3), "labels": torch.zeros(4, dtype=torch.int64)}
SPECS = {name: spec_of(name, value) for name, value in BATCH.items()}


def captured(**metrics):
    model = Classifier()
    return capture_for_evaluation(model, capture(model, SPECS), metrics)


def correct(outputs, batch):
    return (outputs.logits.argmax(-1) == batch["labels"]).sum(), len(batch["labels"])


def test_only_what_metrics_read_is_computed_and_the_structure_is_rebuilt():
    graph = captured(
        correct=correct, seen=lambda outputs, _: (outputs.details["twice"].sum(), outputs.details["seen"].numel())
    )
    assert len(graph.outputs.names) == 3
    values = [torch.full(graph.values[name].shape, float(index)) for index, name in enumerate(graph.outputs.names)]
    rebuilt = graph.outputs.rebuilt(values)
    assert isinstance(rebuilt, Returned)
    assert torch.equal(rebuilt.logits, values[graph.outputs.names.index(graph.outputs.values[1])])
    assert rebuilt.details["hidden"][0].is_meta
    assert rebuilt.details["cache"] is None


def test_outputs_of_every_structure_are_flattened():
    template, tensors = flattened((torch.zeros(1), [{"a": torch.ones(2)}, 3, "text"], None))
    assert [tensor.numel() for tensor in tensors] == [1, 2]
    assert template[1][1:] == [3, "text"]


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (lambda outputs, _: outputs.logits.sum(), "one scalar instead of two scalars"),
        (lambda outputs, _: (outputs.logits.sum(-1), 4), r"a tensor of shape \[2\], int 4"),
        (lambda outputs, _: (outputs.logits.sum(), "many"), "str 'many'"),
        (lambda *_: None, "returned None"),
        (lambda outputs, _: (outputs.logits.mean(), 1), "does not add up over samples"),
        (lambda outputs, _: (outputs.scores.sum(), 1), "raised AttributeError: 'Returned' object has no attribute"),
        (
            lambda outputs, batch: (outputs.loss * len(batch["x"]), len(batch["x"])),
            "reads a loss that forward returned",
        ),
    ],
    ids=["one value", "a tensor", "a text", "nothing", "a mean", "an error", "the loss"],
)
def test_a_metric_that_cannot_be_summed_is_refused(metric, said):
    with pytest.raises(InvalidExperiment, match=said) as caught:
        captured(own=metric)
    assert "'own'" in str(caught.value)


def experiment(**changes) -> wb.Experiment:
    fields = {"model": Classifier, "data": [BATCH], "eval_data": [BATCH], "evaluation": wb.Evaluation()}
    return wb.Experiment.of(**{**fields, **changes})


def test_metrics_with_a_taken_name_are_refused():
    for name in ("loss", "two words", 3):
        with pytest.raises(InvalidExperiment, match="is no name for a metric"):
            experiment(metrics={name: correct})
    for metrics in (correct, {"correct": 3}):
        with pytest.raises(InvalidExperiment, match="does not map names to functions"):
            experiment(metrics=metrics)


def test_metrics_survive_the_way_through_json():
    asked = experiment(metrics={"correct": correct})
    value = asked.to_json()
    assert value["evaluation"]["metrics"]["correct"]["name"] == "correct"
    again = wb.Experiment.from_json(
        value, {"model": Classifier, "data": [BATCH], "eval_data": [BATCH], "metrics": {"correct": correct}}
    )
    assert again.metrics["correct"].function is correct
    assert experiment().to_json()["evaluation"]["metrics"] is None


def test_a_metric_has_its_curve_and_its_panel(tmp_path):
    events = tmp_path / "events.jsonl"
    append_event(events, "start", devices=1, resumed_from=None)
    shared = {"tokens": 10.0, "samples": 1.0, "flops": 1.0, "seconds": 1.0}
    for step in (0, 5):
        metrics = {"correct": 0.25 * (step + 1), "rare": None if step else 3.0}
        append_event(events, "evaluation", step=step, loss=2.0, eval_seconds=1.0, metrics=metrics, **shared)
    for step in range(1, 7):
        append_event(events, "step", step=step, loss=2.0, tokens_per_s=5.0, **shared)
    tail = HistoryTail(events)
    history = tail.read()
    assert tail.evaluations["correct"].tolist() == [0.25, 1.5]
    assert np.isnan(tail.evaluations["rare"][1])
    curves = [Curve("one", history, evaluations=tail.evaluations), Curve("without", history)]
    assert panel_names(curves) == ["tokens_per_s", "correct", "rare"]
    figure = panels(curves, x="step")
    assert [annotation.text for annotation in figure.layout.annotations] == ["Tokens/s", "correct", "rare"]
    drawn = [trace for trace in figure.data if trace.mode == "lines+markers" and len(trace.x)]
    assert list(drawn[0].y) == [0.25, 1.5]
    assert drawn[1].y[0] == 3.0
    assert len(drawn) == 2
    [line] = [trace for trace in loss_curves(curves[:1], x="step", y="correct").data if trace.meta == "line"]
    assert list(line.y) == [0.25, 1.5]
