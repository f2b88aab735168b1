"""Every optimiser under every plan equals the same optimiser in plain PyTorch, with tied weights.

By default each optimiser trains for 20 steps under the plan that is hardest for it, and for a few under others, all in
one group of processes. In `make test-exhaustive`, each trains for 20 steps under every plan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import workbench as wb
from tests.distributed import harness, zoo
from tests.distributed.harness import CPU, Division, Tensors, everywhere, launch, part_of, whole_parameters, worst
from tests.exhaustive import EXHAUSTIVE
from tests.unit.test_optimizer import Interleaved, captured_of, in_plain_fp32
from workbench.capture import Graph, capture, spec_of
from workbench.cost.graph_profiler import profile_graph, with_optimizer
from workbench.cost.memory import FP32, PREFETCHED_BLOCKS, ParameterTable, stage_state
from workbench.execution.checkpoint.save_load import CheckpointStore, TrainingProgress
from workbench.execution.parallel.sharding import local
from workbench.execution.trainer import Trainer
from workbench.experiment import Experiment
from workbench.record.rundir import RunDir
from workbench.strategy import Strategy

MICRO_BATCH, GLOBAL_BATCH, STEPS, FEW = 4, 8, 20, 3
EPS = 1e-3
"""Epsilon of Adam and LAMB. At its default, a gradient that is zero up to rounding (a key's bias) makes a full step of
noise."""
DECAY, BETAS = 0.1, (0.9, 0.98)
SCALES = {"*embeddings*": 0.5, "*.weight": 1.0, "*": 2.0}
RATES = {"adamw": 5e-3, "sgd": 0.05, "lamb": 5e-3, "muon": 5e-3, "own": 0.05}


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


class Counted(torch.optim.Optimizer):
    """An optimiser of the user's own, whose state is a tensor, the sum of all gradients, and a number."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for x in group["params"]:
                state = self.state[x]
                if not state:
                    state |= {"count": 0, "sum": torch.zeros_like(x)}
                state["count"] += 1
                state["sum"] += x.grad
                x.mul_(1 - group["lr"] * group["weight_decay"])
                x.add_(state["sum"], alpha=-group["lr"] / state["count"] ** 0.5)


class MuonAndAdamW:
    """`torch.optim.Muon` for the matrices but embeddings and heads, `torch.optim.AdamW` for the other parameters.

    torch's own orthogonalisation is replaced: it has other coefficients, and rounds to bf16.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        hidden = [group["params"][0].ndim == 2 and not group["is_outer"] for group in groups]
        self.muon = torch.optim.Muon(
            [group for group, mine in zip(groups, hidden, strict=True) if mine], adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW(
            [group for group, mine in zip(groups, hidden, strict=True) if not mine], betas=BETAS, eps=EPS
        )
        adamw, muon = iter(self.adamw.param_groups), iter(self.muon.param_groups)
        self.param_groups = [next(muon if mine else adamw) for mine in hidden]

    def step(self) -> None:
        with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", in_plain_fp32):
            self.muon.step()
        self.adamw.step()


REFERENCES: Mapping[str, Callable[[list[dict[str, Any]]], Any]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, betas=BETAS, eps=EPS),
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "lamb": PlainLamb,
    "muon": MuonAndAdamW,
    "own": Counted,
}


def batch_of(step: int) -> Tensors:
    return zoo.batch("bert", GLOBAL_BATCH, seed=step)


def factor_of(step: int) -> float:
    """A learning-rate schedule of the user's own."""
    return 1.0 - step / 40


def reference(optimizer: str) -> tuple[nn.Module, Any]:
    """Return a model as every plan begins with it, and the optimiser of plain PyTorch."""
    torch.manual_seed(0)
    model = zoo.bert_pretraining().train()
    groups = [
        {
            "params": [parameter],
            "lr": RATES[optimizer] * (0.5 if "embeddings" in name else 1.0 if name.endswith(".weight") else 2.0),
            "weight_decay": DECAY if parameter.ndim >= 2 else 0.0,
            "is_outer": "embeddings" in name or "seq_relationship" in name,
        }
        for name, parameter in model.named_parameters()
    ]
    return model, REFERENCES[optimizer](groups)


@functools.cache
def plain(optimizer: str, noise: float = 0.0) -> dict[int, Tensors]:
    """Return the parameters before, after some and after all steps without any code of Workbench.

    `noise` is a deviation of the elements of each gradient relative to their root mean square, for the last bits in
    which sums of another order differ.
    """
    model, updates = reference(optimizer)
    named, generator = dict(model.named_parameters()), torch.Generator().manual_seed(0)
    peaks = [group["lr"] for group in updates.param_groups]
    found = {0: {name: parameter.detach().clone() for name, parameter in named.items()}}
    for step in range(STEPS):
        model.zero_grad()
        model(**batch_of(step)).loss.backward()
        for parameter in named.values() if noise else ():
            parameter.grad += (
                noise * parameter.grad.square().mean().sqrt() * torch.randn(parameter.shape, generator=generator)
            )
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group, peak in zip(updates.param_groups, peaks, strict=True):
            group["lr"] = peak * factor_of(step)
        updates.step()
        found[step + 1] = {name: parameter.detach().clone() for name, parameter in named.items()}
    return {steps: found[steps] for steps in (0, 1, FEW, 2 * FEW, STEPS)}


@functools.cache
def captured() -> Graph:
    specs = {key: spec_of(key, value[:MICRO_BATCH]) for key, value in batch_of(0).items()}
    return capture(zoo.bert_pretraining().train(), specs, name="bert")


def trainer_of(division: Division, optimizer: str, device: str = "cpu", **choices: Any) -> Trainer:
    torch.manual_seed(0)
    model = zoo.bert_pretraining().train()
    return harness.trainer_of(experiment_of(optimizer), model, captured(), division, MICRO_BATCH, device, **choices)


def experiment_of(optimizer: str) -> Experiment:
    return Experiment.of(
        model=zoo.bert_pretraining,
        data=lambda: None,
        global_batch=GLOBAL_BATCH,
        optimizer=Counted if optimizer == "own" else optimizer,
        learning_rate=RATES[optimizer],
        lr_schedule=factor_of,
        rate_scale=SCALES,
        weight_decay=DECAY,
        betas=BETAS,
        eps=EPS,
        steps=STEPS,
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """Training of one optimiser under one plan."""

    optimizer: str
    division: Division
    steps: range
    load_from: Path | None = None
    save_to: Path | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one case left behind."""

    error: float
    """Worst difference of a whole parameter from plain PyTorch, relative to its norm; Muon's to how far it moved."""
    held: tuple[int, int, int]
    """Bytes of the tensors of rank 0: weights, gradients and optimiser state."""


def train(rank: int, cases: list[Case]) -> dict[Case, Outcome]:
    found = {}
    for case in cases:
        parameters, held = trained(case)
        if rank == 0:  # the others have the same parameters
            expected = plain(case.optimizer)
            start = expected[0] if case.optimizer == "muon" else None
            found[case] = Outcome(worst(parameters, expected[case.steps.stop], start), held)
    return found


def trained(case: Case) -> tuple[Tensors, tuple[int, int, int]]:
    """Return the whole parameters of all stages after the last step, and the bytes that this rank holds then."""
    trainer = trainer_of(case.division, case.optimizer)
    if case.load_from is not None:
        path = RunDir(case.load_from).checkpoint(case.steps.start)
        assert CheckpointStore(trainer, RunDir(case.load_from)).load(path).step == case.steps.start
    for step in case.steps:
        trainer.step(step, part_of(trainer, batch_of(step)))
    if case.save_to is not None:
        case.save_to.mkdir(exist_ok=True)  # a store makes no run's folder, which somebody may have deleted
        checkpoints = CheckpointStore(trainer, RunDir(case.save_to))
        checkpoints.save(TrainingProgress(case.steps.stop, 0.0))
        checkpoints.finish()
    return whole_parameters(trainer), held_by(trainer)


def held_by(trainer: Trainer) -> tuple[int, int, int]:
    parameters = list(trainer.stages.model_parameters().values())
    state = (value for slots in trainer.optimizer.state.values() for value in slots.values() if value.ndim)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    weights, gradient, moments = (sum(local(t).nbytes for t in group) for group in (parameters, gradients, state))
    return weights, gradient, moments


def predicted(division: Division, optimizer: str) -> tuple[float, float, float]:
    """Return the bytes that the planner predicts for a device, without the weights that ZeRO 3 gathers for a moment."""
    experiment = experiment_of(optimizer)
    costs = with_optimizer(profile_graph(captured(), CPU, "fp32", compiled=False), experiment, captured())
    table = ParameterTable(costs)
    strategy = Strategy(
        **dataclasses.asdict(division),
        schedule="1f1b",
        micro_batch=MICRO_BATCH,
        num_microbatches=GLOBAL_BATCH // MICRO_BATCH // division.data,
        recompute="none",
    )
    state = stage_state(costs, table, strategy)
    gathered = PREFETCHED_BLOCKS * FP32 * table.largest if division.zero == 3 else 0.0
    weights, gradients, moments = (
        float(each[0, -1]) for each in (state.parameters - gathered, state.gradients, state.optimizer)
    )
    return weights, gradients, moments


def tolerance(optimizer: str, steps: int) -> float:
    """Return how far a training of so many steps may be from plain PyTorch, as `Outcome.error` measures it.

    Five iterations of Muon stretch the directions that a gradient of low rank does not have by 8.3 · 4.1 · 3.9 · 3.3 ·
    2.3 = 1,000. Gradients whose sums were taken in another order differ by some 2^-22 of their root mean square. Plain
    PyTorch is the measure: twice what so noisy a gradient moves it from itself is allowed. What this may not hide is in
    `test_updates_of_equal_gradients_equal_torchs_muon_under_every_plan`.
    """
    if optimizer != "muon":
        return 1e-5
    one, other = plain("muon"), plain("muon", noise=2**-22)
    return 2 * worst(other[steps], one[steps], one[0])


ZERO0, ZERO3 = Division(data=2), Division(data=2, zero=3)
PIPELINE, TENSOR = Division(pipeline=2), Division(tensor=2)
HARDEST = {"adamw": ZERO3, "sgd": PIPELINE, "lamb": TENSOR, "muon": ZERO3, "own": Division(data=2, zero=2)}
"""Plan under which an optimiser trains for all steps by default."""


def cases() -> list[Case]:
    if EXHAUSTIVE:
        divisions = (ZERO0, ZERO3, PIPELINE, TENSOR, *(Division(data=2, zero=zero) for zero in (1, 2)))
        return [Case(name, division, range(STEPS)) for name in REFERENCES for division in divisions]
    long = [Case(name, division, range(STEPS)) for name, division in HARDEST.items()]
    short = [Case("lamb", ZERO3, range(FEW)), Case("muon", TENSOR, range(FEW)), Case("own", TENSOR, range(FEW))]
    return [*long, *short, *(Case(name, ZERO0, range(1)) for name in REFERENCES)]


def halves(folder: Path) -> list[Case]:
    """Return runs that stop under one plan, each with its continuation under another plan."""
    return [
        half
        for name in REFERENCES
        for half in (
            Case(name, PIPELINE, range(FEW), save_to=folder / name),
            Case(name, ZERO3, range(FEW, 2 * FEW), load_from=folder / name),
        )
    ]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    """Outcomes of all cases, from one group of two processes."""
    asked = [*cases(), *halves(tmp_path_factory.mktemp("checkpoints"))]
    found: dict[Case, Outcome] = launch(train, 2, asked, ahead=captured)
    return found


@pytest.mark.parametrize("optimizer", REFERENCES)
def test_an_optimizer_equals_plain_pytorch_under_every_plan(optimizer: str, outcomes: dict[Case, Outcome]) -> None:
    errors = {
        case: found.error for case, found in outcomes.items() if case.optimizer == optimizer and not case.load_from
    }
    assert any(len(case.steps) == STEPS for case in errors)
    assert all(error < tolerance(optimizer, case.steps.stop) for case, error in errors.items()), errors


@pytest.mark.parametrize("optimizer", REFERENCES)
def test_a_run_continues_under_another_plan(optimizer: str, outcomes: dict[Case, Outcome]) -> None:
    [error] = [found.error for case, found in outcomes.items() if case.optimizer == optimizer and case.load_from]
    assert error < tolerance(optimizer, 2 * FEW)


PARTS = {"qkv": (4, 4, 4), "grouped": (4, 2, 2), "gated": (1, 1), "chunked": (8, 8), "recurrent": (8,) * 4}
"""Outputs of each projection of the matrices of `Interleaved`, again and again until all are given."""
OF_ADAMW = ("tokens", "head", "added", "whole", "factor", "latents", "rows")


def of_interleaved() -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    batch = {name: torch.randint(0, 11, (4, 4)) for name in ("tokens", "labels")}
    return Interleaved(), batch


def muon_by_hand(steps: int) -> Tensors:
    """Return the weights after a loop whose matrices are divided by hand, and each part orthogonalised."""
    model, batch = of_interleaved()
    named = dict(model.named_parameters())
    matrices = {name: p for name, p in named.items() if p.ndim == 2 and name.split(".")[0] not in OF_ADAMW}
    rest = [parameter for name, parameter in named.items() if name not in matrices]
    momenta = {name: torch.zeros_like(parameter) for name, parameter in matrices.items()}
    adamw = torch.optim.AdamW(
        [{"params": [p for p in rest if p.ndim > 1]}, {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}],
        lr=RATES["muon"],
        betas=BETAS,
        eps=EPS,
        weight_decay=DECAY,
    )
    for _ in range(steps):
        model.zero_grad()
        model(**batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        for name, parameter in matrices.items():
            momenta[name].lerp_(parameter.grad, 0.05)
            ahead = parameter.grad.lerp(momenta[name], 0.95)
            sizes = PARTS.get(name.split(".")[0], (len(parameter),))
            owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
            owner = owner.repeat(len(parameter) // len(owner))
            parameter.data.mul_(1 - RATES["muon"] * DECAY)
            for index in range(len(sizes)):
                rows = owner == index
                scale = 0.2 * max(int(rows.sum()), parameter.shape[1]) ** 0.5
                parameter.data[rows] -= RATES["muon"] * scale * in_plain_fp32(ahead[rows])
    return {name: parameter.detach() for name, parameter in named.items()}


def muon_under_plans(_rank: int) -> list[Tensors]:
    model, batch = of_interleaved()
    graph, settings = (
        captured_of(model),
        wb.Optimizer("muon", lr_schedule="constant", warmup_steps=0, eps=EPS, betas=BETAS, weight_decay=DECAY),
    )
    asked = dataclasses.replace(experiment_of("muon"), optimizer=settings, global_batch=4)
    found = []
    for division in (Division(data=2, zero=2), Division(tensor=2)):
        trainer = harness.trainer_of(asked, of_interleaved()[0], graph, division, 2)
        for step in range(FEW):
            trainer.step(step, part_of(trainer, batch))
        found.append(whole_parameters(trainer))
    return found


def test_projections_and_tables_are_updated_as_in_a_loop_that_divides_them_by_hand() -> None:
    expected, start = muon_by_hand(FEW), muon_by_hand(0)
    for found in launch(muon_under_plans, 2):
        assert worst(found, expected, start) < 1e-4


def _given_gradients(step: int, shapes: Mapping[str, torch.Size]) -> Tensors:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def unlike_torchs(
    _rank: int, divisions: list[Division], device: str = "cpu"
) -> dict[Division, tuple[int, float, list[int]]]:
    """Return how many matrices updates by given gradients orthogonalised, how far they are from torch's, relative to
    how far they moved, and how many each rank orthogonalised.

    Replicas share the matrices out.
    """
    model, plain_updates = reference("muon")
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    shapes = {name: value.shape for name, value in start.items()}
    for step in range(FEW):
        for name, gradient in _given_gradients(step, shapes).items():
            model.get_parameter(name).grad = gradient
        plain_updates.step()
    hidden = {id(parameter) for group in plain_updates.muon.param_groups for parameter in group["params"]}
    expected = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in hidden}
    found = {}
    for division in divisions:
        trainer = trainer_of(division, "muon", device, shares_matrices=True)
        own = trainer.stages.model_parameters()
        counted: list[int] = []
        exchange = trainer.optimizer._exchange
        from_owners = exchange.from_owners

        def counting(owned: Any, whole: Any, counted: Any = counted, goes_on: Any = from_owners) -> Any:
            counted.append(len(whole))
            return goes_on(owned, whole)

        exchange.from_owners = counting
        for step in range(FEW):
            gradients = _given_gradients(step, shapes)
            for name, parameter in own.items():
                shard = trainer.whole.as_stored(name, gradients[name].to(parameter.device), parameter)
                parameter.grad = torch.zeros_like(parameter)
                local(parameter.grad).copy_(shard)
            trainer.optimizer.step()
        together = everywhere({name: trainer.full(name, own[name]).cpu() for name in own if name in expected})
        each: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(each, sum(counted) // FEW)
        error = worst(together, {name: expected[name].detach() for name in together}, start)
        found[division] = len(together), error, each
    return found


TWO = [Division(data=2, zero=zero) for zero in range(4)] + [PIPELINE, TENSOR]
FOUR = [
    Division(data=4, zero=3),
    Division(data=2, tensor=2),
    Division(data=2, tensor=2, zero=3),
    Division(pipeline=2, data=2, zero=1),
]


@pytest.mark.parametrize("divisions", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_updates_of_equal_gradients_equal_torchs_muon_under_every_plan(divisions: list[Division]) -> None:
    """Each matrix is orthogonalised once in its stage, and all ranks that hold it end with the same bits."""
    found = launch(unlike_torchs, divisions[0].world, divisions, ahead=captured)
    matrices = max(number for number, _, _ in found.values())
    assert matrices > 10
    for division, (number, error, each) in found.items():
        assert number == matrices, division
        assert error < 1e-5, (division, error)
        assert sum(each) == matrices, (division, each)
        assert min(each) > 0, (division, each)


@pytest.mark.parametrize("division", [ZERO0, ZERO3], ids=["ZeRO 0", "ZeRO 3"])
@pytest.mark.parametrize("optimizer", REFERENCES)
def test_the_bytes_of_an_optimizer_are_predicted(
    optimizer: str, division: Division, outcomes: dict[Case, Outcome]
) -> None:
    """Weights, gradients and state are each within 10 % of the bytes of the tensors on the CPU."""
    held = next(
        found.held for case, found in outcomes.items() if (case.optimizer, case.division) == (optimizer, division)
    )
    assert predicted(division, optimizer) == pytest.approx(held, rel=0.1)
