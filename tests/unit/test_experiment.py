"""An experiment is a value; a wrong one is refused with a sentence and a remedy before any process starts."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pickle
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from workbench import Run
from workbench.base.errors import (
    CaptureError,
    DataError,
    InvalidExperiment,
    PlanInfeasible,
    PlanMismatch,
    RunExists,
    UnknownParameter,
    WorkbenchError,
)
from workbench.experiment import GROUPS, PATHS, Experiment
from workbench.optimizers.parameters import leap_of_rate, rate_factor
from workbench.sweeps.sweep import Axes

TINY = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 400, "max_positions": 32}


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.layers(x), labels)


class Branching(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if x.sum() > -1e9:
            x.mul_(2)
        return super().forward(x, labels)


def build_my_net() -> nn.Module:
    return Net()


class Points:
    reads = 0

    def __len__(self) -> int:
        Points.reads += 1
        return 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(index)), "labels": torch.tensor(index % 3)}


class NoPoints(Points):
    def __len__(self) -> int:
        return 0


def own(**changes: Any) -> Experiment:
    return Experiment.of(**{"model": build_my_net, "data": Points(), "steps": 2, "global_batch": 4, **changes})


def text(**changes: Any) -> Experiment:
    fields = {"model": wb.models.bert(**TINY), "data": wb.data.corpus("demo", vocab_size=400), "seq_len": 32}
    return Experiment.of(**{**fields, **changes})


CPU = wb.Cluster.of("h200", gpus=1)


@pytest.fixture(autouse=True)
def no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test if a refused request starts a process or leaves a run directory."""

    def started(*args: Any, **_: Any) -> None:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(subprocess.Popen, "__init__", started)
    monkeypatch.setattr(os, "fork", started)


def refused(kind: type[WorkbenchError], request: Callable[[], Any], *words: str) -> WorkbenchError:
    """Return the error of a request; check that it is short and that it ends as a sentence."""
    with pytest.raises(kind) as caught:
        request()
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    assert len(re.findall(r"[.?](?: |$)", message)) <= 3, message
    for word in words:
        assert word in message, message
    assert not Path(os.environ["WORKBENCH_RUNS"]).exists()
    return caught.value


@pytest.mark.parametrize(
    ("request_", "meant"),
    [
        (lambda: Experiment(model=build_my_net, data=Points(), global_bach=8), "global_batch"),
        (lambda: own().replace(sequence_len=8), "seq_len"),
        (lambda: wb.models.bert(hiden_size=64), "hidden_size"),
        (lambda: wb.models.bert_large(drop_out=0.0), "dropout"),
        (lambda: wb.models.gpt2(num_layer=3), "num_layers"),
        (lambda: wb.data.corpus("demo", vocab=100), "vocab_size"),
        (lambda: wb.plan(own(), memory_limit=8), "memory_limit_gib"),
        (lambda: wb.launch(own(), dir="here"), "directory"),
        (lambda: wb.planning.graph(own(), microbatch=2), "micro_batch"),
        (lambda: wb.compare([], smothing=0.5), "smoothing"),
        (lambda: Run("no-run").resume(step=5), "steps"),
    ],
)
def test_a_misspelt_parameter_is_answered_with_the_one_that_was_meant(request_: Callable[[], Any], meant: str) -> None:
    refused(WorkbenchError, request_, "has no parameter", meant)


def test_a_misspelt_parameter_of_an_experiment_is_the_same_kind_of_error_everywhere() -> None:
    for request in (lambda: own(global_bach=8), lambda: own().replace(global_bach=8)):
        refused(UnknownParameter, request, "'global_bach'", "Did you mean 'global_batch'?")
    refused(UnknownParameter, lambda: own(lr=1e-3), "'lr'", "Did you mean 'learning_rate'?")
    refused(UnknownParameter, lambda: own(batch_size=8), "'batch_size'", "Did you mean 'global_batch'?")


def test_an_experiment_has_at_most_twenty_fields_and_a_short_name_for_each_value() -> None:
    assert len(dataclasses.fields(Experiment)) <= 20
    held = [
        dataclasses.fields(GROUPS[field.name]) if field.name in GROUPS else [field]
        for field in dataclasses.fields(Experiment)
    ]
    assert len(PATHS) == len(set(PATHS.values())) == sum(map(len, held)), "a short name stands for two values"


def test_a_value_of_a_group_is_answered_with_its_place() -> None:
    refused(
        UnknownParameter, lambda: Experiment(build_my_net, Points(), weight_decay=0.1), "wb.Optimizer(weight_decay="
    )
    refused(UnknownParameter, lambda: Experiment(build_my_net, Points(), eval_every=5), "wb.Evaluation(every=")
    refused(UnknownParameter, lambda: wb.Optimizer("lamb", learning_rate=1e-3), "wb.Experiment(learning_rate=")


def test_short_names_reach_every_value_and_keep_the_others() -> None:
    first = own(optimizer="lamb", eval_data=Points())
    changed = first.replace(
        weight_decay=0.5, eval_every=7, optimizer="sgd", keep_checkpoints=1, project="", prompts=None
    )
    assert (changed.optimizer.name, changed.optimizer.weight_decay) == ("sgd", 0.5)
    assert (changed.evaluation.every, changed.eval_data, changed.samples) == (7, first.eval_data, None)
    assert (changed.checkpoints.keep, changed.tracking.project) == (1, "")
    assert first.optimizer == wb.Optimizer("lamb"), "the first experiment has changed"
    assert changed.replace(optimizer=wb.Optimizer()).optimizer == wb.Optimizer()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, ("steps=0", "1 or more")),
        ({"global_batch": -4}, ("global_batch=-4", "1 or more")),
        ({"global_batch": 2.5}, ("global_batch=2.5", "whole number")),
        ({"steps": "100"}, ("steps='100'", "whole number")),
        ({"learning_rate": "fast"}, ("learning_rate='fast'", "number")),
        ({"learning_rate": 0.0}, ("learning_rate=0.0", "greater than 0")),
        ({"clip_norm": 0}, ("clip_norm=0", "greater than 0")),
        ({"warmup_steps": 3}, ("warmup_steps=3", "2 steps", "Choose 0 to 2")),
        ({"precision": "fp16"}, ("precision='fp16'", "Did you mean 'bf16'?")),
        ({"lr_schedule": "cosin"}, ("lr_schedule='cosin'", "Did you mean 'cosine'?")),
        ({"betas": (0.9,)}, ("betas=(0.9,)", "too few values")),
        ({"betas": (0.9, 1.5)}, ("betas=1.5", "below 1")),
        ({"deterministic": "yes"}, ("deterministic='yes'", "True nor False")),
        ({"stop_on_non_finite": 1}, ("stop_on_non_finite=1", "True nor False")),
        ({"weight_decay": -0.1}, ("weight_decay=-0.1", "0 or more")),
    ],
)
def test_a_value_that_can_never_train_is_refused_when_it_is_written(changes: dict[str, Any], words: Any) -> None:
    refused(InvalidExperiment, lambda: own(**changes), *words)
    refused(InvalidExperiment, lambda: own().replace(**changes), *words)


def test_a_sequence_longer_than_the_models_positions_is_refused_with_both_numbers() -> None:
    refused(InvalidExperiment, lambda: text(seq_len=33), "seq_len=33", "32 positions", "max_positions=33")
    refused(InvalidExperiment, lambda: text().replace(seq_len=64), "seq_len=64")


def test_an_empty_corpus_is_refused_by_plan_and_by_launch(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    for path, word in (("empty.txt", "empty"), ("folder", "folder"), ("missing.txt", "missing.txt")):
        experiment = text(data=wb.data.corpus(tmp_path / path, vocab_size=400))
        refused(DataError, lambda e=experiment: wb.plan(e, CPU), word)
        refused(DataError, lambda e=experiment: wb.launch(e), word)


def test_an_empty_dataset_is_refused_by_plan_and_by_launch() -> None:
    experiment = own(data=NoPoints())
    refused(DataError, lambda: wb.plan(experiment, CPU), "NoPoints is empty")
    refused(DataError, lambda: wb.launch(experiment), "NoPoints is empty")


def test_a_model_that_cannot_be_captured_is_refused_with_its_line() -> None:
    for request in (lambda e: wb.plan(e, CPU), wb.planning.graph):
        error = refused(CaptureError, lambda r=request: r(own(model=Branching)), "if x.sum() > -1e9", "torch.where")
        assert error.facts["file"] == __file__


def test_a_batch_that_the_model_does_not_take_is_refused_with_its_fields() -> None:
    class Renamed(Points):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"inputs": torch.zeros(4), "labels": torch.tensor(0)}

    refused(CaptureError, lambda: wb.plan(own(data=Renamed()), CPU), "'x'", "inputs [2, 4], labels [2]")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Net(), ("instance of Net", "Pass a callable")),
        ("bert", ("the string 'bert'", "wb.models")),
        (lambda width: Net(width), ("needs width", "functools.partial")),
    ],
)
def test_what_cannot_build_a_model_on_another_rank_is_refused(model: Any, words: Any) -> None:
    refused(InvalidExperiment, lambda: own(model=model), *words)


def test_a_global_batch_that_no_micro_batch_divides_is_refused() -> None:
    refused(PlanInfeasible, lambda: wb.plan(own(global_batch=7), CPU, micro_batch=2), "7", "micro-batches of 2")


def test_a_plan_made_for_another_model_is_refused() -> None:
    plan = wb.plan(own())
    wider = own(model=functools.partial(Net, width=16))
    refused(PlanMismatch, lambda: wb.launch(wider, plan), "Plan again")


def test_a_run_directory_that_exists_is_refused(tmp_path: Path) -> None:
    plan = wb.plan(own())
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("precious")
    refused(RunExists, lambda: wb.launch(own(), plan, directory=tmp_path / "taken"), "taken")


def test_an_experiment_of_named_parts_survives_json() -> None:
    experiment = text(tags=("a", "b"), betas=[0.8, 0.9], checkpoint_every=5, compile=False, name="mine")
    assert Experiment.from_json(json.loads(json.dumps(experiment.to_json()))) == experiment


def test_an_experiment_of_ones_own_parts_survives_json_given_the_parts() -> None:
    experiment = own(tags=["x"], warmup_steps=1)
    value = json.loads(json.dumps(experiment.to_json()))
    assert "def build_my_net" in value["model"]["source"]
    rebuilt = Experiment.from_json(value, {"model": build_my_net, "data": experiment.data.dataset_or_factory})
    assert rebuilt == experiment
    assert rebuilt.model.build()(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)).ndim == 0


def test_json_alone_names_ones_own_parts_and_refuses_to_make_them() -> None:
    described = Experiment.from_json(json.loads(json.dumps(own().to_json())))
    assert (described.model.name, described.data.name) == ("build_my_net", "Points")
    refused(InvalidExperiment, described.model.build, "model=build_my_net")
    refused(DataError, lambda: described.data.reads(described).check(), "data=")


def test_an_experiment_pickles_with_ones_own_parts() -> None:
    assert pickle.loads(pickle.dumps(own())).model.factory is build_my_net


def test_an_experiment_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        own().steps = 5  # type: ignore[misc]


def test_replace_renames_after_the_model_unless_a_name_was_chosen() -> None:
    other = wb.models.bert(**{**TINY, "num_layers": 3})
    assert text().replace(model=other).name == "bert-3x16"
    assert text(name="mine").replace(model=other).name == "mine"
    assert text().replace(steps=5).name == "bert-2x16"


def test_warm_up_defaults_to_a_tenth() -> None:
    assert own(steps=55).warmup == 5
    assert own(steps=55, warmup_steps=0).warmup == 0


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "inverse_sqrt", "constant"])
def test_a_rate_that_leaps_when_a_run_is_made_longer_is_told_and_schedule_steps_lets_it_go_on(schedule: str) -> None:
    def rates(asked: Experiment, steps: range) -> list[float]:
        return [asked.learning_rate * rate_factor(asked, step) for step in steps]

    short = own(steps=6, learning_rate=0.01, warmup_steps=2, lr_schedule=schedule)
    longer = short.replace(steps=12)
    told = leap_of_rate(short, longer, 6)
    if schedule in ("inverse_sqrt", "constant"):
        assert not told
    else:
        [last], [first] = rates(short, range(5, 6)), rates(longer, range(6, 7))
        assert f"it is {first:.3g} at step 7, after {last:.3g}. To go on" in told or first == pytest.approx(last)
    if schedule == "linear":
        assert "it is 0.006 at step 7, after 0.0025" in told
        assert "it is 0.008 at step 5, and not 0.005" in leap_of_rate(short, longer, 4), "of a run that was stopped"
        with pytest.raises(InvalidExperiment, match="lets the rate be 0 for the last 6 of the 12 steps"):
            longer.replace(schedule_steps=6)
    planned = short.replace(schedule_steps=12)
    assert rates(planned, range(6)) + rates(planned.replace(steps=12), range(6, 12)) == rates(longer, range(12))
    assert not leap_of_rate(planned, planned.replace(steps=12), 6)
    # A warm-up of a tenth of the steps grows with them.
    assert bool(leap_of_rate(own(steps=10, lr_schedule="constant"), own(steps=80, lr_schedule="constant"), 6))


def tiny(**changes: Any) -> Experiment:
    settings: dict[str, Any] = {"global_batch": 4, "seq_len": 16, **changes}
    return wb.Experiment.of(model=wb.models.gpt2(**TINY), data=Points(), **settings)


def test_tokens_and_epochs_become_the_steps_that_cover_them() -> None:
    assert tiny().steps == 1000
    assert [tiny(tokens=tokens).steps for tokens in (1, 64, 65, 128)] == [1, 1, 2, 2]
    counted = [tiny(epochs=epochs).resolved().steps for epochs in (0.01, 0.4, 1, 2, 3)]
    assert counted == [1, 1, 3, 5, 8]
    assert tiny(epochs=4, warmup_steps=None).resolved().warmup == 1


def test_only_resolved_counts_epochs() -> None:
    Points.reads = 0
    experiment = tiny(epochs=2)
    repr(experiment), experiment.replace(seed=3), pickle.dumps(experiment)
    assert experiment.steps is None
    with pytest.raises(InvalidExperiment, match=r"experiment\.resolved\(\)"):
        _ = experiment.total_steps
    assert Points.reads == 0
    assert experiment.resolved().steps == 5
    assert experiment.steps is None, "a frozen value has changed"


def test_lengths_that_contradict_or_cannot_be_are_refused() -> None:
    for lengths in ({"steps": 3, "epochs": 1}, {"epochs": 1, "tokens": 64}, {"steps": 1, "tokens": 64}):
        with pytest.raises(InvalidExperiment, match=r"given 2 times.*Give one of them"):
            tiny(**lengths)
    for wrong in (
        {"epochs": 0},
        {"epochs": 2**70},
        {"epochs": -1.0},
        {"epochs": float("nan")},
        {"tokens": 0},
        {"tokens": 1.5},
    ):
        with pytest.raises(InvalidExperiment):
            tiny(**wrong)
    with pytest.raises(InvalidExperiment, match="must be at most"):
        tiny(tokens=2**62)
    with pytest.raises(InvalidExperiment, match="outside the 3 steps"):
        tiny(epochs=1, warmup_steps=4).resolved()
    with pytest.raises(InvalidExperiment, match=r"lr_schedule returned -1\.0 for step 4"):
        tiny(epochs=2, lr_schedule=lambda step: -1.0 if step == 4 else 1.0).resolved()


def test_a_change_keeps_the_kind_of_length_or_replaces_it() -> None:
    by_tokens, by_epochs = tiny(tokens=256), tiny(epochs=2)
    assert by_tokens.replace(global_batch=8).steps == 2
    assert by_epochs.replace(global_batch=10).resolved().steps == 2
    assert by_epochs.resolved().replace(learning_rate=1.0).steps == 5
    assert by_epochs.resolved().replace(global_batch=10).steps is None
    assert by_epochs.replace(steps=7).steps == 7
    assert by_epochs.replace(tokens=64).steps == 1
    assert by_tokens.replace(epochs=1).resolved().steps == 3
    assert by_tokens.replace(steps=9).tokens is None
    axes = Axes(tiny(), {"epochs": [1, 2]})
    assert [axes.experiment_of({"epochs": at}).resolved().steps for at in (0, 1)] == [3, 5]


def test_a_description_keeps_the_number_that_was_counted() -> None:
    for lengths in ({"epochs": 2}, {"tokens": 320}):
        described = tiny(**lengths).resolved().to_json()
        assert (described["steps"], {name: described[name] for name in lengths}) == (5, lengths)
        again = Experiment.from_json(described)  # without the dataset
        assert again.steps == 5
        assert again.to_json() == described


def test_epochs_of_text_count_the_windows_that_are_not_held_out(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"{i} is a number, and {i * i} is its square." for i in range(600)))
    data = wb.data.corpus(path, vocab_size=400)
    whole = wb.Experiment(model=wb.models.gpt2(**TINY), data=data, epochs=2, global_batch=4, seq_len=16)
    windows = data.reads(whole).prepare(progress=False).samples
    steps = whole.resolved().total_steps
    assert steps == -(-2 * windows // 4)
    assert whole.replace(eval_samples=8).resolved().total_steps < steps
