"""Block-sparse weights under everything that reads a captured block equal masked ones: one process, on the CPU.

`test_sparsity` compares both with plain PyTorch under several plans.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import workbench as wb
from tests.distributed import zoo
from tests.distributed.harness import forced_plan, launch, trainer_for
from tests.distributed.test_every_plan import BACKEND, compiler
from workbench.capture import Graph, capture, spec_of
from workbench.execution.blocks.sparse_weights import INDEX, BlockSparseWeights, multiply_by_stored_blocks
from workbench.experiment import Experiment
from workbench.sparsity import Dynamic

MICRO_BATCH, COUNT, STEPS = 4, 2, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the scope of its sparse weights, and how it is executed."""

    model: str = "bert"
    scope: str = "encoder"
    recompute: str = "none"
    precision: str = "fp32"
    compiles: bool = False
    offload: bool = False
    optimizer: str = "adamw"


CASES = [
    Case(scope="*"),
    Case("gpt2", "h", recompute="selective"),
    Case(precision="bf16", compiles=True, recompute="selective"),
    Case("gpt2", "h", precision="bf16", recompute="full"),
    Case(offload=True),
    Case(optimizer="lamb"),
    Case(optimizer="sgd"),
]


@dataclasses.dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    patterns: dict[str, torch.Tensor]
    copies: list[str]
    """Weights of which blocks read bf16 copies."""


@functools.cache
def captured(name: str) -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    model = zoo.MODELS[name]().train()
    specs = {key: spec_of(key, value) for key, value in zoo.batch(name, MICRO_BATCH).items()}
    return model, capture(model, specs, name=name)


@compiler(BACKEND)
def outcome(case: Case, block_sparse: bool) -> Outcome:
    model, graph = captured(case.model)
    plan = forced_plan(
        graph,
        pipeline=1,
        micro_batch=MICRO_BATCH,
        num_microbatches=COUNT,
        recompute=case.recompute,
        offload_optimizer=case.offload,
        block_sparse=block_sparse,
    )
    plan = dataclasses.replace(plan, precision=case.precision)
    experiment = Experiment.of(
        model=zoo.MODELS[case.model],
        data=lambda: None,
        global_batch=plan.global_batch,
        optimizer=case.optimizer,
        learning_rate=1e-3,
        warmup_steps=0,
        steps=STEPS,
        clip_norm=0.5,
        sparsity=Dynamic(sparsity=0.5, block=16, updates=2, scope=case.scope),
    )
    trainer = trainer_for(experiment, copy.deepcopy(model), graph, plan, compiles=case.compiles)
    stages = trainer.stages
    assert isinstance(trainer.sparse_weights, BlockSparseWeights) == block_sparse
    buffers = stages.model_buffers()  # the very indices that a moving pattern overwrites
    assert all(
        buffers[INDEX + name].data_ptr() == index.data.data_ptr() for name, index in stages.compact.indices.items()
    )
    multiplied = [
        node
        for module in stages.stages[0].block_modules()
        for node in module.block.code.graph.nodes
        if node.target is multiply_by_stored_blocks
    ]
    assert len(multiplied) == (len(trainer.sparse_weights.names) if block_sparse else 0)
    scalars = [trainer.step(step, zoo.batch(case.model, plan.global_batch, seed=step)).scalars for step in range(STEPS)]
    return Outcome(
        [float(each[0]) for each in scalars],
        [float(each[1].sqrt()) for each in scalars],
        {name: trainer.full(name, parameter) for name, parameter in stages.model_parameters().items()},
        trainer.sparse_weights.patterns,
        sorted(name for module in stages.stages[0].block_modules() for name in module.weight_copies),
    )


def both(_rank: int, cases: list[Case]) -> list[tuple[Outcome, Outcome]]:
    return [(outcome(case, True), outcome(case, False)) for case in cases]


@pytest.fixture(scope="module")
def outcomes() -> dict[Case, tuple[Outcome, Outcome]]:
    found: Any = launch(both, 1, CASES)
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_sparse_training_equals_masked_training(
    case: Case, outcomes: dict[Case, tuple[Outcome, Outcome]]
) -> None:
    found, expected = outcomes[case]
    assert found.copies == expected.copies
    assert bool(found.copies) == (case.precision == "bf16")
    for name, pattern in expected.patterns.items():
        assert torch.equal(found.patterns[name], pattern), name
    rounding = 1e-5 if case.precision == "fp32" else 4e-3
    assert found.losses == pytest.approx(expected.losses, rel=rounding)
    assert found.norms == pytest.approx(expected.norms, rel=10 * rounding)
    for name, weight in expected.weights.items():
        assert (found.weights[name] - weight).norm() <= 10 * rounding * weight.norm() + 1e-6, name


def test_a_block_sparse_run_evaluates_samples_and_exports_as_a_masked_one(tmp_path: Path) -> None:
    """On one CPU process, where the planner would mask: the worker places the model by another name of its device."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The document {n} says that {n} birds sing in tree {n % 7}." for n in range(300)))
    experiment = wb.Experiment(
        model=wb.models.gpt2(hidden_size=32, num_layers=2, num_heads=4, max_positions=32),
        data=wb.data.corpus(text, vocab_size=300),
        seq_len=16,
        global_batch=4,
        steps=3,
        evaluation=wb.Evaluation(every=3, samples=4),
        samples=wb.Samples(("The",), every=3, tokens=4),
        sparsity=Dynamic(sparsity=0.5, block=16, updates=1, scope="h"),
    )
    masked = wb.plan(experiment, wb.measure.local_cluster().resized(1), micro_batch=2)
    found = []
    for plan in (masked, dataclasses.replace(masked, block_sparse=True)):
        run = wb.runs.debug(experiment, plan, directory=tmp_path / str(plan.block_sparse), progress=False)
        export = run.export(tmp_path / f"exported {plan.block_sparse}")
        [weights] = [load_file(path) for path in export if path.suffix == ".safetensors"]
        texts = [event["samples"] for event in run.samples()]
        found.append((run.history().loss.tolist(), run.evaluations().eval_loss.tolist(), texts, weights))
    (losses, held_out, samples, weights), (sparse_losses, sparse_held_out, sparse_samples, sparse_weights) = found
    assert sparse_losses == pytest.approx(losses, rel=1e-6)
    assert sparse_held_out == pytest.approx(held_out, rel=1e-6)
    assert sparse_samples == samples
    assert sparse_weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.allclose(sparse_weights[name], weight, atol=1e-5), name
