"""What changes while a run trains is that of a plain loop, under every plan, and goes on after a stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.distributed.own_machine import eventually
from tests.distributed.real_worker import Ranks, Words, curve, directory, experiment, plan, trained
from workbench.execution.checkpoint.files import complete_checkpoints
from workbench.experiment import Experiment
from workbench.rundir import RunDir, read_events
from workbench.runs.run import Run

STEPS = 12


class Reversed(Words):
    """The words in another order, and fewer of them."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: field.flip(0) for name, field in super().__getitem__(index).items()}


def plain(asked: Experiment, batches: Callable[[int], dict[str, torch.Tensor]]) -> list[float]:
    """Return the losses of a loop without any of the project's runtime."""
    model, losses = asked.build(), []
    update = torch.optim.AdamW(model.parameters(), lr=asked.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(STEPS):
        loss = model(**batches(step)).loss
        losses.append(loss.item())
        update.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
    return losses


def asked(**changes: Any) -> Experiment:
    fields = {"dropout": 0.0, "steps": STEPS, "lr_schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0}
    return experiment(**{**fields, "checkpoint_every": 5, **changes})


def interrupted(path: Path, wanted: Experiment, first: dict[str, Any], second: dict[str, Any]) -> RunDir:
    """Train under one plan until its first checkpoint, kill the ranks, and go on under another plan."""
    run = directory(path, wanted, plan(wanted, **first))
    ranks = Ranks(run, plan(wanted, **first).world)
    eventually(lambda: complete_checkpoints(run.checkpoints) != [])
    ranks.kill(first=0)
    return trained(path, wanted, plan(wanted, **second), complete_checkpoints(run.checkpoints)[0])


def assert_losses(run: RunDir, losses: list[float]) -> None:
    found = curve(run)
    assert [found[step][0] for step in range(1, STEPS + 1)] == pytest.approx(losses, abs=2e-5)


def test_a_mixture_whose_weights_change_is_that_of_a_plain_loop_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    words, others = Words(), Reversed()
    wanted = asked(data=wb.data.mixture([(words, 3), (others, 1)], changes={7: (1, 1)}))
    alone = [wanted.replace(data=source) for source in (words, others)]
    seeds = [own.seed for _, own in wanted.data._read(wanted)]
    orders = [each.replace(seed=seed) for each, seed in zip(alone, seeds, strict=True)]
    sources, taken = [each.data.dataset(each) for each in orders], [0, 0]

    def batch(step: int) -> dict[str, torch.Tensor]:
        items = []
        for source, count in enumerate((6, 2) if step < 7 else (4, 4)):
            items += [sources[source][taken[source] + number] for number in range(count)]
            taken[source] += count
        return {name: torch.stack([item[name] for item in items]) for name in items[0]}

    run = interrupted(tmp_path / "run", wanted, {"data": 2, "zero": 1}, {"pipeline": 2})
    assert_losses(run, plain(wanted, batch))
    used = [event for event in read_events(run.events) if event["type"] == "data_use"]
    assert used[-1]["step"] == STEPS
    assert [(part["samples"], part["epochs"]) for part in used[-1]["parts"]] == [(62, 0.062), (34, 34 / 7)]
    assert "544 tokens of Reversed (4.86 epochs, read more than once)" in Run(run.path)._repr_html_()
