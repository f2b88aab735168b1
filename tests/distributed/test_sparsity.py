"""Sparse training under every plan equals masked training in plain PyTorch, with the same pattern at every step.

The plain loop below shares no code with Workbench but the random numbers of regrowth. All plans train in one group of
two processes. In `make test-exhaustive`, every way of regrowth and every optimiser trains under every plan.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.distributed import harness, zoo
from tests.distributed.harness import Tensors, everywhere, launch, part_of, whole_parameters, worst
from tests.exhaustive import EXHAUSTIVE
from workbench.base.errors import CheckpointError
from workbench.capture import Graph, capture, spec_of
from workbench.execution.blocks.sparse_weights import MaskedWeights
from workbench.execution.checkpoint.save_load import CheckpointStore, TrainingProgress
from workbench.execution.parallel.sharding import local
from workbench.execution.trainer import Trainer
from workbench.experiment import Experiment
from workbench.record.rundir import RunDir
from workbench.sparsity import Dynamic, Static
from workbench.sparsity.pattern import block_sums, initial, is_explored, is_present, uniform

MICRO_BATCH, GLOBAL_BATCH, STEPS, HALF, FEW = 4, 8, 6, 3, 2
RATE, EPS, DECAY, BETAS, CLIP = 5e-3, 1e-3, 0.1, (0.9, 0.98), 0.5
RANDOM = Dynamic(sparsity=0.6, block=4, updates=3, prune_ratio=0.5)
GRADIENT = dataclasses.replace(RANDOM, regrow="gradient", block=2)
STATIC = Static(sparsity=0.6, block=4, rescaled=True)
LARGE = Dynamic(sparsity=0.5, block=16, updates=3, prune_ratio=0.5, rescaled=True)
"""Blocks for which there are kernels."""


def batch_of(step: int) -> Tensors:
    return zoo.batch("bert", GLOBAL_BATCH, seed=step)


@dataclasses.dataclass
class Outcome:
    """What a training left behind."""

    losses: list[float]
    norms: list[float]
    weights: Tensors
    patterns: Tensors


# The reference


def plain_sums(matrix: torch.Tensor, block: int) -> list[float]:
    rows = [row.split(block, 1) for row in matrix.abs().split(block, 0)]
    return [piece.sum().item() for row in rows for piece in row]


def plain_update(present: list[bool], sizes: list[float], growth: list[float], count: int) -> list[bool]:
    here = [index for index, each in enumerate(present) if each]
    absent = [index for index, each in enumerate(present) if not each]
    count = min(count, len(absent))
    pruned = set(sorted(here, key=lambda index: sizes[index])[:count])
    grown = set(sorted(absent, key=lambda index: -growth[index])[:count])
    return [(each and index not in pruned) or index in grown for index, each in enumerate(present)]


@functools.cache
def plain(sparsity: Static) -> Outcome:
    """Return what masked training does without any code of Workbench but its random numbers."""
    torch.manual_seed(0)
    model, block = zoo.bert_pretraining().train(), sparsity.block
    named = dict(model.named_parameters())
    sparse = {name: parameter for name, parameter in named.items() if ".encoder." in name and parameter.ndim == 2}
    decayed = [parameter for parameter in named.values() if parameter.ndim >= 2]
    others = [parameter for parameter in named.values() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=RATE,
        betas=BETAS,
        eps=EPS,
    )
    present, losses, norms = {}, [], []
    for name, parameter in sparse.items():
        blocks = parameter.numel() // block**2
        pattern = initial(tuple(parameter.shape), block, round((1 - sparsity.sparsity) * blocks), f"0/{name}")
        present[name] = is_present(pattern).flatten().tolist()
        if sparsity.rescaled:
            parameter.data *= math.sqrt(blocks / sum(present[name]))
    updates = getattr(sparsity, "updates", 0)
    due = {math.ceil((number + 1) * STEPS / (updates + 1)): number for number in range(updates)}

    def mask(name: str) -> torch.Tensor:
        shape = sparse[name].shape
        blocks = torch.tensor(present[name]).view(shape[0] // block, shape[1] // block)
        return torch.kron(blocks.float(), torch.ones(block, block))

    for step in range(STEPS):
        with torch.no_grad():
            for name, parameter in sparse.items():
                parameter *= mask(name)
        model.zero_grad()
        loss = model(**batch_of(step)).loss
        loss.backward()
        dense = {name: parameter.grad.clone() for name, parameter in sparse.items()}
        for name, parameter in sparse.items():
            parameter.grad *= mask(name)
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        for name, parameter in sparse.items():
            parameter.data *= mask(name)
            if step + 1 in due:
                ratio = sparsity.prune_ratio / 2 * (1 + math.cos(math.pi * (step + 1) / STEPS))
                [growth] = uniform([f"0/{name}/{due[step + 1]}"], (len(present[name]),)).tolist()
                if sparsity.regrow == "gradient":
                    growth = plain_sums(dense[name], block)
                before = mask(name)
                count = round(ratio * sum(present[name]))
                present[name] = plain_update(present[name], plain_sums(parameter.data, block), growth, count)
                parameter.data *= mask(name)
                for slot in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[parameter][slot] *= before * mask(name)
    weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    return Outcome(losses, norms, weights, {name: torch.tensor(each) for name, each in present.items()})


# Workbench


@dataclasses.dataclass(frozen=True)
class Division(harness.Division):
    """The part of a plan that a test chooses."""

    block_sparse: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """Training under one plan, perhaps a part of it."""

    sparsity: Static | None
    division: Division
    steps: range = range(STEPS)
    load_from: Path | None = None
    save_to: Path | None = None
    optimizer: str = "adamw"


@functools.cache
def captured() -> Graph:
    specs = {key: spec_of(key, value[:MICRO_BATCH]) for key, value in batch_of(0).items()}
    return capture(zoo.bert_pretraining().train(), specs, name="bert")


def trainer_of(case: Case) -> Trainer:
    torch.manual_seed(0)
    experiment = Experiment.of(
        model=zoo.bert_pretraining,
        data=lambda: None,
        global_batch=GLOBAL_BATCH,
        optimizer=case.optimizer,
        learning_rate=RATE,
        warmup_steps=0,
        lr_schedule="constant",
        weight_decay=DECAY,
        betas=BETAS,
        eps=EPS,
        steps=STEPS,
        clip_norm=CLIP,
        sparsity=case.sparsity,
    )
    return harness.trainer_of(experiment, zoo.bert_pretraining().train(), captured(), case.division, MICRO_BATCH)


def trained(case: Case) -> Outcome:
    """Return the whole weights and patterns of all stages; checks that ranks agree and that absent blocks are zero."""
    trainer, losses, norms = trainer_of(case), [], []
    if case.load_from is not None:
        CheckpointStore(trainer, RunDir(case.load_from)).load(RunDir(case.load_from).checkpoint(case.steps.start))
    for step in case.steps:
        before = patterns_of(trainer)
        scalars = trainer.step(step, part_of(trainer, batch_of(step))).scalars
        losses.append(scalars[0].item())
        norms.append(scalars[1].sqrt().item())
        check_absent(trainer)
        check_regrown(trainer, before)
    if case.save_to is not None:
        case.save_to.mkdir(exist_ok=True)  # a store makes no run's folder, which somebody may have deleted
        checkpoints = CheckpointStore(trainer, RunDir(case.save_to))
        checkpoints.save(TrainingProgress(case.steps.stop, 0.0))
        checkpoints.finish()
    return Outcome(
        losses,
        norms,
        whole_parameters(trainer),
        everywhere({} if trainer.sparse_weights is None else trainer.sparse_weights.patterns),
    )


def check_absent(trainer: Trainer) -> None:
    """Assert that weights and optimiser state are zero where blocks are absent, and that the number of blocks stays."""
    sparse = trainer.sparse_weights
    if sparse is None:
        return
    for name, pattern in sparse.patterns.items():
        parameter, kept = trainer.stages.model_parameters()[name], sparse.sparsity.kept(pattern.numel())
        assert int(is_present(pattern).sum()) == kept
        assert not bool((is_present(pattern) & ~is_explored(pattern)).any())
        own = [parameter.detach(), *(value for value in trainer.optimizer.state[parameter].values() if value.ndim)]
        for value in own:
            if isinstance(sparse, MaskedWeights):
                assert not local(value)[~sparse._masks[name]].any()
            else:
                assert value.shape == (kept, sparse.sparsity.block, sparse.sparsity.block)
                assert torch.equal(trainer.stages.compact.indices[name].mask, is_present(pattern))


def patterns_of(trainer: Trainer) -> Tensors:
    sparse = trainer.sparse_weights
    return {} if sparse is None else {name: pattern.clone() for name, pattern in sparse.patterns.items()}


def check_regrown(trainer: Trainer, before: Tensors) -> None:
    """Assert that blocks which have just regrown are zero, and that their optimiser state is."""
    for name, pattern in patterns_of(trainer).items():
        grown = is_present(pattern) & ~is_present(before[name])
        parameter = trainer.stages.model_parameters()[name]
        state = [value for value in trainer.optimizer.state[parameter].values() if value.ndim]
        for value in (parameter, *state):
            whole, block = trainer.full(name, value), trainer.sparse_weights.sparsity.block
            assert not bool(block_sums(whole, block)[grown].any())


def train(_rank: int, cases: list[Case]) -> dict[Case, Outcome]:
    return {case: trained(case) for case in cases}


ONE, PIPELINE, DATA = Division(), Division(pipeline=2), Division(data=2)
ZERO3, TENSOR = Division(data=2, zero=3), Division(tensor=2)
CASES = [Case(RANDOM, PIPELINE), Case(RANDOM, DATA), Case(RANDOM, ZERO3), Case(GRADIENT, TENSOR)]
"""The plan of each kind that is hardest for a pattern: weights in other processes, copied, and divided by row."""
RESUMED = [ZERO3, PIPELINE]
BLOCK_SPARSE = [dataclasses.replace(division, block_sparse=True) for division in (PIPELINE, DATA)]
if EXHAUSTIVE:
    DIVISIONS = (PIPELINE, Division(pipeline=2, chunks=2), *(Division(data=2, zero=zero) for zero in range(4)), TENSOR)
    CASES = [Case(sparsity, division) for sparsity in (RANDOM, GRADIENT, STATIC) for division in DIVISIONS]
    RESUMED = [ZERO3, PIPELINE, DATA, TENSOR]
OPTIMIZERS = ("lamb", "muon", "sgd") if EXHAUSTIVE else ("muon",)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    """Outcomes of all cases, from one group of two processes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    halves = [
        Case(RANDOM, ZERO3, range(HALF), save_to=folder),
        *(Case(RANDOM, division, range(HALF, STEPS), load_from=folder) for division in RESUMED),
    ]
    full = [Case(sparsity, ZERO3, range(FEW)) for sparsity in (None, dataclasses.replace(RANDOM, sparsity=0.0))]
    blocks = [Case(LARGE, division) for division in BLOCK_SPARSE]
    for saved, name in ((BLOCK_SPARSE[1], "block-sparse"), (DATA, "masked")):
        path = folder / name
        blocks.append(Case(LARGE, saved, range(HALF), save_to=path))
        resumed = [BLOCK_SPARSE[1], ZERO3] if saved.block_sparse else [BLOCK_SPARSE[0]]
        blocks += [Case(LARGE, division, range(HALF, STEPS), load_from=path) for division in resumed]
    others = [Case(RANDOM, TENSOR, range(HALF), optimizer=name) for name in OPTIMIZERS]
    found: dict[Case, Outcome] = launch(train, 2, [*CASES, *halves, *full, *blocks, *others], ahead=captured)
    return found


def assert_equals_plain(found: Outcome, expected: Outcome, first: int = 0) -> None:
    assert found.patterns.keys() == expected.patterns.keys()
    for name, pattern in found.patterns.items():
        assert torch.equal(is_present(pattern).flatten(), expected.patterns[name]), name
    assert found.losses == pytest.approx(expected.losses[first:], rel=1e-5)
    assert found.norms == pytest.approx(expected.norms[first:], rel=1e-4)
    assert worst(found.weights, expected.weights) < 1e-5


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.representative
def test_every_plan_has_the_pattern_and_the_loss_of_plain_masked_training(
    case: Case, outcomes: dict[Case, Outcome]
) -> None:
    assert_equals_plain(outcomes[case], plain(case.sparsity))


def test_a_run_resumes_to_the_last_bit_and_under_other_plans(outcomes: dict[Case, Outcome]) -> None:
    whole = outcomes[Case(RANDOM, ZERO3)]
    resumed = {case.division: found for case, found in outcomes.items() if case.load_from and case.sparsity == RANDOM}
    assert resumed[ZERO3].losses == whole.losses[HALF:]
    for name, value in (whole.weights | whole.patterns).items():
        assert torch.equal((resumed[ZERO3].weights | resumed[ZERO3].patterns)[name], value)
    for found in resumed.values():
        assert_equals_plain(found, plain(RANDOM), first=HALF)
        assert all(torch.equal(found.patterns[name], whole.patterns[name]) for name in whole.patterns)


def test_block_sparse_training_has_the_pattern_and_the_loss_of_plain_masked_training(
    outcomes: dict[Case, Outcome],
) -> None:
    for division in BLOCK_SPARSE:
        found = outcomes[Case(LARGE, division)]
        assert_equals_plain(found, plain(LARGE))
        assert any((is_explored(pattern) & ~is_present(pattern)).any() for pattern in found.patterns.values())


def test_a_block_sparse_run_resumes_to_the_last_bit_and_changes_to_and_from_masked_weights(
    outcomes: dict[Case, Outcome],
) -> None:
    whole = outcomes[Case(LARGE, BLOCK_SPARSE[1])]
    resumed = {case: found for case, found in outcomes.items() if case.sparsity == LARGE and case.load_from}
    assert len(resumed) == 3
    for case, found in resumed.items():
        assert_equals_plain(found, plain(LARGE), first=HALF)
        if case.division == BLOCK_SPARSE[1]:
            assert found.losses == whole.losses[HALF:]
            for name, value in (whole.weights | whole.patterns).items():
                assert torch.equal((found.weights | found.patterns)[name], value)


def test_a_pattern_without_absent_blocks_trains_as_dense_to_the_last_bit(outcomes: dict[Case, Outcome]) -> None:
    dense, full = (found for case, found in outcomes.items() if case.steps == range(FEW))
    assert dense.losses == full.losses
    assert all(torch.equal(full.weights[name], value) for name, value in dense.weights.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_other_optimizers_keep_absent_blocks_at_zero(optimizer: str, outcomes: dict[Case, Outcome]) -> None:
    """`check_absent` has looked at each step; here, the pattern has moved and every loss differs from the first."""
    [found] = [found for case, found in outcomes.items() if case.optimizer == optimizer]
    assert len(set(found.losses)) == HALF
    assert sum(int((is_explored(p) & ~is_present(p)).sum()) for p in found.patterns.values()) > 0


def alone(_rank: int, folder: Path) -> tuple[Outcome, list[str]]:
    """Train in one process, and resume from checkpoints of other patterns; return the outcome and the errors."""
    for name, sparsity in (("dense", None), ("sparse", STATIC)):
        trained(Case(sparsity, ONE, range(1), save_to=folder / name))
    messages = []
    for saved, sparsity in (("dense", STATIC), ("sparse", dataclasses.replace(STATIC, block=8))):
        with pytest.raises(CheckpointError) as refused:
            trained(Case(sparsity, ONE, range(1, 2), load_from=folder / saved))
        messages.append(str(refused.value))
    return trained(Case(RANDOM, ONE)), messages


def test_one_process_equals_plain_masked_training_and_refuses_checkpoints_of_other_patterns(tmp_path: Path) -> None:
    found, (of_dense, of_other_blocks) = launch(alone, 1, tmp_path, ahead=captured)
    assert_equals_plain(found, plain(RANDOM))
    assert "has no pattern for the weight bert.encoder" in of_dense
    assert "8 × 8 blocks" in of_other_blocks
    assert "4 × 4 blocks" in of_other_blocks
