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


RAMP = {0: 4, 3: 8, 7: 16}


@pytest.mark.parametrize("legs", [({"pipeline": 2}, {"data": 2, "zero": 2}), ({"data": 2, "zero": 0}, {"pipeline": 2})])
def test_a_batch_that_grows_is_that_of_a_plain_loop_and_goes_on_under_another_plan(legs: Any, tmp_path: Path) -> None:
    wanted = asked(global_batch=RAMP)
    dataset = wanted.data.dataset(wanted)
    first = [0, 4, 8, *(12 + 8 * n for n in range(4)), *(44 + 16 * n for n in range(6))]
    assert len(dataset) == first[-1] == 124
    run = interrupted(tmp_path / "run", wanted, *legs)
    assert_losses(run, plain(wanted, lambda step: dataset.__getitems__(range(first[step], first[step + 1]))))
    history = Run(run.path).history()
    assert history.samples.tolist() == first[1:]
    assert history.tokens.tolist() == [16 * samples for samples in first[1:]]
    assert history.flops[-1] == pytest.approx(124 / 16 * Run(run.path).plan.flops_per_step)


def test_an_interleaved_pipeline_runs_every_size_of_a_batch(tmp_path: Path) -> None:
    wanted = asked(global_batch={0: 4, 2: 16, 9: 8}, steps=STEPS)
    dataset = wanted.data.dataset(wanted)
    first = [wanted.samples_before(step) for step in range(STEPS + 1)]
    run = trained(tmp_path / "run", wanted, plan(wanted, pipeline=2, schedule="interleaved", chunks=2))
    assert_losses(run, plain(wanted, lambda step: dataset.__getitems__(range(first[step], first[step + 1]))))


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
