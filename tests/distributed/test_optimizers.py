"""Every optimiser under every plan equals the same optimiser in plain PyTorch, over 20 steps with tied weights.

A representative part by default; every ZeRO stage where WORKBENCH_TEST_ALL is set.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed import zoo
from tests.distributed.harness import coordinate, forced_plan, launch
from workbench.capture import capture, spec_of
from workbench.execution.blocks.context import StepContext
from workbench.execution.build import build_stage
from workbench.execution.checkpoint.save_load import Checkpoints, TrainingProgress
from workbench.execution.trainer import Trainer
from workbench.experiment import Experiment
from workbench.rundir import RunDir

MICRO_BATCH, GLOBAL_BATCH, STEPS, HALF = 4, 8, 20, 10
EPS = 1e-3
"""Epsilon of Adam and LAMB. At its default, a gradient that is zero up to rounding (a key's bias) makes a full step of
noise."""
DECAY, BETAS = 0.1, (0.9, 0.98)
SCALES = {"*embeddings*": 0.5, "*.weight": 1.0, "*": 2.0}
RATES = {"sgd": 0.05, "lamb": 5e-3}
Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Division:
    """The part of a plan that a test chooses."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    zero: int = 0

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor


class PlainLamb(torch.optim.Optimizer):
    """LAMB as arXiv:1904.00962 writes it (algorithm 2), on whole tensors; biases and norms move as in Adam."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for x in group["params"]:
                if not self.state[x]:
                    self.state[x] = {"m": torch.zeros_like(x), "v": torch.zeros_like(x), "t": 0}
                state = self.state[x]
                state["t"] += 1
                state["m"] = BETAS[0] * state["m"] + (1 - BETAS[0]) * x.grad
                state["v"] = BETAS[1] * state["v"] + (1 - BETAS[1]) * x.grad**2
                m = state["m"] / (1 - BETAS[0] ** state["t"])
                v = state["v"] / (1 - BETAS[1] ** state["t"])
                r = m / (v.sqrt() + EPS) + group["weight_decay"] * x
                ratio = x.norm() / r.norm() if x.ndim >= 2 and x.norm() > 0 and r.norm() > 0 else 1.0
                x -= group["lr"] * ratio * r


REFERENCES: Mapping[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "lamb": PlainLamb,
}


def batch_of(step: int) -> Tensors:
    return zoo.batch("bert", GLOBAL_BATCH, seed=step)


def factor_of(step: int) -> float:
    """A learning-rate schedule of the user's own."""
    return 1.0 - step / 40


def scale_of(name: str) -> float:
    return 0.5 if "embeddings" in name else 1.0 if name.endswith(".weight") else 2.0


def plain(optimizer: str) -> Tensors:
    """Return the parameters after the last step without any code of Workbench."""
    torch.manual_seed(0)
    model = zoo.bert_pretraining().train()
    named = dict(model.named_parameters())
    groups = [
        {
            "params": [parameter],
            "lr": RATES[optimizer] * scale_of(name),
            "weight_decay": DECAY if parameter.ndim >= 2 else 0.0,
        }
        for name, parameter in named.items()
    ]
    peaks = [group["lr"] for group in groups]
    reference = REFERENCES[optimizer](groups)
    for step in range(STEPS):
        reference.zero_grad()
        model(**batch_of(step)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group, peak in zip(reference.param_groups, peaks, strict=True):
            group["lr"] = peak * factor_of(step)
        reference.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def trainer_of(division: Division, optimizer: str) -> Trainer:
    torch.manual_seed(0)
    model = zoo.bert_pretraining().train()
    graph = capture(model, {key: spec_of(key, value[:MICRO_BATCH]) for key, value in batch_of(0).items()}, name="bert")
    plan = forced_plan(
        graph,
        **dataclasses.asdict(division),
        micro_batch=MICRO_BATCH,
        num_microbatches=GLOBAL_BATCH // MICRO_BATCH // division.data,
    )
    here = coordinate(division.pipeline, division.data, division.tensor)
    context = StepContext(seed=7, device=torch.device("cpu"))
    experiment = Experiment(
        model=zoo.bert_pretraining,
        data=lambda: None,
        global_batch=GLOBAL_BATCH,
        optimizer=optimizer,
        learning_rate=RATES[optimizer],
        lr_schedule=factor_of,
        rate_scale=SCALES,
        weight_decay=DECAY,
        betas=BETAS,
        eps=EPS,
        steps=STEPS,
    )
    return Trainer(experiment, plan, graph, build_stage(plan, here, model, graph, context), context, here)


def train(
    _rank: int,
    division: Division,
    optimizers: tuple[str, ...],
    steps: range,
    load_from: Path | None = None,
    save_to: Path | None = None,
) -> dict[str, Tensors]:
    """Return the whole parameters of all stages after the last step, by optimiser."""
    found = {}
    for optimizer in optimizers:
        trainer = trainer_of(division, optimizer)
        if load_from is not None:
            path = RunDir(load_from / optimizer).checkpoint(steps.start)
            assert Checkpoints(trainer, RunDir(load_from / optimizer)).load(path).step == steps.start
        for step in steps:
            first = trainer.coordinate.data_rank * trainer.samples
            mine = {key: value[first : first + trainer.samples] for key, value in batch_of(step).items()}
            trainer.step(step, mine)
        if save_to is not None:
            checkpoints = Checkpoints(trainer, RunDir(save_to / optimizer))
            checkpoints.save(TrainingProgress(steps.stop, 0.0))
            checkpoints.finish()
        own = {name: trainer.full(name, p) for name, p in trainer.stages.model_parameters().items()}
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, own)
        for part in parts:
            for name, value in part.items():
                earlier = found.setdefault(optimizer, {}).setdefault(name, value)
                assert torch.equal(earlier, value), f"{name} differs between ranks"
    return found


def worst(found: Tensors, expected: Tensors) -> float:
    """Return the largest difference of a tensor relative to its norm (or to a thousandth of the largest norm)."""
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(value.norm().item() for value in expected.values())
    return max(
        ((found[name] - value).norm() / max(value.norm().item(), floor)).item() for name, value in expected.items()
    )


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensors]:
    return {optimizer: plain(optimizer) for optimizer in REFERENCES}


DIVISIONS = [Division(data=2, zero=3), Division(pipeline=2), Division(tensor=2)]
if os.environ.get("WORKBENCH_TEST_ALL"):
    DIVISIONS += [Division(), *(Division(data=2, zero=zero) for zero in (0, 1, 2))]


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_an_optimizer_equals_plain_pytorch_under_every_plan(division: Division, expected: dict[str, Tensors]) -> None:
    found = launch(train, division.world, division, tuple(REFERENCES), range(STEPS))
    errors = {optimizer: worst(found[optimizer], expected[optimizer]) for optimizer in REFERENCES}
    assert max(errors.values()) < 1e-5, errors


def test_a_run_continues_under_another_plan(expected: dict[str, Tensors], tmp_path: Path) -> None:
    launch(train, 2, Division(pipeline=2), tuple(REFERENCES), range(HALF), None, tmp_path)
    found = launch(train, 2, Division(data=2, zero=3), tuple(REFERENCES), range(HALF, STEPS), tmp_path)
    errors = {optimizer: worst(found[optimizer], expected[optimizer]) for optimizer in REFERENCES}
    assert max(errors.values()) < 1e-5, errors
