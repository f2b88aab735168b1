"""How often `wb.contrast` tells equal pairs of runs apart, and pairs that lie twice the noise apart.

    python benchmarks/contrast_verdicts.py       # writes results/contrast_verdicts.json; 10 minutes of a core

The simulation is that of `tests/unit/test_contrast_verdicts.py`, with 1,000 pairs of each kind of curve, not 40. Of
sweeps, whose configurations are compared with the one that ended lowest, it makes 400 of each of three kinds.
"""

from __future__ import annotations

import json
import statistics
import sys
from unittest import mock

import options

TRIED = 1000
"""Pairs of each kind of curve."""
SWEEPS = 400
"""Sweeps of each kind of curve and number of configurations and seeds."""
OF_SWEEPS = (("power law", True), ("cosine, heavy tails", False), ("seeds that wander", False))
"""Kinds of curves that sweeps are made of, and whether they are dense."""


def main() -> None:
    asked = options.parsed(options.parser(__doc__, "contrast_verdicts.json"))
    sys.path.insert(0, str(options.ROOT / "tests" / "unit"))
    import test_contrast_verdicts as simulation  # a file of the tests, found through the line above

    pairs, sweeps, kinds = *((2, 1) if asked.tiny else (TRIED, SWEEPS)), {}
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
    families = {
        family: {
            f"{name}, {'dense' if dense else 'sparse'}": simulation.shares_of_sweeps(
                simulation.GENERATORS[name], dense, each, sweeps
            )
            for name, dense in OF_SWEEPS[: 1 if asked.tiny else None]
        }
        for family, each in simulation.FAMILIES.items()
    }
    found = {"pairs": pairs, "means": means, "kinds": kinds, "sweeps": sweeps, "families": families}
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({"means": means, "families": families}, indent=1))


if __name__ == "__main__":
    main()
