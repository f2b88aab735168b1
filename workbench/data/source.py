"""`DataSource` describes data, and `Reading` is what an experiment reads of them; the values that they exchange.

`UserData` is that of a dataset of the user's own. `LabelledTexts` is such a dataset, made of rows of text with a class.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from workbench.base.errors import DataError, in_words
from workbench.base.tensors import TensorSpec
from workbench.base.units import count, duration
from workbench.base.user_code import required_arguments
from workbench.data.text import is_rows, reading_rows, rows_at

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from workbench.data.datasets import Batch, IterableItems, StreamedDataset, TrainingDataset, UserDataset
    from workbench.data.sampling import EncodedPrompts

SAMPLED = 4
"""Samples at each end of the training that enter the fingerprint of its data."""


class TrainedBefore(Protocol):
    """The facts about weights from elsewhere that decide which tokens and classes they know."""

    @property
    def path(self) -> str: ...
    @property
    def pad_id(self) -> int | None: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...


class DescribedModel(Protocol):
    """The facts about a model that a data source reads."""

    @property
    def name(self) -> str: ...
    @property
    def objective(self) -> str | None: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def pretrained(self) -> TrainedBefore | None: ...


class HeldOutSamples(Protocol):
    """The field of an experiment's `Evaluation` that a data source reads."""

    @property
    def samples(self) -> int: ...
    @property
    def masked_share(self) -> float | None: ...


class SampleRequest(Protocol):
    """The fields of an `Experiment` that a data source reads."""

    @property
    def model(self) -> DescribedModel: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def largest_batch(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def data(self) -> DataSource: ...
    @property
    def total_samples(self) -> int: ...
    @property
    def evaluation(self) -> HeldOutSamples | None: ...
    @property
    def eval_data(self) -> DataSource | None: ...
    def samples_before(self, step: int) -> int: ...


class EvaluatedRequest(SampleRequest, Protocol):
    """An experiment with further held-out sets, each of which is a request, too."""

    @property
    def held_out_sets(self) -> Mapping[str, SampleRequest]: ...


class DataSource(ABC):
    """A description of training data, from which every process makes the same samples.

    Sample i depends on the experiment's seed and on i only, never on the plan. What an experiment asks of its data is
    answered by the value that `reads` returns.
    """

    @property
    def is_user_defined(self) -> bool:
        """Return True for an object of the user, which JSON can only name."""
        return False

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for tables and messages."""

    @property
    def is_loaded(self) -> bool:
        """Return True unless only the description of a user-defined object is here."""
        return True

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes of labelled texts, in the order of their numbers; empty for other data."""
        return ()

    @property
    def separates_documents(self) -> bool:
        """Return True if samples hold several documents, each of which the model reads as if it stood alone."""
        return False

    @property
    def pad_id(self) -> int | None:
        """Id with which samples are filled where an attention mask hides them; None where none is known."""
        return None

    @abstractmethod
    def reads(self, experiment: SampleRequest) -> Reading:
        """Return the data as an experiment reads them, be they its training data or its `eval_data`."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return a description from which `workbench.data.from_json` rebuilds this value."""


class Reading(ABC):
    """Data as one experiment reads them."""

    data: Any
    """The `DataSource` that describes them."""
    request: SampleRequest
    """The experiment that decides which samples are made of them."""

    @property
    def objective(self) -> str | None:
        """Objective that samples of text are made for; None for user-defined data."""
        return None

    @abstractmethod
    def check(self) -> None:
        """Raise `DataError` if the data cannot feed the experiment."""

    @abstractmethod
    def prepare(self, progress: bool = True, workers: int | None = None) -> Prepared:
        """Do all work that training needs once, such as tokenising, with so many processes; None chooses.

        Text that the cache has is not tokenised again, unless it has changed. If several processes ask at once, one
        works and the others wait. Raises `DataError` for data that cannot be read or hold less than one sample.
        """

    def samples_per_epoch(self) -> int:
        """Return the number of different samples, after preparing the data if they have not been.

        That of a streamed text is estimated, unless the text is small or stored as well. Raises `DataError` for a
        dataset that does not say its length.
        """
        samples = self.prepare().samples
        if samples is None:
            raise DataError(
                f"{self.data.name} has no __len__, so that epochs say nothing about the length of a training. Give "
                "steps=… or tokens=…, or the dataset a __len__."
            )
        return samples

    def counted(self) -> tuple[int | None, bool]:
        """Return the number of different samples, and True if it is estimated; None where the data do not say it."""
        return self.prepare(progress=False).samples, False

    @abstractmethod
    def batch_specs(self) -> dict[str, TensorSpec]:
        """Return the fields of one sample, without a batch dim, in the order in which the model takes them."""

    def labelled_share(self) -> float:
        """Return the fraction of labels, on average, that the loss does not ignore, or 1 if only the loss knows it."""
        return 1.0

    def examples(self) -> Mapping[str, torch.Tensor] | None:
        """Return a batch that stands for the rest in measurements, or None if random tokens do."""
        return None

    @abstractmethod
    def dataset(self) -> TrainingDataset:
        """Return every sample of the training in order, `total_samples` of them, after preparing the data.

        `DataLoader(ds, batch_size=b, collate_fn=ds.collate)` yields dicts of tensors with a leading batch dim.
        """

    @abstractmethod
    def held_out(self, trained_on: Reading | None = None) -> TrainingDataset:
        """Return the samples for evaluation in a fixed order, the same in every experiment on this data.

        They are those that `dataset` leaves out, or all of this data if it is the `eval_data` of an experiment that is
        `trained_on` other data.
        """

    def evaluated_on(self) -> TrainingDataset:
        """Return the held-out samples of an experiment that trains on this data and has an `evaluation`."""
        other = self.request.eval_data
        return self.held_out() if other is None else other.reads(self.request).held_out(self)

    def held_out_in_words(self) -> str:
        """Return sentences with the numbers of what training leaves out for evaluations; empty if it reads all."""
        return ""

    def note(self) -> str:
        """Return a sentence on what batches or held-out samples are that a user may not expect; empty if none is."""
        return ""

    @abstractmethod
    def encoded(self, prompts: Sequence[str]) -> EncodedPrompts:
        """Return prompts as token ids; raise `DataError` for one that the model cannot read, or without a tokeniser."""

    def tokenizer_folder(self, progress: bool = False) -> Path | None:  # noqa: ARG002
        """Return the folder with the files of the tokeniser, after training one if need be; None for data without."""
        return None


@dataclass(frozen=True)
class Prepared:
    """The result of `Reading.prepare`."""

    name: str
    samples: int | None
    """Number of different samples in one epoch; None for a dataset that does not say how many items it has."""
    tokens: int | None = None
    documents: int | None = None
    vocabulary: int | None = None
    folder: Path | None = None
    seconds: float = 0.0
    """Time that tokenising took, now or when the cache was filled."""
    reused: bool = False
    streamed: bool = False
    """True if the text is tokenised while training reads it; `tokens` is then an estimate, and so is `samples` unless
    the text is small or stored as well."""
    tokens_per_core_s: float | None = None
    """Tokens of a streamed text that one core makes in a second, measured on excerpts of it."""
    held_out: str = ""
    """Sentences on what training leaves out for evaluations: how many tokens, of which documents."""

    def __repr__(self) -> str:
        held_out = f"; {self.held_out.removesuffix('.')}" if self.held_out else ""
        if self.tokens is None:
            known = "an unknown number of" if self.samples is None else count(self.samples)
            return f"Prepared({self.name}: {known} samples)"
        if self.streamed:
            return (
                f"Prepared({self.name}: streamed, about {count(self.tokens)} tokens, vocabulary {self.vocabulary:,}, "
                f"{count(self.tokens_per_core_s or 0)} tokens/s a core{held_out})"
            )
        how = "from the cache" if self.reused else f"tokenised in {duration(self.seconds)}"
        return (
            f"Prepared({self.name}: {count(self.tokens)} tokens in {self.documents:,} "
            f"document{'s' * (self.documents != 1)}, vocabulary {self.vocabulary:,}, {how}{held_out})"
        )


def held_out(request: SampleRequest) -> TrainingDataset:
    """Return the held-out samples of an experiment with an `evaluation`, in a fixed order.

    They come from `eval_data`, or from the part of the text that training does not read. Raises `DataError` if there
    are too few of them, if their fields differ from those of the training data, or without an `evaluation`.
    """
    if getattr(request, "evaluation", None) is None:
        raise DataError(
            f"A value of type {type(request).__name__} has no held-out samples. Give an experiment with an evaluation: "
            "wb.Experiment(…, evaluation=wb.Evaluation(every=100))."
        )
    return request.data.reads(request).evaluated_on()


def data_fingerprint(request: EvaluatedRequest) -> str | None:
    """Return SHA-256 over the first and the last samples that training will see; None for data that raises.

    Equal fingerprints mean the same text, tokenisation, order and masking at both ends of the training, and of the
    held-out samples if there are any.
    """

    def datasets() -> list[Any]:
        evaluated = [] if request.evaluation is None else [request, *request.held_out_sets.values()]
        return [request.data.reads(request).dataset(), *map(held_out, evaluated)]

    return _fingerprint(datasets)


def held_out_fingerprint(request: EvaluatedRequest) -> str | None:
    """Return SHA-256 over the first and the last held-out samples, which no seed changes; None where there are none."""
    return None if request.evaluation is None else _fingerprint(lambda: [held_out(request)])


def _fingerprint(datasets: Callable[[], list[Any]]) -> str | None:
    try:
        return fingerprint_of(datasets())
    except Exception:  # user-defined data may raise anything; training will report it
        return None


def fingerprint_of(datasets: Sequence[TrainingDataset]) -> str:
    """Return SHA-256 over the first and the last samples of some datasets, or of streams over what decides them."""
    import numpy as np

    digest = hashlib.sha256()
    for dataset in datasets:
        size, identity = len(dataset), getattr(dataset, "identity", None)
        digest.update(f"{size}{identity or ''}".encode())
        indices = {*range(min(SAMPLED, size)), *range(max(0, size - SAMPLED), size)}
        for index in sorted(indices) if identity is None else ():  # no sample of a stream is made before training
            for name, value in sorted(dataset[index].items()):
                array = np.ascontiguousarray(value)
                digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


# Rows of text with a class each, as the items that a model for classification trains on.

WITH_ROWS = (
    "a .csv or .tsv file with a line of column names, a .jsonl, .json or .parquet file, or a folder of save_to_disk"
)
SHORTEST, LONGEST = 3, 2**20
"""Smallest and largest number of tokens of a row, of which two are special."""


class LabelledTexts:
    """Tokenised rows in memory: a map-style dataset whose items are `input_ids`, `attention_mask` and `labels`.

    A tokeniser that tells two segments apart adds `token_type_ids`.
    """

    pad_id: int | None = None
    """Id with which rows are filled; None for those that an earlier version stored with a run."""

    def __init__(
        self,
        fields: Mapping[str, NDArray[Any]],
        labels: tuple[str, ...],
        name: str,
        tokenizer_folder: Path,
        pad_id: int | None = None,
    ) -> None:
        """`fields` have a row for each text; `labels` are the names of the classes, in the order of their numbers.

        `pad_id` is the id with which rows are filled.
        """
        self.fields, self.labels, self.__name__, self.tokenizer_folder = dict(fields), labels, name, tokenizer_folder
        self.pad_id = pad_id

    def __len__(self) -> int:
        return len(self.fields["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import numpy as np
        import torch

        return {name: torch.from_numpy(np.asarray(rows[index], dtype=np.int64)) for name, rows in self.fields.items()}

    def __repr__(self) -> str:
        width = self.fields["input_ids"].shape[1]
        return f"LabelledTexts({self.__name__}: {len(self):,} rows of {width} tokens, labels {', '.join(self.labels)})"


def labelled_texts(
    source: Any, tokenizer: Any, text: str, pair: str | None, label: str, labels: Sequence[Any] | None, length: int
) -> LabelledTexts:
    """Read and tokenise rows; see `workbench.data.classification`."""
    import numpy as np

    from workbench.data.tokenizer import folder_of, named_tokenizer, saved

    if not SHORTEST <= length <= LONGEST:
        raise DataError(f"length={length:.3g} is no number of tokens between {SHORTEST} and {LONGEST:,}. Give another.")
    if labels is not None and (len(named := set(map(str, labels))) < 2 or len(named) < len(labels)):
        what = "fewer than two classes" if len(named) < 2 else "a class twice"
        raise DataError(f"labels={labels!r:.60} names {what}. Give labels=['no', 'yes'], or leave it out.")
    name, rows, names = _rows(source, label)
    wanted = [column for column in (text, pair, label) if column is not None]
    columns: dict[str, list[Any]] = {column: [] for column in wanted}
    for number, row in enumerate(rows):
        for column in wanted:
            if not isinstance(row, Mapping) or row.get(column) is None:
                has = ", ".join(map(str, row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
                raise DataError(f"Row {number} of {name} has no {column!r}. It has: {has}. Name the columns.")
            columns[column].append(row[column])
            if column != label and not isinstance(row[column], str):
                raise DataError(
                    f"Row {number} of {name} has {row[column]!r:.60} in {column!r}, of type "
                    f"{type(row[column]).__name__} and no text. Name the column with the text, or make text of it."
                )
    if not columns[label]:
        raise DataError(f"{name} is empty: it holds no row. Give at least one.")
    # The classes: those that were given, or the values in order, as numbers if they are.
    given, classes = labels if labels is not None else names, _classes(columns[label], name)
    known = tuple(sorted(set(classes)) if given is None else _classes(given, "labels"))
    equal = None
    if given is None:
        with contextlib.suppress(ValueError):
            known = tuple(sorted(known, key=float))
            equal = next((pair for pair in pairwise(known) if float(pair[0]) == float(pair[1])), None)
    if equal:
        raise DataError(
            f"{name} has the labels {' and '.join(equal)}, which are one number and would be two classes. Write them "
            "alike."
        )
    numbers = {value: number for number, value in enumerate(known)}
    unknown = [value for value in classes if value not in numbers]
    if unknown:
        raise DataError(
            f"{name} has the label {unknown[0]!r}, which is none of {', '.join(known)}. Give the labels of both sets, "
            "labels=[…]."
        )
    # The tokeniser, and the rows as ids.
    is_path = isinstance(tokenizer, str | Path)
    path = str(Path(tokenizer).expanduser().absolute()) if is_path else str(saved(tokenizer))
    folder = folder_of(path)
    reader = named_tokenizer(folder)
    if reader.pad_token is None:
        if reader.eos_token is None:
            raise DataError(
                f"{path} has neither a token for padding (pad_token), with which rows are filled, nor an end token "
                "(eos_token). Name one of its tokens, which the model embeds: tokenizer.pad_token = …."
            )
        reader.pad_token = reader.eos_token
        folder = folder_of(str(saved(reader)))  # so that an export fills rows as training did
    texts = [[str(value) for value in columns[column]] for column in wanted[:-1]]
    encoded = reader(*texts, truncation=True, padding="max_length", max_length=length, return_attention_mask=True)
    fields = {field: np.asarray(encoded[field], dtype=np.int32) for field in ("input_ids", "attention_mask")}
    if "token_type_ids" in encoded:
        fields["token_type_ids"] = np.asarray(encoded["token_type_ids"], dtype=np.int32)
    fields["labels"] = np.asarray([numbers[value] for value in classes], dtype=np.int32)
    return LabelledTexts(fields, known, name, folder, int(reader.pad_token_id))


def _classes(values: Sequence[Any], name: str) -> list[str]:
    """Return labels as names of classes, of which 1 and 1.0 are one, and a text is the same with blanks around it.

    Raises `DataError` for what names no class, and for truth values among numbers.
    """
    found, types = list[str](), set[type]()
    for number, value in enumerate(values):
        if getattr(value, "shape", None) == ():  # a number of NumPy or torch
            value = value.item()
        text = str(value).strip()
        if isinstance(value, float) and math.isfinite(value) and value.is_integer():
            text = str(int(value))
        if not isinstance(value, str | int | float) or not text or text in ("nan", "inf", "-inf"):
            raise DataError(
                f"Row {number} of {name} has the label {value!r:.60}, which names no class. Give each row one text or "
                "number, or leave out rows without a class."
            )
        types.add(type(value))
        found.append(text)
    if bool in types and types & {int, float}:
        raise DataError(f"{name} has both truth values and numbers as labels, which Python holds for equal. Use one.")
    return found


def _rows(source: Any, label: str) -> tuple[str, Iterable[Any], Sequence[Any] | None]:
    """Return the name of a source, its rows, and the names of its classes if it says them."""
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if not os.path.exists(path):
            raise DataError(f"There is no file of rows at {path}. Give {WITH_ROWS}.")
        if not is_rows(path):
            raise DataError(f"{path} holds no rows that are known by its ending. Give {WITH_ROWS}.")
        if path.suffix.lower() not in (".csv", ".tsv"):
            try:
                with reading_rows(str(path)):
                    found = rows_at(str(path))
            except DataError:
                raise
            except Exception as error:  # `datasets` raises many types
                said = in_words(error.__cause__ or error)
                raise DataError(f"{path} cannot be read as rows ({said}). Give {WITH_ROWS}.") from error
            return (path.stem, *_rows(found, label)[1:])
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                rows = list(csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","))
                if (long := next((number for number, row in enumerate(rows) if None in row), None)) is not None:
                    raise DataError(
                        f"Row {long} of {path} has more fields than the line of column names. Put texts with the "
                        "separator in quotation marks."
                    )
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path} cannot be read as CSV: {error}. Give UTF-8 text with one row a line.") from None
        return path.stem, rows, None
    if hasattr(source, "features"):  # a dataset of Hugging Face, whose classes are numbers with names
        feature = (source.features or {}).get(label)
        named = getattr(feature, "names", None)
        if named is not None:
            return "rows", ({**row, label: _named(row[label], named, at)} for at, row in enumerate(source)), named
        return "rows", source, None
    if isinstance(source, Iterable):
        return "rows", source, None
    raise DataError(
        f"source is a {type(source).__name__}. Give {WITH_ROWS}, a dataset of Hugging Face or a list of dicts."
    )


def _named(value: Any, names: Sequence[str], row: int) -> str:
    """Return the name of a class by its number in a dataset of Hugging Face, whose rows without a class have -1."""
    if value is None or not 0 <= int(value) < len(names):
        raise DataError(
            f"Row {row} has the label {value}, which is none of the {len(names)} classes ({', '.join(names)}): it has "
            "no class, as rows of a test set. Leave such rows out: dataset.filter(lambda row: row['label'] …)."
        )
    return names[int(value)]


# A user-defined dataset, read by index or in its own order, or a callable that returns one.

EXAMPLES = 16
"""Upper limit of the items that stand for a dataset in measurements."""
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

    @property
    def class_names(self) -> tuple[str, ...]:
        return () if self._labelled_texts is None else self._labelled_texts.labels

    @property
    def pad_id(self) -> int | None:
        if not self.is_loaded:
            return None
        if self._labelled_texts is not None:
            return self._labelled_texts.pad_id
        ids, mask = (self._examples.get(name) for name in ("input_ids", "attention_mask"))
        if ids is None or mask is None or ids.shape != mask.shape:
            return None
        hidden = ids[mask == 0].unique().tolist()
        return hidden[0] if len(hidden) == 1 else None

    def reads(self, experiment: SampleRequest) -> UserReading:
        return UserReading(self, experiment)

    def to_json(self) -> dict[str, Any]:
        return {"type": "user_defined", "name": self.name}

    @property
    def _labelled_texts(self) -> LabelledTexts | None:
        """The texts with classes that the dataset is, or of which it is a part, such as `random_split` makes."""
        value = self._items
        for _ in range(MOST_SUBSETS):
            if isinstance(value, LabelledTexts):
                return value
            value = getattr(value, "dataset", None)
        return None

    @cached_property
    def _examples(self) -> Batch:
        """Evenly spaced items, since a dataset may be sorted, or the first of one without an index.

        They are `EXAMPLES`, or as many as fill `EXAMPLES_BYTES`, and stand for the whole dataset where costs depend on
        values, such as which rows of a table are read or how many labels count. Raises `DataError` if they differ in
        fields or shapes.
        """
        from workbench.data.datasets import item_at, stacked

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
            from workbench.data.datasets import seeded

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
        from workbench.data.datasets import IterableItems

        return None if _is_map_style(self._items) else IterableItems(self.dataset_or_factory, self.name)

    @cached_property
    def _first_items(self) -> list[Batch]:
        assert self._iterable is not None
        return self._iterable.first(EXAMPLES, seed=0, room=EXAMPLES_BYTES)


@dataclass(frozen=True)
class UserReading(Reading):
    """A user-defined dataset as one experiment reads it."""

    data: UserData
    request: SampleRequest

    def check(self) -> None:
        self.batch_specs()
        self._check_tokens()
        if self.request.eval_data is not None:
            self.evaluated_on()

    def _check_tokens(self) -> None:
        """Raise `DataError` unless ids and classes mean what they meant when the weights of the model were trained."""
        from workbench.data.tokenizer import other_tokens

        data, known = self.data, self.request.model.pretrained
        if known is None:
            return
        folder = self.tokenizer_folder()
        if folder is not None and (wrong := other_tokens(folder, known.path)):
            raise DataError(
                f"{data.name} was tokenised by another tokeniser than that in {known.path}, with which the weights of "
                f'{self.request.model.name} were trained: {wrong}. Give it tokenizer="{known.path}".'
            )
        if None not in (data.pad_id, known.pad_id) and data.pad_id != known.pad_id:
            raise DataError(
                f"{data.name} is filled with the id {data.pad_id}, and {self.request.model.name} reads the class at "
                f"the last token that is not its own padding, {known.pad_id}: it would read padding. Fill the rows "
                f"with {known.pad_id}: tokenizer.pad_token = tokenizer.convert_ids_to_tokens({known.pad_id})."
            )
        places = [name for name in data.class_names if name in known.class_names]
        if any(data.class_names.index(name) != known.class_names.index(name) for name in places):
            raise DataError(
                f"{data.name} numbers the classes {', '.join(data.class_names)}, and the head of "
                f"{self.request.model.name}, which goes on, {', '.join(known.class_names)}. Give "
                f"labels={list(known.class_names)}."
            )

    def prepare(self, progress: bool = True, workers: int | None = None) -> Prepared:  # noqa: ARG002
        self.check()
        items = self.data._items
        return Prepared(name=self.data.name, samples=len(items) if hasattr(items, "__len__") else None)

    def batch_specs(self) -> dict[str, TensorSpec]:
        from workbench.data.datasets import item_at, item_specs

        data = self.data
        return item_specs(data._first_items[0] if data._iterable is not None else item_at(data._items, 0))

    def examples(self) -> Batch:
        return self.data._examples

    def dataset(self) -> UserDataset | StreamedDataset:
        from workbench.data.datasets import UserDataset

        length, seed = self.request.total_samples, self.request.seed
        if self.data._iterable is not None:
            return self.data._iterable.dataset(length, seed)
        return UserDataset(self.data._items, length, seed)

    def held_out(self, trained_on: Reading | None = None) -> UserDataset:
        """Return items in their own order; raise `DataError` unless their fields are those of the training data.

        Those of a dataset without an index are its first ones, which are kept in memory.
        """
        from workbench.data.datasets import UserDataset, described_specs

        assert self.request.evaluation is not None
        assert trained_on is not None
        own, trained = self.batch_specs(), trained_on.batch_specs()
        if own != trained:
            raise DataError(
                f"eval_data has the fields {described_specs(own)}, and data has {described_specs(trained)}. Give both "
                "the same fields with the same shapes and types."
            )
        if self.data.class_names and trained_on.data.class_names:
            require_same_words(self, trained_on, "eval_data", "data")
        count, iterable = self.request.evaluation.samples, self.data._iterable
        items = self.data._items if iterable is None else iterable.first(count, seed=0)
        return UserDataset(items, min(count, len(items)), seed=None)

    def note(self) -> str:
        return " ".join(filter(None, (self._note_on_length(), self._note_on_items(), self._note_on_classes())))

    def _note_on_classes(self) -> str:
        """Return that a head which goes on has other names for its classes: only their order says which is which."""
        model, names = self.request.model, self.data.class_names
        known = () if model.pretrained is None else model.pretrained.class_names
        if not names or not known or set(names) & set(known):
            return ""
        return (
            f"The head of {model.name} goes on with its classes {', '.join(known)}, and {self.data.name} calls them, "
            f"in this order, {', '.join(names)}."
        )

    def _note_on_length(self) -> str:
        """Return that tokens are miscounted where `seq_len` is the length of no tensor of an item."""
        length, specs = self.request.seq_len, self.batch_specs().values()
        if length == 1 or any(length in spec.shape for spec in specs):
            return ""
        listed = ", ".join(f"{spec.name} {tuple(spec.shape)}" for spec in specs)
        return (
            f"A sample counts as seq_len={length:,} tokens, and no tensor of an item of {self.data.name} is that long "
            f"({listed}), so that tokens and tokens/s are off. Give the length of the items, or seq_len=1 to count "
            "samples."
        )

    def _note_on_items(self) -> str:
        data, batch = self.data, self.request.largest_batch
        items = len(data._items) if hasattr(data._items, "__len__") else 0
        if not items or items >= batch or batch % items == 0:
            return ""
        return (
            f"{data.name} has {items:,} items, fewer than the {batch:,} samples of a batch, which reads some of them "
            f"{batch // items + 1} times and the others {batch // items}: its loss is no mean over the items. A batch "
            f"of {items:,}, or of a multiple of that, reads all equally often."
        )

    def tokenizer_folder(self, progress: bool = False) -> Path | None:  # noqa: ARG002
        return None if self.data._labelled_texts is None else self.data._labelled_texts.tokenizer_folder

    def encoded(self, prompts: Sequence[str]) -> EncodedPrompts:  # noqa: ARG002
        raise DataError(
            f"Samples of text need a tokeniser, and {self.data.name} is a user-defined dataset, which has none. Train "
            "on text (wb.data.corpus or wb.data.hub), or remove samples."
        )


def require_same_words(one: Reading, other: Reading, name: str, other_name: str) -> None:
    """Raise `DataError` unless two sets of labelled texts number their classes and their tokens alike."""
    from workbench.data.tokenizer import other_tokens

    if one.data.class_names != other.data.class_names:
        raise DataError(
            f"{name} has the classes {', '.join(one.data.class_names)}, and {other_name} "
            f"{', '.join(other.data.class_names)}. Give both the same labels=[…], in one order."
        )
    own, known = one.tokenizer_folder(), other.tokenizer_folder()
    if own is not None and known is not None and (wrong := other_tokens(own, str(known))):
        raise DataError(f"{name} has another tokeniser than {other_name}: {wrong}. Give both the same tokenizer.")
    if one.data.pad_id != other.data.pad_id:
        raise DataError(
            f"{name} is filled with the id {one.data.pad_id}, and {other_name} with {other.data.pad_id}. Give both the "
            "same tokenizer."
        )


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
