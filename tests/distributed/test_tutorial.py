"""The tutorial runs as it is printed: every Python block of `docs/tutorial.md`, in order, in one interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_block_of_the_tutorial_runs_in_order(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "tutorial.md").read_text(), re.M | re.S)
    assert len(blocks) >= 5
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(blocks) + "\nassert [run.status.state for run in runs] == ['finished'] * 2, runs\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WORKBENCH_RUNS": str(tmp_path / "runs"),
        "WANDB_MODE": "disabled",
    }
    answer = subprocess.run([sys.executable, script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "finished" in answer.stdout
