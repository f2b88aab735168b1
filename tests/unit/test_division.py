"""Whether a batch may be divided is decided by numbers: the loss and gradients of micro-batches against the whole."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import workbench as wb
import workbench.capture.model as capture_model
from tests.distributed import zoo
from tests.distributed.harness import CPU, LINK
from tests.unit.capture_models import MODELS, Net, batch_for, captured, copies, interpret, loss_of
from tests.unit.coupled_models import COUPLED, WEIGHTED, Capacity, DecisionTransformer, Regression, samples_for
from workbench.base.errors import CaptureError, InvalidExperiment, PlanMismatch
from workbench.capture import build_meta
from workbench.capture.captured_model import CapturedModel
from workbench.capture.coupling import division
from workbench.capture.coupling.division import PARTS, Division, division_fault, forward_flops
from workbench.capture.export.opaque import opaque_calls
from workbench.cost.hardware import Cluster
from workbench.execution import comparison
from workbench.execution.comparison import check_numbers
from workbench.experiment import Experiment
from workbench.planning.planner import analytic_profile, check_labels


def experiment_of(model: Callable[[], nn.Module], samples: Any) -> Experiment:
    return Experiment.of(model=model, data=samples, steps=1, global_batch=8, seq_len=1)


def known_by_numbers(model: Callable[[], nn.Module], samples: Any) -> Division:
    """Return what numbers alone say, without what operations tell."""
    model_captured = CapturedModel(experiment_of(model, samples), 2)
    vars(model_captured)["graph"] = replace(model_captured.graph, coupled=())
    return model_captured.division


@pytest.mark.parametrize("how", COUPLED)
def test_numbers_alone_find_a_loss_that_micro_batches_change(how: str) -> None:
    [reason] = known_by_numbers(COUPLED[how], samples_for(how)).coupled
    assert reason.startswith("4 samples have the loss ")
    assert ("divide it by their number" in reason) == (how == "a sum")


@pytest.mark.parametrize("how", COUPLED)
def test_a_profile_keeps_such_a_batch_whole_and_the_whole_equals_plain_pytorch(how: str) -> None:
    samples = samples_for(how)
    assert analytic_profile(experiment_of(COUPLED[how], samples), Cluster(CPU, 2, 2, LINK, LINK)).coupled
    batch = torch.utils.data.default_collate(samples[:8])
    model, same = copies(COUPLED[how])
    expected, found = loss_of(model, batch), interpret(captured(same, batch), same, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    expected.backward()
    found.backward()
    for mine, theirs in zip(same.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", WEIGHTED)
def test_a_mean_over_weights_of_the_batch_is_divided_and_equals_the_whole(how: str) -> None:
    """The weights of a micro-batch are below the clamp of 1, and those of the batch above."""
    model = CapturedModel(experiment_of(WEIGHTED[how], samples_for(how)), 2)
    assert (model.graph.coupled, model.graph.unknown_coupling) == ((), "")
    assert model.division == Division()


def test_a_divisor_that_no_rule_combines_keeps_the_batch_whole() -> None:
    def loss(found: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((found - y).square() * w).sum() / (w.sum() * w.square().sum()).sqrt()

    profile = analytic_profile(
        experiment_of(lambda: Regression(loss), samples_for("RMSE")), Cluster(CPU, 2, 2, LINK, LINK)
    )
    assert profile.coupled


EQUAL = ("bert", "bert with dropout", "electra-discriminator", "mixtral", "swin", "vit", "resnet", *MODELS)
COUPLED_ON_PURPOSE = ("NoGradStatistic", "NoGradBuffers", "Codebook")
"""Models whose layers compute with means over the batch."""


@pytest.mark.parametrize("name", dict.fromkeys(EQUAL))
def test_numbers_raise_no_false_alarm(name: str) -> None:
    """Among these are dropout, BatchNorm, experts, bf16 in forward, buffers, and labels whose number differs."""
    make = {**zoo.MODELS, **MODELS}[name]
    graph = captured(build_meta(make), batch_for(name, 2))
    fault = division_fault(graph, make, lambda count, trial: batch_for(name, count, trial), PARTS)
    assert bool(fault) == (name in COUPLED_ON_PURPOSE), fault


@pytest.mark.parametrize("name", ["bert", "gpt2", "unet"])
def test_the_size_of_a_forward_is_about_what_torch_counts(name: str) -> None:
    model = zoo.MODELS[name]()
    batch = batch_for(name, 2)
    found = forward_flops(captured(model, batch))
    with FlopCounterMode(display=False) as counter:
        model(**batch)
    assert 0.9 < found / counter.get_total_flops() < 2, "operations that are bound by memory count, too"


class Noisy(Net):
    """Noise, dropout within attention, a choice per sample: none of it compares samples."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x) + torch.rand(len(x), 1) + torch.randint(0, 5, (len(x), 1))
        hidden = self.stem(x + 0.1 * noise).unsqueeze(1)
        hidden = functional.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=0.3).squeeze(1)
        masked = torch.where(torch.rand(len(x), 16) < 0.5, hidden, torch.zeros(()))
        masked = masked * torch.distributions.Beta(torch.full((16,), 0.4), 0.4).sample() + torch.empty(16).random_(0, 3)
        return functional.cross_entropy(self.head(self.body(masked)), labels)


def test_random_numbers_of_the_forward_do_not_look_like_coupling() -> None:
    samples = [{"x": torch.randn(8), "labels": torch.tensor(index % 5)} for index in range(16)]
    assert known_by_numbers(Noisy, samples).coupled == ()


class Drawing(nn.Module):
    """A layer that export cannot follow, with numbers of Python's and NumPy's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 0.5 + random.random() + float(np.random.rand())
        return scale * self.linear(x) if float(self.linear.weight.detach().norm()) > 0 else x


class WithDrawing(Net):
    """Three such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Drawing() for _ in range(3))


def test_numbers_that_an_opaque_layer_draws_do_not_look_like_coupling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "NOISE_FACTOR", 0)  # a difference between two forwards excuses nothing
    samples = [{"x": torch.randn(8), "labels": torch.tensor(index % 5)} for index in range(16)]
    model = CapturedModel(experiment_of(WithDrawing, samples), 2)
    assert sum(len(opaque_calls(block.code.graph)) for block in model.graph.blocks) == 3
    assert model.division.coupled == ()


def test_a_coincidence_of_the_data_hides_nothing() -> None:
    """All weights of the samples are one, so that dividing by their norm looks like a mean until they change."""
    samples = [{**sample, "w": torch.ones(1)} for sample in samples_for("RMSE")]

    def loss(found: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((found - y).square() * w).mean() / w.square().mean().sqrt()

    [reason] = known_by_numbers(lambda: Regression(loss), samples).coupled
    assert reason.startswith("6 samples")


class SortedBatch(nn.Module):
    """A classifier of inputs to which those of another sample are added: experts sort tokens, and put them back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.linear(x + x.sort(0, descending=True).values), labels)


SORTED = [{"x": torch.arange(24.0, 32.0) + 3 * each, "labels": torch.tensor(0)} for each in range(8)]


def test_samples_on_which_the_model_saturates_hide_nothing() -> None:
    assert known_by_numbers(SortedBatch, SORTED).coupled


def test_an_order_that_matters_is_no_rounding() -> None:
    """Experts without room for all tokens take the first: another order of the samples has another loss, too."""
    [reason] = known_by_numbers(Capacity, samples_for("tokens")).coupled
    assert reason.startswith("4 samples have the loss ")


def test_numbers_agree_that_a_mean_over_a_choice_of_the_data_is_divided_by_the_choices_of_all() -> None:
    for selects in (False, True):
        model = CapturedModel(experiment_of(lambda s=selects: DecisionTransformer(s), samples_for("episodes")), 2)
        assert (len(model.graph.label_counts), model.division) == (1, Division())


def test_evidence_shows_the_digits_that_differ_or_the_gradient() -> None:
    def loss(found: torch.Tensor, y: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(found, y) + 1e-2 * found.mean().square()

    [reason] = known_by_numbers(lambda: Regression(loss), samples_for("RMSE")).coupled
    one, other = re.match(r"4 samples have the loss ([\d.]+), and ([\d.]+) in 2 micro-batches", reason).groups()  # type: ignore[union-attr]
    assert one != other

    def of_gradient(found: torch.Tensor, y: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
        factor = 1 + found.mean().square().detach()
        return functional.mse_loss(found, y) * factor / factor + factor * (found - found.detach()).mean()

    [reason] = known_by_numbers(lambda: Regression(of_gradient), samples_for("RMSE")).coupled
    assert re.search(r"also in 2 micro-batches, which differ in the gradient of \S+ by [\d.]+% of its norm", reason)


def test_a_micro_batch_that_is_not_finite_is_called_that() -> None:
    def loss(found: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        chosen = w > w.max() * 0.9999
        return ((found - y).square() * chosen).sum() / (chosen * found.detach().exp()).sum()

    samples = [{**sample, "w": torch.tensor([float(index)])} for index, sample in enumerate(samples_for("RMSE"))]
    [reason] = known_by_numbers(lambda: Regression(loss), samples).coupled
    assert "nan" not in reason


def test_a_planted_wrong_combination_rule_is_caught_before_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [{key: field[0] for key, field in batch_for("bert", 1, seed).items()} for seed in range(8)]
    experiment = experiment_of(zoo.MODELS["bert"], samples)
    assert CapturedModel(experiment, 2).division == Division()
    with monkeypatch.context() as planted:  # the mean of the micro-batches' means
        planted.setattr(capture_model, "mean_losses", lambda _: ())
        [reason] = CapturedModel(experiment, 2).division.coupled
        assert "in 2 micro-batches" in reason
    right = capture_model.label_count

    def twice(*arguments: Any) -> Any:
        count = right(*arguments)
        [output] = count.code.graph.find_nodes(op="output")
        with count.code.graph.inserting_before(output):
            doubled = count.code.graph.call_function(torch.ops.aten.mul.Tensor, (output.args[0], 2))
        output.args = (doubled,)
        count.code.recompile()
        return count

    monkeypatch.setattr(capture_model, "label_count", twice)
    with pytest.raises(CaptureError, match="does not compute the model's loss: 2 samples have the loss"):
        _ = CapturedModel(experiment, 2).division


def test_a_model_too_large_for_numbers_is_named_in_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "MOST_FLOPS", 10)
    profile = analytic_profile(experiment_of(SortedBatch, SORTED), Cluster(CPU, 2, 2, LINK, LINK))
    assert profile.coupled == ()
    assert "is not known: the model is too large" in profile.notes[-1]
    assert "sort at " in profile.notes[-1]
    assert "A run that divides the batch compares numbers on its first device" in profile.notes[-1]


def test_a_large_model_of_unknown_operations_is_compared_before_the_first_update(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(division, "MOST_FLOPS", 10)
    experiment = experiment_of(SortedBatch, SORTED)
    plan = wb.plan(experiment, Cluster(CPU, 2, 2, LINK, LINK), data=2, micro_batch=2)
    model = SortedBatch()
    model_captured = CapturedModel(experiment, 2, model)
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "MOST_FLOPS_ON_CPU", 1)
        check_numbers(experiment, plan, model_captured, model)
    assert "Not comparing the loss of micro-batches" in capsys.readouterr().out
    with pytest.raises(
        PlanMismatch,
        match=r"6 samples have the loss .* not followed past sort at .* Plan again with batch_coupling='gather'",
    ):
        check_numbers(experiment, plan, model_captured, model)
    check_numbers(experiment.replace(batch_coupling="allow"), plan, model_captured, model)
    monkeypatch.setattr(division, "MOST_FLOPS", 1e10)  # it was compared when it was planned
    check_numbers(experiment, plan, model_captured, model)


def test_the_dropout_of_a_gpu_does_not_look_like_coupling() -> None:
    def loss(found: torch.Tensor, y: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
        return (torch.native_dropout(found, 0.5, True)[0] - y).square().mean()

    assert known_by_numbers(lambda: Regression(loss), samples_for("RMSE")) == Division()


class Writer(nn.Module):
    """A model of text whose loss compares logits with labels that stand `shift` positions later."""

    def __init__(self, shift: int = 1, sees_later: bool = False, begins_at_zero: bool = False, length: int = 0) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 32), nn.Linear(32, 300)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.table = nn.Parameter(torch.zeros(length or 64, 32))
        self.shift, self.sees_later, self.length = shift, sees_later, length
        if begins_at_zero:
            nn.init.zeros_(self.head.weight)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tokens = input_ids.shape[1]
        hidden = self.embedding(input_ids) + self.table[: self.length or tokens]
        mask = None if self.sees_later else nn.Transformer.generate_square_subsequent_mask(tokens)
        logits = self.head(self.layer(hidden, src_mask=mask))
        return functional.cross_entropy(
            logits[:, : tokens - self.shift].flatten(0, 1), labels[:, self.shift :].flatten()
        )


class Recurrent(Writer):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids).cumsum(1)  # a recurrence that gives each token the same weight
        targets = functional.pad(labels, (0, self.shift), value=-100)[:, self.shift :]
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class ShiftsItsInput(Writer):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.pad(input_ids, (1, 0))[:, :-1], labels)


@pytest.mark.parametrize(
    ("model", "sees"),
    [
        (Writer, False),
        (lambda: Writer(2), False),
        (lambda: Writer(begins_at_zero=True), False),
        (lambda: Writer(length=32), False),
        (Recurrent, False),
        (lambda: ShiftsItsInput(0), False),
        (lambda: Writer(0), True),
        (lambda: Writer(sees_later=True), True),
        (lambda: Writer(0, begins_at_zero=True), True),
        (lambda: Writer(0, length=32), True),
        (lambda: Recurrent(0), True),
        (lambda: ShiftsItsInput(0, sees_later=True), True),
    ],
)
def test_numbers_show_whether_a_model_sees_the_label_that_it_predicts(
    model: Callable[[], nn.Module], sees: bool
) -> None:
    ids = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(0))
    assert division.sees_its_labels(model, {"input_ids": ids}, None, "writer") == sees


def test_a_causal_model_of_text_that_copies_its_input_is_refused_before_it_is_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    texts = [f"The {number}th of {number * number} foxes jumps over a dog." for number in range(200)]
    text = wb.data.documents(texts, vocab_size=300, objective="clm", progress=False)
    mixed = wb.data.mixture([(text, 1), (wb.data.documents(texts[::-1], vocab_size=300, objective="clm"), 1)])
    for data in (text, mixed):
        experiment = Experiment.of(model=lambda: Writer(0), data=data, steps=1, global_batch=8, seq_len=32)
        with pytest.raises(InvalidExperiment, match="sees the tokens that it predicts, and would learn to copy"):
            check_labels(experiment, experiment.build)
    with pytest.raises(InvalidExperiment, match="sees the tokens that it predicts"):
        wb.plan(experiment, Cluster.of("h200", gpus=1))
    right = experiment.replace(model=Writer)
    check_labels(right, right.build)
    # A larger model is tried by the rank that has built it.
    monkeypatch.setattr(comparison, "MOST_TRIED_BY_PLAN", 0)
    model = Writer(0)
    with pytest.raises(InvalidExperiment, match="sees the tokens that it predicts"):
        check_numbers(experiment, None, CapturedModel(experiment, 2, model), model)  # type: ignore[arg-type]
