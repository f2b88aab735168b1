"""Training under any plan equals training without one: dropout, norms, updates, checkpoints."""

from __future__ import annotations

import copy
import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.distributed import harness, zoo
from tests.distributed.harness import Tensors, launch, part_of, worst
from workbench.base.errors import CheckpointError
from workbench.capture import Graph, capture, spec_of
from workbench.execution.blocks.step_context import StepContext
from workbench.execution.checkpoint.files import COMPLETE
from workbench.execution.checkpoint.save_load import CheckpointStore, TrainingProgress
from workbench.execution.parallel.sharding import full
from workbench.execution.trainer import Trainer
from workbench.experiment import Experiment
from workbench.optimizers.building import build_optimizer
from workbench.optimizers.parameters import learning_rate_factor
from workbench.record.rundir import RunDir

MICRO_BATCH, GLOBAL_BATCH, STEPS = 2, 8, 6
EPS = 1e-3
"""Adam's epsilon. At its default, a gradient that is zero up to rounding (a key's bias) makes a full step of noise."""


@dataclasses.dataclass(frozen=True)
class Division(harness.Division):
    """The part of a plan that a test chooses."""

    recompute: str = "none"
    recompute_first: int | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The report of rank 0: whole tensors by the model's own names, gathered from all stages and shards."""

    losses: list[float]
    norms: list[float]
    parameters: Tensors
    gradients: Tensors
    buffers: Tensors


class Normalised(nn.Module):
    """A model with BatchNorm, a frozen lower half and a loss of one element, which stages must handle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1)) for _ in range(4)
        )
        self.head = nn.Linear(16, 5)
        for module in (self.stem, *self.layers[:2]):
            module.requires_grad_(False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x), labels)[None]


MODELS = {"bert": zoo.bert_pretraining, "dropout": lambda: zoo.bert_pretraining(0.1), "normalised": Normalised}


def batch_of(name: str, step: int) -> Tensors:
    if name != "normalised":
        return zoo.batch("bert", GLOBAL_BATCH, seed=step)
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(GLOBAL_BATCH, 8, generator=generator), "labels": torch.arange(GLOBAL_BATCH) % 5}


def experiment_of(name: str, **changes: Any) -> Experiment:
    fields: dict[str, Any] = {"steps": STEPS, "warmup_steps": 2, "learning_rate": 3e-3, "weight_decay": 0.1, "eps": EPS}
    return Experiment.of(
        model=MODELS[name], data=lambda: None, global_batch=GLOBAL_BATCH, name=name, **{**fields, **changes}
    )


@functools.cache
def captured(name: str) -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    specs = {key: spec_of(key, value[:MICRO_BATCH]) for key, value in batch_of(name, 0).items()}
    return model, capture(model, specs, name=name)


def trainer_of(name: str, division: Division) -> Trainer:
    model, graph = captured(name)
    return harness.trainer_of(experiment_of(name), copy.deepcopy(model), graph, division, MICRO_BATCH)


def train(_rank: int, name: str, division: Division, steps: int, save_to: Path | None = None) -> Outcome:
    """Train some steps of a run; the batch of a step depends only on its number."""
    trainer = trainer_of(name, division)
    losses, norms = [], []
    for step in range(steps):
        loss, squared_norm, _ = trainer.step(step, part_of(trainer, batch_of(name, step))).scalars.tolist()
        losses.append(loss)
        norms.append(squared_norm**0.5)
    if save_to is not None:
        save_to.mkdir(exist_ok=True)
        checkpoints = CheckpointStore(trainer, RunDir(save_to))
        checkpoints.save(TrainingProgress(steps, float(steps)))
        checkpoints.finish()
    return gathered(trainer, losses, norms)


def gathered(trainer: Trainer, losses: list[float], norms: list[float]) -> Outcome:
    """Return clipped gradients, parameters and buffers of every stage, on every rank."""
    named = trainer.stages.model_parameters()
    mine = (
        {name: full(parameter.detach()) for name, parameter in named.items()},
        {name: full(parameter.grad) for name, parameter in named.items() if parameter.grad is not None},
        trainer.stages.model_buffers(),
    )
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, mine)
    merged: list[Tensors] = [{}, {}, {}]
    for part in parts:
        for into, found in zip(merged, part, strict=True):
            into.update(found)
    return Outcome(losses, norms, *merged)


IN_STAGES_OF_REPLICAS = [Division(pipeline=2, data=2, zero=zero) for zero in (0, 2, 3)]
DROPPED_OUT = [
    Division(pipeline=2),
    Division(pipeline=2, recompute="full", recompute_first=2),
    Division(data=2),
    Division(data=2, zero=3),
]
NORMED = [Division(pipeline=2), *IN_STAGES_OF_REPLICAS]
NORMALISED = [Division(pipeline=2, recompute="full"), *(each for each in IN_STAGES_OF_REPLICAS if each.zero != 2)]
RUNS: list[tuple[str, Division, int]] = [
    *(("dropout", division, 1) for division in [Division(), *DROPPED_OUT]),
    *(("bert", division, 1) for division in NORMED),
    *(("normalised", division, 2) for division in [Division(), *NORMALISED]),
]
"""Model, division and number of steps of every run that begins at the first step."""


def capture_each(names: set[str]) -> None:
    for name in names:
        captured(name)


def train_each(rank: int, runs: list[tuple[str, Division, int]]) -> list[Outcome]:
    return [train(rank, name, division, steps) for name, division, steps in runs]


@functools.cache
def outcomes(world: int) -> dict[tuple[str, Division, int], Outcome]:
    """Train all runs on so many processes, which start once."""
    runs = [each for each in RUNS if each[1].world == world]
    found = launch(train_each, world, runs, ahead=functools.partial(capture_each, {name for name, _, _ in runs}))
    return dict(zip(runs, found, strict=True))


def run(name: str, division: Division, steps: int = 1) -> Outcome:
    return outcomes(division.world)[name, division, steps]


def plain(name: str, steps: int, clip_norm: float = 1.0, device: str = "cpu") -> Outcome:
    """Train the same without any code of Workbench but the learning-rate schedule."""
    torch.manual_seed(0)
    with torch.device(device):
        model = MODELS[name]().train()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.98), eps=EPS
    )
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**{key: value.to(device) for key, value in batch_of(name, step).items()}).loss
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (0.5, 1.0, 1.0, 0.75, 0.5, 0.25)[step]
        optimizer.step()
        losses.append(loss.item())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(losses, norms, {n: p.detach() for n, p in model.named_parameters()}, gradients, {})


@pytest.mark.parametrize("division", DROPPED_OUT, ids=str)
def test_dropout_draws_the_same_under_every_plan(division: Division) -> None:
    alone, found = run("dropout", Division()), run("dropout", division)
    assert found.losses == pytest.approx(alone.losses, rel=1e-6)
    assert worst(found.gradients, alone.gradients) < 1e-5


def test_dropout_is_drawn_anew_in_every_step_and_micro_batch() -> None:
    trainer_seeds = {
        dataclasses.replace(StepContext(7, torch.device("cpu")), step=step, microbatch=m).block_seed(block)
        for step in range(3)
        for m in range(4)
        for block in range(6)
    }
    assert len(trainer_seeds) == 3 * 4 * 6
    assert run("dropout", Division()).losses[0] != pytest.approx(plain("bert", 1).losses[0], rel=1e-4)


@pytest.mark.parametrize("division", NORMED, ids=str)
def test_the_norm_is_that_of_the_plain_model_with_each_tied_parameter_once(division: Division) -> None:
    expected = plain("bert", 1)
    found = run("bert", division)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert found.norms[0] > 1, "the norm is not clipped here, and the test says nothing about clipping"
    assert worst(found.gradients, expected.gradients) < 1e-5


@pytest.mark.parametrize("division", NORMALISED, ids=str)
def test_a_frozen_first_stage_and_batch_norm_train_as_on_one_process(division: Division) -> None:
    alone, found = run("normalised", Division(), 2), run("normalised", division, 2)
    assert found.losses == pytest.approx(alone.losses, rel=1e-6)
    assert worst(found.parameters, alone.parameters) < 1e-5
    if division.data == 1:  # replicas see their own samples only, as under DistributedDataParallel
        assert worst(found.buffers, alone.buffers) < 1e-6
    micro_batches = 2 * GLOBAL_BATCH // MICRO_BATCH // division.data
    assert found.buffers["layers.0.1.num_batches_tracked"] == micro_batches


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("wsd", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("inverse_sqrt", [0.5, 1.0, 0.816497, 0.707107, 0.632456, 0.577350]),
    ],
)
def test_the_learning_rate_warms_up_and_decays(schedule: str, expected: list[float]) -> None:
    found = [learning_rate_factor(step, 2, 6, schedule) for step in range(6)]
    assert found == pytest.approx(expected, abs=1e-6)
    assert learning_rate_factor(0, 0, 6, schedule) == 1.0, "no warm-up starts at the peak"
    ends = {"constant": 1.0, "inverse_sqrt": 0.534522}
    assert learning_rate_factor(6, 2, 6, schedule) == pytest.approx(ends.get(schedule, 0.0), abs=1e-6)


def test_wsd_decays_in_the_last_fifth_of_the_steps() -> None:
    found = [learning_rate_factor(step, 5, 50, "wsd") for step in (39, 40, 41, 45, 49, 50)]
    assert found == pytest.approx([1.0, 1.0, 0.9, 0.5, 0.1, 0.0])


def test_weight_decay_spares_biases_norms_and_frozen_parameters() -> None:
    model = Normalised()
    optimizer = build_optimizer(dict(model.named_parameters()), experiment_of("normalised"))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: decay.get(id(parameter)) for name, parameter in model.named_parameters()}
    assert found["head.weight"] == 0.1
    assert found["head.bias"] == found["layers.2.1.weight"] == 0.0
    assert found["stem.weight"] is None


@pytest.fixture(scope="module")
def checkpoint_of_two_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train three steps of the dropout model on two stages."""
    folder = tmp_path_factory.mktemp("run")
    launch(train, 2, "dropout", Division(pipeline=2), 3, folder, ahead=functools.partial(captured, "dropout"))
    return RunDir(folder).checkpoint(3)


def refusals(_rank: int, asked: list[tuple[Path, str | None]]) -> list[str]:
    """Return what loading each checkpoint says, with a signature in place of the plan's own where one is given."""
    trainer = trainer_of("dropout", Division())
    own, before = trainer.plan, {name: p.clone() for name, p in trainer.stages.model_parameters().items()}
    said = []
    for path, signature in asked:
        trainer.plan = dataclasses.replace(own, signature=signature or own.signature)
        with pytest.raises(CheckpointError) as caught:
            CheckpointStore(trainer, RunDir(path.parent.parent)).load(path)
        assert all(torch.equal(before[name], p) for name, p in trainer.stages.model_parameters().items())
        said.append(str(caught.value))
    return said


def test_a_checkpoint_that_is_torn_or_missing_or_of_another_model_is_refused(
    checkpoint_of_two_stages: Path, tmp_path: Path
) -> None:
    torn = tmp_path / "step-3"
    shutil.copytree(checkpoint_of_two_stages, torn)
    (torn / COMPLETE).unlink()
    asked = [(torn, None), (tmp_path / "step-4", None), (checkpoint_of_two_stages, "another")]
    interrupted, missing, other = launch(refusals, 1, asked, ahead=functools.partial(captured, "dropout"))
    assert "is not a complete checkpoint" in interrupted
    assert "is not a complete checkpoint" in missing
    assert "saved from a model of other parameters" in other
