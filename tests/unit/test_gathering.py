"""The part of a loss that compares samples is cut off, planned and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from tests.distributed.harness import CPU, LINK
from tests.unit.coupled_models import COUPLED, GATHERED, WIDTH, SupCon, TwoTower, samples_for
from workbench.base.errors import CaptureError, DataError, PlanInfeasible, PlanMismatch
from workbench.capture import SampleDim, captured_model
from workbench.capture.captured_model import CapturedModel
from workbench.capture.coupling import division
from workbench.capture.coupling.gathering import TAIL, join_rows, part_rows
from workbench.cost.hardware import Cluster
from workbench.cost.memory import ParameterTable, stage_state
from workbench.execution.comparison import check_numbers
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.planner import facts_of
from workbench.planning.runnable import check_runnable
from workbench.sparsity import Static

BATCH = 8


def experiment_of(model: Callable[[], nn.Module], samples: Any, **options: Any) -> Experiment:
    return Experiment.of(model=model, data=samples, steps=1, global_batch=BATCH, seq_len=1, **options)


def cluster(devices: int) -> Cluster:
    return Cluster(CPU, devices, devices, LINK, LINK)


def test_rows_of_groups_are_joined_and_parted_again() -> None:
    """`cat([x, y])` of a micro-batch holds its x and then its y; that of the whole batch, every x and then every y."""
    x, y = torch.arange(12.0).view(6, 2), -torch.arange(12.0).view(6, 2)
    parts = [torch.cat([x[at : at + 2], y[at : at + 2]]).T for at in (0, 2, 4)]
    rows = SampleDim("both", dim=1, groups=2)
    whole = join_rows(rows, parts)
    torch.testing.assert_close(whole, torch.cat([x, y]).T)
    torch.testing.assert_close(part_rows(rows, whole, 3), parts)


@pytest.mark.parametrize("how", GATHERED)
def test_a_loss_that_compares_samples_is_cut_off_and_numbers_confirm_the_cut(how: str) -> None:
    captured = CapturedModel(experiment_of(GATHERED[how], samples_for(how)), 2)
    graph = captured.gathered(BATCH)
    assert graph.blocks[-1].name == TAIL
    assert {rows.name for rows in graph.gathered} == set(graph.blocks[-1].receives)
    assert captured.gathering_fault == ""


class _Encoder(SupCon):
    """A model whose towers are given."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*layers)


class _DropsInItsLoss(TwoTower):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y)
        return loss + functional.dropout(loss, 0.5)


class _Counts(TwoTower):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x * self.calls, y)


def normalised() -> nn.Module:
    return _Encoder(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "mixup": (
        COUPLED["mixup by flip"],
        "mixup by flip",
        "its first layers are given mixtures of samples, which other replicas have",
    ),
    "BatchNorm in a tower": (normalised, "SupCon", "a layer before its loss may compare samples"),
    "dropout in the loss": (_DropsInItsLoss, "two towers", "its loss draws random numbers"),
    "a counter in a tower": (_Counts, "two towers", "a layer updates a buffer, which would happen twice"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_be_gathered_is_refused_with_its_operation(how: str) -> None:
    model, samples, reason = REFUSED[how]
    with pytest.raises(CaptureError, match=rf"cannot be gathered: {reason} \(.* at .*\)\."):
        CapturedModel(experiment_of(model, samples_for(samples)), 2).gathered(BATCH)


def test_a_wrong_combination_of_gathered_rows_is_caught_before_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_groups(rows: SampleDim, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts, rows.dim)

    monkeypatch.setattr(division, "join_rows", without_groups)
    experiment = experiment_of(GATHERED["SupCon"], samples_for("SupCon"))
    assert not wb.plan(experiment, cluster(1)).gathers
    with pytest.raises(PlanInfeasible, match="Gathered over micro-batches, it would be another loss: 8 samples have"):
        wb.plan(experiment, cluster(1), micro_batch=2)


def gathered_plan(how: str = "two towers with a temperature") -> tuple[Experiment, Plan]:
    experiment = experiment_of(GATHERED[how], samples_for(how))
    return experiment, wb.plan(experiment, cluster(2), data=2, micro_batch=2)


def test_a_plan_that_gathers_says_so_and_is_priced_with_one_more_forward() -> None:
    experiment, plan = gathered_plan()
    assert plan.gathers
    assert (plan.block_names[-1], plan.num_microbatches) == (TAIL, 2)
    assert "1.0 KiB of 8 samples in 2 micro-batches, each of which runs forward twice, on each of 2" in plan.notes[-1]
    assert Plan.from_json(plan.to_json()) == plan
    once = wb.plan(experiment, cluster(2), data=2, micro_batch=4)
    [twice], [alone] = plan.stages, once.stages
    assert once.gathers
    assert twice.forward_ms > 1.5 * alone.forward_ms * 2 / 4
    assert check_runnable(experiment, plan, facts_of(experiment, CapturedModel(experiment, 2))) is None


def test_a_plan_says_whether_numbers_confirmed_that_samples_are_gathered_rightly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment, plan = gathered_plan("RMSE")
    assert plan.notes[-1].endswith("those of the whole batch, as numbers confirm.")
    monkeypatch.setattr(division, "MOST_FLOPS", 1.0)
    monkeypatch.setattr(captured_model, "division_fault", lambda *_: "never compared")
    large = wb.plan(experiment, cluster(2), data=2, micro_batch=2)
    assert large.gathers
    assert "follows from the operations alone: the model is too large to compare numbers here" in large.notes[-1]


def test_a_large_model_is_gathered_where_its_experiment_says_that_it_compares_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ComparesInOrder(TwoTower):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            views = zip(self.attention, (x.transpose(0, 1), y.transpose(0, 1)), strict=True)
            one, other = (layer(each, each, each)[0].mean(0) for layer, each in views)
            return self.logit_scale * (one * other.sort(0).values).mean()

    monkeypatch.setattr(division, "MOST_FLOPS", 1.0)
    experiment = experiment_of(ComparesInOrder, samples_for("two towers"))
    assert not wb.plan(experiment, cluster(2), data=2, micro_batch=2).gathers
    asked = experiment.replace(batch_coupling="gather")
    plan = wb.plan(asked, cluster(2), data=2, micro_batch=2)
    assert plan.gathers
    check_numbers(asked, plan, CapturedModel(asked, 2, model := ComparesInOrder()), model)


def test_a_batch_in_one_piece_is_planned_without_gathering() -> None:
    experiment = experiment_of(GATHERED["SupCon"], samples_for("SupCon"))
    plan = wb.plan(experiment, cluster(1))
    assert not plan.gathers
    assert TAIL not in plan.block_names


def test_a_pipeline_over_replicas_gathers_in_its_last_stage_alone() -> None:
    how = "two towers with a temperature"
    experiment = experiment_of(GATHERED[how], samples_for(how))
    plan = wb.plan(experiment, cluster(4), pipeline=2, data=2, micro_batch=2)
    assert plan.gathers
    assert (plan.block_names[plan.stages[-1].end_block - 1], plan.num_microbatches) == (TAIL, 2)
    assert check_runnable(experiment, plan, facts_of(experiment, CapturedModel(experiment, 2))) is None
    profile = plan.origin[0].gathered
    with_tail, without = (
        stage_state(each, ParameterTable(each), plan).workspace for each in (profile, replace(profile, tail=None))
    )
    assert not (with_tail - without)[:, :-1].any()
    assert (with_tail - without)[0, -1] == pytest.approx(2 * profile.tail.gathered_bytes)


def test_the_tail_of_a_model_of_one_block_is_a_stage_of_its_own() -> None:
    experiment = experiment_of(GATHERED["Dice over the batch"], samples_for("Dice over the batch"))
    plan = wb.plan(experiment, cluster(2), pipeline=2, micro_batch=2)
    assert plan.block_names[1:] == (TAIL,)
    with pytest.raises(PlanInfeasible, match="more stages than the 2 blocks"):
        wb.plan(experiment, cluster(4), pipeline=4)


def test_what_cannot_be_gathered_is_said_where_the_degrees_divide_a_coupled_batch() -> None:
    experiment = experiment_of(GATHERED["SupCon"], samples_for("SupCon"))
    with pytest.raises(PlanInfeasible, match=r"gathered only with tensor=1 and one stage .* Leave micro_batch=1 out"):
        wb.plan(experiment, cluster(1), micro_batch=1)


def test_an_experiment_with_sparse_weights_is_not_gathered_and_says_why() -> None:
    experiment = experiment_of(GATHERED["SupCon"], samples_for("SupCon"), sparsity=Static(0.5, block=4))
    with pytest.raises(PlanInfeasible, match="not gathered over micro-batches in an experiment with sparsity"):
        wb.plan(experiment, cluster(1), micro_batch=2)


@pytest.mark.parametrize("how", [how for how in GATHERED if how != "Hugging Face's CLIP"])  # it has SigLIP's towers
def test_an_experiment_that_evaluates_is_gathered(how: str) -> None:
    experiment = experiment_of(GATHERED[how], samples_for(how), eval_data=samples_for(how))
    plan = wb.plan(experiment, cluster(2), data=2, micro_batch=2)
    assert plan.gathers
    assert plan.coupled
    assert plan.prediction.evaluation_s > 0
    assert check_runnable(experiment, plan, facts_of(experiment, CapturedModel(experiment, 2)), progress=False) is None


@pytest.mark.parametrize("micro_batch", [2, BATCH])
def test_fewer_held_out_samples_than_the_loss_compares_are_refused(micro_batch: int) -> None:
    experiment = experiment_of(GATHERED["SupCon"], samples_for("SupCon"), eval_data=samples_for("SupCon", BATCH - 1))
    plan = wb.plan(experiment, cluster(1), micro_batch=micro_batch)
    with pytest.raises(DataError, match=r"7 held-out samples, fewer than the 8 of the global batch.* smaller global_b"):
        check_runnable(experiment, plan, facts_of(experiment, CapturedModel(experiment, 2)), progress=False)


def test_a_plan_that_gathers_does_not_start_another_experiment() -> None:
    experiment, plan = gathered_plan("SupCon")
    sparse = experiment.replace(sparsity=Static(0.5, block=4))
    with pytest.raises(PlanMismatch, match=r"gathers the samples of its loss.* experiment has sparsity"):
        check_runnable(sparse, plan, facts_of(sparse, CapturedModel(sparse, 2)))
    other = experiment_of(lambda: _Encoder(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)), samples_for("SupCon"))
    named = experiment.replace(model=other.model)
    with pytest.raises((PlanMismatch, CaptureError)):
        check_runnable(named, plan, facts_of(named, CapturedModel(named, 2)))


def test_a_gathered_loss_of_a_large_model_is_compared_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, plan = gathered_plan("SupCon")
    monkeypatch.setattr(division, "MOST_FLOPS", 1.0)
    model = SupCon()
    model_captured, before = CapturedModel(experiment, 2, model), model.state_dict()
    expected = {name: value.clone() for name, value in before.items()}
    check_numbers(experiment, plan, model_captured, model)
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
    monkeypatch.setattr(division, "join_rows", lambda rows, parts: torch.cat(parts, rows.dim))
    with pytest.raises(PlanMismatch, match=r"4 samples have the loss .* Nothing was updated.* micro_batch=8"):
        check_numbers(experiment, plan, model_captured, model)
