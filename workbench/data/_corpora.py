"""`Corpus`: text as a value, tokenised on first use and sampled for the model's objective."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from workbench.data import _text
from workbench.data._source import DataSource, Prepared, SampleRequest
from workbench.errors import DataError
from workbench.tensors import TensorSpec
from workbench.validation import Field, PlainValidator, Positive, Text, TrueOrFalse, Whole, checked_value, known

if TYPE_CHECKING:
    from workbench.data._datasets import StreamedDataset, TextDataset
    from workbench.data._experiment_text import ExperimentText
    from workbench.data._prompts import EncodedPrompts
    from workbench.data._tokenizer import SpecialTokens, TextTokenizer

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
    def _source(self) -> _text.TextSource:
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
            from workbench.data._sampling import SpanSamples

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

    def text_tokenizer(self, request: SampleRequest) -> TextTokenizer:
        """Return the tokeniser, whose `encode` and `decode` turn text into ids and samples back into text."""
        from workbench.data._tokenizer import TextTokenizer

        return TextTokenizer.of_folder(self.tokenizer_folder(request))

    def tokenizer_folder(self, request: SampleRequest) -> Path:
        return self._of(request).tokenizer_folder()

    def encoded(self, request: SampleRequest, prompts: Sequence[str]) -> EncodedPrompts:
        from workbench.data._prompts import encode

        objective, tokens = self._objective(request), self._of(request).tokens
        return encode(prompts, self.text_tokenizer(request), tokens, objective, request.seq_len)

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
        from workbench.data._tokenizer import SpecialTokens, folder_of
        from workbench.data._vocabulary import special_tokens_of

        if self.tokenizer is not None:
            return SpecialTokens.of_folder(folder_of(self.tokenizer))
        return special_tokens_of(TOKENIZER_OF_OBJECTIVE[objective], self.vocab_size)

    def _of(self, request: SampleRequest) -> ExperimentText:
        from workbench.data._experiment_text import ExperimentText

        return ExperimentText(self, request)


def check_sizes(data: TextData, request: SampleRequest) -> None:
    """Raise `DataError` if the sequence length or the vocabulary does not suit the model."""
    tokenizer_type = data._tokenizer_type(request)
    model, least = request.model, SMALLEST_VOCABULARY[tokenizer_type]
    if data.streaming and data._objective(request) == "mlm_nsp":
        raise DataError(
            f"{data.name} is streamed, and {model.name} predicts next sentences, whose other half may stand "
            "anywhere in the text. Train without (next_sentence=False), or remove streaming=True."
        )
    _check_tokenizer(data, request)
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


def _check_tokenizer(data: TextData, request: SampleRequest) -> None:
    """Raise `DataError` if the tokeniser has changed, or lacks what the samples of the objective need."""
    from workbench.data._sampling import SAMPLES, SpanSamples

    objective = data._objective(request)
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

    def _source(self) -> _text.Files:
        return _text.packaged_speeches() if self.path == DEMO else _text.local_text(self.path)
