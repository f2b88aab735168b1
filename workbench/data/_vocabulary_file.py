"""Vocabularies in local files: GPT-2's and OPT's byte-level BPE. Imports the standard library only."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from workbench.errors import DataError

REMEDY = (
    "Give the tokenizer.json of a byte-level BPE, such as GPT-2's or OPT's, or the folder that holds it, or one with "
    "vocab.json and merges.txt."
)


def vocabulary_files(path: str) -> tuple[Path, ...]:
    """Return the files of a vocabulary: a `tokenizer.json`, or a `vocab.json` and a `merges.txt`.

    `path` is such a folder or a file of the first type. Raises `DataError` if there is none.
    """
    place = Path(path)
    if os.path.isfile(place):  # unlike `Path.is_file` also for a name that is too long for a file
        return (place,)
    for names in (("tokenizer.json",), ("vocab.json", "merges.txt")):
        if all(os.path.isfile(place / name) for name in names):
            return tuple(place / name for name in names)
    missing = (
        f"The folder {path} holds no tokenizer.json" if os.path.isdir(place) else f"There is no tokeniser at {path}"
    )
    raise DataError(f"{missing}. {REMEDY}", tokenizer=path)


def vocabulary_size(path: str) -> int:
    """Return the number of ids of a vocabulary: the largest id that it gives, and one more."""
    value = read_json(vocabulary_files(path)[0])
    try:
        entries = [*value["model"]["vocab"].values()] if "model" in value else [*value.values()]
        added = [token["id"] for token in value.get("added_tokens", ()) or ()] if "model" in value else []
        return int(max([*entries, *added])) + 1
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DataError(f"{path} holds no vocabulary of words and their ids. {REMEDY}", tokenizer=path) from None


def vocabulary_digest(path: str) -> str:
    """Return a hash of the content of a vocabulary's files, wherever they are."""
    digest = hashlib.sha256()
    for file in vocabulary_files(path):
        digest.update(hashlib.sha256(_content(file)).digest())
    return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise `DataError` if it is none."""
    try:
        value = json.loads(_content(file))
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}. {REMEDY}", tokenizer=str(file)) from None
    if not isinstance(value, dict):
        raise DataError(f"{file} holds no tokeniser. {REMEDY}", tokenizer=str(file))
    return value


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}. {REMEDY}", tokenizer=str(file)) from None
