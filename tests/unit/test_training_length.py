"""The length of a training in steps, epochs or tokens: one of them is given, and the number of steps follows."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.errors import InvalidExperiment
from workbench.experiment import Experiment
from workbench.sweeps.axes import Axes

TINY = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 400, "max_positions": 32}


class Points:
    reads = 0

    def __len__(self) -> int:
        Points.reads += 1
        return 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(4), "labels": torch.tensor(index % 3)}


def tiny(**changes: Any) -> Experiment:
    settings: dict[str, Any] = {"global_batch": 4, "seq_len": 16, **changes}
    return wb.Experiment.of(model=wb.models.gpt2(**TINY), data=Points(), **settings)


def test_tokens_and_epochs_become_the_steps_that_cover_them() -> None:
    assert tiny().steps == 1000
    assert [tiny(tokens=tokens).steps for tokens in (1, 64, 65, 128)] == [1, 1, 2, 2]
    counted = [tiny(epochs=epochs).resolved().steps for epochs in (0.01, 0.4, 1, 2, 3)]
    assert counted == [1, 1, 3, 5, 8]
    assert tiny(epochs=4, warmup_steps=None).resolved().warmup == 1


def test_only_resolved_counts_epochs() -> None:
    Points.reads = 0
    experiment = tiny(epochs=2)
    repr(experiment), experiment.replace(seed=3), pickle.dumps(experiment)
    assert experiment.steps is None
    with pytest.raises(InvalidExperiment, match=r"experiment\.resolved\(\)"):
        _ = experiment.total_steps
    assert Points.reads == 0
    assert experiment.resolved().steps == 5
    assert experiment.steps is None, "a frozen value has changed"


def test_lengths_that_contradict_or_cannot_be_are_refused() -> None:
    for lengths in ({"steps": 3, "epochs": 1}, {"epochs": 1, "tokens": 64}, {"steps": 1, "tokens": 64}):
        with pytest.raises(InvalidExperiment, match=r"given 2 times.*Give one of them"):
            tiny(**lengths)
    for wrong in (
        {"epochs": 0},
        {"epochs": 2**70},
        {"epochs": -1.0},
        {"epochs": float("nan")},
        {"tokens": 0},
        {"tokens": 1.5},
    ):
        with pytest.raises(InvalidExperiment):
            tiny(**wrong)
    with pytest.raises(InvalidExperiment, match="must be at most"):
        tiny(tokens=2**62)
    with pytest.raises(InvalidExperiment, match="outside the 3 steps"):
        tiny(epochs=1, warmup_steps=4).resolved()
    with pytest.raises(InvalidExperiment, match=r"lr_schedule returned -1\.0 for step 4"):
        tiny(epochs=2, lr_schedule=lambda step: -1.0 if step == 4 else 1.0).resolved()


def test_a_change_keeps_the_kind_of_length_or_replaces_it() -> None:
    by_tokens, by_epochs = tiny(tokens=256), tiny(epochs=2)
    assert by_tokens.replace(global_batch=8).steps == 2
    assert by_epochs.replace(global_batch=10).resolved().steps == 2
    assert by_epochs.resolved().replace(learning_rate=1.0).steps == 5
    assert by_epochs.resolved().replace(global_batch=10).steps is None
    assert by_epochs.replace(steps=7).steps == 7
    assert by_epochs.replace(tokens=64).steps == 1
    assert by_tokens.replace(epochs=1).resolved().steps == 3
    assert by_tokens.replace(steps=9).tokens is None
    axes = Axes(tiny(), {"epochs": [1, 2]})
    assert [axes.experiment_of({"epochs": at}).resolved().steps for at in (0, 1)] == [3, 5]


def test_a_description_keeps_the_number_that_was_counted() -> None:
    for lengths in ({"epochs": 2}, {"tokens": 320}):
        described = tiny(**lengths).resolved().to_json()
        assert (described["steps"], {name: described[name] for name in lengths}) == (5, lengths)
        again = Experiment.from_json(described)  # without the dataset
        assert again.steps == 5
        assert again.to_json() == described


def test_epochs_of_text_count_the_windows_that_are_not_held_out(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"{i} is a number, and {i * i} is its square." for i in range(600)))
    data = wb.data.corpus(path, vocab_size=400)
    whole = wb.Experiment(model=wb.models.gpt2(**TINY), data=data, epochs=2, global_batch=4, seq_len=16)
    windows = data.prepare(whole, progress=False).samples
    steps = whole.resolved().total_steps
    assert steps == -(-2 * windows // 4)
    assert whole.replace(eval_samples=8).resolved().total_steps < steps
