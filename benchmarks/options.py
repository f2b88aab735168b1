"""What commands of this folder share: their options, where they write, and how they are tried in seconds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"


def parser(words: str | None, raw: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with `--tiny` and `--out`, which is a raw file of this name in `results/` by default."""
    made = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=raw and RESULTS / raw, help="raw file to write")
    made.add_argument("--tiny", action="store_true", help="of no interest but to see that this runs; needs --out")
    return made


def parsed(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Return what was asked for; a trial must name its file, so that it never writes over a measurement."""
    asked = made.parse_args()
    if asked.tiny and asked.out == made.get_default("out"):
        made.error("--tiny needs --out FILE: what it finds is no measurement.")
    return asked


def save_picture(figure: Any, name: str, asked: argparse.Namespace, width: int, scale: float = 1.5) -> Path:
    """Draw a picture of the documentation; that of a trial is a description beside its raw file, without a browser."""
    if asked.tiny:
        file: Path = asked.out.with_name(f"{name}.json")
        file.write_text(figure.to_json())
        return file
    from workbench.figures.figure import save

    return Path(save(figure, PICTURES / f"{name}.png", width=width, scale=scale))
