"""Steps that replay CUDA graphs equal steps that launch the same blocks kernel by kernel, to the last bit.

The models are compiled and run in bf16 with dropout. They are deterministic, because the attention that torch would
choose otherwise adds in no fixed order.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import workbench as wb
from tests.distributed.harness import coordinate, launch
from tests.distributed.test_every_plan import MICRO_BATCH, Case, part_of, plan_of
from tests.gpu.machine import DEVICE, here, needs, together
from workbench.base.tensors import TensorSpec
from workbench.capture import capture
from workbench.capture.coupling.division import random_batch
from workbench.execution import gradients as reducing
from workbench.execution.blocks.cuda_graphs import NCCL_SETTING, WARM_UP_STEPS
from workbench.execution.blocks.step_context import StepContext
from workbench.execution.build import build_model, build_stage, use_deterministic_kernels
from workbench.execution.trainer import Trainer

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="there are no CUDA graphs on a CPU")
STEPS = WARM_UP_STEPS + 4
VOCABULARY, SEQ_LEN, GLOBAL_BATCH = 512, 128, 8
MODEL = wb.models.bert(hidden_size=64, num_layers=4, num_heads=4, vocab_size=VOCABULARY, max_positions=SEQ_LEN)
DATA = wb.data.corpus("demo", vocab_size=VOCABULARY)
EXPERIMENT = wb.Experiment(model=MODEL, data=DATA, steps=STEPS, global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN)

MUON = EXPERIMENT.replace(optimizer=wb.Optimizer("muon", muon_scale="spectral", adamw_rate=1e-4), learning_rate=1e-2)


@dataclasses.dataclass(frozen=True)
class Outcome:
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: float
    """Sum of absolute values."""
    graphs: int
    """Number of forwards that are replayed in a step."""


class Clipped(nn.Module):
    """A layer whose results are changed in place where a mask is true, which cannot be captured."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.layer(*args, **kwargs)
        hidden = (found[0] if isinstance(found, tuple) else found).clone()
        hidden[hidden > 2] = 2.0
        return (hidden, *found[1:]) if isinstance(found, tuple) else hidden


def _freeze(model: Any) -> None:
    model.bert.embeddings.requires_grad_(False)
    for layer in model.bert.encoder.layer[:2]:
        layer.requires_grad_(False)


def _clip(model: Any) -> None:
    model.bert.encoder.layer[1] = Clipped(model.bert.encoder.layer[1])


CHANGES: Mapping[str, Callable[[Any], None]] = {"half frozen": _freeze, "clipped": _clip}
ALONE = (Case(), Case(recompute="selective"), Case(recompute="full"))
TWO = (
    Case(pipeline=2),
    Case(pipeline=2, chunks=2, schedule="interleaved"),
    Case(tensor=2),
    Case(data=2, num_microbatches=2),
)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=together("graphs-1")) for case in ALONE),
        *(pytest.param(case, marks=[needs(2), together("graphs-2")]) for case in TWO),
    ],
    ids=str,
)
def test_replayed_steps_equal_launched_ones_to_the_last_bit(case: Case) -> None:
    launched, captured = outcomes(2 if case in TWO else 1)[case]
    assert launched.graphs == 0
    assert captured.graphs > 0
    assert captured.losses == launched.losses
    assert captured.norms == launched.norms
    assert captured.weights == launched.weights
    assert len(set(captured.losses)) == STEPS


@together("graphs")
def test_recomputed_random_numbers_depend_on_the_step_only() -> None:
    """If they depended on the number of steps this process has trained, a resumed run would differ."""
    for recompute, losses in of_one_world().repeated.items():
        first, other, again = losses
        assert again == first, recompute
        assert other != first, recompute


@together("graphs")
def test_replayed_steps_of_muon_equal_launched_ones_to_the_last_bit() -> None:
    launched, captured = of_one_world().muon
    assert captured.graphs > 0
    assert dataclasses.replace(captured, graphs=0) == launched
    assert len(set(captured.losses)) == STEPS


@together("graphs")
@pytest.mark.parametrize("change", CHANGES)
def test_frozen_blocks_and_blocks_that_cannot_be_captured_train_beside_captured_ones(change: str) -> None:
    launched, captured = of_one_world().changed[change]
    assert captured.graphs > 0
    assert captured.losses == launched.losses
    assert captured.norms == launched.norms
    assert captured.weights == launched.weights
    assert len(set(captured.losses)) == STEPS


@needs(2)
def test_ranks_leave_their_communicators_although_graphs_hold_captured_collectives() -> None:
    assert launch(_released, 2, device=DEVICE) > 0


KEPT: list[Trainer] = []
"""Trainers that live until the process ends, as a worker's does."""


def _released(_rank: int) -> int:
    os.environ.setdefault(*NCCL_SETTING)
    KEPT.append(trainer_of(Case(tensor=2), True))
    captured = _outcome(KEPT[0]).graphs
    assert KEPT[0].context.cuda_graphs is not None
    KEPT[0].context.cuda_graphs.release()
    return captured


@functools.cache
def outcomes(world: int) -> Mapping[Case, tuple[Outcome, Outcome]]:
    """Return (launched, captured) outcomes of all cases with `world` devices, from one start of the processes."""
    found: Mapping[Case, tuple[Outcome, Outcome]] = launch(_outcomes, world, world, device=DEVICE)
    return found


def _outcomes(_rank: int, world: int) -> dict[Case, tuple[Outcome, Outcome]]:
    os.environ.setdefault(*NCCL_SETTING)  # workers do the same
    reducing.OVERLAPPED_BUCKET_BYTES = 0  # reduce each block alone
    reducing.MIN_COMPILED_ELEMENTS = 0
    use_deterministic_kernels()
    cases = ALONE if world == 1 else TWO
    return {case: (_outcome(trainer_of(case, False)), _outcome(trainer_of(case, True))) for case in cases}


class Further(NamedTuple):
    """What one process finds of other trainings than those of `outcomes`."""

    repeated: dict[str, tuple[float, ...]]
    muon: tuple[Outcome, Outcome]
    changed: dict[str, tuple[Outcome, Outcome]]


@functools.cache
def of_one_world() -> Further:
    found: Further = launch(_further, 1, device=DEVICE)
    return found


def _further(_rank: int) -> Further:
    use_deterministic_kernels()
    return Further(_repeated(), _of_muon(), {change: _changed(change) for change in CHANGES})


def _of_muon() -> tuple[Outcome, Outcome]:
    launched, captured = (trainer_of(Case(), graphs, experiment=MUON) for graphs in (False, True))
    return _outcome(launched), _outcome(captured)


def _changed(change: str) -> tuple[Outcome, Outcome]:
    launched, captured = (trainer_of(Case(), graphs, CHANGES[change]) for graphs in (False, True))
    [stage] = captured.stages.stages
    launched_blocks = [block.block.name for block in stage.block_modules() if not block.is_capturable]
    assert len(launched_blocks) == (2 if change == "clipped" else 1), (
        "the head, and a layer that may copy numbers to the host"
    )
    return _outcome(launched), _outcome(captured)


def _outcome(trainer: Trainer) -> Outcome:
    scalars = [trainer.step(step, batch_for(trainer, step)).scalars for step in range(STEPS)]
    losses, norms, _ = zip(*(values.tolist() for values in scalars), strict=True)
    weights = sum(float(value.detach().double().abs().sum()) for value in trainer.stages.model_parameters().values())
    graphs = trainer.context.cuda_graphs
    return Outcome(losses, norms, weights, 0 if graphs is None else len(graphs._forwards))


def _repeated() -> dict[str, tuple[float, ...]]:
    found = {}
    for recompute in ("none", "selective", "full"):
        trainer = trainer_of(Case(recompute=recompute), False)
        found[recompute] = tuple(float(trainer.gradients(step, batch_for(trainer, 0))) for step in (3, 4, 3))
    return found


def trainer_of(
    case: Case, captured: bool, change: Callable[[Any], None] | None = None, experiment: wb.Experiment = EXPERIMENT
) -> Trainer:
    """Return a trainer of a plan with CUDA graphs; unless `captured`, its blocks are launched all the same."""
    model = build_model(MODEL.build, 0, here(), seed=0)
    if change is not None:
        change(model)
    graph = capture(model, {name: spec.batched(MICRO_BATCH) for name, spec in _specs().items()}, name="bert")
    plan = dataclasses.replace(plan_of(graph, dataclasses.replace(case, cuda_graphs=True)), precision="bf16")
    where = coordinate(plan.pipeline, plan.data, plan.tensor, DEVICE)
    context = StepContext(seed=0, device=here())
    half = functools.partial(torch.autocast, here().type, torch.bfloat16)
    stage = build_stage(plan, where, model, graph, context, compile=True, autocast=half)
    if not captured:
        context.cuda_graphs = None
    return Trainer(experiment, plan, graph, stage, context, where)


def batch_for(trainer: Trainer, seed: int) -> dict[str, torch.Tensor]:
    shape = {"vocab_size": VOCABULARY, "labelled_share": DATA.reads(EXPERIMENT).labelled_share()}
    return part_of(trainer, random_batch(_specs(), GLOBAL_BATCH, **shape, device=here(), seed=seed))


def _specs() -> Mapping[str, TensorSpec]:
    return DATA.reads(EXPERIMENT).batch_specs()
