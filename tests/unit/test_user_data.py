"""A user-defined dataset that gives other samples at a continuation is refused until the change is accepted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.distributed.harness import CPU, LINK
from tests.unit.coupled_models import WIDTH, Regression, total
from workbench import models
from workbench.base.errors import DataError
from workbench.cost.hardware import Cluster
from workbench.data.datasets import generator_states
from workbench.execution.feeding import check_user_data
from workbench.experiment import Experiment
from workbench.record.rundir import RunDir, read_json, write_json, write_record

MODEL = models.bert(hidden_size=16, num_layers=2, num_heads=2, vocab_size=50, max_positions=8)


class Rows:
    """Items that a function of their index makes."""

    def __init__(self, value: Callable[[int], float]) -> None:
        self._value = value

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([index]), "weight": torch.tensor(self._value(index))}


def asked(value: Callable[[int], float], **changes: Any) -> Experiment:
    return Experiment.of(
        **{"model": MODEL, "data": Rows(value), "steps": 10, "global_batch": 4, "seq_len": 8, **changes}
    )


def continued(run: RunDir) -> RunDir:
    write_json(run.resume, {"checkpoint": str(run.checkpoint(5)), "step": 5})
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run that trained on weights that equal their index."""
    run = RunDir(tmp_path / "run")
    check_user_data(run, asked(float))
    return continued(run)


def test_the_same_samples_go_on_and_others_are_refused_until_they_are_accepted(run: RunDir) -> None:
    check_user_data(run, asked(float))
    check_user_data(run, asked(float, steps=20))  # the number of steps does not hide a change, nor is it one
    for steps in (10, 20):
        with pytest.raises(DataError, match=r"Rows gives other samples .*accept_changed_data=True"):
            check_user_data(run, asked(lambda index: index + 1.0, steps=steps))
    write_record(run.environment, {"accepted_changed_data": True})
    check_user_data(run, asked(lambda index: index + 1.0))
    write_record(run.environment, {})
    check_user_data(run, asked(lambda index: index + 1.0))  # the new samples are those of the run from now on
    with pytest.raises(DataError, match="gives other samples"):
        check_user_data(run, asked(float))


def test_a_run_that_continues_anothers_checkpoint_is_compared_with_that_run(run: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "other")
    write_json(other.resume, {"checkpoint": str(run.checkpoint(5)), "step": 5})
    with pytest.raises(DataError, match="when run was started"):
        check_user_data(other, asked(lambda index: -float(index)))
    check_user_data(other, asked(float))
    assert read_json(other.user_data) == read_json(run.user_data)


def test_data_that_cannot_be_compared_goes_on(tmp_path: Path) -> None:
    def fails(_index: int) -> float:
        raise RuntimeError("no such file")

    for name, value in (("random", lambda _: random.Random().random()), ("raises", fails)):
        run = RunDir(tmp_path / name)
        check_user_data(run, asked(value))
        assert read_json(run.user_data)["fingerprint"] is None
        check_user_data(continued(run), asked(value))


def test_other_data_is_what_an_experiment_that_names_it_asks_for(run: RunDir) -> None:
    class Others(Rows):
        pass

    check_user_data(run, asked(float).replace(data=Others(lambda index: -float(index))))
    with pytest.raises(DataError, match="Others gives other samples"):
        check_user_data(run, asked(float).replace(data=Others(float)))


def drawn(_index: int) -> float:
    return random.random() + float(np.random.rand()) + float(torch.rand(()))


def drawing_from_its_own() -> Any:
    """Return a function that draws from generators it closes over, of every type, one of them made late."""
    others = [np.random.default_rng(3), np.random.RandomState(3), {"python": random.Random(3)}]
    torchs, late = torch.Generator().manual_seed(3), list[np.random.Generator]()

    def draw(_index: int) -> float:
        late[:] = late or [np.random.default_rng()]
        numbers = others[0].random() + others[1].rand() + others[2]["python"].random() + late[0].random()
        return numbers + float(torch.rand((), generator=torchs))

    return draw


GLOBAL = np.random.default_rng(3)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "made",
    [lambda: drawn, drawing_from_its_own, lambda: lambda _: GLOBAL.random()],
    ids=["shared", "its own", "global"],
)
def test_items_that_draw_are_the_same_however_the_samples_are_divided(seed: int, made: Callable[[], Any]) -> None:
    experiment = asked(made(), seed=seed, steps=60)
    whole = experiment.data.reads(experiment).dataset()
    at_once = whole.__getitems__(range(240))["weight"]
    for parts in (1, 3, 4):
        dataset = asked(made(), seed=seed, steps=60).data.reads(experiment).dataset()
        replicas = [dataset.__getitems__(range(first, 240, parts))["weight"] for first in range(parts)]
        assert torch.equal(torch.stack(replicas, 1).flatten(), at_once)
    ids = whole.__getitems__(range(240))["input_ids"].flatten()
    first, second = ids[:100].argsort(), ids[100:200].argsort()
    assert not torch.isclose(at_once[:100][first], at_once[100:200][second]).any(), "each epoch draws anew"
    assert len(at_once.unique()) == 240


def test_reading_items_leaves_the_generators_of_the_training_alone() -> None:
    experiment = asked(drawn)
    dataset = experiment.data.reads(experiment).dataset()
    before = generator_states()
    dataset.__getitems__(range(4))
    assert generator_states() == before


def test_a_dataset_that_is_read_once_is_read_once() -> None:
    """Only the first batch in which an item draws is read again, to seed before each item."""
    read = []

    def counted(index: int) -> float:
        read.append(index)
        return float(index)

    experiment = asked(counted)
    experiment.data.reads(experiment).dataset().__getitems__(range(8))
    assert len(read) == 8


def test_a_plan_says_that_tokens_are_miscounted_where_no_tensor_of_an_item_has_the_length() -> None:
    data = [{"x": torch.randn(WIDTH), "y": torch.randn(1), "w": torch.ones(1)} for _ in range(8)]
    for seq_len, is_said in ((1, False), (WIDTH, False), (128, True)):
        asked_for = Experiment.of(model=lambda: Regression(total), data=data, steps=1, global_batch=8, seq_len=seq_len)
        notes = wb.plan(asked_for, Cluster(CPU, 1, 1, LINK, LINK)).notes
        assert any("A sample counts as seq_len=128 tokens, and no tensor" in note for note in notes) == is_said


def test_a_plan_says_that_a_batch_reads_some_items_more_often_than_others() -> None:
    for items, is_said in ((3, True), (4, False), (8, False), (12, False)):
        data = [{"x": torch.randn(WIDTH), "y": torch.randn(1), "w": torch.ones(1)} for _ in range(items)]
        experiment = Experiment.of(model=lambda: Regression(total), data=data, steps=1, global_batch=8, seq_len=1)
        notes = wb.plan(experiment, Cluster(CPU, 1, 1, LINK, LINK)).notes
        said = [note for note in notes if "reads some of them 3 times and the others 2" in note]
        assert len(said) == is_said
