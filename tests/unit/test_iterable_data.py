"""Datasets that can only be iterated give the same samples in every process and from any place."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from streams import fed_alone
from torch.utils.data import IterableDataset

import workbench as wb
from workbench.base.errors import DataError, InvalidExperiment
from workbench.base.tensors import TensorSpec
from workbench.data import as_data, data_fingerprint, held_out
from workbench.data.datasets import RecordLayout
from workbench.execution.feeding import check_user_data
from workbench.experiment import Experiment
from workbench.record.rundir import RunDir, write_json

MODEL = wb.models.bert(hidden_size=16, num_layers=2, num_heads=2, vocab_size=50, max_positions=8)
ITEMS = 100


def item(number: int) -> dict[str, torch.Tensor]:
    return {
        "x": torch.tensor([number, number * number]),
        "weight": torch.tensor(number / 2),
        "odd": torch.tensor(number % 2 == 1),
    }


class Numbers(IterableDataset):
    """Numbered items that are noted as they are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def numbers(self) -> Iterator[int]:
        yield from range(ITEMS)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in self.numbers():
            self.read.append(number)
            yield item(number)


class Shuffled(Numbers):
    """A new order each epoch, from a generator of the whole process."""

    def numbers(self) -> Iterator[int]:
        yield from random.sample(range(ITEMS), ITEMS)


class Epochs(Numbers):
    """A new order each epoch, from the number of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def numbers(self) -> Iterator[int]:
        yield from random.Random(self.epoch).sample(range(ITEMS), ITEMS)


class Stateful(Numbers):
    """Knows its position, and goes on there even if that is not what was asked for."""

    position = 0

    def numbers(self) -> Iterator[int]:
        while self.position < ITEMS:
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Forgetful(Stateful):
    """Has a state that is wrong."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"] // 2


def generated() -> Iterator[dict[str, torch.Tensor]]:
    return map(item, range(ITEMS))


def streaming(buffer: int = 0) -> Any:
    rows = datasets.Dataset.from_dict({"x": [[n, n * n] for n in range(ITEMS)]}).with_format("torch")
    streamed = rows.to_iterable_dataset(num_shards=4)
    return streamed.shuffle(seed=1, buffer_size=buffer) if buffer else streamed


KINDS: dict[str, Callable[[], Any]] = {
    "torch": Numbers,
    "drawn from a generator": Shuffled,
    "shuffled by epoch": Epochs,
    "with a state": Stateful,
    "with a wrong state": Forgetful,
    "a function": lambda: generated,
    "a class": lambda: Numbers,
    "Hugging Face": streaming,
    "Hugging Face, shuffled": lambda: streaming(40),
}
SAME_EACH_EPOCH = {"torch", "with a state", "with a wrong state", "a function", "a class", "Hugging Face"}


def asked(data: Any, **changes: Any) -> Experiment:
    return Experiment.of(**{"model": MODEL, "data": data, "steps": 50, "global_batch": 4, "seq_len": 8, **changes})


def stream_of(data: Any) -> Any:
    experiment = asked(data)
    return experiment.data.reads(experiment).dataset().stream


def chunks(data: Any, epochs: int = 2) -> list[Any]:
    return list(itertools.takewhile(lambda chunk: chunk.first < epochs * ITEMS, stream_of(data).chunks(None)))


def first_numbers(chunk: Any, stream: Any) -> list[int]:
    return stream.layout.unpacked(chunk.records)["x"][:, 0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_every_pass_has_every_item_once_and_goes_on_from_any_place(kind: str) -> None:
    data = KINDS[kind]()
    found, stream = chunks(data), stream_of(data)
    numbers = [number for chunk in found for number in first_numbers(chunk, stream)]
    passes = numbers[:ITEMS], numbers[ITEMS:]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(ITEMS))
    assert (passes[0] == passes[1]) == (kind in SAME_EACH_EPOCH)
    for chunk in found:
        again = stream_of(data).chunks(json.loads(json.dumps(chunk.state)))
        for before, after in zip(found[found.index(chunk) :], itertools.islice(again, 3), strict=False):
            assert (after.first, after.records.tolist()) == (before.first, before.records.tolist())


@pytest.mark.parametrize(
    ("kind", "reads_again"), [("with a state", False), ("torch", True), ("with a wrong state", True)]
)
def test_a_state_saves_reading_items_again_if_it_is_right(kind: str, reads_again: bool) -> None:
    last = chunks(KINDS[kind]())[-1]
    assert (last.state["dataset_state"] is None) == (kind == "torch")
    stream, begun = stream_of(KINDS[kind]()), []
    begin = stream.items.begun

    def noted(*arguments: Any) -> Any:
        begun.append(begin(*arguments))
        return begun[-1]

    object.__setattr__(stream.items, "begun", noted)
    next(stream.chunks(last.state))
    read = begun[-1][0].read
    assert (read[0] == 0) == reads_again
    assert len(begun) == (2 if kind == "with a wrong state" else 1)


def test_state_of_a_shuffled_dataset_of_hugging_face_is_found_to_be_incomplete(
    capsys: pytest.CaptureFixture[str],
) -> None:
    last = chunks(streaming(40), epochs=1)[-1]
    assert last.state["dataset_state"] is not None
    next(stream_of(streaming(40)).chunks(last.state))
    assert "is not all of its state: 96 items are read again" in capsys.readouterr().out


def test_a_process_hands_the_items_on_without_sharing_them_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(Numbers):
        def numbers(self) -> Iterator[int]:
            yield from range(int(os.environ.get("RANK", 0)), ITEMS, int(os.environ.get("WORLD_SIZE", 1)))

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    experiment = asked(Shared())
    dataset = experiment.data.reads(experiment).dataset()
    with fed_alone(dataset.stream, 8, 0) as ring:
        batch = dataset.reading(ring).__getitems__([5, 0])
    assert batch.keys() == {"x", "weight", "odd"}
    assert batch["x"].tolist() == [[5, 25], [0, 0]]
    assert (batch["weight"].dtype, batch["weight"].tolist()) == (torch.float32, [2.5, 0.0])
    assert (batch["odd"].dtype, batch["odd"].tolist()) == (torch.bool, [True, False])
    assert os.environ["RANK"] == "1"


def test_records_hold_every_type_bit_by_bit() -> None:
    fields = {
        "flag": torch.tensor(True),
        "half": torch.randn(3, dtype=torch.bfloat16),
        "small": torch.tensor([[1, 2]], dtype=torch.uint16),
        "wide": torch.randn(2, 3, dtype=torch.float64).t(),
        "none": torch.empty(0),
    }
    specs = tuple(TensorSpec(name, tuple(v.shape), str(v.dtype).removeprefix("torch.")) for name, v in fields.items())
    layout = RecordLayout(specs, "fields")

    def bits(value: torch.Tensor) -> list[int]:
        return value.contiguous().reshape(-1).view(torch.uint8).tolist()

    for count in (1, 2):
        batch = layout.unpacked(np.stack([layout.packed(fields, 0)] * count))
        for name, value in fields.items():
            assert (batch[name].dtype, batch[name].shape) == (value.dtype, (count, *value.shape))
            assert bits(batch[name][count - 1]) == bits(value)


def test_the_planner_sees_the_first_items_and_the_callers_generators_stay() -> None:
    data = Shuffled()
    experiment = asked(data)
    random.seed(5)
    torch.manual_seed(5)
    before = random.getstate(), torch.get_rng_state().tolist()
    specs = experiment.data.reads(experiment).batch_specs()
    assert {name: (spec.shape, spec.dtype) for name, spec in specs.items()} == {
        "x": ((2,), "int64"),
        "weight": ((), "float32"),
        "odd": ((), "bool"),
    }
    assert experiment.data.reads(experiment).examples()["x"].shape == (16, 2)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert data.read == [], "the dataset that was given is not touched"
    assert asked([item(1)] * 3).data.reads(experiment).examples()["x"].shape == (3, 2), "a list is map-style"


def test_held_out_items_are_the_first_ones() -> None:
    experiment = asked(Numbers(), eval_data=generated, evaluation=wb.Evaluation(samples=6))
    assert held_out(experiment).__getitems__(range(6))["x"][:, 0].tolist() == list(range(6))
    assert len(held_out(experiment.replace(eval_samples=1000))) == ITEMS
    with pytest.raises(InvalidExperiment, match=r"Evaluation\(data=my_validation_dataset"):
        asked(Numbers(), evaluation=wb.Evaluation(samples=6))


def test_epochs_need_a_length() -> None:
    assert "unknown number of samples" in repr(asked(generated).data.reads(asked(generated)).prepare())
    with pytest.raises(DataError, match=r"generated has no __len__.*steps=… or tokens=…"):
        print(asked(generated, steps=None, epochs=2).resolved().steps)
    assert asked(generated, steps=None, tokens=8 * 4 * 7).steps == 7

    class Counted(Numbers):
        def __len__(self) -> int:
            return ITEMS

    assert asked(Counted(), steps=None, epochs=2).resolved().steps == 2 * ITEMS // 4
    assert stream_of(Counted()).record_bytes == 21, "a length does not make an iterable dataset map-style"


def test_a_changed_dataset_is_noticed(tmp_path: Any) -> None:
    class Others(Numbers):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            return map(item, range(1, ITEMS))

    run = RunDir(tmp_path / "run")
    check_user_data(run, asked(as_data(Numbers())))
    write_json(run.resume, {"checkpoint": str(run.checkpoint(5)), "step": 5})
    check_user_data(run, asked(Numbers(), steps=70))
    with pytest.raises(DataError, match="gives other samples"):
        check_user_data(run, asked(wb.data.UserData(Others(), name="Numbers")))
    assert data_fingerprint(asked(Numbers())) != data_fingerprint(asked(Numbers(), seed=1))


class Once(Numbers):
    """Gives its items in the first epoch only."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def numbers(self) -> Iterator[int]:
        yield from range(0 if self.epoch else ITEMS)


class Ragged(Numbers):
    def __iter__(self) -> Iterator[Any]:
        yield from (item(number) if number != 70 else {"x": torch.zeros(3)} for number in self.numbers())


class Raising(Numbers):
    def numbers(self) -> Iterator[int]:
        yield 0
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Once(), r"Once gave no item in epoch 2\. Let each iteration over it begin anew"),
        (Ragged(), r"Item 70 of Ragged has the fields x \[3\] float32, and the first has x \[2\] int64, weight"),
    ],
)
def test_what_goes_wrong_later_is_one_sentence(data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        chunks(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Raising(), "Reading item 1 of Raising raised OSError: the disk is gone"),
        (lambda: iter(()), "is empty: it gives no item"),
        (lambda: iter([1]), "Item 0 of the dataset is of type int"),
        (lambda: torch.utils.data.DataLoader([1]), "is a DataLoader, which makes batches"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_starts(data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        asked(data).data.reads(asked(data)).check()
