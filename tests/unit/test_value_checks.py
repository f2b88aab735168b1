"""Checks of values that raise do not stop the capture; the plan says that training does not make them."""

from __future__ import annotations

import pytest
import torch

from tests.unit.capture_models import Checks, Net, batch_for, captured

BATCH = batch_for("Net")


def test_each_check_is_a_note_with_its_line() -> None:
    notes = captured(Checks(), BATCH).notes
    texts = ("labels.max() >= 5", "x.abs().max().item() > 100", "assert not torch.isnan(loss)")
    assert all(sum(text in note and "capture_models.py:" in note for note in notes) == 1 for text in texts), notes
    assert len(notes) == len(texts)
    assert all("as if it passed in every step" in note for note in notes)
    assert captured(Net(), BATCH).notes == ()


class Mixed(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        if (x > 9).any() and not (x < -9).any():
            raise ValueError("x is not balanced.")
        return super().body(x)


class Caught(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        try:
            assert x.sum() > 0
        except AssertionError:
            x = -x
        return super().body(x)


class Branches(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = -x
        return super().body(x)


@pytest.mark.parametrize("model", [Mixed, Caught, Branches])
def test_what_may_be_a_branch_runs_as_written(model: type[Net]) -> None:
    how, why_whole = captured(model(), BATCH).notes
    assert "runs as written" in how
    assert "depends on the values of a tensor" in how
    assert "has one pipeline stage" in why_whole


def test_the_truth_of_tensors_is_as_before_after_a_capture() -> None:
    before = torch.Tensor.__bool__, torch.SymBool.__bool__
    captured(Checks(), BATCH)
    assert (torch.Tensor.__bool__, torch.SymBool.__bool__) == before
    assert "__bool__" not in vars(torch.Tensor) or vars(torch.Tensor)["__bool__"] is before[0]
    with pytest.raises(AssertionError):
        assert not torch.tensor(True)
