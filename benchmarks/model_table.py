"""Which unmodified models train here, and how far they are from plain PyTorch: the first table of `docs/models.md`.

    python -m benchmarks.model_table measure FILE [NAME ...]
    python -m benchmarks.model_table update FILE

`measure` captures every model of the tests' zoo, plans it with the real planner for several divisions of 2 and 4
processes, runs one step of each plan on real processes (gloo, fp32, dropout off) beside plain PyTorch on the whole
batch, and writes the largest differences to FILE; with names, it measures these and keeps the other rows of FILE.
`update` puts FILE's table into `docs/models.md`. Minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.pages import MODELS_PAGE, fill, read_rows, versions, write_rows
from tests.distributed import zoo
from tests.distributed.test_models import ON_FOUR, ON_TWO, captured, differences, offers
from workbench.base.errors import CaptureError
from workbench.capture import build_meta

CASES = (*ON_TWO, *ON_FOUR)


def measured(name: str) -> dict[str, Any]:
    """Return the differences of each division; a model that cannot be captured says why."""
    model = build_meta(zoo.MODELS[name])
    row = {"name": name, "class": type(model).__name__, "by_hand": name in zoo.BY_HAND}
    try:
        graph = captured(name, model)
    except CaptureError as error:
        return row | {"refused": str(error)}
    found = differences(name, ON_TWO) | differences(name, ON_FOUR)
    return row | {
        "blocks": len(graph.blocks),
        "block_types": len(graph.block_types),
        "differences": {str(case): asdict(found[case]) for case in CASES},
        "not_offered": [str(case) for case in CASES if not offers(name, case)],
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    titles = [str(case) for case in CASES]
    lines = [
        f"| model | captured | blocks of types | {' | '.join(titles)} |",
        "|---|---|--:|" + "--:|" * len(titles),
    ]
    for row in rows:
        name = f"`{row['class']}`" + " (by hand)" * row["by_hand"]
        if "refused" in row:
            lines.append(f"| {name} | no: {row['refused']} |" + " |" * (len(titles) + 1))
            continue
        largest = {title: max(row["differences"][title].values()) for title in titles}
        cells = [f"{largest[title]:.0e}" + " ¹" * (title in row["not_offered"]) for title in titles]
        lines.append(f"| {name} | yes | {row['blocks']} of {row['block_types']} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "update"))
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models of tests/distributed/zoo.py; all by default")
    asked = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = read_rows(asked.file)
    if asked.what == "update":
        fill(MODELS_PAGE, "model_table.py", [*table(list(rows.values())), "", versions(asked.file)])
        return
    for name in asked.names or zoo.MODELS:
        rows[name] = measured(name)
        print(*table([rows[name]])[2:], flush=True)
        write_rows(asked.file, [rows[each] for each in zoo.MODELS if each in rows])


if __name__ == "__main__":
    main()
