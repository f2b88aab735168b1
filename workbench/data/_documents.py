"""Documents of an iterable, written to a text file of the cache."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from workbench.errors import DataError
from workbench.home import cache_home
from workbench.units import gib

PIECE = 1 << 16
"""Characters that are written at a time."""
_LINE = re.compile(r"\S(?:[^\n]*\S)?")
"""A line that is not blank, without blanks around it; only newlines end one."""


def write_documents(documents: Iterable[str], name: str, progress: bool) -> Path:
    """Write documents to `texts` of the cache, in a folder named by a hash of them, and return the file.

    Each line of a document becomes a paragraph. One document at a time is in memory. Raises `DataError` for a document
    that is no text, for an iterable without any word, and for a disk that is full.
    """
    folder = cache_home() / "texts"
    part = folder / f"{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        digest = _write(part, documents, progress)
        path = folder / digest / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        part.replace(path)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        free = f" ({gib(shutil.disk_usage(cache_home()).free)} are free)" if full else ""
        raise DataError(
            f"The documents cannot be written to {folder}: {error.strerror}{free}. Point WORKBENCH_HOME at a folder "
            "that has room for the text.",
            path=str(folder),
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return path


def _write(part: Path, documents: Iterable[str], progress: bool) -> str:
    """Write documents to a file, each followed by an empty line, and return a hash of what was written."""
    from tqdm.auto import tqdm

    digest = hashlib.sha256()
    with part.open("wb") as file:
        for number, document in enumerate(tqdm(documents, "Writing", unit=" documents", disable=not progress)):
            if not isinstance(document, str):
                raise DataError(
                    f"Document {number} is of type {type(document).__name__} and must be text. Take the field that "
                    "holds it: (row['text'] for row in rows).",
                    document=number,
                )
            try:
                for piece in _pieces(document):
                    file.write(encoded := piece.encode())
                    digest.update(encoded)
            except UnicodeEncodeError as error:
                raise DataError(
                    f"Document {number} cannot be written as UTF-8: {error}. Decode its bytes with errors='replace'.",
                    document=number,
                ) from None
        if not file.tell():
            raise DataError("The documents are empty: they hold no word of text. Give at least one.", tokens=0)
    return digest.hexdigest()[:16]


def _pieces(document: str) -> Iterator[str]:
    """Yield the lines of a document without blanks around them, and an empty line after it; a blank one gives none.

    The pieces are short, so that no copy of a long document or line is in memory.
    """
    is_blank = True
    for line in _LINE.finditer(document):
        begin, end = line.span()
        yield from (document[at : min(at + PIECE, end)] for at in range(begin, end, PIECE))
        yield "\n"
        is_blank = False
    if not is_blank:
        yield "\n"
