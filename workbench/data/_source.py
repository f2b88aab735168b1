"""`DataSource`: the role that every kind of data plays for an experiment, and the values that it exchanges."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from workbench.errors import DataError
from workbench.tensors import TensorSpec
from workbench.units import count, duration

if TYPE_CHECKING:
    import torch

    from workbench.data._datasets import TrainingDataset
    from workbench.data._prompts import EncodedPrompts


SAMPLED = 4
"""Samples at each end of the training that enter the fingerprint of its data."""


class DescribedModel(Protocol):
    """The facts about a model that a data source reads."""

    @property
    def name(self) -> str: ...
    @property
    def objective(self) -> str | None: ...
    @property
    def vocab_size(self) -> int | None: ...


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


class DataSource(ABC):
    """A description of training data, from which every process makes the same samples.

    Sample i depends on the experiment's seed and on i only, never on the plan.
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

    @abstractmethod
    def check(self, request: SampleRequest) -> None:
        """Raise `DataError` if the data cannot feed the experiment."""

    @abstractmethod
    def prepare(self, request: SampleRequest, progress: bool = True, workers: int | None = None) -> Prepared:
        """Do all work that training needs once, such as tokenising, with so many processes; None chooses.

        Text that the cache has is not tokenised again, unless it has changed. If several processes ask at once, one
        works and the others wait. Raises `DataError` for data that cannot be read or hold less than one sample.
        """

    def samples_per_epoch(self, request: SampleRequest) -> int:
        """Return the number of different samples, after preparing the data if they have not been.

        That of a streamed text is estimated, unless the text is small or stored as well. Raises `DataError` for a
        dataset that does not say its length.
        """
        samples = self.prepare(request).samples
        if samples is None:
            raise DataError(
                f"{self.name} has no __len__, so that epochs say nothing about the length of a training. Give steps=… "
                "or tokens=…, or the dataset a __len__."
            )
        return samples

    @abstractmethod
    def batch_specs(self, request: SampleRequest) -> dict[str, TensorSpec]:
        """Return the fields of one sample, without a batch dim, in the order in which the model takes them."""

    @abstractmethod
    def labelled_share(self, request: SampleRequest) -> float:
        """Return the fraction of labels, on average, that the loss does not ignore, or 1 if only the loss knows it."""

    @abstractmethod
    def examples(self, request: SampleRequest) -> Mapping[str, torch.Tensor] | None:
        """Return a batch that stands for the rest in measurements, or None if random tokens do."""

    @abstractmethod
    def dataset(self, request: SampleRequest) -> TrainingDataset:
        """Return every sample of the training in order, `total_samples` of them, after preparing the data.

        `DataLoader(ds, batch_size=b, collate_fn=ds.collate)` yields dicts of tensors with a leading batch dim.
        """

    @abstractmethod
    def held_out(self, request: SampleRequest, trained_on: DataSource | None = None) -> TrainingDataset:
        """Return the samples for evaluation in a fixed order, the same in every experiment on this data.

        They are those that `dataset` leaves out, or all of this data if it is the `eval_data` of an experiment that is
        `trained_on` other data.
        """

    def evaluated_on(self, request: SampleRequest) -> TrainingDataset:
        """Return the held-out samples of an experiment that trains on this data and has an `evaluation`."""
        return self.held_out(request) if request.eval_data is None else request.eval_data.held_out(request, self)

    def note(self, request: SampleRequest) -> str:  # noqa: ARG002
        """Return a sentence on how batches are filled that a user may not expect; empty if there is none."""
        return ""

    @abstractmethod
    def encoded(self, request: SampleRequest, prompts: Sequence[str]) -> EncodedPrompts:
        """Return prompts as token ids; raise `DataError` for one that the model cannot read, or without a tokeniser."""

    def tokenizer_folder(self, request: SampleRequest) -> Path | None:  # noqa: ARG002
        """Return the folder with the files of the tokeniser, after training one if need be; None for data without."""
        return None

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes of labelled texts, in the order of their numbers; empty for other data."""
        return ()

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return a description from which `workbench.data.from_json` rebuilds this value."""


@dataclass(frozen=True)
class Prepared:
    """The result of `DataSource.prepare`."""

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

    def __repr__(self) -> str:
        if self.tokens is None:
            known = "an unknown number of" if self.samples is None else count(self.samples)
            return f"Prepared({self.name}: {known} samples)"
        if self.streamed:
            return (
                f"Prepared({self.name}: streamed, about {count(self.tokens)} tokens, vocabulary {self.vocabulary:,}, "
                f"{count(self.tokens_per_core_s or 0)} tokens/s a core)"
            )
        how = "from the cache" if self.reused else f"tokenised in {duration(self.seconds)}"
        return (
            f"Prepared({self.name}: {count(self.tokens)} tokens in {self.documents:,} documents, "
            f"vocabulary {self.vocabulary:,}, {how})"
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
    return request.data.evaluated_on(request)


def data_fingerprint(request: SampleRequest) -> str | None:
    """Return SHA-256 over the first and the last samples that training will see; None for data that raises.

    Equal fingerprints mean the same text, tokenisation, order and masking at both ends of the training, and of the
    held-out samples if there are any.
    """
    import numpy as np

    digest = hashlib.sha256()
    try:
        for dataset in [request.data.dataset(request), *([] if request.evaluation is None else [held_out(request)])]:
            size, identity = len(dataset), getattr(dataset, "identity", None)
            digest.update(f"{size}{identity or ''}".encode())
            indices = {*range(min(SAMPLED, size)), *range(max(0, size - SAMPLED), size)}
            for index in sorted(indices) if identity is None else ():  # no sample of a stream is made before training
                for name, value in sorted(dataset[index].items()):
                    array = np.ascontiguousarray(value)
                    digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    except Exception:  # user-defined data may raise anything; training will report it
        return None
    return digest.hexdigest()
