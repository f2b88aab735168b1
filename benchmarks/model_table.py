"""Which unmodified models train here, and how far they are from plain PyTorch: the table of `docs/models.md`.

    python -m benchmarks.model_table [--update] [NAME …]

Captures every model of the tests' zoo, plans it with the real planner for several divisions of 2 and 4 processes, and
runs one step of each plan on real processes (gloo, fp32, dropout off) beside plain PyTorch on the whole batch.
`--update` puts the table into `docs/models.md`. More than ten minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import logging
import platform
from pathlib import Path

import torch
import transformers

from tests.distributed import zoo
from tests.distributed.test_models import ON_FOUR, ON_TWO, captured, differences, offers
from workbench.capture import build_meta
from workbench.errors import CaptureError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- made by benchmarks/model_table.py -->", "<!-- end -->"
CASES = (*ON_TWO, *ON_FOUR)
HEADER = (
    "| model | captured | blocks of types | " + " | ".join(map(str, CASES)) + " |",
    "|---|---|--:|" + "--:|" * len(CASES),
)


def row(name: str) -> str:
    """One line of the table; a model that cannot be captured says why."""
    model = build_meta(zoo.MODELS[name])
    title = f"`{type(model).__name__}`" + (" (by hand)" if name in zoo.BY_HAND else "")
    try:
        graph = captured(name, model)
    except CaptureError as error:
        return f"| {title} | no: {error} |" + " |" * (len(CASES) + 1)
    found = differences(name, ON_TWO) | differences(name, ON_FOUR)
    cells = [f"{found[degrees].largest:.0e}{'' if offers(name, degrees) else ' ¹'}" for degrees in CASES]
    return f"| {title} | yes | {len(graph.blocks)} of {len(graph.block_types)} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models of tests/distributed/zoo.py; all by default")
    parser.add_argument("--update", action="store_true", help="write the table into docs/models.md")
    asked = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    lines = [*HEADER]
    for name in asked.names or zoo.MODELS:
        lines.append(row(name))
        print(lines[-1], flush=True)
    made = (
        f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}, {platform.machine()}."
    )
    lines += ["", f"Measured with {made}"]
    if asked.update:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text("\n".join([before + BEGIN, *lines, END + rest.partition(END)[2]]))


if __name__ == "__main__":
    main()
