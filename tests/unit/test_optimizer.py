"""The optimiser computes the same bits as PyTorch's; its rates and schedules are checked before any process starts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.capture import capture
from workbench.capture.hidden_matrices import hidden_matrices
from workbench.cost.optimizer_cost import optimizer_cost
from workbench.cost.profile import ADAMW
from workbench.errors import InvalidExperiment, PlanInfeasible, PlanMismatch
from workbench.execution.trainer import squared_norm
from workbench.optimizers.adamw import OffloadedAdamW, ShardedAdamW
from workbench.optimizers.building import build_optimizer
from workbench.optimizers.groups import parameter_groups
from workbench.optimizers.schedules import learning_rate_factor
from workbench.optimizers.user_optimizer import ELEMENT, MODEL, TENSOR, reach_of_update
from workbench.tensors import TensorSpec


@pytest.mark.parametrize(
    ("optimizer_type", "fused"), [(ShardedAdamW, None), (ShardedAdamW, True), (OffloadedAdamW, None)]
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


def test_a_norm_over_gradients_in_bf16_and_fp32_is_that_of_their_values_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(300, 70, generator=generator).to(dtype) for dtype in (torch.bfloat16, torch.float32) * 2]
    divisors = (1.0, 1.0, 4.0, 2.0)
    expected = sum(g.double().square().sum() / divisor for g, divisor in zip(gradients, divisors, strict=True))
    found = squared_norm(zip(gradients, divisors, strict=True), torch.device("cpu"))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_a_fused_update_is_left_out_on_the_device_and_is_otherwise_the_same() -> None:
    def trained(*skips: float | None) -> tuple[torch.Tensor, dict[str, Any]]:
        weight = nn.Parameter(torch.linspace(-1, 1, 8))
        optimizer = ShardedAdamW([weight], lr=1e-2, fused=True)
        for index, skip in enumerate(skips):
            weight.grad = torch.linspace(0, 1, 8) if not skip else torch.full((8,), torch.nan)
            optimizer.skips_update = None if skip is None else torch.tensor(skip)
            optimizer.step()
            assert weight.isfinite().all(), index
        return weight.detach(), optimizer.state_dict()["state"]

    for found in (trained(0.0, 0.0), trained(0.0, 0.0, 1.0), trained(0.0, 1.0, 0.0)):
        torch.testing.assert_close(found, trained(None, None), rtol=0, atol=0)


def tiny(**changes: Any) -> wb.Experiment:
    fields = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 400, "max_positions": 32}
    data = wb.data.corpus("demo", vocab_size=400)
    return wb.Experiment.of(**{"model": wb.models.bert(**fields), "data": data, "seq_len": 32, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adam"}, "optimizer.algorithm='adam' is not one of the choices"),
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
    assert not any("eps" in group for group in groups), "groups have an epsilon of their own only if it is scaled"
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
    assert described["optimizer"]["lr_schedule"]["name"] == "half"
    assert wb.Experiment.from_json(described, {"lr_schedule": half}) == experiment
    with pytest.raises(InvalidExperiment, match="Only the description of half is here"):
        learning_rate_factor(0, 1, 2, wb.Experiment.from_json(described).optimizer.lr_schedule)


def half(_step: int) -> float:
    return 0.5


def test_a_pattern_without_a_parameter_is_refused_before_planning() -> None:
    for field in ("rate_scale", "decay_scale", "eps_scale", "grad_norm_scale"):
        with pytest.raises(InvalidExperiment, match=rf"The pattern '\*attentoin\*' of {field} matches none"):
            wb.plan(tiny(**{field: {"*attentoin*": 0.5, "*": 1.0}}), wb.Cluster.of("h200", gpus=1))


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
        ("muon", 4, 82),  # momentum 3 passes, decay 2, direction 3 and 3 halves, norm, scaling and result in bf16
    ],
)
def test_state_and_traffic_are_found_by_running_the_optimizer(optimizer: str, state: int, update: int) -> None:
    found = optimizer_cost(tiny(optimizer=optimizer))
    assert (found.state_bytes, found.update_bytes) == (state, update)
    assert optimizer_cost(tiny()).state_bytes == ADAMW


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_muon_equals_that_of_torch_in_every_bit(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    initial, vector = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    gradients = [torch.randn(shape, generator=generator) for _ in range(5)]
    found, expected = (nn.Parameter(initial.clone()) for _ in range(2))
    bias = nn.Parameter(vector)
    experiment = tiny(optimizer="muon", learning_rate=0.02, weight_decay=0.1)
    ours = build_optimizer({"weight": found, "bias": bias}, experiment, matrices={"weight"})
    torchs = torch.optim.Muon([expected], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        found.grad, expected.grad, bias.grad = gradient.clone(), gradient.clone(), torch.ones_like(bias)
        ours.step()
        torchs.step()
    assert torch.equal(found, expected)
    assert ours.state[found].keys() == {"momentum_buffer"}
    assert ours.state[bias].keys() == {"step", "exp_avg", "exp_avg_sq"}


SHAPES = {"table": (11, 4), "hidden": (4, 4), "bias": (4,)}


class Hidden(torch.optim.SGD):
    """Divides its rate by an attribute that counts steps and is in no checkpoint."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        assert closure is None
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] / self.steps * parameter.grad


class Coupled(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step(closure)


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn_like(parameter)
        super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "reach"),
    [
        (torch.optim.RMSprop, ELEMENT),
        (lambda groups: torch.optim.SGD(groups, momentum=0.9), ELEMENT),
        (torch.optim.Adafactor, TENSOR),
        (Coupled, MODEL),
    ],
)
def test_how_far_an_update_reaches_is_found_by_updating_parts(optimizer: Any, reach: str) -> None:
    before = torch.get_rng_state()
    assert reach_of_update(tiny(optimizer=optimizer), SHAPES) == reach
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda _groups: None, "returned NoneType"),
        (lambda groups: torch.optim.SGD(groups[:1]), "ignores 1 of the model's parameters, among them bias."),
        (lambda groups: torch.optim.LBFGS([p for g in groups for p in g["params"]]), "step() is called without a"),
        (Hidden, "goes on differently from a checkpoint"),
        (Noisy, "draws random numbers"),
    ],
)
def test_an_optimizer_that_cannot_train_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(InvalidExperiment, match=re.escape(message)):
        reach_of_update(tiny(optimizer=optimizer), SHAPES)


def test_plans_divide_only_what_an_optimizer_of_ones_own_allows() -> None:
    cluster = wb.Cluster.of("h200", gpus=2)
    whole, elementwise = tiny(optimizer=torch.optim.Adafactor), tiny(optimizer=torch.optim.RMSprop)
    assert {(plan.zero, plan.tensor) for plan in wb.search(whole, cluster)} == {(0, 1)}
    with pytest.raises(PlanInfeasible, match="zero=3 divides what the optimizer of Adafactor needs whole"):
        wb.plan(whole, cluster, zero=3)
    sharded = wb.plan(elementwise, cluster, zero=3, data=2)
    with pytest.raises(PlanMismatch, match="zero=3, which divides what the optimizer of Adafactor needs whole"):
        wb.launch(whole, sharded)
    with pytest.raises(InvalidExperiment, match="returned NoneType"):
        wb.plan(tiny(optimizer=lambda _groups: None), cluster)
    rms, adamw = (wb.plan(each, cluster, zero=0, data=2).stages[0].memory for each in (elementwise, tiny()))
    assert rms.optimizer == pytest.approx(adamw.optimizer / 2, rel=1e-3)


def test_an_optimizer_of_ones_own_is_described_and_rebuilt() -> None:
    experiment = tiny(optimizer=torch.optim.RMSprop)
    described = json.loads(json.dumps(experiment.to_json()))
    assert described["optimizer"]["algorithm"]["name"] == experiment.optimizer.name == "RMSprop"
    functions = {"optimizer": torch.optim.RMSprop}
    assert wb.Experiment.from_json(described, functions).optimizer == experiment.optimizer


class TinyModel(nn.Module):
    """A language model of one hidden matrix whose output head is not its embedding table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.relu(self.hidden(self.table(tokens))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_muon_leaves_tables_and_heads_to_adamw() -> None:
    tokens = TensorSpec("tokens", (2, 4), "int64")
    captured = capture(TinyModel(), {"tokens": tokens, "labels": replace(tokens, name="labels")}, name="tiny")
    assert hidden_matrices(captured) == {"hidden.weight"}
    tied = wb.planning.graph(tiny())
    outer = {name for name, spec in tied.parameters.items() if len(spec.shape) == 2} - hidden_matrices(tied)
    assert outer == {f"bert.embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")} | {
        "cls.seq_relationship.weight"
    }


def test_muons_products_and_all_gathers_are_priced() -> None:
    def optimizer_ms(experiment: wb.Experiment, **choices: Any) -> float:
        return wb.plan(experiment, wb.Cluster.of("h200", gpus=2), data=2, **choices).prediction.optimizer_ms

    muon, adamw = tiny(optimizer="muon"), tiny()
    assert optimizer_ms(muon, zero=0) > optimizer_ms(adamw, zero=0)
    assert optimizer_ms(muon, zero=3) > optimizer_ms(muon, zero=0)


def test_a_plan_holds_the_state_of_its_optimizer() -> None:
    cluster = wb.Cluster.of("h200", gpus=1)
    adamw, sgd = (
        wb.plan(tiny(optimizer=name), cluster, offload_optimizer=False).stages[0].memory for name in ("adamw", "sgd")
    )
    assert sgd.optimizer == adamw.optimizer // 2
    assert sgd.parameters == adamw.parameters
