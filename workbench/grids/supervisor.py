"""The process that sees the measurement of a grid through: `python -m workbench.grids.supervisor GRID_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

from workbench.grids.measuring import GridDir
from workbench.sweeps.supervisor import supervise

if __name__ == "__main__":
    # No run is launched ahead of its turn: its start would take time from the steps that are measured.
    sys.exit(supervise(GridDir(Path(sys.argv[1])), ahead=0))
