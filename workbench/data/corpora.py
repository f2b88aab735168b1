"""Text as a value that is tokenised on first use and sampled for the model's objective, and mixtures of data.

`Corpus` is packaged or local text, `HubText` comes from the Hugging Face hub or a dataset folder on disk, and `Mixture`
reads several sources of data in one training, each with its share of the samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from workbench.data.source import DataSource, DescribedModel, HeldOutSamples, Prepared, SampleRequest, UserData
from workbench.data.text import DatasetColumn, Files, TextSource, local_text, packaged_speeches
from workbench.display import waiting
from workbench.errors import DataError, in_words
from workbench.events import DataUseEvent
from workbench.tensors import TensorSpec
from workbench.units import count, is_count
from workbench.validation import (
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

if TYPE_CHECKING:
    from workbench.data.datasets import Batch, MixedDataset, StreamedDataset, TextDataset, TrainingDataset
    from workbench.data.sampling import EncodedPrompts, MixedOrder
    from workbench.data.tokenizer import SpecialTokens, TextTokenizer
    from workbench.data.tokenizing import ExperimentText

DEMO = "demo"
TOKENIZER_OF_OBJECTIVE = {"mlm": "wordpiece", "mlm_nsp": "wordpiece", "clm": "bpe", "seq2seq": "span_bpe"}
"""Type of tokeniser that is trained for each objective, unless the text comes with one."""
LARGEST_VOCABULARY = 2**24
SMALLEST_VOCABULARY = {"wordpiece": 64, "bpe": 300, "span_bpe": 400}
SHORTEST_SEQUENCE = 8
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
    streaming: TrueOrFalse = False
    """Tokenise while training, in the order of the text."""
    shuffle_buffer: Annotated[Whole, Field(ge=1, le=LARGEST_BUFFER)] | None = None
    """Consecutive samples that are shuffled at a time; None for all of a stored text, or 4,096 of a streamed one."""

    def __post_init__(self) -> None:
        least = SMALLEST_VOCABULARY["wordpiece"]
        if self.tokenizer is None and self.vocab_size < least:
            raise DataError(f"{type(self).__name__}.vocab_size={self.vocab_size} must be {least} or more.")

    @abstractmethod
    def _source(self) -> TextSource:
        """Return the text itself; raise `DataError` if it is missing or empty."""

    def _fingerprint(self) -> str:
        """Return a key that changes when the text changes."""
        return self._source().fingerprint()

    def check(self, request: SampleRequest) -> None:
        check_sizes(self, request)
        if self._source().text_bytes <= CHECKED_WHOLE_BYTES:  # only small texts are tokenised to check an experiment
            self.prepare(request, progress=False)

    def prepare(self, request: SampleRequest, progress: bool = True, workers: int | None = None) -> Prepared:
        return self._of(request).prepare(progress, workers)

    def batch_specs(self, request: SampleRequest) -> dict[str, TensorSpec]:
        shapes: dict[str, tuple[int, ...]] = {"input_ids": (request.seq_len,), "labels": (request.seq_len,)}
        objective = self._objective(request)
        if objective == "seq2seq":
            from workbench.data.sampling import SpanSamples

            tokens = self._special_tokens(objective)
            shapes["labels"] = (SpanSamples.label_length(request.seq_len, tokens, self.masked_share),)
        if objective == "mlm_nsp":
            shapes = {"input_ids": shapes["input_ids"], "token_type_ids": (request.seq_len,), **shapes}
            shapes["next_sentence_label"] = ()
        return {name: TensorSpec(name, shape, "int64") for name, shape in shapes.items()}

    def labelled_share(self, request: SampleRequest) -> float:
        return 1.0 if self._objective(request) in ("clm", "seq2seq") else self.masked_share

    def examples(self, request: SampleRequest) -> None:  # noqa: ARG002
        return

    def dataset(self, request: SampleRequest) -> TextDataset | StreamedDataset:
        return self._of(request).dataset()

    def held_out(self, request: SampleRequest, trained_on: DataSource | None = None) -> TextDataset:
        return self._of(request).held_out(trained_on)

    def held_out_in_words(self, request: SampleRequest) -> str:
        return self._of(request).held_out_in_words()

    def note(self, request: SampleRequest) -> str:
        return self._of(request).note()

    def text_tokenizer(self, request: SampleRequest) -> TextTokenizer:
        """Return the tokeniser, whose `encode` and `decode` turn text into ids and samples back into text."""
        from workbench.data.tokenizer import TextTokenizer

        return TextTokenizer.of_folder(self.tokenizer_folder(request))

    def tokenizer_folder(self, request: SampleRequest) -> Path:
        return self._of(request).tokenizer_folder()

    def encoded(self, request: SampleRequest, prompts: Sequence[str]) -> EncodedPrompts:
        from workbench.data.sampling import encoded_prompts

        objective, tokens = self._objective(request), self._of(request).tokens
        return encoded_prompts(prompts, self.text_tokenizer(request), tokens, objective, request.seq_len)

    def _objective(self, request: SampleRequest) -> str:
        """Return the objective that the text is prepared for; raise `DataError` if it is unknown or contradictory."""
        model = request.model
        if self.objective and model.objective and self.objective != model.objective:
            raise DataError(
                f"{self.name} is prepared for {self.objective!r}, but {model.name} learns {model.objective!r}. "
                "Remove the objective of the corpus, or change the model."
            )
        objective = self.objective or model.objective
        if objective is None:
            raise DataError(
                f"{self.name} is text, and nothing says what {model.name} learns from it. "
                'Give the corpus an objective ("mlm", "mlm_nsp", "clm" or "seq2seq"), or pass a dataset of tensors.'
            )
        return objective

    def _tokenizer_type(self, request: SampleRequest) -> str:
        return TOKENIZER_OF_OBJECTIVE[self._objective(request)]

    def _special_tokens(self, objective: str) -> SpecialTokens:
        """Return the special tokens of the tokeniser, without training one."""
        from workbench.data.tokenizer import SpecialTokens, folder_of, special_tokens_of

        if self.tokenizer is not None:
            return SpecialTokens.of_folder(folder_of(self.tokenizer))
        return special_tokens_of(TOKENIZER_OF_OBJECTIVE[objective], self.vocab_size)

    def _of(self, request: SampleRequest) -> ExperimentText:
        from workbench.data.tokenizing import ExperimentText

        return ExperimentText(self, request)


def check_sizes(data: TextData, request: SampleRequest) -> None:
    """Raise `DataError` if the sequence length, the vocabulary or the tokeniser does not suit the model."""
    from workbench.data.sampling import SAMPLES, SpanSamples

    model, objective = request.model, data._objective(request)
    least = SMALLEST_VOCABULARY[TOKENIZER_OF_OBJECTIVE[objective]]
    if data.streaming and objective == "mlm_nsp":
        raise DataError(
            f"{data.name} is streamed, and {model.name} predicts next sentences, whose other half may stand "
            "anywhere in the text. Train without (next_sentence=False), or remove streaming=True."
        )
    # The tokeniser: it may have changed, or lack what the samples of the objective need.
    tokens = data._special_tokens(objective)
    if data.tokenizer is not None:
        if tokens.vocabulary != data.vocab_size:
            raise DataError(
                f"{data.tokenizer} had {data.vocab_size:,} ids and now has {tokens.vocabulary:,}. Describe the data "
                "again, or restore the file."
            )
        if (lack := SAMPLES[objective].lack_of(tokens)) is not None:
            raise DataError(
                f"{data.tokenizer} has {lack}, which samples for {objective!r} need. Give the tokeniser one with "
                "tokenizer.add_special_tokens({…}), or leave tokenizer out: one is trained on the text."
            )
    if data.whole_words and objective not in ("mlm", "mlm_nsp"):
        raise DataError(
            f"whole_words says how masked models hide words, and the objective is {objective!r}. Remove it."
        )
    if objective == "seq2seq" and request.seq_len >= SHORTEST_SEQUENCE:
        spans = SpanSamples.spans(request.seq_len, tokens, data.masked_share)
        if tokens.sentinels and spans > len(tokens.sentinels):
            raise DataError(
                f"seq_len={request.seq_len} and masked_share={data.masked_share:g} hide {spans} spans, and the "
                f"tokeniser has {len(tokens.sentinels)} sentinels. Give shorter sequences or a smaller share."
            )
        share = None if request.evaluation is None else request.evaluation.masked_share
        if share not in (None, data.masked_share):
            raise DataError(
                f"Held-out samples of a sequence-to-sequence model have the shapes of training, and hide "
                f"{data.masked_share:g} of the text too. Remove masked_share={share:g} from the evaluation."
            )

    # Sizes that do not suit the model.
    if request.seq_len < SHORTEST_SEQUENCE:
        raise DataError(
            f"seq_len={request.seq_len} is too short for a sample of text. Give at least {SHORTEST_SEQUENCE}."
        )
    if model.vocab_size is not None and data.vocab_size > model.vocab_size:
        if isinstance(data, Corpus):
            data._source()  # a file that is missing matters first
        raise DataError(
            f"{data.name} is tokenised into a vocabulary of {data.vocab_size:,}, but {model.name} embeds "
            f"{model.vocab_size:,} tokens. Give "
            + ("" if data.tokenizer else f"the data vocab_size={model.vocab_size}, or ")
            + f"the model vocab_size={data.vocab_size}."
        )
    if data.tokenizer is None and data.vocab_size < least:
        raise DataError(
            f"vocab_size={data.vocab_size} is less than the {least} that byte-level tokens need. "
            f"Give the data at least vocab_size={least}."
        )


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
        return self.repository

    def check(self, request: SampleRequest) -> None:
        from workbench.data.tokenizing import is_tokenised

        check_sizes(self, request)
        if is_tokenised(self._of(request).key):
            return
        import datasets

        try:
            with _as_text(self.repository):
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
        if (folder := Path(self.repository)).is_dir():
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            parts += [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _source(self) -> DatasetColumn:
        """Return the rows of the split, downloaded on first use."""
        import datasets

        try:
            with _as_text(self.repository):
                dataset = datasets.load_dataset(self.repository, self.config, split=self.split, revision=self.revision)
        except Exception as error:  # the client raises many types, none of them ours
            raise self._unavailable(error) from error
        self._require_column(dataset.features)
        if len(dataset) == 0:
            raise DataError(f"Split {self.split!r} of {self.repository} is empty. Choose another.")
        return DatasetColumn(dataset, self.text_column, self._fingerprint())

    def _require_column(self, features: Any) -> None:
        if self.text_column not in features:
            raise DataError(
                f"{self.repository} has no column {self.text_column!r}. It has: {', '.join(features)}. "
                "Name one as text_column."
            )

    def _unavailable(self, error: Exception) -> DataError:
        return DataError(
            f"The dataset {self.repository!r} cannot be loaded ({in_words(error)}). "
            "Check its name and that the hub is reachable from here, or use local text: wb.data.corpus(path)."
        )


@contextlib.contextmanager
def _as_text(repository: str) -> Iterator[None]:
    """Say that a dataset is read, without the progress bars of its libraries: their widgets are broken when saved."""
    import datasets
    from huggingface_hub import utils

    libraries = (datasets, datasets.is_progress_bar_enabled()), (utils, not utils.are_progress_bars_disabled())
    shown = [library for library, is_shown in libraries if is_shown]
    for library in shown:
        library.disable_progress_bars()
    try:
        with waiting(f"reading the dataset {repository}"):
            yield
    finally:
        for library in shown:
            library.enable_progress_bars()


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
    epochs: float
    """Samples over the different samples that the source has."""

    def __str__(self) -> str:
        again = ", read more than once" if self.epochs > 1 else ""
        return f"{count(self.tokens)} tokens of {self.name} ({self.epochs:.3g} epochs{again})"


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


@dataclass(frozen=True)
class _PartRequest:
    """An experiment as one source of its mixture sees it: a training on that source alone."""

    whole: SampleRequest
    data: DataSource
    seed: int
    evaluation: HeldOutSamples | None
    eval_data: DataSource | None = None

    @property
    def model(self) -> DescribedModel:
        return self.whole.model

    @property
    def total_steps(self) -> int:
        return self.whole.total_steps

    @property
    def largest_batch(self) -> int:
        return self.whole.largest_batch

    @property
    def seq_len(self) -> int:
        return self.whole.seq_len

    @property
    def total_samples(self) -> int:
        return self.whole.total_samples

    def samples_before(self, step: int) -> int:
        return self.whole.samples_before(step)


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
        for step, weights in self._stretches:
            said = f"The weights from step {step} on are {list(weights)}"
            if len(weights) != len(self.parts):
                raise DataError(f"{said}, for {len(self.parts)} sources. Give one for each source.")
            if not all(map(is_factor, weights)) or not sum(weights) > 0 or not is_factor(sum(weights)):
                raise DataError(f"{said}. Give finite numbers of at least 0, not all of them 0.")
        for number, part in enumerate(self.parts):
            if not any(weights[number] for _, weights in self._stretches):
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
            if part in self.parts[:number]:
                raise DataError(f"{part.name} is given twice. Give it once, with the sum of its weights.")
            if part.streaming:
                raise DataError(
                    f"{part.name} is streamed, and a mixture reads its sources by index. Remove streaming=True."
                )

    @property
    def is_user_defined(self) -> bool:
        return self.parts[0].is_user_defined

    @property
    def name(self) -> str:
        """Sources with their shares in per cent, at first and from each step at which they change."""
        each = [
            " + ".join(
                f"{float(100 * s):.3g} % {p.name}" for p, s in zip(self.parts, shares_of(weights), strict=True) if s
            )
            for _, weights in self._stretches
        ]
        later = [f"from step {step:,} on {words}" for (step, _), words in zip(self.changes, each[1:], strict=True)]
        return ", ".join([each[0], *later])

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
    def _stretches(self) -> list[tuple[int, tuple[float, ...]]]:
        """First step of each stretch of constant weights, with the weights."""
        return [(0, self.weights), *self.changes]

    def order(self, request: SampleRequest) -> MixedOrder:
        """Return the source of every sample of the training."""
        from workbench.data.sampling import MixedOrder

        return MixedOrder([(request.samples_before(step), shares_of(weights)) for step, weights in self._stretches])

    def use(self, request: SampleRequest, samples: int) -> list[PartUse]:
        """Return what the first `samples` of the training read of each source, after preparing the data."""
        given = self.order(request).given(samples)
        return [
            PartUse(part.name, n, n * request.seq_len, n / part.samples_per_epoch(own))
            for (part, own), n in zip(self._read(request), given.tolist(), strict=True)
        ]

    # What each source sees

    def _read(self, request: SampleRequest, progress: bool = False) -> list[tuple[DataSource, SampleRequest]]:
        """Return the sources as they are read, all text with one tokeniser, each with its own request."""
        from workbench.data.sampling import seeds_of_parts

        seeds = seeds_of_parts(request.seed, len(self.parts))
        is_split = request.eval_data is None or request.eval_data in self._texts
        evaluation = request.evaluation if is_split and not self.is_user_defined else None
        own = [_PartRequest(request, part, seed, evaluation) for part, seed in zip(self.parts, seeds, strict=True)]
        first = self.parts[0]
        if not isinstance(first, TextData):
            return list(zip(self.parts, own, strict=True))
        folder: Path | None = None
        read: list[tuple[DataSource, SampleRequest]] = [(first, own[0])]
        for part, each in zip(self._texts[1:], own[1:], strict=True):
            if part.tokenizer is None:
                from workbench.data.tokenizer import SpecialTokens

                folder = folder or first._of(own[0]).tokenizer_folder(progress)
                found = SpecialTokens.of_folder(folder).vocabulary
                part = replace(part, tokenizer=str(folder), vocab_size=found, strip_accents=False)
            read.append((part, replace(each, data=part)))
        return read

    @property
    def _texts(self) -> list[TextData]:
        return [part for part in self.parts if isinstance(part, TextData)]

    # `DataSource`

    def check(self, request: SampleRequest) -> None:
        if self.is_user_defined:
            specs = self.parts[0].batch_specs(request)
            for part in self.parts:
                part.check(_PartRequest(request, part, request.seed, None))
                _require_specs(part, part.batch_specs(request), self.parts[0], specs)
                if part.class_names != self.class_names:
                    raise DataError(
                        f"{part.name} has the classes {', '.join(part.class_names)}, and {self.parts[0].name} "
                        f"{', '.join(self.class_names)}. Give both the same labels=[…], in one order."
                    )
                if isinstance(part, UserData) and part._iterable is not None:
                    raise DataError(
                        f"{part.name} has no index, and a mixture reads its sources by index. Give a dataset with "
                        "__len__ and __getitem__."
                    )
            if request.eval_data is not None:
                request.eval_data.held_out(request, self)
            return
        _check_texts(self._texts, request)
        if all(part._source().text_bytes <= CHECKED_WHOLE_BYTES for part in self._texts):
            self.prepare(request, progress=False)

    def prepare(self, request: SampleRequest, progress: bool = True, workers: int | None = None) -> Prepared:
        prepared = [part.prepare(own, progress, workers) for part, own in self._read(request, progress)]
        if request.evaluation is not None and request.eval_data is not None:
            self.evaluated_on(request)
        return Prepared(
            name=self.name,
            samples=None,  # an epoch of a mixture is none of its sources'
            tokens=None if self.is_user_defined else sum(each.tokens or 0 for each in prepared),
            documents=None if self.is_user_defined else sum(each.documents or 0 for each in prepared),
            vocabulary=prepared[0].vocabulary,
            folder=prepared[0].folder,
            seconds=sum(each.seconds for each in prepared),
            reused=all(each.reused for each in prepared),
            held_out=_of_parts((each.name, each.held_out) for each in prepared),
        )

    def samples_per_epoch(self, request: SampleRequest) -> int:  # noqa: ARG002
        raise DataError(
            f"The data is a mixture ({self.name}), whose sources are read at different rates, so that epochs say "
            "nothing about the length of a training. Give steps=… or tokens=…."
        )

    def batch_specs(self, request: SampleRequest) -> dict[str, TensorSpec]:
        return self.parts[0].batch_specs(request)

    def labelled_share(self, request: SampleRequest) -> float:
        given = self.order(request).given(request.total_samples) / request.total_samples
        return float(sum(n * part.labelled_share(request) for part, n in zip(self.parts, given, strict=True)))

    def examples(self, request: SampleRequest) -> Batch | None:
        if not self.is_user_defined:
            return None
        import torch

        from workbench.data.sampling import MixedOrder

        batches = [part.examples(request) for part in self.parts]
        size = min(len(next(iter(batch.values()))) for batch in batches if batch)
        given = MixedOrder([(0, shares_of(self.weights))]).given(size).tolist()
        return {
            name: torch.cat([batch[name][:n] for batch, n in zip(batches, given, strict=True) if batch])
            for name in batches[0] or ()
        }

    def dataset(self, request: SampleRequest) -> MixedDataset:
        from workbench.data.datasets import MixedDataset

        datasets = [part.dataset(own) for part, own in self._read(request)]
        return MixedDataset(datasets, self.order(request), request.total_samples)

    def held_out(self, request: SampleRequest, trained_on: DataSource | None = None) -> MixedDataset:
        """Return held-out samples of each source, mixed by the weights of the last stretch."""
        from workbench.data.datasets import MixedDataset
        from workbench.data.sampling import MixedOrder

        assert request.evaluation is not None
        if trained_on is None:
            held = [part.held_out(own) for part, own in self._read(request)]
        else:
            held = [part.held_out(request, trained_on) for part in self.parts]
        order, length = MixedOrder([(0, shares_of(self._stretches[-1][1]))]), request.evaluation.samples
        while any(n > len(part) for n, part in zip(order.given(length), held, strict=True)):
            length -= 1
        return MixedDataset(held, order, length, spread=True)

    def evaluated_on(self, request: SampleRequest) -> TrainingDataset:
        if request.eval_data is None:
            return self.held_out(request)
        for part, (read, own) in zip(self.parts, self._read(request), strict=True):
            if request.eval_data == part and not self.is_user_defined:
                return read.held_out(own)  # the part of the source that training does not read
        return request.eval_data.held_out(request, self.parts[0] if self._texts else self)

    def note(self, request: SampleRequest) -> str:
        """Return how often the training reads each source, where its samples have been counted, and their notes."""
        from workbench.data.tokenizing import is_tokenised

        read = self._read(request) if all(is_tokenised(part._of(request).key) for part in self._texts[:1]) else []
        if not read or not all(is_tokenised(part._of(own).key) for part, own in read if isinstance(part, TextData)):
            return ""
        used = f"The mixture reads {', '.join(map(str, self.use(request, request.total_samples)))}."
        return " ".join([used, *filter(None, (part.note(own) for part, own in read))])

    def held_out_in_words(self, request: SampleRequest) -> str:
        return _of_parts((part.name, part.held_out_in_words(own)) for part, own in self._read(request))

    def tokenizer_folder(self, request: SampleRequest) -> Path | None:
        return self.parts[0].tokenizer_folder(request)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.parts[0].class_names

    def encoded(self, request: SampleRequest, prompts: Sequence[str]) -> EncodedPrompts:
        return self.parts[0].encoded(request, prompts)

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "mixture",
            "parts": [part.to_json() for part in self.parts],
            "weights": list(self.weights),
            "changes": [[step, list(weights)] for step, weights in self.changes],
        }


def _of_parts(held_out: Iterable[tuple[str, str]]) -> str:
    """Return what is held out of each source of a mixture, of those that are divided."""
    return " ".join(f"Of {name}, {said}" for name, said in held_out if said)


def _check_texts(texts: Sequence[TextData], request: SampleRequest) -> None:
    """Raise `DataError` unless all texts have one tokeniser, one objective, and samples of one shape."""
    from workbench.data.tokenizer import digest_of

    first, *others = texts
    check_sizes(first, request)
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
        if first._objective(request) != part._objective(request):
            raise DataError(
                f"{first.name} is prepared for {first._objective(request)!r} and {part.name} for "
                f"{part._objective(request)!r}. Give all sources of a mixture one objective."
            )
        read = replace(part, tokenizer=first.tokenizer, vocab_size=first.vocab_size)
        check_sizes(read, request)
        _require_specs(part, read.batch_specs(request), first, first.batch_specs(request))


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
