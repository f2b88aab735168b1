"""Averages of weights, clipping by group and parameters that are trained for a while, as in a plain loop."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import workbench as wb
from tests.distributed.harness import CPU, Division, Tensors, everywhere, launch, part_of, trainer_of, whole_parameters
from workbench.base.errors import InvalidExperiment
from workbench.base.tensors import TensorSpec
from workbench.capture.model import capture
from workbench.cost.graph_profiler import profile_graph, with_optimizer
from workbench.cost.memory import ParameterTable, stage_state
from workbench.execution.checkpoint.model_export import describe_model, export_checkpoint
from workbench.execution.checkpoint.save_load import CheckpointExtras, CheckpointStore, TrainingProgress
from workbench.execution.trainer import Trainer
from workbench.record.rundir import RunDir
from workbench.strategy import Strategy

GLOBAL, MICRO, STEPS, HALF, DECAY = 8, 2, 8, 4, 0.8
LIMITS = {"*.weight": 0.05, "*bias": 0.01}
SPANS = {"layers.0.*": (2, None), "head.*": (0, 5), "embedding.*": (6, 7)}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = hidden + self.down(functional.gelu(self.up(hidden)))
        return found


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(5, 16), nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.layers = nn.ModuleList([Layer() for _ in range(4)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.mse_loss(self.scale * self.head(hidden), y)


class Numbers:
    def __init__(self, seed: int = 0) -> None:
        self.x = torch.randn(STEPS * GLOBAL, 5, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.x[index].sum()[None].sin()}


def experiment(**changes: Any) -> wb.Experiment:
    values: dict[str, Any] = {"ema_decay": DECAY, "clip_norm": LIMITS, "trained_during": SPANS, **changes}
    values = {"warmup_steps": 0, "lr_schedule": "constant", "learning_rate": 3e-2, "steps": STEPS, **values}
    return wb.Experiment.of(model=Small, data=Numbers(), global_batch=GLOBAL, seq_len=5, project="", **values)


def batch(step: int) -> Tensors:
    items = [Numbers()[index] for index in range(step * GLOBAL, (step + 1) * GLOBAL)]
    return {name: torch.stack([item[name] for item in items]) for name in ("x", "y")}


def model() -> Small:
    torch.manual_seed(1)
    return Small()


@functools.cache
def graph() -> Any:
    return capture(model(), {"x": TensorSpec("x", (MICRO, 5), "float32"), "y": TensorSpec("y", (MICRO, 1), "float32")})


def plain() -> tuple[Tensors, Tensors]:
    """Return the weights and their average after a loop of plain PyTorch."""
    trained = model()
    named, asked = dict(trained.named_parameters()), experiment()
    groups = [{"params": [p], "weight_decay": asked.optimizer.weight_decay * (p.ndim > 1)} for p in named.values()]
    optimizer = torch.optim.AdamW(groups, lr=asked.learning_rate, betas=(0.9, 0.98))
    average = AveragedModel(trained, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(STEPS):
        optimizer.zero_grad()
        trained(**batch(step)).backward()
        for name, parameter in named.items():
            spans = {"layers.0.": (2, STEPS), "head.": (0, 5), "embedding.": (6, 7)}
            first, end = next((span for prefix, span in spans.items() if name.startswith(prefix)), (0, STEPS))
            if not first <= step < end:
                parameter.grad = None
        nn.utils.clip_grad_norm_([p for name, p in named.items() if name.endswith(".weight")], 0.05)
        nn.utils.clip_grad_norm_([p for name, p in named.items() if name.endswith("bias")], 0.01)
        optimizer.step()
        average.update_parameters(trained)
    averages = dict(average.module.named_parameters())
    return tuple({name: p.detach().clone() for name, p in each.items()} for each in (named, averages))  # type: ignore


def averages_of(trainer: Trainer) -> Tensors:
    assert trainer.average is not None
    return everywhere({name: trainer.full(name, value) for name, value in trainer.average.values.items()})


def trained_in_two(_rank: int, first: Division, second: Division, folder: Path) -> tuple[Tensors, Tensors]:
    """Train half under one division, write a checkpoint, and go on from it under another."""
    folder.mkdir(exist_ok=True)
    run = RunDir(folder)
    trainer = trainer_of(experiment(), model(), graph(), first, MICRO)
    for step in range(HALF):
        trainer.step(step, part_of(trainer, batch(step)))
    store = CheckpointStore(trainer, run)
    store.save(TrainingProgress(HALF, 0.0))
    store.finish()
    trainer = trainer_of(experiment(), model(), graph(), second, MICRO)
    store = CheckpointStore(trainer, run, extras=CheckpointExtras(describe_model(model())[0]))
    store.load(run.checkpoint(HALF))
    for step in range(HALF, STEPS):
        trainer.step(step, part_of(trainer, batch(step)))
    store.save(TrainingProgress(STEPS, 0.0))
    store.finish()
    return whole_parameters(trainer), averages_of(trainer)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Division(pipeline=2), Division(data=2, zero=3)),
        (Division(data=2), Division(tensor=2)),
        (Division(tensor=2), Division(pipeline=2, chunks=2)),
        (Division(data=2, zero=1), Division(data=2, zero=2)),
    ],
    ids=str,
)
def test_averages_groups_of_norms_and_spans_are_those_of_a_plain_loop_also_resumed_under_another_plan(
    first: Division, second: Division, tmp_path: Path
) -> None:
    found = launch(trained_in_two, 2, first, second, tmp_path / "run", ahead=graph)
    for of_plan, of_loop in zip(found, plain(), strict=True):
        assert of_plan.keys() == of_loop.keys()
        for name, expected in of_loop.items():
            torch.testing.assert_close(of_plan[name], expected, rtol=2e-5, atol=1e-6, msg=name)
    files = export_checkpoint(RunDir(tmp_path / "run").checkpoint(STEPS), tmp_path / "exported")
    exported = load_file(next(file for file in files if file.suffix == ".safetensors"))
    assert exported.keys() == found[1].keys()
    assert all(torch.equal(exported[name], value) for name, value in found[1].items())


def test_evaluations_and_exports_use_the_average_and_training_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    held_out = wb.Evaluation(every=2, samples=1000, data=Numbers(seed=1))
    losses = {}
    for decay in (None, DECAY):
        asked = experiment(ema_decay=decay, evaluation=held_out, checkpoint_every=STEPS)
        run = wb.runs.debug(asked, wb.plan(asked, wb.measure.local_cluster(1), micro_batch=MICRO))
        run.export(tmp_path / f"exported {decay}")
        exported = Small()
        exported.load_state_dict(load_file(tmp_path / f"exported {decay}" / "model.safetensors"))
        samples = [Numbers(seed=1)[index] for index in range(STEPS * GLOBAL)]
        with torch.no_grad():
            loss = exported(*(torch.stack([item[name] for item in samples]) for name in ("x", "y")))
        assert run.evaluations().eval_loss[-1] == pytest.approx(float(loss), rel=1e-6)
        losses[decay] = run.history().loss, run.evaluations().eval_loss
    assert losses[None][0].tolist() == losses[DECAY][0].tolist()
    assert losses[None][1][0] == losses[DECAY][1][0], "before the first update"
    assert losses[None][1][-1] != pytest.approx(losses[DECAY][1][-1], rel=1e-3)


@pytest.mark.parametrize("zero", [0, 3])
def test_the_planner_counts_one_more_copy_of_trained_weights_sharded_as_they_are(zero: int) -> None:
    division = Division(data=2, zero=zero)
    strategy = Strategy(
        **dataclasses.asdict(division), schedule="1f1b", micro_batch=MICRO, num_microbatches=2, recompute="none"
    )
    totals = []
    for decay in (None, DECAY):
        costs = with_optimizer(
            profile_graph(graph(), CPU, "fp32", compiled=False), experiment(ema_decay=decay), graph()
        )
        table = ParameterTable(costs)
        totals.append((stage_state(costs, table, strategy).total[0, -1], table.update.traffic_bytes[0, -1]))
    elements = sum(parameter.numel() for parameter in model().parameters())
    (before, traffic), (after, more) = totals
    assert after - before == pytest.approx(4 * elements / (2 if zero else 1))
    assert more - traffic == pytest.approx(12 * elements)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clip_norm": {"*": 0.0}}, "is no limit of a norm"),
        ({"clip_norm": {}}, "is no limit of a norm"),
        ({"trained_during": {"*": (5, 5)}}, "counted from 0, and an end after it"),
        ({"trained_during": {"*": 3}}, "trained_during="),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"trained_during": {"*": (STEPS, None)}}, "8 steps"),
        ({"ema_decay": 0.9, "sparsity": wb.sparsity.Static(sparsity=0.5, block=16)}, "ema_decay"),
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidExperiment, match=said):
        experiment(**{"ema_decay": None, "clip_norm": None, "trained_during": None, **wrong})
