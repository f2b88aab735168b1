"""Text as a value that is tokenised on first use and sampled for the model's objective, and mixtures of data.

`Corpus` is packaged or local text, `HubText` comes from the Hugging Face hub or a dataset folder on disk, and `Mixture`
reads several sources of data in one training, each with its share of the samples.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import math
import operator
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

from workbench.base.errors import DataError, in_words
from workbench.base.tensors import TensorSpec
from workbench.base.units import count, is_count
from workbench.base.validation import (
    Field,
    Line,
    PlainValidator,
    Positive,
    Text,
    TrueOrFalse,
    Whole,
    checked_value,
    is_factor,
    known,
)
from workbench.data.source import (
    DataSource,
    HeldOutSamples,
    Prepared,
    Reading,
    SampleRequest,
    UserData,
    fingerprint_of,
    require_same_words,
)
from workbench.data.text import (
    SMALLEST_VOCABULARY,
    TOKENIZER_OF_OBJECTIVE,
    DatasetColumn,
    Files,
    TextSource,
    is_rows,
    local_text,
    packaged_speeches,
    reading_rows,
    rows_at,
)
from workbench.record.events import DataUseEvent

if TYPE_CHECKING:
    from workbench.data.datasets import Batch, MixedDataset, StreamedDataset, TrainingDataset
    from workbench.data.sampling import EncodedPrompts, MixedOrder
    from workbench.data.tokenizing import TextReading

DEMO = "demo"
LARGEST_VOCABULARY = 2**24
LARGEST_MASKED_SHARE = 0.8
LARGEST_BUFFER = 2**24
CHECKED_WHOLE_BYTES = 1 << 20
"""Size up to which a text is tokenised when an experiment is checked, so that the check sees exact numbers."""


@checked_value(error_type=DataError)
class TextData(DataSource):
    """Everything that packaged, local and hub text share, which is all but the origin of the text."""

    _: KW_ONLY
    vocab_size: Annotated[Whole, Field(ge=1, le=LARGEST_VOCABULARY)] = 30522
    """Ids of the tokeniser, or the upper limit of a vocabulary to train, which a small text does not reach."""
    objective: Annotated[str, PlainValidator(known(TOKENIZER_OF_OBJECTIVE))] | None = None
    """`mlm`, `mlm_nsp`, `clm` or `seq2seq`; `None` takes the model's objective."""
    masked_share: Annotated[Positive, Field(le=LARGEST_MASKED_SHARE)] = 0.15
    """Fraction of the positions of a training sample that a masked model predicts; evaluations have their own."""
    tokenizer: Text | None = None
    """Absolute path of a tokeniser's file or folder; None trains a vocabulary on the text."""
    whole_words: TrueOrFalse = False
    """Mask all tokens of a word together."""
    strip_accents: TrueOrFalse = False
    """Train the vocabulary of a masked model on text without accents."""
    separate_documents: TrueOrFalse = False
    """Read each document of a sample as if it stood alone."""
    deduplicate: Annotated[str, PlainValidator(known(("exact", "near")))] | None = None
    """`exact` or `near`: documents that are equal, or nearly, are held out together or not at all."""
    held_out_by: Line | None = None
    """`document`, `file` or a field of rows, whose documents are held out together; None for runs of documents."""
    streaming: TrueOrFalse = False
    """Tokenise while training, in the order of the text."""
    shuffle_buffer: Annotated[Whole, Field(ge=1, le=LARGEST_BUFFER)] | None = None
    """Consecutive samples that are shuffled at a time; None for all of a stored text, or 4,096 of a streamed one."""

    def __post_init__(self) -> None:
        least = SMALLEST_VOCABULARY["wordpiece"]
        if self.tokenizer is None and self.vocab_size < least:
            raise DataError(f"{type(self).__name__}.vocab_size={self.vocab_size} must be {least} or more.")
        if self.streaming and (self.deduplicate or self.held_out_by):
            given = "deduplicate" if self.deduplicate else "held_out_by"
            raise DataError(
                f"{given}={getattr(self, given)!r} chooses among all documents of a text, and a stream holds out text "
                "of its beginning. Remove streaming=True; shuffle_buffer gives stored text the order of a stream."
            )

    @property
    def separates_documents(self) -> bool:
        return self.separate_documents

    @abstractmethod
    def _source(self) -> TextSource:
        """Return the text itself; raise `DataError` if it is missing or empty."""

    def _fingerprint(self) -> str:
        """Return a key that changes when the text changes."""
        return self._source().fingerprint()

    def check_source(self, reading: TextReading) -> None:
        """Raise `DataError` if the text cannot be read, as far as that is cheap to know."""
        if self._source().text_bytes <= CHECKED_WHOLE_BYTES:  # only small texts are tokenised to check an experiment
            reading.prepare(progress=False)

    def reads(self, experiment: SampleRequest) -> TextReading:
        from workbench.data.tokenizing import TextReading

        return TextReading(self, experiment)


@checked_value(error_type=DataError)
class Corpus(TextData):
    """Packaged or local text."""

    _: KW_ONLY
    path: Text
    """`demo`, or the absolute path of a text file or of a folder of text files."""

    @property
    def name(self) -> str:
        return self.path if self.path == DEMO else Path(self.path).name.split(".")[0]

    def to_json(self) -> dict[str, Any]:
        return {"type": "corpus", **dataclasses.asdict(self)}

    def _source(self) -> Files:
        return packaged_speeches() if self.path == DEMO else local_text(self.path)


# Text from the Hugging Face hub or a dataset folder on disk.


@checked_value(error_type=DataError)
class HubText(TextData):
    """The text column of a Hugging Face dataset, each row one document."""

    _: KW_ONLY
    repository: Line
    config: Line | None = None
    split: Line = "train"
    text_column: Line = "text"
    revision: Line | None = None
    """Commit or tag of the dataset. Pin it if the text may change under its name."""

    @property
    def name(self) -> str:
        path = Path(self.repository)
        if not path.is_absolute():
            return self.repository
        return f"{path.parent.name}/{path.name}" if glob.has_magic(path.name) else path.name

    def check_source(self, reading: TextReading) -> None:
        """Raise `DataError` unless the hub has the split and the column, or the cache the tokens."""
        if reading.is_tokenised:
            return
        if is_rows(self.repository):
            super().check_source(reading)
            return
        import datasets

        try:
            with reading_rows(self.repository):
                builder = datasets.load_dataset_builder(self.repository, self.config, revision=self.revision)
        except Exception as error:
            raise self._unavailable(error) from error
        splits = builder.info.splits or {}
        if splits and self.split.split("[")[0] not in splits:
            raise DataError(f"{self.repository} has no split {self.split!r}. It has: {', '.join(splits)}.")
        if builder.info.features:
            self._require_column(builder.info.features)

    def to_json(self) -> dict[str, Any]:
        return {"type": "hub", **dataclasses.asdict(self)}

    def _fingerprint(self) -> str:
        parts = [self.repository, self.config, self.split, self.text_column, self.revision]
        if is_rows(self.repository) or Path(self.repository).is_dir():
            parts += [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in self._files]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _source(self) -> DatasetColumn:
        """Return the rows of the split, downloaded on first use."""
        import datasets

        try:
            with reading_rows(self.repository):
                if is_rows(self.repository):
                    dataset = rows_at(self.repository, self.split)
                else:
                    place = self.repository, self.config
                    dataset = datasets.load_dataset(*place, split=self.split, revision=self.revision)
        except DataError:
            raise
        except Exception as error:  # the client raises many types, none of them ours
            raise self._unavailable(error) from error
        self._require_column(dataset.features)
        if len(dataset) == 0:
            raise DataError(f"Split {self.split!r} of {self.repository} is empty. Choose another.")
        return DatasetColumn(dataset, self.text_column, self._fingerprint())

    @property
    def _files(self) -> list[Path]:
        """Files of a folder, or those that a path or a pattern names."""
        folder = Path(self.repository)
        found = folder.rglob("*") if folder.is_dir() else map(Path, glob.glob(self.repository))
        return sorted(path for path in [folder, *found] if path.is_file())

    def _require_column(self, features: Any) -> None:
        if self.text_column not in features:
            raise DataError(
                f"{self.repository} has no column {self.text_column!r}. It has: {', '.join(features)}. "
                "Name one as text_column."
            )
        if (found := getattr(features[self.text_column], "dtype", "a list")) not in ("string", "large_string", "null"):
            raise DataError(
                f"The column {self.text_column!r} of {self.repository} holds {found} and no text. It has: "
                f"{', '.join(features)}. Name another as text_column."
            )

    def _unavailable(self, error: Exception) -> DataError:
        if is_rows(self.repository):
            return DataError(
                f"{self.repository} cannot be read as rows ({in_words(error.__cause__ or error)}). Give a file with a "
                "row a line and at least one, such as rows.to_json(path) and rows.to_parquet(path) of datasets write."
            )
        return DataError(
            f"The dataset {self.repository!r} cannot be loaded ({in_words(error)}). "
            "Check its name and that the hub is reachable from here, or use local text: wb.data.corpus(path)."
        )


# A mixture. Which source sample n of the training comes from is a function of n and of the weights alone: no number is
# drawn. After n samples of a stretch of constant weights, each source has given within 1 of its share of n. Sample j of
# a source is that of a training on the source alone.

LARGEST_PERIOD = 1 << 16
"""Largest number of samples after which the order of the sources repeats: shares with a larger common denominator are
rounded to multiples of its inverse."""


class PartUse(NamedTuple):
    """Samples that a training reads of one source of its mixture."""

    name: str
    samples: int
    tokens: int
    """Tokens of these samples, `seq_len` each."""
    epochs: float | None
    """Samples over the different samples that the source has; None where it does not say how many."""
    estimated: bool = False
    """True if these are estimated, as those of a long text that is streamed."""

    def __str__(self) -> str:
        read = f"{count(self.tokens)} tokens of {self.name}"
        if self.epochs is None:
            return read
        again = ", read more than once" if self.epochs > 1 else ""
        return f"{read} ({'about ' * self.estimated}{self.epochs:.3g} epochs{again})"


def use_in_words(event: DataUseEvent | None) -> str:
    """Return what a training has read of each source of its mixture; empty for other data."""
    return "" if event is None else ", ".join(str(PartUse(**part)) for part in event["parts"])


def shares_of(weights: Sequence[float]) -> list[Fraction]:
    """Return the share of each weight in their sum, with a common denominator of at most `LARGEST_PERIOD`.

    Shares are exact where their denominator allows it. Others are rounded by largest remainders, and none that is
    greater than 0 to 0.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    if math.lcm(*(share.denominator for share in shares)) <= LARGEST_PERIOD:
        return shares
    parts = [max(math.floor(share * LARGEST_PERIOD), 1 if share else 0) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda part: parts[part] - shares[part] * LARGEST_PERIOD)
    for part in by_remainder[: max(0, LARGEST_PERIOD - sum(parts))]:
        parts[part] += 1
    parts[parts.index(max(parts))] += LARGEST_PERIOD - sum(parts)
    return [Fraction(part, LARGEST_PERIOD) for part in parts]


def _same_text(one: DataSource, other: DataSource) -> bool:
    """Return True if two sources are one text, however it is read: what one holds out, the other would train on."""
    origin = ("type", "path", "repository", "config", "split", "text_column", "revision")
    described = [each.to_json() for each in (one, other)]
    return isinstance(one, TextData) and len({tuple(map(each.get, origin)) for each in described}) == 1


@dataclass(frozen=True)
class _PartRequest:
    """An experiment as one source of its mixture sees it: a training on that source alone."""

    whole: SampleRequest
    data: DataSource
    seed: int
    evaluation: HeldOutSamples | None
    eval_data: DataSource | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "whole"), name)


@dataclass(frozen=True)
class Mixture(DataSource):
    """Sources of data with weights, which may change at steps."""

    parts: tuple[DataSource, ...]
    weights: tuple[float, ...]
    """Weight of each source at the first step; only their proportions count."""
    changes: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """Steps (counted from 0), ascending, with the weights from that step on."""

    def __post_init__(self) -> None:
        if len(self.parts) < 2:
            raise DataError(f"A mixture has at least two sources, and this one has {len(self.parts)}. Give more.")
        steps = [step for step, _ in self.changes]
        if not all(map(is_count, steps)) or sorted(set(steps)) != steps:
            raise DataError(f"The weights change at the steps {steps}. Give ascending whole numbers from 1.")
        for step, weights in self.stretches:
            said = f"The weights from step {step} on are {list(weights)}"
            if len(weights) != len(self.parts):
                raise DataError(f"{said}, for {len(self.parts)} sources. Give one for each source.")
            if not all(map(is_factor, weights)) or not sum(weights) > 0 or not is_factor(sum(weights)):
                raise DataError(f"{said}. Give finite numbers of at least 0, not all of them 0.")
        for number, part in enumerate(self.parts):
            if not any(weights[number] for _, weights in self.stretches):
                raise DataError(f"{part.name} has the weight 0 at every step. Leave it out of the self.")
        if len({part.is_user_defined for part in self.parts}) > 1:
            raise DataError(
                "The mixture has text and user-defined datasets, and nothing says whether their tokens are the same. "
                "Mix texts with texts, and datasets with datasets."
            )
        for number, part in enumerate(self.parts):
            if isinstance(part, Mixture):
                raise DataError(
                    "A source of the mixture is a mixture itself. Give all sources with their weights in one."
                )
            if not isinstance(part, TextData):
                continue
            if any(_same_text(part, other) for other in self.parts[:number]):
                raise DataError(f"{part.name} is given twice. Give it once, with the sum of its weights.")

    @property
    def is_user_defined(self) -> bool:
        return self.parts[0].is_user_defined

    @property
    def name(self) -> str:
        """Sources with their shares in per cent, at first and from each step at which they change."""
        each = [
            " + ".join(f"{float(100 * s):.3g} % {n}" for n, s in zip(self.names, shares_of(weights), strict=True) if s)
            for _, weights in self.stretches
        ]
        later = [f"from step {step:,} on {words}" for (step, _), words in zip(self.changes, each[1:], strict=True)]
        return ", ".join([each[0], *later])

    @property
    def names(self) -> list[str]:
        """Names of the sources, each different: those with the name of another say which of the sources they are."""
        names = [part.name for part in self.parts]
        return [f"{name} (source {at})" if names.count(name) > 1 else name for at, name in enumerate(names, start=1)]

    @property
    def is_loaded(self) -> bool:
        return all(part.is_loaded for part in self.parts)

    @property
    def dataset_or_factory(self) -> list[Any] | None:
        """The user-defined datasets; None unless all of them are here."""
        return (
            [part.dataset_or_factory for part in self.parts if isinstance(part, UserData)] if self.is_loaded else None
        )

    @property
    def stretches(self) -> list[tuple[int, tuple[float, ...]]]:
        """First step of each stretch of constant weights, with the weights."""
        return [(0, self.weights), *self.changes]

    @property
    def separates_documents(self) -> bool:
        return self.parts[0].separates_documents

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.parts[0].class_names

    @property
    def pad_id(self) -> int | None:
        return self.parts[0].pad_id

    def reads(self, experiment: SampleRequest) -> MixtureReading:
        return MixtureReading(self, experiment)

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "mixture",
            "parts": [part.to_json() for part in self.parts],
            "weights": list(self.weights),
            "changes": [[step, list(weights)] for step, weights in self.changes],
        }


@dataclass(frozen=True, eq=False)
class MixtureReading(Reading):
    """A mixture as one experiment reads it."""

    data: Mixture
    request: SampleRequest

    @property
    def objective(self) -> str | None:
        return self._first.objective

    @cached_property
    def order(self) -> MixedOrder:
        """The source of every sample of the training."""
        from workbench.data.sampling import MixedOrder

        before = self.request.samples_before
        return MixedOrder([(before(step), shares_of(weights)) for step, weights in self.data.stretches])

    def use(self, samples: int) -> list[PartUse]:
        """Return what the first `samples` of the training read of each source, after preparing the data."""
        given, length = self.order.given(samples).tolist(), self.request.seq_len
        used = []
        for name, part, n in zip(self.data.names, self.parts(), given, strict=True):
            each, is_estimated = part.counted()
            used.append(PartUse(name, n, n * length, None if each is None else n / each, is_estimated))
        return used

    def parts(self, progress: bool = False) -> list[Reading]:
        """Return the sources as they are read: each as by a training on it alone, all text with one tokeniser."""
        from workbench.data.sampling import seeds_of_parts

        request, sources = self.request, self.data.parts
        seeds = seeds_of_parts(request.seed, len(sources))
        is_split = request.eval_data is None or request.eval_data in self._texts
        evaluation = request.evaluation if is_split and not self.data.is_user_defined else None
        read = [self._alone(part, seed, evaluation) for part, seed in zip(sources, seeds, strict=True)]
        if not self._texts or all(part.tokenizer is not None for part in self._texts[1:]):
            return read
        from workbench.data.tokenizer import SpecialTokens

        folder = cast(Path, read[0].tokenizer_folder(progress))
        vocabulary = SpecialTokens.of_folder(folder).vocabulary
        for number, (part, seed) in enumerate(zip(self._texts, seeds, strict=True)):
            if number and part.tokenizer is None:
                given = replace(part, tokenizer=str(folder), vocab_size=vocabulary, strip_accents=False)
                read[number] = self._alone(given, seed, evaluation)
        return read

    def _alone(self, part: DataSource, seed: int, evaluation: HeldOutSamples | None) -> Reading:
        return part.reads(cast("SampleRequest", _PartRequest(self.request, part, seed, evaluation)))

    @property
    def _texts(self) -> list[TextData]:
        return [part for part in self.data.parts if isinstance(part, TextData)]

    def check(self) -> None:
        if self.data.is_user_defined:
            specs = self.batch_specs()
            for part in self.data.parts:
                read = self._alone(part, self.request.seed, None)
                read.check()
                _require_specs(part, read.batch_specs(), self.data.parts[0], specs)
                require_same_words(read, self._first, part.name, self.data.parts[0].name)
            if self.request.eval_data is not None:
                self.request.eval_data.reads(self.request).held_out(self)
            return
        # All texts have one tokeniser, one objective, and samples of one shape.
        from workbench.data.tokenizer import digest_of
        from workbench.data.tokenizing import check_sizes

        first, *others = self._texts
        of_first = first.reads(self.request)
        check_sizes(of_first)
        for part in others:
            if part.tokenizer is not None and (
                first.tokenizer is None or digest_of(part.tokenizer) != digest_of(first.tokenizer)
            ):
                own = "one that is trained on it" if first.tokenizer is None else first.tokenizer
                raise DataError(
                    f"The sources of a mixture need one tokeniser: {part.name} has {part.tokenizer}, and {first.name} "
                    f"has {own}. Give every source the same tokenizer, or only the first one: the others are read "
                    "with it."
                )
            of_part = replace(part, tokenizer=first.tokenizer, vocab_size=first.vocab_size).reads(self.request)
            if of_first.objective != of_part.objective:
                raise DataError(
                    f"{first.name} is prepared for {of_first.objective!r} and {part.name} for "
                    f"{of_part.objective!r}. Give all sources of a mixture one objective."
                )
            check_sizes(of_part)
            _require_specs(part, of_part.batch_specs(), first, of_first.batch_specs())
        if all(part._source().text_bytes <= CHECKED_WHOLE_BYTES for part in self._texts):
            self.prepare(progress=False)

    def prepare(self, progress: bool = True, workers: int | None = None) -> Prepared:
        prepared = [part.prepare(progress, workers) for part in self.parts(progress)]
        if self.request.evaluation is not None and self.request.eval_data is not None:
            self.evaluated_on()
        counted = not self.data.is_user_defined
        return Prepared(
            name=self.data.name,
            samples=None,  # an epoch of a mixture is none of its sources'
            tokens=sum(each.tokens or 0 for each in prepared) if counted else None,
            documents=sum(each.documents or 0 for each in prepared) if counted else None,
            vocabulary=prepared[0].vocabulary,
            folder=prepared[0].folder,
            seconds=sum(each.seconds for each in prepared),
            reused=all(each.reused for each in prepared),
            streamed=any(each.streamed for each in prepared),
            tokens_per_core_s=self._tokens_per_core_s(prepared),
            held_out=self.held_out_in_words(),
        )

    def _tokens_per_core_s(self, prepared: Sequence[Prepared]) -> float | None:
        """Return the tokens of the mixture that a core makes in a second with the weights that cost it most.

        None if no source is tokenised while training reads it; those that are not cost nothing.
        """
        costs = [1 / each.tokens_per_core_s if each.tokens_per_core_s else 0.0 for each in prepared]
        most = max(sum(map(operator.mul, shares_of(weights), costs)) for _, weights in self.data.stretches)
        return 1 / most if most else None

    def samples_per_epoch(self) -> int:
        raise DataError(
            f"The data is a mixture ({self.data.name}), whose sources are read at different rates, so that epochs say "
            "nothing about the length of a training. Give steps=… or tokens=…."
        )

    @property
    def _first(self) -> Reading:
        """The first source, which answers what is the same for all of them."""
        return self.data.parts[0].reads(self.request)

    def batch_specs(self) -> dict[str, TensorSpec]:
        return self._first.batch_specs()

    def labelled_share(self) -> float:
        given, total = self.order.given(self.request.total_samples), self.request.total_samples
        shares = [part.reads(self.request).labelled_share() for part in self.data.parts]
        return float(sum(n / total * share for n, share in zip(given, shares, strict=True)))

    def examples(self) -> Batch | None:
        if not self.data.is_user_defined:
            return None
        import torch

        from workbench.data.sampling import MixedOrder

        batches = [part.reads(self.request).examples() for part in self.data.parts]
        size = min(len(next(iter(batch.values()))) for batch in batches if batch)
        given = MixedOrder([(0, shares_of(self.data.weights))]).given(size).tolist()
        return {
            name: torch.cat([batch[name][:n] for batch, n in zip(batches, given, strict=True) if batch])
            for name in batches[0] or ()
        }

    def dataset(self) -> MixedDataset | StreamedDataset:
        """Return the samples of the training in order: a stream if a source is one."""
        from workbench.data.datasets import mixed_dataset

        parts = [part.dataset() for part in self.parts()]
        return mixed_dataset(parts, self.order, self.request.total_samples, fingerprint_of)

    def held_out(self, trained_on: Reading | None = None) -> MixedDataset:
        """Return held-out samples of each source, mixed by the weights of the last stretch."""
        from workbench.data.datasets import MixedDataset
        from workbench.data.sampling import MixedOrder

        assert self.request.evaluation is not None
        parts = self.parts() if trained_on is None else [part.reads(self.request) for part in self.data.parts]
        held = [part.held_out(trained_on) for part in parts]
        order, length = MixedOrder([(0, shares_of(self.data.stretches[-1][1]))]), self.request.evaluation.samples
        while any(n > len(part) for n, part in zip(order.given(length), held, strict=True)):
            length -= 1
        return MixedDataset(held, order, length, spread=True)

    def evaluated_on(self) -> TrainingDataset:
        other = self.request.eval_data
        if other is None:
            return self.held_out()
        for part, read in zip(self.data.parts, self.parts(), strict=True):
            if other == part and not self.data.is_user_defined:
                return read.held_out()  # the part of the source that training does not read
        return other.reads(self.request).held_out(self._first if self._texts else self)

    def held_out_in_words(self) -> str:
        """Return the numbers of what each text holds out, and how much of it training reads in any of the texts."""
        if self.data.is_user_defined or self.request.evaluation is None:
            return ""
        texts = cast("list[TextReading]", self.parts())
        if texts[0].holds_out:
            words = [text.held_out_in_words([each for each in texts if each is not text]) for text in texts]
            named = zip(self.data.names, words, strict=True)
            return " ".join(f"Of {name}, {said}" for name, said in named if said)
        from workbench.data.datasets import TextDataset
        from workbench.data.duplicates import overlap_in_words

        held_out, stored = self.evaluated_on(), [text.trained_on() for text in texts if not text.data.streaming]
        if not isinstance(held_out, TextDataset) or not stored:
            return ""
        return overlap_in_words(stored, held_out.samples.text, texts[0].width)

    def note(self) -> str:
        """Return how often the training reads each source, where its samples have been counted, and their notes."""
        is_counted = all(text.reads(self.request).is_counted for text in self._texts[:1])  # and has a vocabulary
        read = self.parts() if is_counted else [text.reads(self.request) for text in self._texts]
        if self._texts and not all(cast("TextReading", part).is_counted for part in read):
            return " ".join(filter(None, (part.note() for part in read if part.data.streaming)))
        used = f"The mixture reads {', '.join(map(str, self.use(self.request.total_samples)))}."
        return " ".join([used, *filter(None, (part.note() for part in read))])

    def tokenizer_folder(self, progress: bool = False) -> Path | None:
        return self._first.tokenizer_folder(progress)

    def encoded(self, prompts: Sequence[str]) -> EncodedPrompts:
        return self._first.encoded(prompts)


def _require_specs(
    part: DataSource, found: Mapping[str, TensorSpec], first: DataSource, wanted: Mapping[str, TensorSpec]
) -> None:
    """Raise `DataError` unless samples of a source have the fields of those of the first one."""
    from workbench.data.datasets import described_specs

    if found != wanted:
        raise DataError(
            f"Samples of {part.name} have the fields {described_specs(found)}, and those of {first.name} "
            f"{described_specs(wanted)}. Give all sources of a mixture the same fields, shapes and types."
        )
