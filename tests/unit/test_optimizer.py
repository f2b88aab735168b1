"""The optimiser computes the same bits as PyTorch's; its rates and schedules are checked before any process starts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.cost.optimizer_cost import optimizer_cost
from workbench.cost.profile import ADAMW
from workbench.errors import InvalidExperiment, PlanInfeasible, PlanMismatch
from workbench.optimizers.adamw import OffloadedAdamW, PartwiseAdamW
from workbench.optimizers.building import parameter_groups
from workbench.optimizers.schedules import learning_rate_factor


@pytest.mark.parametrize(
    ("optimizer_type", "fused"), [(PartwiseAdamW, None), (PartwiseAdamW, True), (OffloadedAdamW, None)]
)
def test_updates_and_state_equal_those_of_torch(optimizer_type: Any, fused: bool | None) -> None:
    def trained(make: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,), (2, 2))]
        groups = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}]
        optimizer = make(groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-6, fused=fused)
        for step in range(5):
            for weight in weights[: 2 + step % 2]:  # the last has no gradient in some steps
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return [weight.detach() for weight in weights], optimizer.state_dict()

    found, expected = trained(optimizer_type), trained(torch.optim.AdamW)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    assert found[1].keys() == expected[1].keys()
    torch.testing.assert_close(found[1]["state"], expected[1]["state"], rtol=0, atol=0)


def tiny(**changes: Any) -> wb.Experiment:
    fields = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 400, "max_positions": 32}
    data = wb.data.corpus("demo", vocab_size=400)
    return wb.Experiment(**{"model": wb.models.bert(**fields), "data": data, "seq_len": 32, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adam"}, "optimizer='adam' is not one of the choices"),
        ({"lr_schedule": "steps"}, "lr_schedule='steps' is not one of the choices"),
        ({"lr_schedule": lambda _step: -1.0}, "lr_schedule returned -1.0 for step 0"),
        ({"lr_schedule": lambda: 1.0}, "lr_schedule raised TypeError for step 0"),
        ({"lr_schedule": float, "warmup_steps": 2}, "warmup_steps=2 is given, and lr_schedule is a callable"),
        ({"rate_scale": {"*": 0.0}}, "to numbers greater than 0"),
        ({"rate_scale": {}}, "to numbers greater than 0"),
        ({"rate_scale": 0.5}, "to numbers greater than 0"),
    ],
)
def test_wrong_rates_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidExperiment, match=re.escape(message)):
        tiny(**changes)


def test_rates_go_by_the_first_pattern_that_matches() -> None:
    names = {"embed.weight": (4, 2), "layer.weight": (2, 2), "layer.bias": (2,), "norm.weight": (2,)}
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in names.items()}
    experiment = tiny(learning_rate=2.0, weight_decay=0.1, rate_scale={"embed*": 1.0, "layer.*": 0.5})
    groups = parameter_groups(parameters, experiment)
    found = {name: (group["lr"], group["weight_decay"]) for group in groups for name in group["names"]}
    decayed, plain = 0.1, 0.0
    assert found == {
        "embed.weight": (2.0, decayed),
        "layer.weight": (1.0, decayed),
        "layer.bias": (1.0, plain),
        "norm.weight": (2.0, plain),
    }


def test_a_schedule_of_ones_own_is_described_and_rebuilt() -> None:
    experiment = tiny(lr_schedule=half, rate_scale={"*": 0.5}, optimizer="sgd")
    described = json.loads(json.dumps(experiment.to_json()))
    assert described["lr_schedule"]["name"] == "half"
    assert wb.Experiment.from_json(described, functions={"lr_schedule": half}) == experiment
    with pytest.raises(InvalidExperiment, match="Only the description of half is here"):
        learning_rate_factor(0, 1, 2, wb.Experiment.from_json(described).lr_schedule)


def half(_step: int) -> float:
    return 0.5


def test_a_pattern_without_a_parameter_is_refused_before_planning() -> None:
    with pytest.raises(InvalidExperiment, match=r"The pattern '\*attentoin\*' of rate_scale matches none"):
        wb.plan(tiny(rate_scale={"*attentoin*": 0.5, "*": 1.0}), wb.Cluster.of("h200", gpus=1))


def test_only_adamw_can_be_offloaded() -> None:
    cluster = wb.Cluster.of("h200", gpus=1)
    with pytest.raises(PlanInfeasible, match="the experiment trains with lamb, whose state stays on the device"):
        wb.plan(tiny(optimizer="lamb"), cluster, offload_optimizer=True)
    plan = wb.plan(tiny(), cluster, offload_optimizer=True)
    with pytest.raises(PlanMismatch, match="trains with lamb, whose state stays on the device"):
        wb.launch(tiny(optimizer="lamb"), plan)
    assert not wb.plan(tiny(optimizer="sgd"), cluster, memory_limit_gib=1.0).offload_optimizer


@pytest.mark.parametrize(
    ("optimizer", "state", "update"),
    [
        ("sgd", 4, 44),  # 11 passes: weight decay 3, momentum 2 + 3, update 3
        ("lamb", 8, 132),
    ],
)
def test_state_and_traffic_are_found_by_running_the_optimizer(optimizer: str, state: int, update: int) -> None:
    found = optimizer_cost(tiny(optimizer=optimizer))
    assert (found.state_bytes, found.update_bytes) == (state, update)
    assert optimizer_cost(tiny()).state_bytes == ADAMW


def test_a_plan_holds_the_state_of_its_optimizer() -> None:
    cluster = wb.Cluster.of("h200", gpus=1)
    adamw, sgd = (
        wb.plan(tiny(optimizer=name), cluster, offload_optimizer=False).stages[0].memory for name in ("adamw", "sgd")
    )
    assert sgd.optimizer == adamw.optimizer // 2
    assert sgd.parameters == adamw.parameters
