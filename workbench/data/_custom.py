"""`CustomData`: the user's own map-style dataset, or a callable that returns one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from workbench.data._corpora import Corpus, HubText, Prepared
from workbench.errors import DataError
from workbench.tensors import TensorSpec

if TYPE_CHECKING:
    from workbench.data._datasets import Batch, CustomDataset

EXAMPLES = 16
EXAMPLES_BYTES = 64 << 20


@dataclass(frozen=True)
class CustomData:
    """A dataset whose items are dicts of tensors, keyed by the model's arguments; or a callable returning one."""

    dataset_or_factory: Any = field(repr=False)
    """`None` where the data was only read from a run's description."""
    name: str = ""
    """Taken from the callable or the dataset's class unless given."""

    def __post_init__(self) -> None:
        if not self.name and self.dataset_or_factory is not None:
            value = self.dataset_or_factory
            name = getattr(value, "__name__", type(value).__name__)
            object.__setattr__(self, "name", "dataset" if name == "<lambda>" else name)

    @property
    def is_custom(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset_or_factory": self.dataset_or_factory, "name": self.name}

    def check(self, experiment: Any) -> None:
        """Refuse an empty dataset and items that are not dicts of tensors; `DataError`."""
        self.batch_specs(experiment)

    def batch_specs(self, experiment: Any) -> dict[str, TensorSpec]:  # noqa: ARG002
        """Fields of item 0, without a batch dim, in its own order."""
        from workbench.data._datasets import item_specs, require_tensors

        return item_specs(require_tensors(self._items[0], 0))

    def labelled_share(self, experiment: Any) -> float:  # noqa: ARG002
        """Only a loss knows which fields hold its labels, and which of them it passes over; see `examples`."""
        return 1.0

    def examples(self, experiment: Any) -> Batch:  # noqa: ARG002
        """A batch of items from all over the dataset (it may be sorted): `EXAMPLES`, or what fills `EXAMPLES_BYTES`.

        They stand for the rest where costs hang on values: which rows of a table are read, how many labels count.
        Raises `DataError` where they differ in fields or shapes.
        """
        return self._examples

    def prepare(self, experiment: Any, progress: bool = True) -> Prepared:  # noqa: ARG002
        """Nothing to do but look."""
        self.check(experiment)
        return Prepared(name=self.name, samples=len(self._items))

    def dataset(self, experiment: Any) -> CustomDataset:
        """Every sample of the training in order: the items in a new seeded order each epoch.

        Its length is `steps * global_batch`; see `Corpus.dataset`.
        """
        from workbench.data._datasets import CustomDataset

        return CustomDataset(self._items, experiment.steps * experiment.global_batch, experiment.seed)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "custom", "name": self.name}

    @cached_property
    def _examples(self) -> Batch:
        from workbench.data._datasets import require_tensors, stacked

        first = require_tensors(self._items[0], 0)
        room = EXAMPLES_BYTES // max(1, sum(field.nbytes for field in first.values()))
        count = max(1, min(EXAMPLES, len(self._items), room))
        others = [index * len(self._items) // count for index in range(1, count)]
        return stacked([first, *(require_tensors(self._items[index], index) for index in others)])

    @cached_property
    def _items(self) -> Any:
        """The dataset itself; a callable is called once in each process."""
        if self.dataset_or_factory is None:
            raise DataError(
                f"Only the description of {self.name} is here, not the dataset itself. "
                "Pass it: Experiment.from_json(…, data=my_dataset).",
                data=self.name,
            )
        value = self.dataset_or_factory
        if not _is_map_style(value):
            value = _called(value, self.name)
        _require_map_style(value, self.name)
        if len(value) == 0:
            raise DataError(f"{self.name} is empty: it has 0 items. Give it at least one.", data=self.name, items=0)
        return value


def as_data(value: Any) -> Corpus | HubText | CustomData:
    """`value` itself if it is one of `wb.data.…`, or the user's dataset wrapped in a `CustomData`."""
    if isinstance(value, Corpus | HubText | CustomData):
        return value
    if isinstance(value, str):
        raise DataError(f"The data is the string {value!r}. Write wb.data.corpus({value!r}) for text.", data=value)
    if not callable(value) or _is_map_style(value):
        _require_map_style(value, f"The data, a {type(value).__name__},")
    else:
        _require_no_arguments(value)
    return CustomData(value)


def _is_map_style(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _require_map_style(value: Any, name: str) -> None:
    if _is_map_style(value) and not isinstance(value, dict | str):
        return
    raise DataError(
        f"{name} is not a map-style dataset: it needs __len__ and __getitem__, so that any plan reads the same "
        "samples. Pass such a dataset, a callable that returns one, or wb.data.corpus(path) for text.",
        found=type(value).__name__,
    )


def _called(factory: Callable[[], Any], name: str) -> Any:
    try:
        return factory()
    except Exception as error:
        raise DataError(
            f"{name}() raised {type(error).__name__}: {error}. Call it by itself until it returns the dataset.",
            data=name,
            error=str(error),
        ) from error


def _require_no_arguments(factory: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # built-ins without a signature: calling will tell
        return
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if required:
        raise DataError(
            f"The callable that returns the data needs {', '.join(required)}, but it is called without arguments. "
            f"Bind them with functools.partial or a lambda.",
            required=tuple(required),
        )
