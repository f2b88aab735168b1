"""Raw files of rows with names, and tables of pages that are made from raw files."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODELS_PAGE = ROOT / "docs" / "models.md"


def fill(page: Path, command: str, lines: Sequence[str]) -> None:
    """Put lines in the place of those that the page has from this command."""
    before, begin, rest = page.read_text().partition(f"<!-- made by benchmarks/{command} -->")
    _, end, after = rest.partition(f"<!-- end of {command} -->")
    assert begin, f"{page} has no place for {command}"
    assert end, f"{page} does not say where the place of {command} ends"
    page.write_text("\n".join([before + begin, *lines, end + after]))


def read_rows(file: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a raw file by their names; none if there is no such file."""
    return {row["name"]: row for row in json.loads(file.read_text())["rows"]} if file.exists() else {}


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows beside the versions that made them; paths in their texts begin at a package or at `tests`."""
    import torch
    import transformers

    made_with = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    made = {**made_with, "machine": platform.machine(), "rows": rows}
    file.write_text(re.sub(r"/\S*/(?:site-packages/|(?=tests/))", "", json.dumps(made, indent=1)) + "\n")


def versions(file: Path) -> str:
    """Return the sentence below a table of a raw file."""
    made = json.loads(file.read_text())
    return f"Measured with torch {made['torch']}, transformers {made['transformers']}, {made['machine']}."
