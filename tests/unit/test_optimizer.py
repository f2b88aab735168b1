"""The optimiser computes the same bits as PyTorch's; its rates and schedules are checked before any process starts."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import workbench as wb
from workbench.base.errors import InvalidExperiment, PlanInfeasible, PlanMismatch
from workbench.base.tensors import TensorSpec
from workbench.capture import capture
from workbench.capture.blocks.hidden_matrices import Projections, hidden_matrices, matrices_in_words, projections
from workbench.cost.graph_profiler import optimizer_cost
from workbench.cost.memory import PRODUCTS, ROUND_ELEMENTS
from workbench.cost.profile import ADAMW
from workbench.execution.gradients import squared_norm
from workbench.optimizers import muon
from workbench.optimizers.adamw import BATCH_ELEMENTS, OffloadedAdamW, ShardedAdamW
from workbench.optimizers.building import ELEMENT, MODEL, TENSOR, build_optimizer, reach_of_update
from workbench.optimizers.muon import COEFFICIENTS, SAFETY, orthogonalisation_flops, orthogonalised, shared_out
from workbench.optimizers.parameters import learning_rate_factor, parameter_groups
from workbench.planning.plan import Plan


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_real_and_complex_parameters_are_updated_as_by_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(4, 3, dtype=dtype, generator=generator)
    found, expected = nn.Parameter(initial.clone()), nn.Parameter(initial.clone())
    experiment = tiny(learning_rate=0.01)
    betas, eps, decay = (getattr(experiment.optimizer, name) for name in ("betas", "eps", "weight_decay"))
    ours = build_optimizer({"weight": found}, experiment)
    theirs = torch.optim.AdamW([expected], lr=0.01, betas=betas, eps=eps, weight_decay=decay)
    for _ in range(3):
        gradient = torch.randn(4, 3, dtype=dtype, generator=generator)
        found.grad, expected.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


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


H200 = wb.Cluster.of("h200", gpus=1)


def tiny(**changes: Any) -> wb.Experiment:
    fields = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 400, "max_positions": 32}
    data = wb.data.corpus("demo", vocab_size=400)
    return wb.Experiment.of(**{"model": wb.models.bert(**fields), "data": data, "seq_len": 32, **changes})


class TwoMatrices(nn.Module):
    """A model that is captured in a moment, for tests of what does not depend on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(400, 8), nn.Linear(8, 8), nn.Linear(8, 400)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.relu(self.hidden(self.table(input_ids))))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def quick(**changes: Any) -> wb.Experiment:
    corpus = wb.data.corpus("demo", vocab_size=400, objective="clm")
    return tiny(model=TwoMatrices, data=corpus, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adam"}, "optimizer.algorithm='adam' is not one of the choices"),
        ({"lr_schedule": "steps"}, "lr_schedule='steps' is not one of the choices"),
        ({"lr_schedule": lambda _step: -1.0}, "lr_schedule returned -1.0 for step 0"),
        ({"lr_schedule": lambda: 1.0}, "lr_schedule raised TypeError for step 0: "),
        (
            {"lr_schedule": lambda _step: next(iter(()))},
            "raised StopIteration for step 0 without a message. It is called",
        ),
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
    for field in ("rate_scale", "decay_scale", "eps_scale", "grad_norm_scale", "fused_projections"):
        optimizer = "muon" if field == "fused_projections" else "adamw"
        with pytest.raises(InvalidExperiment, match=rf"The pattern '\*attentoin\*' of {field} matches none"):
            wb.plan(quick(optimizer=optimizer, **{field: {"*attentoin*": 2.0, "*": 1.0}}), H200)
    for field, value in (("clip_norm", 1.0), ("trained_during", (0, 1))):
        with pytest.raises(InvalidExperiment, match=rf"of {field} matches none"):
            wb.plan(quick(**{field: {"*attentoin*": value}}), H200)


def test_only_adamw_can_be_offloaded() -> None:
    cluster = wb.Cluster.of("h200", gpus=1)
    with pytest.raises(PlanInfeasible, match="the experiment trains with lamb, whose state stays on the device"):
        wb.plan(quick(optimizer="lamb"), cluster, offload_optimizer=True)
    plan = wb.plan(quick(), cluster, offload_optimizer=True)
    with pytest.raises(PlanMismatch, match="trains with lamb, whose state stays on the device"):
        wb.launch(quick(optimizer="lamb"), plan)
    assert not wb.plan(quick(optimizer="sgd"), cluster, memory_limit_gib=1.0).offload_optimizer


@pytest.mark.parametrize(
    ("optimizer", "state", "update"),
    [
        ("sgd", 4, 44),  # 11 passes: weight decay 3, momentum 2 + 3, update 3
        ("lamb", 8, 132),
        ("muon", 4, 68),  # momentum 3 passes, decay 2, direction 5, update 3; of square Gram matrices 4
    ],
)
def test_state_and_traffic_are_found_by_running_the_optimizer(optimizer: str, state: int, update: int) -> None:
    found = optimizer_cost(tiny(optimizer=optimizer))
    assert (found.state_bytes, found.update_bytes) == (state, update)
    assert optimizer_cost(tiny()).state_bytes == ADAMW


TORCHS = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients of `torch.optim.Muon`."""


def in_plain_fp32(matrix: torch.Tensor, *_torchs: Any) -> torch.Tensor:
    """Orthogonalise one matrix by Polar Express, without any code of Workbench."""
    x = matrix / (matrix.norm() * SAFETY + 1e-7)
    for a, b, c in COEFFICIENTS:
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    return x


@pytest.mark.parametrize(("scale", "torchs"), [("adamw_rms", "match_rms_adamw"), ("spectral", "original")])
@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_muon_equals_torchs_with_another_orthogonalisation(
    shape: tuple[int, int], scale: str, torchs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_plain_fp32)
    generator = torch.Generator().manual_seed(0)
    initial, vector = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    gradients = [torch.randn(shape, generator=generator) for _ in range(5)]
    found, expected = (nn.Parameter(initial.clone()) for _ in range(2))
    bias, biases = nn.Parameter(vector), nn.Parameter(vector.clone())
    rates = {"learning_rate": 0.02, "adamw_rate": 0.003}
    experiment = tiny(optimizer="muon", weight_decay=0.1, muon_scale=scale, **rates)
    matrices = {"weight": Projections()}
    ours = build_optimizer({"weight": found, "bias": bias}, experiment, matrices=matrices)
    muon = torch.optim.Muon([expected], lr=0.02, weight_decay=0.1, adjust_lr_fn=torchs)
    adamw = torch.optim.AdamW([biases], lr=0.003, weight_decay=0.0, betas=(0.9, 0.98))
    for gradient in gradients:
        found.grad, expected.grad = gradient.clone(), gradient.clone()
        bias.grad, biases.grad = torch.ones_like(bias), torch.ones_like(bias)
        for each in (ours, muon, adamw):
            each.step()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * (expected.detach() - initial).abs().max().item())
    torch.testing.assert_close(bias, biases, rtol=0, atol=0)
    assert ours.state[found].keys() == {"momentum_buffer"}
    assert ours.state[bias].keys() == {"step", "exp_avg", "exp_avg_sq"}


class InFp32(TorchFunctionMode):
    """Leaves tensors in fp32 that torch's Muon would cast to bf16."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].clone() if func is torch.Tensor.bfloat16 else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (1, 7)])
def test_with_torchs_coefficients_matrices_are_orthogonalised_as_torch_does(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "SAFETY", 1.0)
    batch = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalised(batch, TORCHS)
    with InFp32():
        expected = torch.stack([torch.optim._muon._zeropower_via_newtonschulz(m, TORCHS[0], 5, 1e-7) for m in batch])
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)


def test_the_page_has_the_coefficients_of_the_orthogonalisation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    rows = re.findall(r"^  \| \d \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    found = [(float(a) / SAFETY, float(b) / SAFETY**3, float(c) / SAFETY**5) for a, b, c in rows]
    assert found == [pytest.approx(each) for each in COEFFICIENTS]


def errors_of(dtype: torch.dtype, coefficients: Any) -> float:
    """Return the root mean square error of singular values that begin between 0.001 and 1 of the largest."""
    generator, side = torch.Generator().manual_seed(0), 96
    left, right = (torch.linalg.qr(torch.randn(side, side, generator=generator))[0] for _ in range(2))
    matrix = left @ torch.diag(torch.logspace(-2, 0, side)) @ right
    values = torch.linalg.svdvals(orthogonalised(matrix[None].to(dtype), coefficients)[0].double())
    return float((values - 1).square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_polar_express_leaves_a_smaller_error_of_singular_values_than_torchs_coefficients(dtype: torch.dtype) -> None:
    polar, torchs = errors_of(dtype, COEFFICIENTS), errors_of(dtype, TORCHS)
    assert polar < 0.12, polar
    assert torchs > 0.17, torchs


@pytest.mark.parametrize("safety", [SAFETY, 1.01])
def test_no_norm_lets_a_row_of_a_matrix_explode(safety: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All roundings of a row are alike in bf16, so that a margin for random ones does not suffice.

    The factor of Polar Express's authors stands beside ours, to show that these norms are bad ones.
    """
    coefficients = [
        (a * SAFETY / safety, b * (SAFETY / safety) ** 3, c * (SAFETY / safety) ** 5) for a, b, c in COEFFICIENTS
    ]
    monkeypatch.setattr(muon, "SAFETY", safety)
    generator, side, share = torch.Generator().manual_seed(0), 128, 0.37
    matrix = torch.randn(side, side, generator=generator)
    matrix[0] = 0
    matrix *= math.sqrt(1 - share**2) / matrix.norm()
    row = torch.randn(side, generator=generator)
    matrix[0] = row / row.norm() * share
    norms = torch.exp2(torch.linspace(0, 2, 128))[10:20]
    found = orthogonalised((matrix * norms[:, None, None]).bfloat16(), coefficients).float()
    largest = float(found.norm(dim=2).max())
    assert largest < 1.2 if safety == SAFETY else largest > 100, largest


@pytest.mark.parametrize("shape", [(2, 256, 512), (2, 256, 256)])
@pytest.mark.parametrize("norm", [1e-5, 1.0, 1e5])
def test_updates_in_bf16_are_near_those_in_fp32_whatever_the_norm(shape: tuple[int, ...], norm: float) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * norm / 256
    matrices[1] *= 1000
    exact = orthogonalised(matrices)
    errors = (orthogonalised(matrices.bfloat16()).float() - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    assert errors.max() < 0.04, errors


def test_a_matrix_of_zeros_is_not_updated() -> None:
    assert torch.equal(orthogonalised(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))


def updated(
    shapes: Mapping[str, Sequence[int]], projections: Mapping[str, Projections], skips: Sequence[float | None] = (None,)
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return matrices and their momenta after an update for each of `skips`; those that are skipped see NaN."""
    generator = torch.Generator().manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(*shape, generator=generator)) for name, shape in shapes.items()}
    optimizer = build_optimizer(parameters, tiny(optimizer="muon", muon_scale="spectral"), matrices=projections)
    assert isinstance(optimizer, muon.MuonAndAdamW)
    for skip in skips:
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            if skip:
                parameter.grad.fill_(torch.nan)
        optimizer.skips_update = None if skip is None else torch.tensor(skip)
        optimizer.step()
    momenta = {name: optimizer.state[parameter]["momentum_buffer"] for name, parameter in parameters.items()}
    return {name: parameter.detach() for name, parameter in parameters.items()}, momenta


def test_an_update_of_muon_that_is_skipped_on_the_device_changes_neither_weights_nor_momenta() -> None:
    shapes = {"a": (4, 6), "b": (6, 4), "c": (5, 5)}
    matrices = dict.fromkeys(shapes, Projections())
    expected = updated(shapes, matrices)
    for skips in ((0.0,), (0.0, 1.0), (0.0, 1.0, 1.0)):
        assert_equal(updated(shapes, matrices, skips), expected)


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_projections_of_a_matrix_are_updated_as_if_they_were_matrices() -> None:
    fused, _ = updated({"qkv": (24, 8)}, {"qkv": Projections(0, (8, 8, 8))})
    apart, _ = updated({"qkv": (24, 8)}, {"qkv": Projections(0, ())})
    assert not torch.allclose(fused["qkv"], apart["qkv"], atol=1e-5)
    for dim, sizes, repeats in ((0, (12, 6, 6), 1), (1, (12, 6, 6), 1), (0, (2, 2, 4), 3), (1, (6, 2), 3)):
        shape = (24, 8) if dim == 0 else (8, 24)
        parameter = nn.Parameter(torch.zeros(shape))
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        experiment = tiny(optimizer="muon", muon_scale="spectral", learning_rate=1.0, weight_decay=0.0)
        parameter.grad = gradient.clone()
        build_optimizer({"qkv": parameter}, experiment, matrices={"qkv": Projections(dim, sizes, repeats)}).step()
        owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).repeat(repeats)
        for index in range(len(sizes)):
            found, part = (each.transpose(0, dim)[owner == index].transpose(0, dim) for each in (parameter, gradient))
            alone = nn.Parameter(torch.zeros(part.shape))
            alone.grad = part.clone()
            build_optimizer({"part": alone}, experiment, matrices={"part": Projections(dim)}).step()
            torch.testing.assert_close(found, alone.detach(), rtol=0, atol=1e-5)


def test_the_flops_of_an_update_are_those_that_torch_counts() -> None:
    shapes = {"square": (16, 16), "wide": (8, 32), "tall": (32, 8), "qkv": (48, 16)}
    matrices = {name: Projections(0, (16, 16, 16) if name == "qkv" else ()) for name in shapes}
    with FlopCounterMode(display=False) as counter:
        updated(shapes, matrices)
    expected = sum(orthogonalisation_flops(shape, matrices[name]) for name, shape in shapes.items())
    assert counter.get_total_flops() == expected


def test_four_ranks_share_the_work_of_a_bert_within_a_tenth_of_a_quarter() -> None:
    layers = {"query": (1, 1), "key": (1, 1), "value": (1, 1), "output": (1, 1), "up": (4, 1), "down": (1, 4)}
    flops = {
        f"{layer}.{name}": orthogonalisation_flops([1024 * side for side in shape], Projections())
        for layer in range(24)
        for name, shape in layers.items()
    }
    owners = shared_out(flops, 4)
    loads = [sum(flops[name] for name in flops if owners[name] == rank) for rank in range(4)]
    assert max(loads) <= 1.1 * sum(flops.values()) / 4
    assert owners == shared_out(dict(reversed(flops.items())), 4), "every rank finds the same"


def test_sharing_out_ends_within_a_third_of_the_best_division() -> None:
    generator = random.Random(0)
    for _ in range(20):
        flops = {str(index): generator.randint(1, 30) for index in range(7)}
        owners = shared_out({name: float(each) for name, each in flops.items()}, 3)
        found = max(sum(flops[name] for name in flops if owners[name] == rank) for rank in range(3))
        best = min(
            max(sum(each for each, rank in zip(flops.values(), ranks, strict=True) if rank == own) for own in range(3))
            for ranks in itertools.product(range(3), repeat=7)
        )
        assert best <= found <= 4 / 3 * best


def test_rounds_of_an_update_and_of_its_price_have_as_many_elements() -> None:
    assert ROUND_ELEMENTS == BATCH_ELEMENTS
    assert len(COEFFICIENTS) * 3 == PRODUCTS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"muon_scale": "rms"}, "muon_scale='rms' is not one of the choices"),
        ({"optimizer": "adamw", "muon_scale": "spectral"}, "muon_scale can be given for muon alone"),
        ({"optimizer": "sgd", "adamw_rate": 1e-3}, "adamw_rate can be given for muon alone"),
        ({"optimizer": "lamb", "fused_projections": {"*": 3}}, "fused_projections can be given for muon alone"),
        ({"fused_projections": {"*": 1.5}}, "a whole number"),
        ({"adamw_rate": 0.0}, "adamw_rate=0.0"),
        ({"optimizer": "adamw", "adamw": ["*"]}, "adamw can be given for muon alone"),
        ({"adamw": []}, "is no list of patterns of parameter names"),
    ],
)
def test_wrong_choices_of_muon_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidExperiment, match=re.escape(message)):
        tiny(**{"optimizer": "muon", **changes})


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


class Sophia(torch.optim.SGD):
    """Divides by a curvature that a second pass estimates, as Sophia-G does every ten steps (arXiv:2305.14342)."""

    def update_hessian(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["hessian"] = parameter.grad**2

    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                curvature = self.state[parameter].setdefault("hessian", torch.zeros_like(parameter))
                parameter.data -= group["lr"] * parameter.grad / (1 + curvature)


class PassedBy(Sophia):
    """Is given what it cannot be called without, so that its code alone tells that it reads gradients."""

    def update_hessian(self, batch_size: int) -> None:  # type: ignore[override]  # noqa: ARG002
        super().update_hessian()


class WithoutHessian(Sophia):
    update_hessian = None  # type: ignore[assignment]


class Sharpness(torch.optim.SGD):
    """Moves the weights up the gradient before a second pass, as SAM does (arXiv:2010.01412)."""

    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += 0.05 * parameter.grad


class Inspected(torch.optim.SGD):
    """Has methods that no update needs: one that reads, one that forgets, and one that `step` calls itself."""

    def gradient_norm(self) -> float:
        return sum(float(parameter.grad.norm()) for group in self.param_groups for parameter in group["params"])

    def reset(self) -> None:
        self.state.clear()

    def halve(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= 2

    def step(self, closure: Any = None) -> None:
        self.halve()
        super().step(closure)


class Listed(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["factors"] = [parameter.grad]
        super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "reach"),
    [
        (torch.optim.RMSprop, ELEMENT),
        (WithoutHessian, ELEMENT),
        (Inspected, ELEMENT),
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
        (
            lambda groups: torch.optim.SGD(groups, lr=0.05),
            "lr=0.05, and its parameter groups have lr=0.0001",
        ),
        (
            lambda groups: torch.optim.AdamW(groups, weight_decay=0.3),
            "to the experiment, weight_decay=0.3, and leave",
        ),
        (Hidden, "goes on differently from a checkpoint"),
        (Noisy, "draws random numbers"),
        (Sophia, "has the method update_hessian(), which reads gradients or moves weights beside step()"),
        (PassedBy, "a subclass in which update_hessian is None"),
        (Sharpness, "has the method first_step()"),
        (Listed, "keeps a list as 'factors' of a parameter"),
    ],
)
def test_an_optimizer_that_cannot_train_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(InvalidExperiment, match=re.escape(message)):
        reach_of_update(tiny(optimizer=optimizer), SHAPES)


def test_plans_divide_only_what_an_optimizer_of_ones_own_allows() -> None:
    cluster = wb.Cluster.of("h200", gpus=2)
    whole, elementwise = quick(optimizer=torch.optim.Adafactor), quick(optimizer=torch.optim.RMSprop)
    assert {(plan.zero, plan.tensor) for plan in wb.search(whole, cluster)} == {(0, 1)}
    with pytest.raises(PlanInfeasible, match="zero=3 divides what the optimizer of Adafactor needs whole"):
        wb.plan(whole, cluster, zero=3)
    sharded = wb.plan(elementwise, cluster, zero=3, data=2)
    with pytest.raises(PlanMismatch, match="zero=3, which divides what the optimizer of Adafactor needs whole"):
        wb.launch(whole, sharded)
    with pytest.raises(InvalidExperiment, match="returned NoneType"):
        wb.plan(quick(optimizer=lambda _groups: None), cluster)
    rms, adamw = (wb.plan(each, cluster, zero=0, data=2).stages[0].memory for each in (elementwise, quick()))
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
    captured = captured_of(TinyModel())
    assert hidden_matrices(captured) == {"hidden.weight"}
    tied = wb.planning.graph(tiny())
    outer = {name for name, spec in tied.parameters.items() if len(spec.shape) == 2} - hidden_matrices(tied)
    assert outer == {f"bert.embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")} | {
        "cls.seq_relationship.weight"
    }


def wide(**changes: Any) -> wb.Experiment:
    """A BERT whose matrices are large enough for products to take longer than launching them."""
    return tiny(model=wb.models.bert(1024, 4, 16, vocab_size=400, max_positions=32), optimizer="muon", **changes)


def test_orthogonalisation_is_priced_by_its_flops_bytes_and_division() -> None:
    experiment = wide()
    graph = wb.planning.graph(experiment)
    matrices = projections(graph)
    flops = sum(orthogonalisation_flops(graph.parameters[name].shape, matrices[name]) for name in matrices)
    elements = sum(graph.parameters[name].numel for name in matrices)

    def priced(gpus: int, **choices: Any) -> Any:
        return wb.plan(experiment, wb.Cluster.of("h200", gpus=gpus), data=gpus, **choices)

    device = wb.Cluster.of("h200", gpus=1).device
    least_ms = 1e3 * flops / device.peak("bf16")
    alone = priced(1)
    assert least_ms < alone.prediction.orthogonalisation_ms < 3 * least_ms
    assert alone.prediction.orthogonalisation_ms < alone.prediction.optimizer_ms < alone.prediction.step_ms
    share = alone.prediction.orthogonalisation_ms / alone.prediction.step_ms
    assert f"({share:.1%}) of it to orthogonalise Muon's matrices" in repr(wb.planning.explain(alone))
    for zero in range(4):
        plan = priced(4, zero=zero)
        assert plan.shares_matrices == (True,)
        link = plan.cluster.intra
        sent_ms = 1e3 * 2 * elements * 3 / 4 / link.bandwidth / (1 if zero == 0 else 4)
        found = plan.prediction.orthogonalisation_ms
        assert least_ms / 4 + sent_ms < found < 3 * least_ms / 4 + 3 * sent_ms, zero


def test_replicas_orthogonalise_everything_themselves_where_that_is_faster_than_a_collective() -> None:
    cluster = wb.Cluster.of("h200", gpus=2)
    slow = replace(cluster, intra=replace(cluster.intra, latency_s=1.0))
    alone = wb.plan(tiny(optimizer="muon"), slow, data=2, zero=0)
    assert alone.shares_matrices == (False,)
    assert not alone.shares_matrices_of(0)
    assert alone.prediction.orthogonalisation_ms < 1e3, "no collective"
    assert wb.plan(tiny(optimizer="muon"), slow, data=2, zero=1).shares_matrices_of(0), "no rank has whole matrices"


def test_a_stored_plan_says_whether_its_ranks_share_matrices_out() -> None:
    cluster = wb.Cluster.of("h200", gpus=4)
    plan = wb.plan(wide(), cluster, pipeline=2, data=2, zero=0)
    assert plan.shares_matrices == (True, True)
    stored = plan.to_json()
    assert [Plan.from_json(stored).shares_matrices_of(rank) for rank in (0, 1)] == [True, True]
    earlier = {name: value for name, value in stored.items() if name != "shares_matrices"}
    assert Plan.from_json(earlier).shares_matrices_of(1), "plans that did not store it"
    with pytest.raises(PlanMismatch, match="shares_matrices has 1 entries for 2 pipeline ranks"):
        Plan.from_json({**stored, "shares_matrices": [True]})
    one = wb.plan(wide(), wb.Cluster.of("h200", gpus=1))
    assert not one.shares_matrices_of(0)
    assert wb.plan(quick(), cluster).shares_matrices == ()


def test_a_plan_of_another_optimiser_orthogonalises_nothing() -> None:
    plan = wb.plan(quick(), wb.Cluster.of("h200", gpus=1))
    assert plan.prediction.orthogonalisation_ms == 0
    assert "Muon" not in repr(wb.planning.explain(plan))


class Gated(nn.Module):
    """Fused queries, keys and values of unequal sizes, a gated feed-forward, and a matrix that is read whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.up = nn.Embedding(11, 8), nn.Linear(8, 16), nn.Linear(8, 24)
        self.packed, self.down, self.head = nn.Linear(8, 24, bias=False), nn.Linear(12, 8), nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        q, k, v = self.qkv(x).split([8, 4, 4], dim=-1)
        x = x + q * torch.cat([torch.sigmoid(k), v], dim=-1)
        a, b, c = self.packed(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + nn.functional.scaled_dot_product_attention(a, b, c).transpose(1, 2).flatten(2)
        gate, value = self.up(x).chunk(2, dim=-1)
        logits = self.head(self.down(nn.functional.silu(gate) * value))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def captured_of(model: nn.Module) -> Any:
    tokens = TensorSpec("tokens", (2, 4), "int64")
    return capture(model, {"tokens": tokens, "labels": replace(tokens, name="labels")}, name="tiny")


def test_projections_that_a_model_reads_apart_are_found_and_others_can_be_said() -> None:
    graph = captured_of(Gated())
    assert projections(graph) == {
        "qkv.weight": Projections(0, (8, 4, 4)),
        "packed.weight": Projections(0, (8, 8, 8)),
        "up.weight": Projections(0, (12, 12)),
        "down.weight": Projections(),
    }
    said = projections(graph, wb.Optimizer("muon", fused_projections={"down.*": 2, "up.*": 1, "qkv.*": 4}))
    assert said["down.weight"] == Projections(0, (4, 4))
    assert said["up.weight"] == Projections()
    assert said["qkv.weight"] == Projections(0, (4, 4, 4, 4))
    with pytest.raises(InvalidExperiment, match=r"down\.weight \(8, 12\) holds 3 projections, and its 8 outputs"):
        projections(graph, wb.Optimizer("muon", fused_projections={"down.*": 3}))
    gpt2 = tiny(model=wb.models.gpt2(16, 2, 2, vocab_size=400, max_positions=32))
    assert projections(wb.planning.graph(gpt2))["transformer.h.1.attn.c_attn.weight"] == Projections(1, (16, 16, 16))


class Interleaved(nn.Module):
    """Queries, keys and values of each head beside each other, rotated positions, and tables of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.added, self.whole, self.factor = nn.Parameter(torch.ones(4, 8)), nn.Embedding(4, 8), nn.Embedding(4, 8)
        self.latents, self.rows = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(11, 8))
        self.qkv, self.grouped, self.gated = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(8, 16)
        self.query, self.chunked, self.mix = nn.Linear(8, 8), nn.Parameter(torch.ones(16, 8)), nn.Linear(4, 4)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        angles = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.1])
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, -1)
        return torch.cat([one * self.cos - other * self.sin, other * self.cos + one * self.sin], -1)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = (self.tokens(tokens) + self.added + self.whole.weight) * nn.functional.softplus(self.factor.weight)
        x = x + nn.functional.one_hot(tokens, 11).float() @ self.rows
        query, key, value = self.qkv(x).view(-1, 4, 2, 12).transpose(1, 2).chunk(3, -1)
        attend = nn.functional.scaled_dot_product_attention
        x = x + attend(self.rotated(query), self.rotated(key), value).transpose(1, 2).flatten(2)
        groups = self.grouped(x).view(-1, 4, 2, 4, 2)  # two heads of queries share a key and a value, as in Falcon
        queries, shared = groups[..., :-2, :], [groups[..., [at], :].expand(-1, -1, -1, 2, -1) for at in (-2, -1)]
        x = x + attend(*(each.flatten(2, 3).transpose(1, 2) for each in (queries, *shared))).transpose(1, 2).flatten(2)
        gate = self.gated(x)
        x = x + nn.functional.silu(gate[..., ::2]) * gate[..., 1::2]
        one, other = (nn.functional.linear(x, part) for part in self.chunked.chunk(2))
        x = x + torch.tanh(one) * other + attend(self.query(self.latents), x, x)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2) + self.recurrent(x)[0]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_muon_takes_what_multiplies_and_reads_interleaved_projections_apart() -> None:
    graph = captured_of(Interleaved())
    assert projections(graph) == {
        "qkv.weight": Projections(0, (4, 4, 4), 2),
        "grouped.weight": Projections(0, (4, 2, 2), 2),
        "gated.weight": Projections(0, (1, 1), 8),
        "query.weight": Projections(),
        "chunked": Projections(0, (8, 8)),
        "mix.weight": Projections(),
        "recurrent.weight_ih_l0": Projections(0, (8,) * 4),
        "recurrent.weight_hh_l0": Projections(0, (8,) * 4),
    }
    of_muon, of_adamw = matrices_in_words(graph, wb.Optimizer("muon"))
    assert "qkv.weight (24 × 8) as 3 projections of 8, 8, 8 outputs, interleaved 2 times" in of_muon
    assert "tables that are looked up (rows, tokens.weight)" in of_adamw
    assert "tensors that no product multiplies by (added, latents, whole.weight, factor.weight)" in of_adamw
    chosen = wb.Optimizer("muon", parameters=["*.weight", "added"], adamw="*k*")
    modules = ("whole", "factor", "head", "grouped", "gated", "query", "mix")
    assert projections(graph, chosen).keys() == {"added", *(f"{name}.weight" for name in modules)}
    with pytest.raises(InvalidExperiment, match=r"With adamw=\['\*'\], Muon has none of the 15 trained parameters"):
        projections(graph, wb.Optimizer("muon", adamw=["*"]))


def test_a_plan_lists_what_muon_and_adamw_update() -> None:
    asked = quick(optimizer=wb.Optimizer("muon", adamw=["head.*"]))
    said = repr(wb.planning.explain(wb.plan(asked, H200)))
    assert "Muon updates 1 matrix: hidden.weight (8 × 8)." in said
    assert "AdamW updates tables that are looked up (table.weight); tensors that do not have two dims (2); what" in said
    with pytest.raises(InvalidExperiment, match="The pattern 'hiden' of adamw matches none of the 5 parameters"):
        wb.plan(quick(optimizer=wb.Optimizer("muon", adamw=["hiden"])), H200)


def test_a_plan_holds_the_state_of_its_optimizer() -> None:
    cluster = wb.Cluster.of("h200", gpus=1)
    adamw, sgd = (
        wb.plan(quick(optimizer=name), cluster, offload_optimizer=False).stages[0].memory for name in ("adamw", "sgd")
    )
    assert sgd.optimizer == adamw.optimizer // 2
    assert sgd.parameters == adamw.parameters
