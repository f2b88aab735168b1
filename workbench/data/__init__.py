"""Data that feeds an experiment: packaged, local or hub text, and the user's own datasets.

Every kind answers the same questions, given the experiment: `check`, `batch_specs`, `examples`, `prepare`,
`dataset`, and `to_json`. Samples are pure functions of the seed and their place in the training, so that
every plan trains on the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.data._corpora import DEMO, Corpus, HubText, Prepared
from workbench.data._custom import CustomData, as_data
from workbench.errors import DataError, checked_keywords

__all__ = ["Corpus", "CustomData", "HubText", "Prepared", "as_data", "corpus", "from_json", "hub"]


@checked_keywords
def corpus(name_or_path: str | Path = DEMO, vocab_size: int = 30522, objective: str | None = None) -> Corpus:
    """Text to train on: `"demo"`, a text file, or a folder of `.txt` files (each one document).

    `"demo"` is 249 presidential addresses (2 million words, public domain) that `pip` brought along.
    A file is UTF-8, one paragraph a line, documents parted by empty lines, plain or as `.xz` or `.gz`.
    The vocabulary (WordPiece for `mlm` and `mlm_nsp`, byte-level BPE for `clm`) is trained on the text
    itself, at most `vocab_size` entries. `objective` is the model's unless the model is your own.

    Raises `DataError`; whether the text exists is asked when an experiment is checked.
    """
    if not isinstance(name_or_path, str | Path) or not str(name_or_path):
        raise DataError(
            f"The corpus is {name_or_path!r}. Give 'demo' or the path of a text file or folder.",
            corpus=repr(name_or_path),
        )
    path = str(name_or_path)
    if path != DEMO:
        path = str(Path(path).expanduser().absolute())
    return Corpus(path=path, vocab_size=vocab_size, objective=objective)


@checked_keywords
def hub(
    name: str,
    split: str = "train",
    text_column: str = "text",
    vocab_size: int = 30522,
    config: str | None = None,
    revision: str | None = None,
    objective: str | None = None,
) -> HubText:
    """The text column of a Hugging Face dataset (or of a dataset folder on disk), each row one document.

    `config` is the dataset's own sub-name (`"wikitext-2-raw-v1"`). Tokenised once, like `corpus`.
    """
    return HubText(
        repository=name,
        config=config,
        split=split,
        text_column=text_column,
        revision=revision,
        vocab_size=vocab_size,
        objective=objective,
    )


def from_json(value: Mapping[str, Any], dataset: Any = None) -> Corpus | HubText | CustomData:
    """Rebuild what `to_json` described; `dataset` supplies the user's own, which JSON only names.

    Without it a custom dataset still shows its name, and refuses to be read.
    """
    fields = dict(value)
    kind = fields.pop("kind")
    if kind == "custom":
        return CustomData(dataset, **fields)
    return Corpus(**fields) if kind == "corpus" else HubText(**fields)
