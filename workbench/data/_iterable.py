"""`ItemStream`: a user-defined dataset that can only be iterated, as a stream of samples in its own order.

A pass over the dataset is a function of the dataset, the seed and the epoch: it begins with a copy of the dataset, or
with another call of the user's function, with `set_epoch(epoch)` where that is offered, and with Python's, NumPy's and
PyTorch's own random generators seeded. The state of the stream before a chunk is therefore the number of items before
it. The dataset's `state_dict` is stored beside it where there is one, and saves reading them again. A digest of the
chunk shows whether the dataset's state is complete; if not, the items are read again.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.data._datasets import (
    Batch,
    StreamedDataset,
    TrainingDataset,
    described_specs,
    generator_states,
    item_specs,
    require_tensors,
    untouched_generators,
)
from workbench.data._feeder import OF_A_RANK
from workbench.data._ring import Ring
from workbench.data._stream import Chunk
from workbench.errors import DataError, in_words
from workbench.tensors import TensorSpec

CHUNK_ITEMS, CHUNK_BYTES = 32, 4 << 20
"""Upper limits of the items in a chunk, after each of which a run can go on, and of their bytes."""
STATE_BYTES = 1 << 20
"""Upper limit of a dataset's state as JSON; of a larger one, such as a full shuffle buffer, items are read again."""
COMPARED = 4
"""Items at the beginning of a dataset by which it is recognised."""


@dataclass(frozen=True)
class IterableItems:
    """A dataset that can be iterated any number of times, or a callable that returns what can be iterated."""

    dataset_or_factory: Any
    name: str

    def begun(self, epoch: int, seed: int, state: Mapping[str, Any] | None = None) -> tuple[Any, Iterator[Any]]:
        """Begin a pass, from the dataset's own state if one is given; also return the dataset.

        Seeds the random generators of Python, NumPy and PyTorch in this process.
        """
        random.seed(seed + epoch)
        np.random.seed((seed + epoch) % 2**32)
        torch.manual_seed(seed + epoch)
        value = self.dataset_or_factory
        is_factory = isinstance(value, type) or not hasattr(value, "__iter__")
        dataset = value() if is_factory else copy.deepcopy(value)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if state is not None:
            dataset.load_state_dict(state)
        return dataset, iter(dataset)

    def first(self, count: int, seed: int, room: int = sys.maxsize) -> list[Batch]:
        """Return the first items, `count` of them or as many as fill `room` bytes; the caller's generators stay.

        Raises `DataError` if there are none, if reading them fails, or if they are not dicts of tensors.
        """
        items: list[Batch] = []
        with _alone():
            try:
                for item in itertools.islice(self.begun(0, seed)[1], count):
                    items.append(require_tensors(item, len(items)))
                    room -= sum(field.nbytes for field in items[-1].values())
                    if room <= 0:
                        break
            except DataError:
                raise
            except Exception as error:
                raise DataError(
                    f"Reading item {len(items)} of {self.name} raised {in_words(error)}. Iterate over it "
                    "by itself until it gives its items."
                ) from error
        if not items:
            raise DataError(f"{self.name} is empty: it gives no item. Let it give at least one.")
        return items

    def dataset(self, length: int, seed: int) -> StreamedDataset:
        """Return so many samples: the items in their own order, pass after pass."""
        items = self.first(COMPARED, seed)
        layout = RecordLayout(tuple(item_specs(items[0]).values()), self.name)
        digest = hashlib.sha256(repr((layout.specs, seed)).encode())
        for number, item in enumerate(items):
            digest.update(layout.packed(item, number).tobytes())
        stream = ItemStream(self, layout, seed)
        return StreamedDataset(stream, length, digest.hexdigest(), lambda ring: _RingItems(ring, layout, length))


@dataclass(frozen=True)
class RecordLayout:
    """A sample as bytes: those of its fields, one after the other."""

    specs: tuple[TensorSpec, ...]
    """Fields of one sample, without a batch dim."""
    name: str

    @property
    def record_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    def packed(self, item: Any, index: int) -> NDArray[np.uint8]:
        """Return item `index` as bytes; raise `DataError` if its fields are not those of the first item."""
        found, expected = item_specs(require_tensors(item, index)), {spec.name: spec for spec in self.specs}
        if found != expected:
            raise DataError(
                f"Item {index} of {self.name} has the fields {described_specs(found)}, and the first has "
                f"{described_specs(expected)}. Give every item the same fields with the same shapes and types: pad or "
                "crop them in the dataset."
            )
        fields = [item[spec.name].detach().cpu().contiguous().reshape(-1).view(torch.uint8) for spec in self.specs]
        record: NDArray[np.uint8] = torch.cat(fields).numpy()
        return record

    def unpacked(self, records: NDArray[np.uint8]) -> Batch:
        """Return a batch of records, shape `(B, record_bytes)`."""
        rows, begin, batch = torch.from_numpy(records.copy()), 0, {}
        for spec in self.specs:
            own = rows[:, begin : begin + spec.nbytes].clone(memory_format=torch.contiguous_format)
            batch[spec.name] = own.reshape(-1).view(getattr(torch, spec.dtype)).reshape(len(rows), *spec.shape)
            begin += spec.nbytes
        return batch


class _RingItems(TrainingDataset):
    """User-defined samples that arrive in a ring."""

    def __init__(self, ring: Ring, layout: RecordLayout, length: int) -> None:
        super().__init__(length)
        self._ring, self._layout = ring, layout

    def _batch(self, index_B: NDArray[np.int64]) -> Batch:
        return self._layout.unpacked(self._ring.read(index_B))


@dataclass(frozen=True)
class ItemStream:
    """The items of a dataset in its own order, pass after pass."""

    items: IterableItems
    layout: RecordLayout
    seed: int
    dtype: str = "uint8"

    @property
    def record_bytes(self) -> int:
        return self.layout.record_bytes

    @property
    def buffer(self) -> int:
        """Largest number of items in a chunk."""
        return max(1, min(CHUNK_ITEMS, CHUNK_BYTES // max(1, self.record_bytes)))

    def chunks(self, state: Mapping[str, Any] | None = None) -> Iterator[Chunk]:
        """Yield chunks of items without end; raise `DataError` if a pass gives none."""
        first, epoch, done = (state["first"], state["epoch"], state["item"]) if state else (0, 0, 0)
        records = self._rest(state) if state else self._pass(epoch)
        while True:
            for rows, state in records:
                facts = {"first": first, "epoch": epoch, "item": done, "dataset_state": state, "digest": _digest(rows)}
                yield Chunk(first, rows, facts)
                first, done = first + len(rows), done + len(rows)
            if done == 0:
                raise DataError(
                    f"{self.items.name} gave no item in epoch {epoch + 1}. Let each iteration over it begin anew."
                )
            epoch, done = epoch + 1, 0
            records = self._pass(epoch)

    def _rest(self, state: Mapping[str, Any]) -> Iterator[tuple[NDArray[np.uint8], Any]]:
        """Return the rest of a pass: from the dataset's state if that gives the same items, else by reading again."""
        epoch, done = state["epoch"], state["item"]
        if state["dataset_state"] is not None:
            records = self._pass(epoch, done, state["dataset_state"])
            with contextlib.suppress(Exception):  # of user-defined code, which is asked again without the state
                head = next(records)
                if _digest(head[0]) == state["digest"]:
                    return itertools.chain([head], records)
            print(f"The state_dict of {self.items.name} is not all of its state: {done} items are read again.")
        return self._pass(epoch, done)

    def _pass(
        self, epoch: int, done: int = 0, state: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[NDArray[np.uint8], Any]]:
        """Yield the items of a pass after the first `done`, in chunks, each with the state before it."""
        dataset, items = self.items.begun(epoch, self.seed, state)
        generators = _generators()
        if state is None:
            next(itertools.islice(items, done, done), None)
            state = _state(dataset, generators) if done else None
        while rows := [
            self.layout.packed(item, done + number) for number, item in enumerate(itertools.islice(items, self.buffer))
        ]:
            yield np.stack(rows), state
            done, state = done + len(rows), _state(dataset, generators)


def _digest(rows: NDArray[np.uint8]) -> str:
    return hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()


def _state(dataset: Any, generators: str) -> Any:
    """Return the dataset's own state, if it has one that JSON can hold and that is all of it; None otherwise."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")) or _generators() != generators:
        return None
    state = dataset.state_dict()
    try:
        text = json.dumps(state)
        return state if len(text) <= STATE_BYTES and json.loads(text) == state else None
    except (TypeError, ValueError):
        return None


def _generators() -> str:
    """Return a digest of the state of the random generators that a dataset may draw from without asking."""
    return hashlib.blake2b(repr(generator_states()).encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Give the body random generators of its own, and an environment that names no rank."""
    ranks = {name: os.environ.pop(name) for name in OF_A_RANK if name in os.environ}
    try:
        with untouched_generators():
            yield
    finally:
        os.environ.update(ranks)
