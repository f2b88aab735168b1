"""A run is evaluated on a second set of the class of its own held-out set, which is the usual case."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import workbench as wb


class Sums:
    """Random vectors and their sums."""

    def __init__(self, size: int, salt: int = 0) -> None:
        self.size, self.salt = size, salt

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(1000 * self.salt + index))
        return {"x": x, "y": x.sum(-1, keepdim=True)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.outer(torch.tanh(self.inner(x))) - y) ** 2).mean()}


def test_a_second_set_of_the_class_of_the_held_out_set_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    held_out = wb.Evaluation(every=2, data=Sums(8, salt=1))
    experiment = wb.Experiment.of(
        model=Net, data=Sums(64), steps=2, global_batch=4, evaluation=held_out, checkpoint_every=2
    )
    run = wb.launch(experiment, wb.plan(experiment, pipeline=1, data=1))
    run.wait(timeout=120)
    own = run.evaluations().eval_loss[-1]
    other = run.evaluate(Sums(40, salt=9))
    assert (other.count, other.data) == (40, "Sums")
    assert other.loss != own
