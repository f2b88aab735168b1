"""`DataSource`: the role that every kind of data plays for an experiment, and the values that it exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from workbench.tensors import TensorSpec
from workbench.units import count, duration

if TYPE_CHECKING:
    import torch

    from workbench.data._datasets import TrainingDataset
    from workbench.data._prompts import EncodedPrompts


class DescribedModel(Protocol):
    """The facts about a model that a data source reads."""

    @property
    def name(self) -> str: ...
    @property
    def objective(self) -> str | None: ...
    @property
    def vocab_size(self) -> int | None: ...


class HeldOutSamples(Protocol):
    """The field of an experiment's `Evaluate` that a data source reads."""

    @property
    def samples(self) -> int: ...


class SampleRequest(Protocol):
    """The fields of an `Experiment` that a data source reads."""

    @property
    def model(self) -> DescribedModel: ...
    @property
    def steps(self) -> int: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def data(self) -> DataSource: ...
    @property
    def evaluate(self) -> HeldOutSamples | None: ...
    @property
    def eval_data(self) -> DataSource | None: ...


class DataSource(Protocol):
    """A description of training data, from which every process makes the same samples.

    Sample i depends on the experiment's seed and on i only, never on the plan.
    """

    @property
    def name(self) -> str:
        """Short name for tables and messages."""

    @property
    def is_user_defined(self) -> bool:
        """Return True if the data is user-defined: an object that JSON can only name."""

    @property
    def is_loaded(self) -> bool:
        """Return True unless only the description of the user's own object is here."""

    def check(self, request: SampleRequest) -> None:
        """Raise `DataError` if the data cannot feed the experiment."""

    def prepare(self, request: SampleRequest, progress: bool = True, workers: int | None = None) -> Prepared:
        """Do all work that training needs once, such as tokenising, with so many processes; None chooses."""

    def samples_per_epoch(self, request: SampleRequest) -> int:
        """Return the number of different samples, after preparing the data if it has not been."""

    def batch_specs(self, request: SampleRequest) -> dict[str, TensorSpec]:
        """Return the fields of one sample, without a batch dim, in the order in which the model takes them."""

    def labelled_share(self, request: SampleRequest) -> float:
        """Return the fraction of labels, on average, that the loss does not ignore."""

    def examples(self, request: SampleRequest) -> Mapping[str, torch.Tensor] | None:
        """Return a batch that stands for the rest in measurements, or None if random tokens do."""

    def dataset(self, request: SampleRequest) -> TrainingDataset:
        """Return every sample of the training in order, `steps * global_batch` of them."""

    def held_out(self, request: SampleRequest, trained_on: DataSource | None = None) -> TrainingDataset:
        """Return the samples for evaluation in a fixed order, the same in every experiment on this data.

        They are those that `dataset` leaves out, or all of this data if it is the `eval_data` of an experiment that is
        `trained_on` other data.
        """

    def encoded(self, request: SampleRequest, prompts: Sequence[str]) -> EncodedPrompts:
        """Return prompts as token ids; raise `DataError` for one that the model cannot read, or without a tokeniser."""

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
