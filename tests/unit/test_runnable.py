"""The gate before a training, and how often a model is captured on the way through it."""

import pickle
from dataclasses import replace
from importlib import import_module

import cloudpickle
import pytest
import torch
from torch import nn

import workbench as wb
from workbench import models
from workbench.base.errors import CaptureError, InvalidExperiment, PlanInfeasible, PlanMismatch
from workbench.capture import model as capturing
from workbench.cost.hardware import Cluster, Device, Link
from workbench.planning.plan import Plan
from workbench.planning.runnable import check_runnable, facts_for
from workbench.record.rundir import read_json
from workbench.runs.launching import launcher
from workbench.sparsity import Static

LINK = Link(1e9, 1e-5)
CLUSTER = Cluster(Device("CPU", "cpu", 2**33, {"fp32": 1e11}, 1e10), 1, 1, LINK, LINK)


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) + index) % 64
        return {"input_ids": ids, "labels": ids}


class Stack(nn.Module):
    """Layers over an embedding; in eval mode it may skip some of them."""

    def __init__(self, layers: int = 2, width: int = 16, skips: bool = False) -> None:
        super().__init__()
        self.table, self.head, self.skips = nn.Embedding(64, width), nn.Linear(width, 64), skips
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden_BSD = self.table(input_ids)
        for layer in self.layers if self.training or not self.skips else self.layers[:1]:
            hidden_BSD = torch.relu(layer(hidden_BSD))
        return nn.functional.cross_entropy(self.head(hidden_BSD).flatten(0, 1), labels.flatten())


def experiment(model=Stack, **changes) -> wb.Experiment:
    fields = {"model": model, "data": Words(), "global_batch": 8, "seq_len": 8, "steps": 3}
    return wb.Experiment.of(**{**fields, **changes})


def evaluated_and_sparse(model=Stack) -> wb.Experiment:
    return experiment(model, eval_data=Words(), evaluation=wb.Evaluation(samples=8), sparsity=Static(0.5, 8, "layers"))


@pytest.fixture
def captures(monkeypatch, tmp_path) -> list[bool]:
    """Whether the model was in train mode, for each capture in this process; runs are written and not started."""
    modes, export = list[bool](), capturing.export
    monkeypatch.setattr(
        capturing, "export", lambda search, *rest: modes.append(search.model.training) or export(search, *rest)
    )
    monkeypatch.setattr(launcher, "_start_supervisor", lambda *_: None)
    monkeypatch.setattr(import_module("workbench.measure.calibration"), "local_cluster", lambda: CLUSTER)
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    return modes


def test_a_launch_captures_its_training_once_and_its_evaluation_once(captures):
    """Layers of the model may compute something else in eval mode, so that an evaluation has a graph of its own."""
    asked = evaluated_and_sparse()
    run = wb.launch(asked)
    assert captures == [True, False]
    assert run.plan.prediction.evaluation_s > 0
    assert "data_fingerprint" in read_json(run.directory.environment)


def test_a_launch_takes_over_what_its_plan_captured(captures):
    asked = evaluated_and_sparse()
    plan = wb.plan(asked)
    assert captures == [True]
    wb.launch(asked, plan)
    wb.launch(asked.replace(seed=1), plan)
    assert captures == [True, False], "the second launch captures nothing"
    longer = asked.replace(seq_len=4)
    with pytest.raises(PlanMismatch, match="seq_len=8"):
        wb.launch(longer, plan)


def test_a_plan_from_a_file_needs_a_capture_only_where_the_experiment_does(captures):
    asked = experiment()
    stored = Plan.from_json(wb.plan(asked).to_json())
    captures.clear()
    wb.launch(asked, stored)
    assert captures == []
    wb.launch(evaluated_and_sparse(), Plan.from_json(wb.plan(evaluated_and_sparse()).to_json()))
    assert captures == [True, True, False], "the plan, the sparse weights, the evaluation"


def test_a_plan_travels_without_its_graphs(captures):
    plan = wb.plan(evaluated_and_sparse())
    assert captures == [True]
    assert plan.origin[0].facts.captured.is_captured
    there = pickle.loads(cloudpickle.dumps(plan))
    assert there == plan
    assert there.origin[0].facts.captured is None


def test_a_sweep_captures_each_model_once(captures, monkeypatch):
    monkeypatch.setattr(import_module("workbench.sweeps.queue"), "start_supervisor", lambda _: None)
    monkeypatch.setattr(import_module("workbench.sweeps.sweep"), "local_cluster", lambda: CLUSTER)
    wb.sweep(evaluated_and_sparse(), learning_rate=[1e-3, 2e-3], global_batch=[4, 8])
    assert captures == [True, False]


def test_a_clone_is_captured_only_for_a_change_that_its_graphs_depend_on(captures, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(f"The {i} brown foxes jump over {i * i} dogs." for i in range(300)))
    small = models.bert(hidden_size=16, num_layers=2, num_heads=2, vocab_size=64, max_positions=16)
    asked = experiment(
        small,
        data=wb.data.corpus(tmp_path / "text.txt", vocab_size=64),
        seq_len=16,
        evaluation=wb.Evaluation(samples=8),
    )
    run = wb.launch(asked)
    captures.clear()
    run.clone(learning_rate=1e-4)
    assert captures == []
    run.clone(sparsity=Static(0.5, 8))
    assert captures == [True, False]


@pytest.mark.usefixtures("captures")
def test_a_plan_is_refused_for_a_model_that_has_changed_since():
    width = [16]
    asked = experiment(lambda: Stack(width=width[0]))
    plan = wb.plan(asked)
    width[0] = 24
    with pytest.raises(PlanMismatch, match="The plan was made for"):
        wb.launch(asked, plan)


@pytest.mark.usefixtures("captures")
def test_a_model_that_is_only_described_is_left_to_the_ranks():
    asked = experiment()
    plan = wb.plan(asked)
    described = wb.Experiment.from_json(asked.to_json())
    assert facts_for(described, plan) is None
    check_runnable(described, plan, None, progress=False)
    with pytest.raises(PlanMismatch, match="global_batch"):
        check_runnable(described, replace(plan, global_batch=4), None)


@pytest.mark.usefixtures("captures")
def test_an_evaluation_that_skips_layers_is_refused_before_a_process_starts():
    with pytest.raises(CaptureError, match="in train mode and"):
        wb.launch(evaluated_and_sparse(lambda: Stack(skips=True)))


def test_a_batch_that_changes_counts_its_samples_and_has_steps_for_tokens():
    ramp = experiment(global_batch={0: 4, 3: 8, 10: 16}, steps=20)
    sizes = [4] * 3 + [8] * 7 + [16] * 10
    assert [ramp.batches.at(step) for step in range(20)] == sizes
    assert [ramp.samples_before(step) for step in range(21)] == [sum(sizes[:step]) for step in range(21)]
    assert (ramp.largest_batch, ramp.total_samples) == (16, 228)
    for samples in range(1, 300):
        steps = ramp.replace(tokens=8 * samples).total_steps
        assert ramp.samples_before(steps) >= samples > ramp.samples_before(steps - 1)
    assert ramp.replace(epochs=1).resolved().total_steps == 10  # 12 + 7 × 8 samples, the last 4 of a second epoch
    assert ramp.to_json()["global_batch"] == {"0": 4, "3": 8, "10": 16}
    assert wb.Experiment.of(**{**vars(ramp), "global_batch": ramp.to_json()["global_batch"]}).batches == ramp.batches
    for wrong in ({}, {1: 4}, {0: 4, 3: 0}, {0: 4, 2.5: 8}, {0: 4, -3: 8}, {0: True}, {"zero": 4}):
        with pytest.raises(InvalidExperiment, match="no table of whole numbers by the step"):
            experiment(global_batch=wrong)
    with pytest.raises(InvalidExperiment, match="captured for one length"):
        experiment(seq_len={0: 8, 2: 16})


def test_a_plan_divides_every_size_of_a_batch_and_tells_the_time_of_all_steps():
    ramp, cluster = experiment(global_batch={0: 4, 3: 8, 10: 16}, steps=20), replace(CLUSTER, gpus=2, gpus_per_node=2)
    plan = wb.plan(ramp, cluster)
    assert plan.global_batch == 16
    assert 4 % (plan.data * plan.micro_batch) == 0
    fixed = {"pipeline": plan.pipeline, "micro_batch": plan.micro_batch, "zero": plan.zero, "schedule": plan.schedule}
    each = [wb.plan(ramp.replace(global_batch=size), cluster, **fixed).prediction.step_ms for size in (4, 8, 16)]
    assert plan.prediction.step_ms == pytest.approx(each[2])
    assert plan.prediction.training_s == pytest.approx((3 * each[0] + 7 * each[1] + 10 * each[2]) / 1e3, rel=1e-6)
    assert any("3 of 4 samples in" in note and "10 of 16 samples" in note for note in plan.notes)
    assert Plan.from_json(plan.to_json()).prediction == plan.prediction
    check_runnable(ramp, plan, facts_for(ramp, plan))
    for degrees in ({"pipeline": 2, "schedule": "1f1b"}, {"pipeline": 2, "schedule": "interleaved"}):
        chosen = wb.plan(ramp.replace(global_batch={0: 6, 3: 8}), cluster, **degrees)
        assert all(size // chosen.micro_batch >= 2 for size in (6, 8))
    with pytest.raises(PlanInfeasible, match="A global batch of 4 samples cannot be divided into micro-batches of 8"):
        wb.plan(ramp, cluster, micro_batch=8)
    whole = wb.plan(ramp.replace(global_batch=16), cluster, data=2, micro_batch=8)
    with pytest.raises(PlanMismatch, match="from step 0 on: 4 samples are no whole micro-batches of 8 on 2 replicas"):
        wb.launch(ramp, whole)
    with pytest.raises(PlanInfeasible, match="A global batch of 3 samples cannot be divided over data=2"):
        wb.plan(ramp.replace(global_batch={0: 3, 3: 16}), cluster, data=2, pipeline=1)
