"""Ranks that read what was captured train the same bits as ranks that capture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.distributed.real_worker import DEVICE, LINK, curve, trained
from tests.unit.coupled_models import TwoTower, samples_for
from workbench.capture import captured_model, stored_captures
from workbench.cost.hardware import Cluster
from workbench.experiment import Experiment
from workbench.planning.planner import plan as make_plan
from workbench.record.event_log import read_events

READS_CAPTURES = True


class SquaredLength:
    """A metric of the user that reads what forward returned beside the loss."""

    def __call__(self, outputs: Any, _batch: Any) -> tuple[torch.Tensor, int]:
        logits = outputs["prediction_logits"]
        return logits.square().sum(), logits.numel()


def bert(folder: Path) -> Experiment:
    """A named model with an evaluation, a metric and samples, in two stages."""
    (folder / "text.txt").write_text("\n\n".join(f"A text of {at} words about a model." for at in range(200)))
    return wb.Experiment(
        model=wb.models.bert(hidden_size=16, num_layers=2, num_heads=2),
        data=wb.data.corpus(str(folder / "text.txt")),
        steps=3,
        global_batch=4,
        seq_len=16,
        evaluation=wb.Evaluation(every=2, samples=4, metrics={"squared": SquaredLength()}),
        samples=wb.Samples(prompts=("A [MASK] of",), every=2),
        checkpoints=wb.Checkpoints(keep=0),
    )


def towers(_: Path) -> Experiment:
    """A module of the user whose loss is gathered over micro-batches."""
    data = samples_for("two towers", 16)
    checkpoints = wb.Checkpoints(keep=0)
    return wb.Experiment(model=TwoTower, data=data, steps=3, global_batch=8, checkpoints=checkpoints)


@pytest.mark.parametrize(
    ("experiment", "degrees"), [(bert, {"pipeline": 2}), (towers, {"data": 2})], ids=["bert", "gathered"]
)
def test_ranks_that_read_a_capture_train_the_same_bits(
    experiment: Any, degrees: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    # What other tests of this process have compiled or patched, because of which nothing would be stored here
    monkeypatch.setattr(stored_captures, "_is_edited_meanwhile", lambda _: False)
    monkeypatch.setattr(captured_model, "patches", lambda _: [])
    asked = experiment(tmp_path)
    plan = make_plan(asked, Cluster(DEVICE, 2, 2, LINK, LINK), micro_batch=2, **degrees)
    assert plan.num_microbatches == 2
    found = []
    for name in ("captures", "reads"):
        run = trained(tmp_path / name, asked, plan)
        between = [event for event in read_events(run.events) if event["type"] in ("eval", "samples")]
        evaluated = [{**event, "time": 0, "seconds": 0} for event in between]
        found.append((curve(run), evaluated, files()))
    assert found[0] == found[1]  # a rank that captures writes a file anew
    assert len(found[0][0]) == 3
    assert len(found[0][2]) >= 2


def files() -> dict[str, int]:
    """Return the stored captures, each with the number of its file on disk."""
    return {entry.name: entry.inode() for entry in os.scandir(stored_captures.folder())}
