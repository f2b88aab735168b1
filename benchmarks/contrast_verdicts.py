"""How often `wb.contrast` tells equal pairs of runs apart, and pairs that lie twice the noise apart.

    python benchmarks/contrast_verdicts.py       # writes results/contrast_verdicts.json; 3 minutes of a core

The simulation is that of `tests/unit/test_contrast_verdicts.py`, with 1,000 pairs of each kind of curve, not 40.
"""

from __future__ import annotations

import json
import statistics
import sys
from unittest import mock

import options

TRIED = 1000
"""Pairs of each kind of curve."""


def main() -> None:
    asked = options.parsed(options.parser(__doc__, "contrast_verdicts.json"))
    sys.path.insert(0, str(options.ROOT / "tests" / "unit"))
    import test_contrast_verdicts as simulation  # a file of the tests, found through the line above

    pairs, kinds = 2 if asked.tiny else TRIED, {}
    for name, generator in list(simulation.GENERATORS.items())[: 1 if asked.tiny else None]:
        for dense in (True, False):
            with mock.patch.object(simulation, "PAIRS", pairs):
                shares = simulation.measured(generator, dense)
            kinds[f"{name}, {'dense' if dense else 'sparse'}"] = {
                f"{seeds} seeds, {'with' if known else 'without'} scatter": {"false": false, "found": found}
                for (seeds, known), (false, found) in shares.items()
            }
    columns = next(iter(kinds.values()))
    means = {
        column: {verdict: statistics.mean(kind[column][verdict] for kind in kinds.values()) for verdict in found}
        for column, found in columns.items()
    }
    asked.out.write_text(json.dumps({"pairs": pairs, "means": means, "kinds": kinds}, indent=1) + "\n")
    print(json.dumps(means, indent=1))


if __name__ == "__main__":
    main()
