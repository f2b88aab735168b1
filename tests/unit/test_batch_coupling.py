"""Losses that mix the samples of a batch are found, and planned so that they keep their value."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.distributed import zoo
from tests.distributed.harness import CPU, LINK
from tests.unit.capture_models import Net, ResNet, batch_for, captured
from tests.unit.coupled_models import Capacity, DecisionTransformer, Reader, samples_for
from workbench.base.errors import InvalidExperiment, PlanInfeasible, PlanMismatch
from workbench.capture import Graph, capture, spec_of
from workbench.capture.captured_model import CapturedModel, Facts
from workbench.capture.coupling.division import Division
from workbench.cost.graph_profiler import profile_graph
from workbench.cost.hardware import Cluster
from workbench.experiment import Experiment
from workbench.planning import planner
from workbench.planning.plan import Plan
from workbench.planning.runnable import check_facts
from workbench.planning.search import what_if
from workbench.runs.registry import Summary, notes_of_plans

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_GENERATOR = torch.Generator().manual_seed(0)
BATCH = {name: torch.randn(4, 8, generator=_GENERATOR) for name in ("x", "y")} | {"labels": torch.arange(4)}


class Pairs(Net):
    """Two encodings of each sample; `loss` compares them."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        one, other = (self.head(self.body(self.stem(value))) for value in (x, y))
        return self.loss(one, other, labels)


def clip(one: torch.Tensor, other: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    scores = 9 * functional.normalize(one, dim=-1) @ functional.normalize(other, dim=-1).T
    here = torch.arange(len(one), device=one.device)
    return (functional.cross_entropy(scores, here) + functional.cross_entropy(scores.T, here)) / 2


def siglip(one: torch.Tensor, other: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    return -functional.logsigmoid((2 * torch.eye(len(one), device=one.device) - 1) * (one @ other.mT)).mean()


def balanced(one: torch.Tensor, _other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    chosen = functional.one_hot(one.topk(2, -1)[1], 5).float().sum(1)
    return functional.cross_entropy(one, labels) + (one.softmax(-1).mean(0) * chosen.mean(0)).sum()


COUPLED: dict[str, tuple[Loss, str]] = {
    "CLIP": (clip, "matmul"),
    "SigLIP": (siglip, "matmul"),
    "load balance": (balanced, "mul"),
    "einsum": (lambda a, b, _: torch.einsum("bd,cd->bc", a, b).exp().mean(), "einsum"),
    "distances": (lambda a, b, _: (a[:, None] - b[None]).square().sum(-1).exp().mean(), "sub"),
    "spread over the batch": (lambda a, _b, labels: functional.cross_entropy(a, labels) - a.std(0).mean(), "std"),
    "layer norm over the batch": (lambda a, b, _: (functional.layer_norm(a, a.shape) * b).mean(), "layer_norm"),
    "layer norm of a number for each": (
        lambda a, b, _: functional.layer_norm((a * b).sum(-1), (len(a),)).exp().mean(),
        "layer_norm",
    ),
    "RMS norm over the batch": (lambda a, b, _: (functional.rms_norm(a, a.shape) * b).mean(), "rms_norm"),
    "softmax over the batch": (lambda a, b, _: (a.softmax(0) * b).sum(), "softmax"),
    "mean subtracted": (lambda a, _b, _l: (a - a.mean(0)).square().mean(), "sub"),
}
SEPARATE: dict[str, Loss] = {
    "cross-entropy": lambda a, _b, labels: functional.cross_entropy(a, labels),
    "sums of means": lambda a, b, _: a.square().mean() + 0.1 * functional.mse_loss(a, b) + (a * b).sum(-1).mean(),
    "a count of its own": lambda a, b, labels: ((a - b).square().mean(-1) * (labels >= 0)).sum() / (labels >= 0).sum(),
    "within a sample": lambda a, b, _: (a[:, :, None] @ b[:, None]).softmax(-1).flatten(1).logsumexp(-1).mean(),
    "norms of each": lambda a, b, _: (
        functional.layer_norm(a * functional.rms_norm(b, b.shape[1:]), a.shape[1:]).square().sum(-1).sqrt().mean()
    ),
    "merged and split again": lambda a, b, _: (
        a.unsqueeze(1).expand(-1, 3, -1).reshape(-1, 5).view(-1, 3, 5) * b[:, None]
    ).mean(),
}


def graph_of(loss: Loss) -> Graph:
    return capture(Pairs(loss), {key: spec_of(key, value) for key, value in BATCH.items()}, name="pairs")


@pytest.mark.parametrize("how", COUPLED)
def test_an_operation_that_mixes_samples_is_named_with_its_line(how: str) -> None:
    loss, operation = COUPLED[how]
    found = graph_of(loss).coupled
    assert any(line.startswith(f"{operation} at {__file__}:") for line in found), found


@pytest.mark.parametrize("how", SEPARATE)
def test_a_loss_of_separate_samples_couples_nothing(how: str) -> None:
    assert graph_of(SEPARATE[how]).coupled == ()


class LooksUp(Net):
    """Tables of which each row has its gradient divided by how often the batch names it."""

    def __init__(self, table: Callable[..., nn.Module], *, by_position: bool = False) -> None:
        super().__init__()
        self.table, self.by_position = table(9, 16, scale_grad_by_freq=True), by_position

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        places = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        rows = self.table(places if self.by_position else ids)
        rows = rows.mean(1) if rows.dim() == 3 else rows
        return functional.cross_entropy(self.head(self.body(rows)), labels)


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("by_position", [False, True])
def test_a_gradient_that_counts_lookups_keeps_the_batch_whole(
    table: Callable[..., nn.Module], by_position: bool
) -> None:
    batch = {"ids": torch.arange(12).reshape(4, 3) % 9, "labels": torch.arange(4)}
    specs = {name: spec_of(name, field) for name, field in batch.items()}
    [line] = capture(LooksUp(table, by_position=by_position), specs, name="tables").coupled
    assert line.startswith("embedding")


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "electra-discriminator", "vit", "swin"])
def test_models_of_the_zoo_couple_nothing(name: str) -> None:
    assert captured(zoo.MODELS[name](), batch_for(name)).coupled == ()


def test_batch_norm_is_noted_and_does_not_restrict_the_plan() -> None:
    graph = captured(ResNet(), batch_for("ResNet"))
    assert graph.coupled == ()
    [note] = graph.notes_if_divided
    assert note.startswith("BatchNorm (10 layers) takes its statistics from one micro-batch")
    for choices in ({"data": 1, "micro_batch": 4}, {"data": 2, "micro_batch": 4}, {"data": 1, "micro_batch": 8}):
        plan = plan_of(graph, choices["data"], **choices)
        assert (note in plan.notes) == (plan.micro_batch < plan.global_batch), choices


class NormAsWritten(nn.Module):
    """A norm in code that export cannot follow."""

    def __init__(self, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) if float(x.detach().max()) < 1e9 else x


@pytest.mark.parametrize(
    ("norm", "noted"),
    [
        (lambda: nn.BatchNorm1d(16), "BatchNorm (4 layers) takes its statistics from one micro-batch"),
        (lambda: nn.BatchNorm1d(16, track_running_stats=False), "BatchNorm (4 layers)"),
        (lambda: nn.BatchNorm1d(16).eval(), ""),
        (lambda: lambda x: functional.instance_norm(x[:, None])[:, 0], ""),
        (lambda: nn.LayerNorm(16), ""),
    ],
)
def test_batch_norm_in_code_that_runs_as_written_is_noted_as_any_other(
    norm: Callable[[], Callable[[torch.Tensor], torch.Tensor]], noted: str
) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(NormAsWritten(norm()) for _ in range(4))

        def train(self, mode: bool = True) -> Self:
            for each in self.layers:
                each.training = mode
            return self

    found = captured(Model(), {name: BATCH[name] for name in ("x", "labels")}).notes_if_divided
    assert len(found) == bool(noted)
    assert all(note.startswith(noted) for note in found)


def free_nats(last: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A divergence of each unit, averaged over the batch, that counts above 0.05 only (arXiv:1606.04934)."""
    divergence = (last.square() - last.square().add(1e-3).log()).mean(0)
    return functional.cross_entropy(logits, labels) + divergence.clamp(min=0.05).sum()


def plain(_last: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, labels)


def softened(_last: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(logits, labels)
    return torch.where(loss > 1, loss, 0.1 * loss)


def hardest(_last: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = functional.cross_entropy(logits, labels, reduction="none")
    return losses[losses > 0.5].mean()


def hinged(last: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, labels) + (last[last[:, 0] > 0].sum(0) / len(last) - 3).relu().sum()


def flooded(_last: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(logits, labels, reduction="none").sort().values.mean()
    return (loss - 0.1).abs() + 0.1


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def doubled_free_nats(last: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return free_nats(Doubled.apply(last), logits, labels)


def halved(_last: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(logits, labels)
    if loss > 5:
        return loss / 2
    return loss


def scaled(_last: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(logits, labels)
    return loss * min(1.0, 5 / float(loss.detach().numpy()))


def halved_behind_a_loop(_last: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = torch.zeros(len(logits))
    for index, row in enumerate(logits):
        losses[index] = functional.cross_entropy(row, labels[index])
    return losses.mean() if losses.mean() < 5 else losses.mean() / 2


def chosen_by_sample(last: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Branches by single samples, checks, and a printed mean, none of which makes the loss one of the batch."""
    if (labels < 0).any() or last.abs().max() > 1e4 or not torch.isfinite(logits.mean()):
        raise ValueError(f"labels {labels}, mean {logits.mean():.2f}")
    f"{logits.mean():.2f}"
    rows = [row / row.norm() if row.norm() > 2 else row for row in logits]
    return functional.cross_entropy(torch.stack(rows), labels)


def finite(_last: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(logits, labels)
    return torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))


BENT: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "free nats behind an LSTM": (lambda: Reader(free_nats), "sequences", "clamp at "),
    "free nats behind a GRU": (lambda: Reader(free_nats, "GRU", batch_first=True), "sequences", "clamp at "),
    "free nats behind a cell": (lambda: Reader(free_nats, "GRUCell"), "sequences", "clamp at "),
    "a choice by the loss": (lambda: Reader(softened), "sequences", "gt at "),
    "a mean over a choice of the model": (lambda: Reader(hardest), "sequences", "mean at "),
    "a hinge on a sum over a choice": (lambda: Reader(hinged), "sequences", "relu at "),
    "a bend behind a sort over the batch": (lambda: Reader(flooded), "sequences", "abs at .* behind sort at "),
    "behind a function": (lambda: Reader(doubled_free_nats), "sequences", "clamp at .* behind Doubled at "),
    "a branch by the loss": (lambda: Reader(halved), "sequences", "gt at .* in .*, which runs as written"),
    "a number of the loss": (lambda: Reader(scaled), "sequences", "item at .* in .*, which runs as written"),
    "a branch behind a loop over samples": (lambda: Reader(halved_behind_a_loop), "sequences", "lt at "),
    "room for a part of the tokens": (Capacity, "tokens", "le at "),
}
"""Losses that bend a mean over the batch, or choose by it, where a few samples take one branch: model, data, reason."""
STRAIGHT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{kind: (lambda kind=kind: Reader(plain, kind), "sequences") for kind in ("LSTM", "GRU", "RNN")},  # type: ignore[misc]
    **{kind: (lambda kind=kind: Reader(plain, kind), "sequences") for kind in ("LSTMCell", "GRUCell")},  # type: ignore[misc]
    "in both directions": (lambda: Reader(plain, "LSTM", bidirectional=True, num_layers=2), "sequences"),
    "a check of the loss": (lambda: Reader(finite, batch_first=True), "sequences"),
    "a repeated mask": (lambda: DecisionTransformer(selects=False), "episodes"),
    "a mean over a choice of the data": (lambda: DecisionTransformer(selects=True), "episodes"),
}


def of_model(model: Callable[[], nn.Module], data: str) -> CapturedModel:
    samples = samples_for(data)
    return CapturedModel(Experiment.of(model=model, data=samples, steps=1, global_batch=8, seq_len=1), 2)


@pytest.mark.parametrize("how", BENT)
def test_a_bend_of_a_mean_over_the_batch_keeps_it_whole_although_no_numbers_show_it(how: str) -> None:
    model, data, reason = BENT[how]
    [found, *_] = of_model(model, data).division.coupled
    assert re.match(reason, found), found


@pytest.mark.parametrize("how", STRAIGHT)
def test_the_batch_is_followed_through_recurrent_layers_repeated_masks_and_choices(how: str) -> None:
    found = of_model(*STRAIGHT[how])
    assert (found.graph.coupled, found.graph.unknown_coupling) == ((), "")
    assert found.division == Division()


def test_code_that_runs_as_written_may_choose_by_sample_check_and_print() -> None:
    found = of_model(lambda: Reader(chosen_by_sample), "sequences")
    assert found.graph.unknown_coupling.startswith("model")
    assert found.division == Division()


def test_two_views_in_one_batch_are_followed_to_the_product_that_compares_them() -> None:
    def compared(one: torch.Tensor, other: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
        both = torch.cat([one, other]).tanh()
        first, second = both.chunk(2)
        return (first * second).mean() + torch.cat([first, second]).square().mean()

    assert (graph_of(compared).coupled, graph_of(compared).unknown_coupling) == ((), "")

    def contrasted(one: torch.Tensor, other: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
        both = torch.cat([one, other])
        return (both @ both.T).exp().mean()

    assert any(line.startswith("matmul at") for line in graph_of(contrasted).coupled)


def plan_of(graph: Graph, gpus: int, **choices: Any) -> Plan:
    cluster = Cluster(CPU, gpus, gpus, LINK, LINK)
    profile = profile_graph(graph, CPU, "fp32", compiled=False)
    return what_if(profile, cluster, global_batch=8, seq_len=1, **choices)


def test_a_coupled_batch_stays_in_one_micro_batch_on_one_replica() -> None:
    graph = graph_of(clip)
    plan = plan_of(graph, 2)
    assert (plan.data, plan.num_microbatches, plan.micro_batch, plan.pipeline) == (1, 1, 8, 2)
    assert "matmul at" in plan.notes[-1]
    assert Plan.from_json(plan.to_json()).notes == plan.notes
    assert all(row.micro_batch == 8 and row.data == 1 for row in plan.candidates)
    free = plan_of(replace(graph, coupled=()), 2)
    assert any(row.data == 2 for row in free.candidates)
    assert free.to_json()["notes"] == []


def test_a_plan_that_divides_a_coupled_batch_is_refused_when_the_model_is_built() -> None:
    """The plan was made for another loss, whose model has the same parameters."""
    graph = graph_of(clip)
    divided = plan_of(replace(graph, coupled=()), 2, data=2)
    known = Facts(graph.signature, reach="element", coupled=graph.coupled)
    with pytest.raises(PlanMismatch, match=r"compares samples of one batch \(matmul at .*batch_coupling='allow'"):
        check_facts(_experiment(), divided, known)
    check_facts(_experiment(batch_coupling="allow"), divided, known)
    check_facts(_experiment(), divided, replace(known, coupled=()))
    check_facts(_experiment(), plan_of(graph, 2), known)


def test_a_summary_of_runs_shows_the_notes_of_their_plans_once() -> None:
    coupled, free = plan_of(graph_of(clip), 2), plan_of(replace(graph_of(clip), coupled=()), 2)
    runs: Any = [SimpleNamespace(name=name, plan=plan) for name, plan in (("a", coupled), ("b", free), ("c", coupled))]
    notes = notes_of_plans(runs)
    assert notes == (f"a, c: {coupled.notes[0]}",)
    shown = Summary(("run",), (("a",),), "this machine", notes)
    assert notes[0] in repr(shown)
    assert "a, c: The loss compares samples of one batch" in shown._repr_html_()


def test_degrees_that_would_divide_a_coupled_batch_are_refused_with_the_way_out() -> None:
    fixed: dict[str, Any]
    for fixed in ({"data": 2}, {"micro_batch": 4}, {"micro_batch": 4, "data": 2}):
        choices = " and ".join(f"{name}={value}" for name, value in fixed.items())
        words = rf"samples of one batch.* all 8 must .* and {choices} divides them. Leave {choices} out.*'allow'"
        with pytest.raises(PlanInfeasible, match=words):
            plan_of(graph_of(clip), 2, **fixed)


def _experiment(**fields: Any) -> Experiment:
    samples = [{key: value[0] for key, value in BATCH.items()}] * 8
    return Experiment.of(model=lambda: Pairs(clip), data=samples, steps=1, global_batch=8, seq_len=1, **fields)


@pytest.mark.parametrize(("gpus", "limit_gib"), [(16, None), (1, 2e-5)])
def test_a_coupled_batch_that_suits_no_division_is_refused_with_devices_or_a_batch_that_do(
    gpus: int, limit_gib: float | None
) -> None:
    graph = graph_of(clip)
    with pytest.raises(PlanInfeasible, match="stay in one micro-batch") as refused:
        plan_of(graph, gpus, memory_limit_gib=limit_gib)
    found = re.search(r"(?:[Gg]ive the plan|choose a global batch of) (\d+)", str(refused.value))
    assert found, refused.value
    if limit_gib is None:
        assert f"wb.measure.local_cluster({found[1]})" in str(refused.value)
        assert plan_of(graph, int(found[1])).micro_batch == 8


def test_a_coupled_batch_is_divided_where_the_experiment_allows_it() -> None:
    cluster = Cluster(CPU, 2, 2, LINK, LINK)
    assert planner.analytic_profile(_experiment(), cluster).coupled
    profile = planner.analytic_profile(_experiment(batch_coupling="allow"), cluster)
    assert profile.coupled == ()
    assert "its value depends on the plan" in profile.notes[-1]
    with pytest.raises(InvalidExperiment, match="batch_coupling"):
        _experiment(batch_coupling="maybe")


def test_the_value_of_a_coupled_loss_does_depend_on_its_division() -> None:
    """What `coupled` says is so: the mean over two halves is another number."""
    for how, (loss, _) in COUPLED.items():
        torch.manual_seed(1)
        model: nn.Module = Pairs(loss)
        whole = model(**BATCH)
        halves = [model(**{key: value[half] for key, value in BATCH.items()}) for half in (slice(2), slice(2, 4))]
        assert abs(sum(halves) / 2 - whole) > 1e-4 * abs(whole), how
