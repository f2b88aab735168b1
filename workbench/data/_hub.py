"""`HubText`: text from the Hugging Face hub or a dataset folder on disk; the only file that imports `datasets`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any

from workbench.data._corpora import TextData, check_sizes
from workbench.data._source import SampleRequest
from workbench.data._text import Rows
from workbench.errors import DataError, in_words
from workbench.validation import Line, checked_value
from workbench.waiting import waiting


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
        from workbench.data._tokens import is_tokenised

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

    def _source(self) -> Rows:
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
        return Rows(dataset, self.text_column, self._fingerprint())

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
