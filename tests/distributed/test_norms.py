"""Norms of weights, gradients and updates are those of a plain loop, under every division and optimiser."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.distributed import real_worker
from tests.distributed.harness import Division, launch, part_of, trainer_of
from tests.distributed.test_optimizer_values import MICRO, Layer, Small, batch, experiment
from workbench.base.errors import InvalidArgument, UnknownParameter
from workbench.base.tensors import TensorSpec
from workbench.capture.blocks.hidden_matrices import projections
from workbench.capture.model import capture
from workbench.execution.between_steps import exponents_of
from workbench.execution.tensor_norms import TensorNorms
from workbench.execution.trainer import layers_of
from workbench.optimizers.building import build_optimizer
from workbench.optimizers.expected_update import ExpectedUpdates
from workbench.record.norms import NormsTail
from workbench.record.rundir import append_event
from workbench.runs.run import Run

STEPS, LIMIT, TRAINED_FROM = 4, 0.05, 1
TABLES = ("weights", "gradients", "updates")
DIVISIONS = (
    *(Division(data=2, zero=zero) for zero in range(4)),
    Division(pipeline=2),
    Division(pipeline=2, chunks=2),
    Division(tensor=2),
)


class Tied(Small):
    """The first and the last layer, which stand in different stages, share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        first, last = self.layers[0], self.layers[3]
        assert isinstance(first, Layer)
        assert isinstance(last, Layer)
        last.up.weight = first.up.weight


def model() -> Tied:
    torch.manual_seed(1)
    return Tied()


@functools.cache
def graph() -> Any:
    return capture(model(), {"x": TensorSpec("x", (MICRO, 5), "float32"), "y": TensorSpec("y", (MICRO, 1), "float32")})


def asked(algorithm: str, **changes: Any) -> wb.Experiment:
    values: dict[str, Any] = {"ema_decay": None, "clip_norm": LIMIT, "steps": STEPS, "weight_decay": 0.1}
    values |= {"trained_during": {"layers.1.*": (TRAINED_FROM, None)}, "norms_every": 1, "optimizer": algorithm}
    return experiment(**{**values, **changes}).replace(model=Tied)


def matrices(algorithm: str) -> Mapping[str, Any]:
    return projections(graph(), asked("muon").optimizer) if algorithm == "muon" else {}


def measured(_rank: int, algorithm: str) -> list[Any]:
    found = []
    for division in DIVISIONS:
        trainer = trainer_of(asked(algorithm), model(), graph(), division, MICRO)
        assert trainer.tensor_norms is not None
        of_division = []
        for step in range(STEPS):
            trainer.step(step, part_of(trainer, batch(step)))
            of_division.append(trainer.tensor_norms.measured())
        found.append(of_division)
    return found


def plain(algorithm: str) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Return the weights, gradients and updates of each step of a loop of plain PyTorch."""
    trained = model()
    named = dict(trained.named_parameters())
    optimizer = build_optimizer(named, asked(algorithm), matrices=matrices(algorithm))
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        trained(**batch(step)).backward()
        for name, parameter in named.items():
            if name.startswith("layers.1.") and step < TRAINED_FROM:
                parameter.grad = None
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        nn.utils.clip_grad_norm_(trained.parameters(), LIMIT)
        optimizer.step()
        updates = {name: named[name].detach() - before[name] for name in gradients}
        steps.append({"weights": before, "gradients": gradients, "updates": updates})
    return steps


@pytest.mark.parametrize("algorithm", ["adamw", "muon", "lamb"])
def test_norms_are_those_of_a_plain_loop_under_every_division(algorithm: str) -> None:
    expected, names = plain(algorithm), list(graph().parameters)
    for division, steps in zip(DIVISIONS, launch(measured, 2, algorithm, ahead=graph), strict=True):
        for step, (found, right) in enumerate(zip(steps, expected, strict=True)):
            for what in TABLES:
                norms = [float(right[what][name].norm()) if name in right[what] else math.nan for name in names]
                message = f"{what} of step {step} under {division}"
                np.testing.assert_allclose(found.norms[what], norms, rtol=2e-4, atol=1e-7, err_msg=message)
                elements = sum(tensor.numel() for tensor in right[what].values())
                assert sum(map(sum, found.counts[what])) == elements, f"each element of the {message} counts once"
        for layer, counts in enumerate(steps[0].counts["weights"]):
            of_layer = [expected[0]["weights"][name] for name, first in layers_of(graph()).items() if first == layer]
            assert not of_layer or counts == exponents(of_layer)


def exponents(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how many elements have each exponent of fp32, found by logarithms."""
    values = np.abs(torch.cat([tensor.flatten() for tensor in tensors]).numpy())
    powers = np.floor(np.log2(values[values > 0])).astype(int) + 127
    return [int((values == 0).sum()), *np.bincount(powers, minlength=256)[1:].tolist()]


def test_zeros_and_what_is_not_finite_have_bins_of_their_own() -> None:
    edges = nn.Parameter(torch.tensor([0.0, 1.0, -1.5, 2.0, math.inf, math.nan]))
    norms = TensorNorms(1, 1, {"edges": edges}, {"edges"}, {"edges": 0}, torch.device("cpu"))
    norms.before_update()
    norms.after_update()
    found = norms.measured()
    assert exponents_of(found.counts["weights"][0]) == {"zeros": 1, "first": 127, "counts": [2, 1], "not_finite": 2}
    assert math.isnan(found.norms["updates"][0]), "a parameter without a gradient is not trained"


# What an optimiser lets expect


def moved(algorithm: str, gradients: list[torch.Tensor], name: str = "layers.0.down.weight") -> tuple[float, Any]:
    """Return the norm of the last update of one parameter with these gradients, and what was expected of it."""
    chosen = asked(algorithm, clip_norm=None, trained_during=None, weight_decay=0.0)
    parameter = nn.Parameter(torch.randn(gradients[0].shape, generator=torch.Generator().manual_seed(3)))
    found = {name: matrices(algorithm)[name]} if name in matrices(algorithm) else {}
    optimizer = build_optimizer({name: parameter}, chosen, matrices=found)
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = ExpectedUpdates(chosen, {name: tuple(parameter.shape)}, found)
    norms = {name: float(before.norm())}, {name: float(gradients[-1].norm())}
    return float((parameter.detach() - before).norm()), expected.at(len(gradients) - 1, *norms)[name]


@pytest.mark.parametrize("steps", [1, 2, 30])
@pytest.mark.parametrize("algorithm", ["adamw", "sgd", "lamb", "muon"])
def test_independent_gradients_and_equal_ones_are_the_ends_of_what_is_expected(algorithm: str, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    # Signs have a constant square, as the estimate of √v̂ supposes.
    drawn = [torch.randn(64, 96, generator=generator).sign() for _ in range(steps)]
    low, least = moved(algorithm, drawn)
    high, most = moved(algorithm, [drawn[0]] * steps)
    if algorithm in ("adamw", "sgd"):
        assert low == pytest.approx(least.least, rel=0.03)
        assert high == pytest.approx(most.most, rel=0.03)
    else:
        assert 0.995 * least.least <= low <= 1.005 * least.most
        assert 0.995 * most.least <= high <= 1.005 * most.most


def test_no_update_is_expected_of_a_function_and_of_what_a_step_does_not_train() -> None:
    own = asked("adamw").replace(optimizer=lambda groups: torch.optim.RAdam(groups))
    shapes = {"head.weight": (1, 16), "scale": (1,)}
    expected = ExpectedUpdates(own, shapes, {}).at(0, {"head.weight": 1.0, "scale": 1.0}, {"head.weight": 1.0})
    assert all(map(math.isnan, (*expected["head.weight"], *expected["scale"])))


# The record of a run


def test_a_run_records_norms_when_they_are_due_and_they_change_nothing_in_it(tmp_path: Path) -> None:
    chosen = real_worker.experiment(steps=5, warmup_steps=1, norms_every=2)
    stages = real_worker.plan(chosen, pipeline=2)
    run = Run(real_worker.trained(tmp_path / "with", chosen, stages).path)
    without = Run(real_worker.trained(tmp_path / "without", chosen.replace(norms_every=None), stages).path)
    assert run.history().loss.tolist() == without.history().loss.tolist()
    norms = run.norms()
    assert norms.step.tolist() == [1, 2, 4, 5]
    total = np.sqrt(np.nansum(norms.gradients**2, axis=1))
    np.testing.assert_allclose(total, run.history().grad_norm[[0, 1, 3, 4]], rtol=1e-5)
    layers = norms.by_layer()
    np.testing.assert_allclose(np.sqrt((layers.weights**2).sum(1)), np.sqrt((norms.weights**2).sum(1)))
    assert (
        layers.elements.sum() == norms.elements.sum() == run.milestones()[-1].get("parameters", layers.elements.sum())
    )
    assert norms.histogram("weights", norms.layers[0]).sum(1).max() <= layers.elements[0]
    with pytest.raises(InvalidArgument, match="has recorded no norms"):
        without.norms()
    with pytest.raises(UnknownParameter, match="There is no layer 'x'"):
        norms.histogram("weights", "x")
    # A new attempt from step 2 repeats what follows.
    log, tail = run.directory.events, NormsTail(run.directory.events)
    assert tail.read().step.tolist() == [1, 2, 4, 5]
    append_event(log, "start", resumed_from="checkpoints/step-00000002")
    assert tail.read().step.tolist() == [1, 2]
