"""`LabelledTexts`: rows of text with a class each, as the items that a model for classification trains on."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import DataError

if TYPE_CHECKING:
    import torch


SHORTEST, LONGEST = 3, 2**20
"""Smallest and largest number of tokens of a row, of which two are special."""


class LabelledTexts:
    """Tokenised rows in memory: a map-style dataset whose items are `input_ids`, `attention_mask` and `labels`.

    A tokeniser that tells two segments apart adds `token_type_ids`.
    """

    def __init__(
        self, fields: Mapping[str, NDArray[Any]], labels: tuple[str, ...], name: str, tokenizer_folder: Path
    ) -> None:
        """`fields` have a row for each text; `labels` are the names of the classes, in the order of their numbers."""
        self.fields, self.labels, self.__name__, self.tokenizer_folder = dict(fields), labels, name, tokenizer_folder

    def __len__(self) -> int:
        return len(self.fields["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import torch

        return {name: torch.from_numpy(np.asarray(rows[index], dtype=np.int64)) for name, rows in self.fields.items()}

    def __repr__(self) -> str:
        width = self.fields["input_ids"].shape[1]
        return f"LabelledTexts({self.__name__}: {len(self):,} rows of {width} tokens, labels {', '.join(self.labels)})"


def labelled_texts(
    source: Any, tokenizer: Any, text: str, pair: str | None, label: str, labels: Sequence[Any] | None, length: int
) -> LabelledTexts:
    """Read and tokenise rows; see `workbench.data.classification`."""
    from workbench.data._tokenizer import folder_of, named_tokenizer, saved

    if not SHORTEST <= length <= LONGEST:
        raise DataError(f"length={length:.3g} is no number of tokens between {SHORTEST} and {LONGEST:,}. Give another.")
    if labels is not None and len(set(map(str, labels))) < 2:
        raise DataError(
            f"labels={labels!r:.60} names fewer than two classes. Give labels=['no', 'yes'], or leave it out."
        )
    name, rows, names = _rows(source, label)
    wanted = [column for column in (text, pair, label) if column is not None]
    columns: dict[str, list[Any]] = {column: [] for column in wanted}
    for number, row in enumerate(rows):
        for column in wanted:
            if not isinstance(row, Mapping) or row.get(column) is None:
                has = ", ".join(map(str, row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
                raise DataError(f"Row {number} of {name} has no {column!r}. It has: {has}. Name the columns.")
            columns[column].append(row[column])
    if not columns[label]:
        raise DataError(f"{name} is empty: it holds no row. Give at least one.")
    known = _names(columns[label], labels if labels is not None else names)
    numbers = {value: number for number, value in enumerate(known)}
    unknown = [value for value in columns[label] if str(value) not in numbers]
    if unknown:
        raise DataError(
            f"{name} has the label {unknown[0]!r}, which is none of {', '.join(known)}. Give the labels of both sets, "
            "labels=[…]."
        )
    is_path = isinstance(tokenizer, str | Path)
    path = str(Path(tokenizer).expanduser().absolute()) if is_path else str(saved(tokenizer))
    folder = folder_of(path)
    reader = named_tokenizer(folder)
    if reader.pad_token is None:
        reader.pad_token = reader.eos_token
    if reader.pad_token is None:
        raise DataError(f"{path} has no token for padding (pad_token), with which rows are filled. Give it one.")
    texts = [[str(value) for value in columns[column]] for column in wanted[:-1]]
    encoded = reader(*texts, truncation=True, padding="max_length", max_length=length, return_attention_mask=True)
    fields = {field: np.asarray(encoded[field], dtype=np.int32) for field in ("input_ids", "attention_mask")}
    if "token_type_ids" in encoded:
        fields["token_type_ids"] = np.asarray(encoded["token_type_ids"], dtype=np.int32)
    fields["labels"] = np.asarray([numbers[str(value)] for value in columns[label]], dtype=np.int32)
    return LabelledTexts(fields, known, name, folder)


def _rows(source: Any, label: str) -> tuple[str, Iterable[Any], Sequence[Any] | None]:
    """Return the name of a source, its rows, and the names of its classes if it says them."""
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if not os.path.isfile(path):
            raise DataError(
                f"There is no file of rows at {path}. Give a .csv or .tsv file with a line of column names."
            )
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                rows = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path} cannot be read as CSV: {error}. Give UTF-8 text with one row a line.") from None
        return path.stem, rows, None
    if hasattr(source, "features"):  # a dataset of Hugging Face, whose classes are numbers with names
        feature = (source.features or {}).get(label)
        named = getattr(feature, "names", None)
        if named is not None:
            return "rows", ({**row, label: named[row[label]]} for row in source), named
        return "rows", source, None
    if isinstance(source, Iterable):
        return "rows", source, None
    raise DataError(
        f"source is a {type(source).__name__}. Give a .csv file, a dataset of Hugging Face or a list of dicts."
    )


def _names(values: Sequence[Any], given: Sequence[Any] | None) -> tuple[str, ...]:
    """Return the names of the classes: those given, or the values in order, as numbers if they are."""
    if given is not None:
        return tuple(map(str, given))
    found = set(map(str, values))
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(sorted(found))
