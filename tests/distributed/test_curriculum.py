"""What changes while a run trains is that of a plain loop, under every plan, and goes on after a stop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.distributed.real_worker import VOCAB, Ranks, Words, curve, directory, experiment, plan, trained
from tests.distributed.test_streaming import killed_after_checkpoint
from tests.distributed.word_stream import WordStream
from workbench.base.errors import InvalidExperiment, LossSpikes
from workbench.data.sampling import shuffled
from workbench.execution.trainer import Spikes
from workbench.experiment import Experiment
from workbench.record.event_log import read_events
from workbench.record.history import resumed_step
from workbench.record.rundir import RunDir
from workbench.runs.run import Run
from workbench.widgets.run_reader import RunReader

STEPS = 12


class Reversed(Words):
    """The words in another order, and fewer of them."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: field.flip(0) for name, field in super().__getitem__(index).items()}


def plain(
    wanted: Experiment,
    batches: Sequence[dict[str, torch.Tensor]],
    skipped: Collection[int] = (),
    look: Callable[[Any, dict[str, torch.Tensor]], Any] = lambda _model, _batch: None,
) -> list[float]:
    """Return the losses of a loop without any of the project's runtime, which leaves out the updates of some steps."""
    model, losses = wanted.build(), []
    update = torch.optim.AdamW(model.parameters(), lr=wanted.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for step, batch in enumerate(batches):
        look(model, batch)
        found = model(**batch)
        loss = getattr(found, "loss", found)
        losses.append(loss.item())
        update.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step not in skipped:
            update.step()
    return losses


def asked(**changes: Any) -> Experiment:
    fields = {"dropout": 0.0, "steps": STEPS, "lr_schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0}
    return experiment(**{**fields, "checkpoint_every": 5, **changes})


def interrupted(path: Path, wanted: Experiment, first: dict[str, Any], second: dict[str, Any]) -> RunDir:
    """Train under one plan until its first checkpoint, kill the ranks, and go on under another plan."""
    checkpoint = killed_after_checkpoint(path, wanted, first)
    return trained(path, wanted, plan(wanted, **second), checkpoint)


class Broken(Words):
    """Words of which some have a loss fifty times as high."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(index)
        return {**item, "scale": torch.tensor(50.0 if index in self.broken else 1.0)}

    def __init__(self, broken: Sequence[int] = ()) -> None:
        self.broken = frozenset(broken)


class Scaled(torch.nn.Module):
    """A model that multiplies the loss of each sample by a field of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(VOCAB, 16), torch.nn.Linear(16, VOCAB)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return hidden

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(input_ids)
        wb.log_scalar("height", hidden.square().mean())
        wb.log_scalar("largest", hidden.max(), "max")
        each = torch.nn.functional.cross_entropy(self.head(hidden).mT, labels, reduction="none").mean(1)
        return (each * scale).mean()


def spiking(step: int, **changes: Any) -> tuple[Experiment, Any]:
    """Return an experiment whose loss is fifty times as high in one step (from 0), and its samples."""
    wanted = asked(model=Scaled, data=Broken(), checkpoint_every=3, spike_factor=4.0, spike_window=4, **changes)
    items = wanted.data.reads(wanted.replace(steps=2 * STEPS)).dataset()
    order = [int(index) for index in shuffled(wanted.seed, np.arange(8 * step, 8 * step + 8), 1000)]
    return wanted.replace(data=Broken(order)), items


def of_type(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [dict(event) for event in read_events(run.events) if event["type"] == name]


RAMP = {0: 4, 3: 8, 7: 16}


@pytest.mark.parametrize("legs", [({"pipeline": 2}, {"data": 2, "zero": 2}), ({"data": 2, "zero": 0}, {"pipeline": 2})])
def test_a_batch_that_grows_is_that_of_a_plain_loop_and_goes_on_under_another_plan(legs: Any, tmp_path: Path) -> None:
    wanted = asked(global_batch=RAMP)
    dataset = wanted.data.reads(wanted).dataset()
    first = [0, 4, 8, *(12 + 8 * n for n in range(4)), *(44 + 16 * n for n in range(6))]
    assert len(dataset) == first[-1] == 124
    run = interrupted(tmp_path / "run", wanted, *legs)
    assert_losses(run, plain(wanted, [dataset.__getitems__(range(*ends)) for ends in pairwise(first)]))
    history = Run(run.path).history()
    assert history.samples.tolist() == first[1:]
    assert history.tokens.tolist() == [16 * samples for samples in first[1:]]
    assert history.flops[-1] == pytest.approx(124 / 16 * Run(run.path).plan.flops_per_step)


def test_an_interleaved_pipeline_runs_every_size_of_a_batch(tmp_path: Path) -> None:
    wanted = asked(model=Scaled, data=Broken(), global_batch={0: 4, 2: 16, 9: 8})
    dataset = wanted.data.reads(wanted).dataset()
    first = [wanted.samples_before(step) for step in range(STEPS + 1)]
    run = trained(tmp_path / "run", wanted, plan(wanted, pipeline=2, schedule="interleaved", chunks=2))
    batches, heights = [dataset.__getitems__(range(*ends)) for ends in pairwise(first)], []

    def look(model: Scaled, batch: dict[str, torch.Tensor]) -> None:
        hidden = model.hidden(batch["input_ids"])
        heights.append((hidden.square().mean().item(), hidden.max().item()))

    assert_losses(run, plain(wanted, batches, look=look))
    logged = [(event["scalars"]["height"], event["scalars"]["largest"]) for event in of_type(run, "step")]
    assert np.array(logged) == pytest.approx(np.array(heights), rel=1e-4)


@pytest.mark.parametrize("degrees", [{}, {"pipeline": 2}, {"data": 2, "zero": 3}])
def test_the_update_of_a_spike_is_left_out_as_in_a_plain_loop(degrees: dict[str, Any], tmp_path: Path) -> None:
    wanted, _ = spiking(6)
    dataset = wanted.data.reads(wanted).dataset()
    batches = [dataset.__getitems__(range(8 * step, 8 * step + 8)) for step in range(STEPS)]
    run = trained(tmp_path / "run", wanted, plan(wanted, **degrees))
    assert_losses(run, plain(wanted, batches, skipped={6}))
    [spike] = of_type(run, "spike")
    assert (spike["step"], spike["number"], spike["action"]) == (7, 1, "skipped")
    assert spike["loss"] == curve(run)[7][0] > 50
    history = Run(run.path).history()
    assert history.spikes.tolist() == [0] * 6 + [1] * 6
    assert [mark.step for mark in RunReader(run.path).read().marks if mark.type == "spike"] == [7]
    whole = asked(model=Scaled, data=Broken())
    assert plain(whole, batches)[8:] != pytest.approx(plain(whole, batches, skipped={6})[8:], abs=1e-3)


@pytest.mark.parametrize("degrees", [{"pipeline": 2}, {"data": 2, "zero": 2}])
def test_a_run_goes_back_from_a_spike_and_trains_on_with_the_samples_after_it(
    degrees: dict[str, Any], tmp_path: Path
) -> None:
    """The spike is step 8 of 12, counted from 1, and the last checkpoint that of step 6."""
    wanted, _ = spiking(7, on_spike="rewind")
    longer = wanted.replace(steps=2 * STEPS)
    dataset = longer.data.reads(longer).dataset()
    numbers = [*range(6), *range(8, 14)]
    batches = [dataset.__getitems__(range(8 * number, 8 * number + 8)) for number in numbers]
    run = trained(tmp_path / "run", wanted, plan(wanted, **degrees))
    assert_losses(run, plain(wanted, batches))
    [spike] = of_type(run, "spike")
    assert {name: spike[name] for name in ("step", "action", "to", "skipped_samples", "number")} == {
        "step": 8, "action": "rewound", "to": 6, "skipped_samples": 16, "number": 1,
    }  # fmt: skip
    assert [resumed_step(start["resumed_from"]) for start in of_type(run, "start")] == [0, 6]
    assert [mark.step for mark in RunReader(run.path).read().marks if mark.type == "spike"] == [8]
    # A run that stops after the spike goes on with the samples left out, under another plan.
    again = directory(tmp_path / "run", wanted, plan(wanted), run.checkpoint(9))
    Ranks(again, 1).wait()
    assert_losses(again, plain(wanted, batches))


class SpikesAt25(Scaled):
    """A model whose loss is fifty times as high for the samples 25 to 32 of a `WordStream`."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        number = input_ids[:, 0]
        return super().forward(input_ids, labels, torch.where((number > 24) & (number < 33), 50.0, 1.0))


@pytest.mark.representative
def test_a_streamed_run_that_went_back_from_a_spike_reads_no_skipped_sample_again(tmp_path: Path) -> None:
    """The spike is step 4 of 6, and the last checkpoint that of step 2; a pass of the stream has 50 samples."""
    fields = {"checkpoint_every": 2, "spike_factor": 4.0, "spike_window": 2, "on_spike": "rewind"}
    wanted = asked(model=SpikesAt25, data=WordStream(), steps=6, **fields)
    run = wb.runs.debug(wanted, plan(wanted), directory=tmp_path / "run", progress=False)
    items = 2 * list(WordStream())
    left = items[:16] + items[32:64]
    batches = [
        {key: torch.stack([item[key] for item in left[at : at + 8]]) for key in items[0]} for at in range(0, 48, 8)
    ]
    assert_losses(run.directory, plain(wanted, batches))
    assert [spike["to"] for spike in of_type(run.directory, "spike")] == [2]


def test_a_spike_before_the_first_checkpoint_is_skipped_and_too_many_end_the_run(tmp_path: Path) -> None:
    early, _ = spiking(4, on_spike="rewind")
    early = early.replace(checkpoint_every=6)
    run = wb.runs.debug(early, plan(early), directory=tmp_path / "early", progress=False)
    assert [spike["action"] for spike in of_type(run.directory, "spike")] == ["skipped"]
    many = early.replace(data=Broken(range(1000)), spike_factor=1.0001, spike_limit=2, on_spike="skip")
    with pytest.raises(LossSpikes, match="It is spike 3 of the run"):
        wb.runs.debug(many, plan(many), directory=tmp_path / "many", progress=False)
    with pytest.raises(InvalidExperiment, match="goes back to the last checkpoint, and none is written"):
        early.replace(checkpoint_every=None)


def test_the_rule_compares_with_the_median_of_steps_that_were_no_spikes() -> None:
    """A plain rule beside it, over losses with leaps, NaN and infinity; the state of a checkpoint goes on alike."""
    numerics = experiment(spike_factor=2.0, spike_window=5).numerics
    rule, draw = Spikes(numerics, torch.device("cpu")), np.random.default_rng(0)
    kept: list[tuple[float, float]] = []
    for step in range(200):
        loss, norm = (float(np.float32(value)) for value in np.exp(draw.normal(0, 0.5, 2)))
        loss = {50: math.nan, 60: math.inf}.get(step, loss)
        median = [sorted(values)[2] for values in zip(*kept[-5:], strict=True)] if len(kept) >= 5 else [math.inf] * 2
        expected = not math.isfinite(loss) or loss > 2 * median[0] or math.sqrt(norm) > 2 * median[1]
        if step % 37 == 0:
            state = json.loads(json.dumps(rule.state()))
            rule = Spikes(numerics, torch.device("cpu"))
            rule.load(state)
        assert bool(rule.seen(torch.tensor([loss, norm]))) is expected, step
        kept += [] if expected else [(loss, float(torch.tensor(norm).sqrt()))]
    assert 100 < len(kept) < 190


def assert_losses(run: RunDir, losses: list[float]) -> None:
    found = curve(run)
    assert [found[step][0] for step in range(1, len(losses) + 1)] == pytest.approx(losses, abs=2e-5)


def test_a_mixture_whose_weights_change_is_that_of_a_plain_loop_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    words, others = Words(), Reversed()
    wanted = asked(data=wb.data.mixture([(words, 3), (others, 1)], changes={7: (1, 1)}))
    alone = [wanted.replace(data=source) for source in (words, others)]
    seeds = [part.request.seed for part in wanted.data.reads(wanted).parts()]
    orders = [each.replace(seed=seed) for each, seed in zip(alone, seeds, strict=True)]
    sources, taken = [each.data.reads(each).dataset() for each in orders], [0, 0]

    def batch(step: int) -> dict[str, torch.Tensor]:
        items = []
        for source, count in enumerate((6, 2) if step < 7 else (4, 4)):
            items += [sources[source][taken[source] + number] for number in range(count)]
            taken[source] += count
        return {name: torch.stack([item[name] for item in items]) for name in items[0]}

    run = interrupted(tmp_path / "run", wanted, {"data": 2, "zero": 1}, {"pipeline": 2})
    assert_losses(run, plain(wanted, list(map(batch, range(STEPS)))))
    used = [event for event in read_events(run.events) if event["type"] == "data_use"]
    assert used[-1]["step"] == STEPS
    assert [(part["samples"], part["epochs"]) for part in used[-1]["parts"]] == [(62, 0.062), (34, 34 / 7)]
    assert "544 tokens of Reversed (4.86 epochs, read more than once)" in Run(run.path)._repr_html_()
