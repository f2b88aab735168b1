"""What a plan stores of the forward tells another computation from the same one for another number of samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.harness import CPU, LINK
from workbench.base.errors import PlanMismatch
from workbench.capture.captured_model import CapturedModel, computation_of
from workbench.capture.graph import Computation
from workbench.cost.hardware import Cluster
from workbench.experiment import Experiment
from workbench.planning.plan import Plan, _stored
from workbench.planning.planner import facts_of
from workbench.planning.planner import plan as make_plan
from workbench.planning.runnable import check_facts


class Net(nn.Module):
    power, factor, dim = 2, 0.5, -1

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.factor * layer(x)
        x = x.reshape(len(x) * 2, 2).sum(self.dim).reshape(len(y), 2)
        return ((x[:, 0] - y).abs() ** self.power).mean()


class FromASet(nn.Module):
    """Layers in the order of a set, which another process draws anew."""

    names = ("alpha", "beta", "gamma")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in self.names})

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for name in sorted(self.layers):
            x = torch.tanh(self.layers[name](x))
        return ((x[:, 0] - y) ** 2).mean()


class SampleBySample(Net):
    """A loop over the samples, which is unrolled."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.stack([sample.flip(0) for sample in x]), y)


def _captured(model: Any, samples: int, **values: Any) -> CapturedModel:
    changed = type("Net", (model,), {"__module__": __name__, **values})
    data = [{"x": torch.randn(4), "y": torch.tensor(1.0)}] * 8
    experiment = Experiment.of(model=Net, data=data, global_batch=4, seq_len=1)
    return CapturedModel(experiment, samples, changed())


@pytest.mark.parametrize("model", [Net, SampleBySample])
@pytest.mark.parametrize("samples", [1, 2, 3, 8])
def test_the_number_of_samples_makes_no_difference(model: Any, samples: int) -> None:
    assert _captured(model, samples).difference_from(_captured(model, 2).computation) is None


@pytest.mark.parametrize("values", [{"power": 4}, {"factor": 0.25}, {"dim": 1}, {"power": 1.5}])
def test_each_number_and_operation_makes_one_and_has_a_line(values: dict[str, Any]) -> None:
    planned = _captured(Net, 2).computation
    for samples in (2, 4):
        line = _captured(Net, samples, **values).difference_from(planned)
        assert line is not None
        assert {"factor": "factor", "dim": "self.dim", "power": "self.power"}[next(iter(values))] in line.text
    longer = _captured(Net, 2, forward=lambda self, x, y: Net.forward(self, torch.relu(x), y))
    assert longer.difference_from(planned) is not None


def test_another_device_or_model_is_not_compared() -> None:
    captured = _captured(Net, 2)
    other = computation_of(_captured(Net, 2, factor=2.0).graph, "another model")
    assert captured.difference_from(other) is None


def test_a_stored_plan_tells_what_it_was_made_for() -> None:
    stored = Computation("a", 2, "b", ("0 c", "d:1:-2"))
    assert "computation" in Plan.__dataclass_fields__
    assert _stored().core_schema
    assert stored.first_difference(Computation("a", 4, "b", ("0 c", "d:2:-2"))) is None
    assert stored.first_difference(Computation("a", 4, "b", ("0 c", "d:3:-2"))) == 1
    assert stored.first_difference(Computation("a", 2, "b", ("0 c",))) == 1


def test_a_constructor_that_goes_through_a_set_is_told_to_sort_it_and_not_to_plan_again() -> None:
    data = [{"x": torch.randn(4), "y": torch.tensor(1.0)}] * 8
    experiment = Experiment.of(model=FromASet, data=data, global_batch=4, seq_len=1)
    plan = make_plan(experiment, Cluster(CPU, 2, 2, LINK, LINK), pipeline=2)
    reordered = type("FromASet", (FromASet,), {"names": ("gamma", "alpha", "beta")})()
    captured = CapturedModel(experiment, plan.micro_batch, reordered)
    assert captured.graph.parameters.keys() == {
        f"layers.{name}.{part}" for name in FromASet.names for part in ("weight", "bias")
    }
    with pytest.raises(PlanMismatch, match=r"another order in this process .* sorted\(names\)") as refused:
        check_facts(experiment, plan, facts_of(experiment, captured))
    assert "Plan" not in str(refused.value)
