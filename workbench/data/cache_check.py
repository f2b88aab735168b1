"""The whole token cache compared with what was written to it; opening a text reads only files that were touched."""

from __future__ import annotations

import json
from pathlib import Path

from workbench.data._tokens import _digest, _digest_of_facts
from workbench.home import cache_home


def cached_texts() -> list[Path]:
    """Return the folders of the token cache that hold a tokenised text."""
    return sorted(file.parent for file in (cache_home() / "tokens").glob("*/facts.json"))


def damage_of(folder: Path) -> str | None:
    """Return a sentence on the first file of a cached text that differs from what was written, None if none does.

    Every byte is read. A text that an earlier version tokenised has no digests and counts as whole.
    """
    try:
        facts = json.loads((folder / "facts.json").read_text())
        if facts.get("digest", _digest_of_facts(facts)) != _digest_of_facts(facts):
            return f"{folder / 'facts.json'} does not hold what was written to it."
        for name, written in facts.get("files", {}).items():
            if _digest(folder / name) != written["blake2b"]:
                return f"{folder / name} does not hold what was written to it."
    except FileNotFoundError as error:
        return f"{error.filename} is missing."
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{folder} cannot be read: {error}."
    return None
