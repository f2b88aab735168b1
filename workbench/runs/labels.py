"""Labels of a run: tags, a note, and whether it is archived. None of them changes what is trained."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from workbench.arguments import checked_arguments
from workbench.errors import InvalidArgument, WorkbenchError
from workbench.rundir import RunDir, read_json, remedy_for, write_json

LONGEST_TAG, LONGEST_NOTE = 64, 10_000
"""Most letters of a tag and of a note."""


@dataclass(frozen=True)
class Labels:
    """The content of `labels.json`."""

    tags: tuple[str, ...] = ()
    notes: str = ""
    archived: bool = False


def read_labels(run: RunDir, config: dict[str, Any]) -> Labels:
    """Return what was said of a run; before anybody did, its tags are those of the experiment in `config`."""
    try:
        fields = read_json(run.labels)
        tags, notes, archived = fields["tags"], fields["notes"], fields["archived"]
    except (OSError, ValueError, KeyError, TypeError):  # nobody said anything, or another program wrote the file
        tracking = config.get("tracking")
        tags, notes, archived = tracking.get("tags") if isinstance(tracking, dict) else (), "", False
    words = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list | tuple) else []
    return Labels(tuple(words), notes if isinstance(notes, str) else "", archived is True)


class Labelled:
    """The part of `Run` that keeps tags, a note and the archive in the run directory."""

    directory: RunDir

    if TYPE_CHECKING:

        @property
        def config(self) -> dict[str, Any]: ...

    @property
    def labels(self) -> Labels:
        """Return the run's tags, its note, and whether it is archived."""
        return read_labels(self.directory, {} if self.directory.labels.exists() else self.config)

    @checked_arguments
    def tag(self, *tags: str) -> Self:
        """Add tags to the run: `run.tag("baseline", "paper")`. An experiment's own tags are there from the start."""
        for tag in tags:
            if not isinstance(tag, str) or not tag.strip() or len(tag) > LONGEST_TAG or not tag.isprintable():
                raise InvalidArgument(f"{tag!r:.80} is no tag. Give one line of 1 to {LONGEST_TAG} letters.")
        return self._relabel(tags=lambda labels: tuple(dict.fromkeys([*labels.tags, *map(str.strip, tags)])))

    @checked_arguments
    def untag(self, *tags: str) -> Self:
        """Remove tags from the run, those of its experiment too; W&B keeps the tags with which the run began."""
        return self._relabel(tags=lambda labels: tuple(tag for tag in labels.tags if tag not in tags))

    @checked_arguments
    def note(self, text: str) -> Self:
        """Write a note about the run, in place of an earlier one; an empty text removes it."""
        if len(text) > LONGEST_NOTE:
            raise InvalidArgument(f"A note has at most {LONGEST_NOTE:,} letters, and this one {len(text):,}.")
        return self._relabel(notes=lambda _: text)

    @checked_arguments
    def archive(self, archived: bool = True) -> Self:
        """Hide the run from lists, which show it again with `archived=True`; `archive(False)` brings it back."""
        return self._relabel(archived=lambda _: archived)

    def _relabel(self, **changes: Any) -> Self:
        try:
            with _locked(self.directory):
                labels = self.labels
                new = replace(labels, **{name: change(labels) for name, change in changes.items()})
                write_json(self.directory.labels, asdict(new))
        except OSError as error:
            raise WorkbenchError(
                f"The labels of {self.directory.path.name} cannot be written in {self.directory.path}: "
                f"{error.strerror}. They are as before. {remedy_for(error)}"
            ) from None
        return self


@contextlib.contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    """Hold a lock on the run's directory itself, so that two kernels that label a run at once lose nothing."""
    descriptor = os.open(run.path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
