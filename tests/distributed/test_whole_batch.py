"""Losses that count or compare the samples of a batch are plain PyTorch's of the whole batch, on real processes."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

import workbench as wb
from tests.distributed.harness import forced_plan, launch, plain_step, unlike_plain
from tests.distributed.real_worker import Ranks, curve, directory
from tests.distributed.test_every_plan import trainer_of
from tests.patience import PATIENCE_S
from tests.unit.coupled_models import COUPLED, WEIGHTED, WIDTH, Mixup, samples_for
from workbench.capture import Graph, capture, spec_of
from workbench.experiment import Experiment
from workbench.record.rundir import read_json

TOLERANCE = 1e-5
BATCH = 8
DIVIDED: tuple[dict[str, Any], ...] = (
    {"pipeline": 1, "data": 2, "num_microbatches": 2},
    {"pipeline": 1, "data": 2, "num_microbatches": 2, "zero": 3},
    {"pipeline": 2, "num_microbatches": 4},
)
WHOLE: tuple[dict[str, Any], ...] = ({"pipeline": 2, "num_microbatches": 1, "schedule": "gpipe"},)
"""What the planner leaves of a loss that compares samples."""
COMPARING = ("RMSE", "two towers with a temperature", "Hugging Face's CLIP", "SupCon", "mixup by flip")


CASES: list[tuple[str, dict[str, Any]]] = [
    (name, choices) for names, cases in ((WEIGHTED, DIVIDED), (COMPARING, WHOLE)) for name in names for choices in cases
]


def _size(choices: dict[str, Any]) -> int:
    return int(BATCH // choices["num_microbatches"] // choices.get("data", 1))


@functools.cache
def _captured(name: str, size: int) -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    model, batch = {**COUPLED, **WEIGHTED}[name]().train(), samples_for(name, size)
    specs = {key: spec_of(key, field) for key, field in default_collate(batch).items()}
    return model, capture(model, specs, name=name)


def _capture_all() -> None:
    for name, choices in CASES:
        _captured(name, _size(choices))


def _compared(_rank: int) -> dict[str, float]:
    """Largest relative difference of a loss or a gradient from plain PyTorch's, for every model and division."""
    return {f"{name}, {choices}": _difference(name, choices) for name, choices in CASES}


def _difference(name: str, choices: dict[str, Any]) -> float:
    (model, graph), batch = _captured(name, _size(choices)), default_collate(samples_for(name, BATCH))
    plain = plain_step(model, batch)
    plan = forced_plan(graph, micro_batch=_size(choices), **choices)
    return max(unlike_plain(trainer_of(copy.deepcopy(model), graph, plan), batch, *plain, floor=1.0))


@pytest.mark.representative
def test_losses_that_count_or_compare_samples_equal_plain_pytorch_of_the_whole_batch() -> None:
    found = launch(_compared, 2, ahead=_capture_all)
    wrong = {case: error for case, error in found.items() if not error <= TOLERANCE}
    assert not wrong, wrong


class LargeSorted(Mixup):
    """A sorted batch in a forward of 21 GFLOP for two samples, which `wb.plan` does not compute."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(2048, 2048, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tokens = x.detach().repeat(1, 2048 // WIDTH).unsqueeze(1).expand(len(x), 1280, 2048)
        mixed = x + self.large(tokens).mean(2).mean(1, keepdim=True)
        return functional.cross_entropy(self.layers(mixed + mixed.sort(0, descending=True).values), labels)


def test_a_run_of_a_large_model_whose_loss_compares_samples_ends_before_its_first_update(tmp_path: Path) -> None:
    samples = samples_for("mixup by flip", BATCH)
    experiment = Experiment.of(model=LargeSorted, data=samples, steps=1, global_batch=BATCH, seq_len=1)
    plan = wb.plan(experiment, data=2, micro_batch=2)
    assert "compares numbers on its first device before the first update" in plan.notes[-1]
    run = directory(tmp_path / "run", experiment, plan)
    ranks = Ranks(run, plan.world)
    for process in ranks.processes:
        process.join(PATIENCE_S)
        assert process.exitcode == 1
    said = read_json(run.error(0))["message"]
    assert re.search(r"samples have the loss .* sort at .* Nothing was updated", said), said
    assert not curve(run)
