"""Torch datasets of every sample of a training: of a text, of user-defined items, and of a mixture.

A dataset that can only be iterated becomes a stream (`ItemStream`), whose samples a process of the node makes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import itertools
import json
import os
import pickle
import random
import sys
import traceback
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from workbench.base.display import place
from workbench.base.errors import DataError, in_words, message_of
from workbench.base.tensors import TensorSpec
from workbench.data.sampling import EVALUATION_SEED, ITEM, MixedOrder, TokenSamples, hashed, shuffled
from workbench.data.streaming import OF_A_RANK, Chunk, MixedStream, Ring, SampleStream, SourceRing

Batch = dict[str, torch.Tensor]
CPU = torch.device("cpu")


class TrainingDataset(Dataset[Batch], ABC):
    """Every sample of a training in order; `__getitems__` makes a whole batch at once, already collated."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return {name: field[0] for name, field in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        index_B = np.asarray(indices, dtype=np.int64)
        if index_B.size and not (index_B.min() >= 0 and index_B.max() < self.length):
            raise IndexError(f"Sample {index_B.max()} was requested, but the training has {self.length} samples.")
        return self._batch(index_B)

    @abstractmethod
    def _batch(self, index_B: np.ndarray[Any, np.dtype[np.int64]]) -> Batch: ...

    @staticmethod
    def collate(batch: Batch | Sequence[Batch]) -> Batch:
        """Return the batch, which `__getitems__` has collated already; pass it as `DataLoader(collate_fn=…)`."""
        if isinstance(batch, Mapping):
            return dict(batch)
        return stacked(batch)


class TextDataset(TrainingDataset):
    """Samples of a tokenised corpus; fields are int64 tensors."""

    def __init__(self, samples: TokenSamples, length: int) -> None:
        super().__init__(length)
        self.samples = samples

    def _batch(self, index_B: np.ndarray[Any, np.dtype[np.int64]]) -> Batch:
        return {name: torch.from_numpy(field) for name, field in self.samples.batch(index_B).items()}


class StreamedDataset(TrainingDataset):
    """Samples that a process makes while training reads them; `reading` returns them once it runs."""

    def __init__(
        self,
        stream: SampleStream,
        length: int,
        identity: str,
        reading: Callable[[Ring], TrainingDataset],
        vocabulary: int = 0,
    ) -> None:
        """`identity` is a hash of what decides the samples; `reading` makes samples of the records of a ring."""
        super().__init__(length)
        self.stream, self.identity, self.reading, self.vocabulary = stream, identity, reading, vocabulary

    def _batch(self, index_B: np.ndarray[Any, np.dtype[np.int64]]) -> Batch:
        raise DataError(
            f"Sample {index_B[0]} of streamed data is made while training reads it, and nothing trains. To look at "
            "samples, describe text with streaming=False, or iterate over the dataset itself.",
        )


class UserDataset(TrainingDataset):
    """User-defined items: in a new order each epoch, or without a `seed` in their own, spread evenly over all.

    Items may draw from Python's, NumPy's and torch's generators (a crop, a noise), and from generators that the dataset
    holds. These are seeded before each item by the seed and the number of the sample in the training, so that a sample
    is the same under every plan, and another in each epoch. Seeding takes longer than reading a tensor: the first batch
    in which an item draws is read again for it.
    """

    def __init__(self, items: Any, length: int, seed: int | None) -> None:
        super().__init__(length)
        self.items, self.seed = items, seed
        self._draws = False
        self._held: list[Any] = []
        """Generators that the items hold, as far as they were found."""

    def _batch(self, index_B: np.ndarray[Any, np.dtype[np.int64]]) -> Batch:
        size = len(self.items)
        order_B = index_B * size // self.length if self.seed is None else shuffled(self.seed, index_B, size)
        with untouched_generators():
            if not self._draws:
                held = generators_in(self.items)
                before = generator_states(held)
                items = [item_at(self.items, index) for index in order_B.tolist()]
                self._held = generators_in(self.items)  # an item may have made one
                self._draws = len(self._held) > len(held) or generator_states(held) != before
            if self._draws:
                seeds = hashed(EVALUATION_SEED if self.seed is None else self.seed, ITEM, index_B)
                items = []
                for index, seed in zip(order_B.tolist(), seeds.tolist(), strict=True):
                    seed_generators(seed, self._held)
                    items.append(item_at(self.items, index))
        return stacked(items)


class MixedDataset(TrainingDataset):
    """Samples of several datasets with the same fields, in the order of a mixture."""

    def __init__(
        self, parts: Sequence[TrainingDataset], order: MixedOrder, length: int, *, spread: bool = False
    ) -> None:
        """`spread` spreads what is read of a dataset evenly over all of it."""
        super().__init__(length)
        self.parts, self.order = parts, order
        self._read = order.given(length) if spread else None

    def _batch(self, index_B: np.ndarray[Any, np.dtype[np.int64]]) -> Batch:
        part_B, number_B = self.order.of(index_B)
        batch: Batch = {}
        wanted: Mapping[str, TensorSpec] = {}
        for part in np.unique(part_B).tolist():
            chosen, dataset = np.flatnonzero(part_B == part), self.parts[part]
            number = number_B[chosen]
            if self._read is not None:
                number = number * len(dataset) // self._read[part]
            own = dataset._batch(number)
            specs = item_specs({name: field[0] for name, field in own.items()})
            wanted = wanted or specs
            if specs != wanted:
                raise DataError(
                    f"Items of the mixture's sources differ: {described_specs(wanted)} against "
                    f"{described_specs(specs)}. Give all sources the same fields, shapes and types."
                )
            for name, field in own.items():
                mixed = batch.setdefault(name, field.new_empty((len(index_B), *field.shape[1:])))
                mixed[torch.from_numpy(chosen)] = field
        return batch


def mixed_dataset(
    parts: Sequence[TrainingDataset], order: MixedOrder, length: int, identity: Callable[[Sequence[Any]], str]
) -> MixedDataset | StreamedDataset:
    """Return the samples of several datasets in the order of a mixture: a stream if one of them is.

    `identity` returns a hash of what decides the samples of some datasets.
    """
    streams = tuple(part.stream if isinstance(part, StreamedDataset) else None for part in parts)
    streamed = [part for part in parts if isinstance(part, StreamedDataset)]
    if not streamed:
        return MixedDataset(parts, order, length)

    def reading(ring: Ring) -> MixedDataset:
        rings = [SourceRing(**vars(ring), order=order, source=source) for source in range(len(parts))]
        own = [
            part.reading(of_part) if isinstance(part, StreamedDataset) else part
            for part, of_part in zip(parts, rings, strict=True)
        ]
        return MixedDataset(own, order, length)

    digest = hashlib.sha256(f"{order} {identity(parts)}".encode()).hexdigest()
    return StreamedDataset(MixedStream(streams, order), length, digest, reading, streamed[0].vocabulary)


def item_at(items: Any, index: int) -> Batch:
    """Return one item of a user-defined dataset, checked.

    Raises `DataError` where the dataset has fewer items than it says, and for `StopIteration`, which would end whatever
    loop reads the items as if they were all.
    """
    try:
        item = items[index]
    except (StopIteration, IndexError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = place(frame.filename, frame.lineno or 0)
        if isinstance(error, StopIteration):
            raise DataError(
                f"Item {index:,} of the dataset raised StopIteration at {where}: an iterator in it came to its end. "
                "Begin it anew there, or read by the index."
            ) from None
        raise DataError(
            f"The dataset says that it has {len(items):,} items, and item {index:,} raised IndexError at {where}: "
            f"{message_of(error)}. Let __len__ return the number of items that __getitem__ can return, or correct what "
            "it looks up."
        ) from None
    return require_tensors(item, index)


def stacked(items: Sequence[Batch]) -> Batch:
    """Stack items into one tensor per field, with a leading batch dim.

    Raises `DataError` if the items differ in fields or shapes.
    """
    fields = items[0]
    for item in items:
        if item.keys() != fields.keys():
            raise DataError(
                f"Items differ in their fields: {', '.join(fields)} against {', '.join(item)}. "
                "Return the same fields for every item."
            )
    for name in fields:
        types = sorted({str(item[name].dtype).removeprefix("torch.") for item in items})
        if len(types) > 1:
            raise DataError(
                f"Items differ in the type of {name!r}: {' and '.join(types)}. Convert them to one type in the "
                f"dataset: .to(torch.{types[0]})."
            )
        shapes = {tuple(item[name].shape) for item in items}
        if len(shapes) > 1:
            raise DataError(
                f"Items differ in the shape of {name!r}: {' and '.join(map(str, sorted(shapes)[:2]))}. "
                "Pad or crop them to one shape in the dataset."
            )
    return {name: torch.stack([item[name] for item in items]) for name in fields}


def require_tensors(item: Any, index: int) -> Batch:
    """Return `item` as a dict of tensors; raise a `DataError` that describes it if it is anything else."""
    if not isinstance(item, Mapping) or not item:
        raise DataError(
            f"Item {index} of the dataset is {_described(item)}. "
            "Return a dict of tensors, keyed by the names of the arguments that the model takes."
        )
    for name, value in item.items():
        if not isinstance(value, torch.Tensor):
            remedy = "Convert it in the dataset: torch.as_tensor(…)."
            if isinstance(value, str | bytes):
                remedy = "Remove it, or turn it into numbers in the dataset."
            elif isinstance(value, list) and not any(isinstance(field, torch.Tensor) for field in item.values()):
                remedy = f"{remedy[:-1]}, or dataset.with_format('torch') of a Hugging Face one."
            raise DataError(f"Field {name!r} of item {index} is {_described(value)} instead of a tensor. {remedy}")
    return dict(item)


@contextlib.contextmanager
def untouched_generators(device: torch.device = CPU) -> Iterator[None]:
    """Restore the host's random generators afterwards, and a GPU's; code of the user's may draw from any of them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
LEAVES = (str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray, type, types.ModuleType)
MOST_OBJECTS = 10_000
"""Objects among which generators are looked for: a list of a million samples is not read for it."""


def generators_in(items: Any) -> list[Any]:
    """Return the random generators that the code of a dataset reaches.

    They are looked for in attributes and containers, in datasets that it wraps, and in what its functions close over or
    name as globals.
    """
    found, seen, left = list[Any](), dict[int, Any](), [items]
    while left and len(seen) < MOST_OBJECTS:
        one = left.pop()
        if isinstance(one, LEAVES) or id(one) in seen:
            continue
        seen[id(one)] = one  # which keeps it, so that no other object has its address
        if isinstance(one, GENERATORS):
            found += [] if isinstance(one, random.SystemRandom) else [one]
        else:
            left += itertools.islice(_parts(one), MOST_OBJECTS)
    return found


def _parts(one: Any) -> Iterator[Any]:
    """Yield what an object is made of."""
    if isinstance(one, dict):  # another mapping may read a file for each of its values
        yield from one.values()
    elif isinstance(one, list | tuple | set | frozenset):
        yield from one
    elif isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, types.MethodType):
        yield from (one.__self__, one.__func__)
    elif isinstance(one, types.FunctionType):
        with contextlib.suppress(ValueError):  # of a variable that has no value yet
            yield from inspect.getclosurevars(one).nonlocals.values()
        yield from (one.__globals__[name] for name in one.__code__.co_names if name in one.__globals__)
        yield from (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values())
    else:
        yield from getattr(one, "__dict__", {}).values()
        for base in type(one).__mro__[:-1]:
            yield from (getattr(one, name, None) for name in getattr(base, "__slots__", ()) if isinstance(name, str))
            yield from (each for each in vars(base).values() if isinstance(each, types.FunctionType))


def generator_states(held: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Return the states of the host's random generators and of others, in a form that can be compared."""
    name, keys, *rest = np.random.get_state()
    states = [pickle.dumps(_state(one)) for one in held]
    return random.getstate(), name, np.asarray(keys).tobytes(), rest, torch.get_rng_state().numpy().tobytes(), states


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, torch.Generator):
        return generator.get_state().cpu().numpy()
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def seed_generators(seed: int, held: Sequence[Any] = ()) -> None:
    """Seed Python's, NumPy's and torch's random generators alike, and those of the ambient device if it is a GPU.

    Each of the generators `held` gets a seed of its own.
    """
    for number, generator in enumerate(held, start=1):
        own = (seed ^ number) % 2**32
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(own).state
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        else:
            generator.seed(own)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.get_default_device().type == "cuda":
        torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators for code of the user's that may draw from any of them, and restore them afterwards."""
    with untouched_generators(torch.get_default_device()):
        seed_generators(seed)
        yield


def item_specs(item: Batch) -> dict[str, TensorSpec]:
    """Return the specs of the fields of one sample, without a batch dim."""
    return {
        name: TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in item.items()
    }


def described_specs(specs: Mapping[str, TensorSpec]) -> str:
    """Return the fields of a sample in words, with their shapes and types."""
    return ", ".join(f"{name} {list(spec.shape)} {spec.dtype}" for name, spec in specs.items())


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(part).__name__ for part in value[:3])})"
    return "an empty dict" if isinstance(value, Mapping) else f"of type {type(value).__name__}"


# A user-defined dataset that can only be iterated is a stream of samples in its own order. A pass over the dataset is a
# function of the dataset, the seed and the epoch: it begins with a copy of the dataset, or with another call of the
# user's function, with `set_epoch(epoch)` where that is offered, and with Python's, NumPy's and PyTorch's own random
# generators seeded. The state of the stream before a chunk is therefore the number of items before it. The dataset's
# `state_dict` is stored beside it where there is one, and saves reading them again. A digest of the chunk shows whether
# the dataset's state is complete; if not, the items are read again.

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
        ranks = {name: os.environ.pop(name) for name in OF_A_RANK if name in os.environ}
        with untouched_generators():
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
            finally:
                os.environ.update(ranks)
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
            state = _dataset_state(dataset, generators) if done else None
        while rows := [
            self.layout.packed(item, done + number) for number, item in enumerate(itertools.islice(items, self.buffer))
        ]:
            yield np.stack(rows), state
            done, state = done + len(rows), _dataset_state(dataset, generators)


def _digest(rows: NDArray[np.uint8]) -> str:
    return hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()


def _dataset_state(dataset: Any, generators: str) -> Any:
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
