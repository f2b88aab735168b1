"""The commands behind figures that drive JupyterLab still run, tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("what_if.py --tiny --out OUT", {"GPUs", "GiB each", "global batch", "micro-batch"}),
        ("live.py measure OUT first_curve", {"first_curve"}),
    ],
)
def test_a_command_that_drives_jupyterlab_runs(words: str, found: set[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command, *arguments = words.replace("OUT", str(out)).split()
    subprocess.run([sys.executable, str(BENCHMARKS / command), *arguments], check=True)
    assert json.loads(out.read_text()).keys() >= found
