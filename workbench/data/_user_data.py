"""`UserData`: a user-defined dataset, read by index or in its own order, or a callable that returns one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.data._source import DataSource, Prepared, SampleRequest
from workbench.errors import DataError, in_words
from workbench.tensors import TensorSpec
from workbench.user_code import required_arguments

if TYPE_CHECKING:
    from workbench.data._datasets import Batch, StreamedDataset, UserDataset
    from workbench.data._iterable import IterableItems
    from workbench.data._labelled_texts import LabelledTexts
    from workbench.data._prompts import EncodedPrompts

EXAMPLES = 16
"""Upper limit of the items in `UserData.examples`."""
EXAMPLES_BYTES = 64 << 20
"""Upper limit of their size in bytes."""
MOST_SUBSETS = 8
"""Depth to which a part of a part of a dataset is followed to the whole (`torch.utils.data.Subset`)."""
DATASET_SEED = 0
"""Seed of the generators while a callable makes a dataset, so that every rank and every experiment has the same."""


@dataclass(frozen=True)
class UserData(DataSource):
    """A dataset whose items are dicts of tensors, keyed by the model's arguments; or a callable returning one.

    A map-style dataset (`__len__` and `__getitem__`) is read by index, in a new seeded order each epoch. Any other that
    can be iterated, such as a `torch.utils.data.IterableDataset` or a streaming dataset of Hugging Face, is read in its
    own order, by one process for each node.
    """

    dataset_or_factory: Any = field(repr=False)
    """The dataset or callable; `None` if the data was only read from the description of a run."""
    name: str = ""
    """Name for tables and messages; defaults to that of the callable or of the dataset's class."""

    def __post_init__(self) -> None:
        if not self.name and self.dataset_or_factory is not None:
            value = self.dataset_or_factory
            name = getattr(value, "__name__", type(value).__name__)
            object.__setattr__(self, "name", "dataset" if name == "<lambda>" else name)

    @property
    def is_user_defined(self) -> bool:
        return True

    @property
    def is_loaded(self) -> bool:
        """Return True unless only the description of the dataset is here."""
        return self.dataset_or_factory is not None

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset_or_factory": self.dataset_or_factory, "name": self.name}

    def check(self, request: SampleRequest) -> None:
        self.batch_specs(request)
        if request.eval_data is not None:
            request.eval_data.held_out(request, self)

    def prepare(self, request: SampleRequest, progress: bool = True, workers: int | None = None) -> Prepared:  # noqa: ARG002
        self.check(request)
        return Prepared(name=self.name, samples=len(self._items) if hasattr(self._items, "__len__") else None)

    def batch_specs(self, request: SampleRequest) -> dict[str, TensorSpec]:  # noqa: ARG002
        from workbench.data._datasets import item_at, item_specs

        return item_specs(self._first_items[0] if self._iterable is not None else item_at(self._items, 0))

    def labelled_share(self, request: SampleRequest) -> float:  # noqa: ARG002
        return 1.0

    def examples(self, request: SampleRequest) -> Batch:  # noqa: ARG002
        """Return a batch of evenly spaced items, since a dataset may be sorted, or the first of one without an index.

        The batch has `EXAMPLES` items, or as many as fill `EXAMPLES_BYTES`. It stands for the whole dataset where
        costs depend on values, such as which rows of a table are read or how many labels count. Raises `DataError`
        if the items differ in fields or shapes.
        """
        return self._examples

    def dataset(self, request: SampleRequest) -> UserDataset | StreamedDataset:
        from workbench.data._datasets import UserDataset

        length = request.total_samples
        if self._iterable is not None:
            return self._iterable.dataset(length, request.seed)
        return UserDataset(self._items, length, request.seed)

    def held_out(self, request: SampleRequest, trained_on: DataSource | None = None) -> UserDataset:
        """Return items in their own order; raise `DataError` unless their fields are those of the training data.

        Those of a dataset without an index are its first ones, which are kept in memory.
        """
        from workbench.data._datasets import UserDataset, described_specs

        assert request.evaluation is not None
        assert trained_on is not None
        own, trained = (source.batch_specs(request) for source in (self, trained_on))
        if own != trained:
            raise DataError(
                f"eval_data has the fields {described_specs(own)}, and data has {described_specs(trained)}. Give both "
                "the same fields with the same shapes and types."
            )
        count = request.evaluation.samples
        items = self._items if self._iterable is None else self._iterable.first(count, seed=0)
        return UserDataset(items, min(count, len(items)), seed=None)

    def note(self, request: SampleRequest) -> str:
        items, batch = len(self._items) if hasattr(self._items, "__len__") else 0, request.largest_batch
        if not items or items >= batch or batch % items == 0:
            return ""
        return (
            f"{self.name} has {items:,} items, fewer than the {batch:,} samples of a batch, which reads some of them "
            f"{batch // items + 1} times and the others {batch // items}: its loss is no mean over the items. A batch "
            f"of {items:,}, or of a multiple of that, reads all equally often."
        )

    def tokenizer_folder(self, request: SampleRequest) -> Path | None:  # noqa: ARG002
        return None if self._labelled_texts is None else self._labelled_texts.tokenizer_folder

    @property
    def class_names(self) -> tuple[str, ...]:
        return () if self._labelled_texts is None else self._labelled_texts.labels

    def encoded(self, request: SampleRequest, prompts: Sequence[str]) -> EncodedPrompts:  # noqa: ARG002
        raise DataError(
            f"Samples of text need a tokeniser, and {self.name} is a user-defined dataset, which has none. Train on "
            "text (wb.data.corpus or wb.data.hub), or remove samples."
        )

    def to_json(self) -> dict[str, Any]:
        return {"type": "user_defined", "name": self.name}

    @property
    def _labelled_texts(self) -> LabelledTexts | None:
        """The texts with classes that the dataset is, or of which it is a part, such as `random_split` makes."""
        from workbench.data._labelled_texts import LabelledTexts

        value = self._items
        for _ in range(MOST_SUBSETS):
            if isinstance(value, LabelledTexts):
                return value
            value = getattr(value, "dataset", None)
        return None

    @cached_property
    def _examples(self) -> Batch:
        from workbench.data._datasets import item_at, stacked

        if self._iterable is not None:
            return stacked(self._first_items)
        first = item_at(self._items, 0)
        room = EXAMPLES_BYTES // max(1, sum(field.nbytes for field in first.values()))
        count = max(1, min(EXAMPLES, len(self._items), room))
        others = [index * len(self._items) // count for index in range(1, count)]
        return stacked([first, *(item_at(self._items, index) for index in others)])

    @cached_property
    def _items(self) -> Any:
        """The dataset itself; a callable is called once in each process, by the first access."""
        value = self.dataset_or_factory
        if value is None:
            raise DataError(
                f"Only the description of {self.name} is here, not the dataset itself. "
                "Pass it: Experiment.from_json(…, data=my_dataset)."
            )
        if not _is_map_style(value) and not _is_iterable(value):
            from workbench.data._datasets import seeded

            try:
                with seeded(DATASET_SEED):
                    value = value()
            except Exception as error:
                raise DataError(
                    f"{self.name}() raised {in_words(error)}. Call it by itself until it returns the dataset."
                ) from error
        _require_dataset(value, self.name)
        try:
            is_empty = hasattr(value, "__len__") and len(value) == 0
        except Exception as error:  # more than Python can count, for instance
            raise DataError(
                f"len() of {self.name} raised {in_words(error)}. Let __len__ return the "
                f"number of items that __getitem__ can return, below {sys.maxsize:,}."
            ) from error
        if is_empty:
            raise DataError(f"{self.name} is empty: it has 0 items. Give it at least one.")
        return value

    @cached_property
    def _iterable(self) -> IterableItems | None:
        """The dataset if it has no index, which is begun anew for each pass over it."""
        from workbench.data._iterable import IterableItems

        return None if _is_map_style(self._items) else IterableItems(self.dataset_or_factory, self.name)

    @cached_property
    def _first_items(self) -> list[Batch]:
        assert self._iterable is not None
        return self._iterable.first(EXAMPLES, seed=0, room=EXAMPLES_BYTES)


def as_data(value: Any) -> DataSource:
    """Return `value` if it is one of `wb.data.…`, else wrap the user's dataset in a `UserData`."""
    if isinstance(value, DataSource):
        return value
    if isinstance(value, str):
        raise DataError(f"The data is the string {value!r}. Write wb.data.corpus({value!r}) for text.")
    if not callable(value) or _is_map_style(value) or _is_iterable(value):
        _require_dataset(value, f"The data, a {type(value).__name__},")
        if isinstance(value, Iterator):
            raise DataError(
                f"The data is a {type(value).__name__}, which can be read only once, and a training begins it anew in "
                "several processes. Pass the function that makes it: data=my_function."
            )
    elif required := required_arguments(value):
        raise DataError(
            f"The callable that returns the data needs {', '.join(required)}, but it is called without arguments. "
            "Bind them with functools.partial or a lambda."
        )
    return UserData(value)


def _is_map_style(value: Any) -> bool:
    has_index = not isinstance(value, type) and hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return has_index and not _is_torch(value, "IterableDataset")  # which inherits an index that it does not have


def _is_iterable(value: Any) -> bool:
    is_other = isinstance(value, type | Mapping | str | bytes)
    return hasattr(value, "__iter__") and not is_other and not _is_map_style(value)


def _is_torch(value: Any, name: str) -> bool:
    """Return True for an instance of a class of `torch.utils.data`, which is loaded if there is any."""
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(value, getattr(torch_data, name))


def _require_dataset(value: Any, name: str) -> None:
    if _is_torch(value, "DataLoader"):
        raise DataError(
            f"{name} is a DataLoader, which makes batches, and their size is a plan's to choose. Pass its dataset: "
            "data=loader.dataset."
        )
    if not _is_iterable(value) and (not _is_map_style(value) or isinstance(value, dict | str)):
        raise DataError(
            f"{name} is no dataset: it has neither __len__ and __getitem__ nor __iter__. Pass a map-style dataset, one "
            "that can be iterated, a callable that returns one, or wb.data.corpus(path) for text."
        )
