"""The raw files of the benchmarks, and the tables of the pages that show their figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS, HISTORY, README = "benchmarks/README.md", "benchmarks/HISTORY.md", "README.md"


def raw(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def words(page: str) -> str:
    """Return a page with each run of blanks as one space, so that sentences are found across lines."""
    return " ".join((ROOT / page).read_text().split())


def table(page: str, header: str) -> list[list[str]]:
    """Return the cells of the table that begins with a header, without the header, unmarked."""
    lines = (ROOT / page).read_text().partition(f"\n{header}")[2].splitlines()[2:]
    assert lines, header
    rows = lines[: next((at for at, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip().replace("*", "") for cell in row.strip("|").split("|")] for row in rows]


def shows(shown: str, value: float) -> bool:
    """Return whether a number in a cell is the value, rounded to the decimals that the cell has; "k" is a thousand."""
    found = re.search(r"[+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?", shown)
    assert found, shown
    text = found[0].replace(",", "")
    unit = {"k": 1e3, "%": 1e-2}.get(shown[found.end() :].strip()[:1], 1.0)
    decimals = len(text.partition("e")[0].partition(".")[2])
    half = 0.5 * 10.0 ** (int(text.partition("e")[2] or 0) - decimals)
    return abs(float(text) - value / unit) <= half * (1 + 1e-6)
