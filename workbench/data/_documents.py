"""Documents of an iterable, written to a text file of the cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from workbench.data._store import writing_to
from workbench.errors import DataError
from workbench.home import cache_home
from workbench.waiting import waiting

PIECE = 1 << 16
"""Characters that are written at a time."""
_LINE = re.compile(r"\S(?:[^\n]*\S)?")
"""A line that is not blank, without blanks around it; only newlines end one."""


def write_documents(documents: Iterable[str], name: str, progress: bool) -> Path:
    """Write documents to `texts` of the cache, in a folder named by a hash of them, and return the file.

    Each line of a document becomes a paragraph. One document at a time is in memory. Raises `DataError` for a document
    that is no text, for an iterable without any word, and for a disk that is full.
    """
    folder, digest = cache_home() / "texts", hashlib.sha256()
    part = folder / f"{os.getpid()}.part"
    with writing_to(folder, "cache of texts"):
        try:
            shown = waiting(f"writing {name}") if progress else contextlib.nullcontext(lambda _: None)
            with part.open("wb") as file, shown as say:
                for number, document in enumerate(documents):
                    say(f"{number + 1:,} documents")
                    for piece in _pieces(document, number):
                        file.write(piece)
                        digest.update(piece)
                if not file.tell():
                    raise DataError("The documents are empty: they hold no word of text. Give at least one.")
            path = folder / digest.hexdigest()[:16] / f"{name}.txt"
            path.parent.mkdir(exist_ok=True)
            return part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _pieces(document: Any, number: int) -> Iterator[bytes]:
    """Yield the lines of a document without blanks around them, and an empty line after it; a blank one gives none.

    The pieces are short, so that no copy of a long document or line is in memory.
    """
    if not isinstance(document, str):
        raise DataError(
            f"Document {number} is of type {type(document).__name__} and must be text. Take the field that "
            "holds it: (row['text'] for row in rows)."
        )
    end = b""
    try:
        for line in _LINE.finditer(document):
            for at in range(line.start(), line.end(), PIECE):
                yield document[at : min(at + PIECE, line.end())].encode()
            yield (end := b"\n")
    except UnicodeEncodeError as error:
        raise DataError(
            f"Document {number} cannot be written as UTF-8: {error}. Decode its bytes with errors='replace'."
        ) from None
    yield end
