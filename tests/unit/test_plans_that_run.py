# ruff: noqa: ARG002 (losses of one signature read different fields)
"""A plan that is offered is one whose ranks run, with the numbers of a plain loop."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

import workbench as wb
from tests.distributed.harness import CPU, LINK, loss_of, trainer_for
from workbench.base.errors import CaptureError, PlanInfeasible
from workbench.capture.captured_model import CapturedModel
from workbench.cost.hardware import Cluster
from workbench.experiment import Experiment
from workbench.planning.planner import facts_of
from workbench.planning.runnable import check_runnable

WIDTH, CLASSES, BATCH = 8, 3, 8
Samples = list[dict[str, torch.Tensor]]


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """Two residual layers and a head; `loss` is given its outputs and the labels, whole numbers and one-hot."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.table = nn.Parameter(torch.randn(4, CLASSES))
        self.register_buffer("average", torch.ones(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.loss(self.head(x), y, hot, task) + 0 * self.table.sum()

    def loss(self, e: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def samples(count: int = BATCH) -> Samples:
    generator = torch.Generator().manual_seed(0)
    labels = [torch.tensor((0, 1, 0, 2, 2, 0, 1, 0)[index % 8]) for index in range(count)]
    return [
        {
            "x": torch.randn(WIDTH, generator=generator),
            "y": label,
            "hot": functional.one_hot(label, CLASSES).float(),
            "task": torch.tensor(1),
        }
        for label in labels
    ]


class WeightedByLabels(Net):
    def loss(self, e: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        rare = (len(hot) - hot.sum(0)) / (hot.sum(0) + 1)
        certain = e.detach().sigmoid().mean(0) + hot.std(0)
        return functional.binary_cross_entropy_with_logits(e, hot, weight=certain, pos_weight=rare)


class WeightedByCounts(Net):
    def loss(self, e: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(e, y, weight=1 / (torch.bincount(y, minlength=CLASSES).float() + 1))


class Rebinds(Net):
    def loss(self, e: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        size = e.square().mean()
        out = size / self.average
        self.average = 0.9 * self.average + 0.1 * size.detach()
        return out


class Counts(Net):
    def loss(self, e: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        out = functional.cross_entropy(e * self.average, y)
        self.average = self.average * 0.5 + 1
        return out


class Pairs(Net):
    def loss(self, e: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return 1 - functional.cosine_similarity(e[0::2], e[1::2]).mean()


class Fours(Net):
    def loss(self, e: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        one, near, far, last = e.view(-1, 4, CLASSES).unbind(1)
        return functional.triplet_margin_loss(one, near, far) + last.square().mean()


class OfOneSample(Net):
    def loss(self, e: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return (e - e[y.argmax()]).square().mean()


class WithoutItems(Net):
    def loss(self, e: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        found = torch.empty(0, CLASSES)
        for label in range(CLASSES + 1):
            if bool((y == label).any()):
                found = torch.cat([found, e[y == label].mean(0, keepdim=True)])
        return found.square().mean()


class OfTask(Net):
    def loss(self, e: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(e + self.table[task[0]], y)


class Branches(Net):
    def loss(self, e: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        e = torch.cond(e.sum() > 0, lambda t: 2 * t, lambda t: t + t.mean(), (e,))
        return functional.cross_entropy(e, y)


def experiment_of(model: Callable[[], nn.Module], **options: Any) -> Experiment:
    fields = {"data": samples(), "steps": 2, "global_batch": BATCH, "seq_len": 1, **options}
    return Experiment.of(model=model, **fields)


def cluster(devices: int = 1) -> Cluster:
    return Cluster(CPU, devices, devices, LINK, LINK)


def assert_runs_as_a_plain_loop(model: Callable[[], nn.Module], **choices: Any) -> None:
    """Assert that three steps of a plan in one process have the losses, gradients and buffers of plain PyTorch."""
    experiment = experiment_of(model)
    plan = wb.plan(experiment, cluster(), **choices)
    check_runnable(experiment, plan, facts_of(experiment, CapturedModel(experiment, 2)))
    torch.manual_seed(0)
    plain, batch = model().train(), default_collate(samples())
    built = copy.deepcopy(plain)
    graph = CapturedModel(experiment, plan.micro_batch, built).step_graph(plan.loss_samples)
    trainer = trainer_for(experiment, built, graph, plan)
    for _step in range(3):
        plain.zero_grad()
        loss = loss_of(plain(**batch))
        loss.backward()
        torch.testing.assert_close(trainer.gradients(0, batch), loss.detach())
        for name, parameter in plain.named_parameters():
            found = trainer.full_gradient(name)
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)
        buffers = dict(plain.named_buffers())
        for name, buffer in trainer.stages.model_buffers().items():
            if name in buffers:
                torch.testing.assert_close(buffer, buffers[name])


@pytest.mark.parametrize(
    ("model", "choices"),
    [
        *((WeightedByLabels, {"micro_batch": size}) for size in (2, 4, BATCH)),
        *((Rebinds, {"micro_batch": size}) for size in (4, BATCH)),
        (Counts, {"micro_batch": BATCH}),
        *((each, {}) for each in (WeightedByCounts, Pairs, Fours, OfOneSample, WithoutItems, OfTask, Branches)),
        (Branches, {"micro_batch": 4}),
    ],
)
def test_the_ranks_of_a_plan_run_as_a_plain_loop(model: Callable[[], nn.Module], choices: dict[str, Any]) -> None:
    assert_runs_as_a_plain_loop(model, **choices)


def test_samples_in_pairs_are_not_divided_into_odd_micro_batches() -> None:
    of_six = experiment_of(Pairs, data=samples(24), global_batch=6)
    assert wb.plan(of_six, cluster(2)).micro_batch % 2 == 0
    with pytest.raises(
        PlanInfeasible, match=r"into micro-batches of 3, and there are no others\. .*another micro_batch"
    ):
        wb.plan(of_six, cluster(2), micro_batch=3, data=2)


def test_a_forward_that_needs_four_samples_keeps_its_batch_whole() -> None:
    plan = wb.plan(experiment_of(Fours), cluster(2))
    assert (plan.micro_batch, plan.data) == (BATCH, 1)
    assert "its forward does not run on two samples: RuntimeError" in plan.facts.coupled[0]


def test_a_price_that_only_values_tell_is_rough_and_said_so() -> None:
    notes = " ".join(wb.plan(experiment_of(OfTask), cluster()).notes)
    assert "The predicted time and memory of item at " in notes
    assert "are rough" in notes


def test_torch_cond_and_compiled_functions_run_after_a_plan_as_before() -> None:
    compiled = list[int]()

    @torch.compile(backend=lambda code, _: (compiled.append(1), code.forward)[1])
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    class Compiles(Net):
        def loss(self, e: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
            if float(e.detach().max()) > 1e9:  # runs as written
                e = e * 2
            return functional.cross_entropy(doubled(e), y)

    for model in (Branches, Compiles):
        wb.plan(experiment_of(model), cluster())
    compiled.clear()
    batch = default_collate(samples())
    Branches()(**batch).backward()
    doubled(torch.ones(5))
    assert compiled


def test_a_forward_that_reads_the_clock_is_refused_with_that_reason() -> None:
    class Clocked(Net):
        def loss(self, e: torch.Tensor, y: torch.Tensor, hot: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(e * (1 + time.perf_counter() % 7), y)  # clock: the fault itself

    with pytest.raises(CaptureError, match="computes something else each time that it is called with the same samples"):
        wb.plan(experiment_of(Clocked), cluster())
