"""Text from the Hugging Face hub (or a dataset folder on disk): the only file that imports `datasets`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import datasets

from workbench.data._text import Rows
from workbench.errors import DataError

if TYPE_CHECKING:
    from workbench.data._corpora import HubText


def rows(data: HubText, key: str) -> Rows:
    """The rows of the split, downloaded on first use.

    Raises `DataError` when the hub cannot be reached, or the dataset lacks the split or the column.
    """
    try:
        dataset = datasets.load_dataset(data.repository, data.config, split=data.split, revision=data.revision)
    except Exception as error:  # the client raises many kinds, none of them ours
        raise _unavailable(data, error) from error
    _require_column(data, dataset.features)
    if len(dataset) == 0:
        raise DataError(f"Split {data.split!r} of {data.repository} is empty. Choose another.", rows=0)
    return Rows(dataset, data.text_column, key)


def require_reachable(data: HubText) -> None:
    """Ask for the dataset's description, without its rows."""
    try:
        builder = datasets.load_dataset_builder(data.repository, data.config, revision=data.revision)
    except Exception as error:
        raise _unavailable(data, error) from error
    splits = builder.info.splits or {}
    if splits and data.split.split("[")[0] not in splits:
        raise DataError(
            f"{data.repository} has no split {data.split!r}. It has: {', '.join(splits)}.", split=data.split
        )
    if builder.info.features:
        _require_column(data, builder.info.features)


def _require_column(data: HubText, features: Any) -> None:
    if data.text_column not in features:
        raise DataError(
            f"{data.repository} has no column {data.text_column!r}. It has: {', '.join(features)}. "
            "Name one as text_column.",
            column=data.text_column,
        )


def _unavailable(data: HubText, error: Exception) -> DataError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return DataError(
        f"The dataset {data.repository!r} cannot be loaded ({type(error).__name__}: {reason}). "
        "Check its name and that the hub is reachable from here, or use local text: wb.data.corpus(path).",
        dataset=data.repository,
    )
