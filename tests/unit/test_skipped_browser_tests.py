"""The end of `make test` on a machine without Chromium."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_without_chromium_the_last_lines_say_what_did_not_run_and_the_command_that_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/browser/test_curve_in_view.py"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    *_, title, words, counts = done.stdout.splitlines()
    assert "BROWSER TESTS DID NOT RUN" in title
    assert words.endswith(
        "because there is no Chromium on this machine. To have these tests: sudo apt-get install chromium"
    )
    assert "skipped" in counts
