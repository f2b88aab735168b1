"""The Makefile: what its commands find in their environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_processes_that_make_starts_keep_their_compiled_modules() -> None:
    rule = "seen: ; @echo $${PYTHONDONTWRITEBYTECODE-unset}"
    command = ["make", "--silent", f"--eval={rule}", "seen"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "unset"


def test_jupyterlab_starts_as_root_too_as_in_a_container() -> None:
    command = ["make", "--dry-run", "--silent", "lab"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "jupyter lab" in printed
    assert ("--allow-root" in printed) == (os.getuid() == 0)


def test_ci_runs_all_tests_and_the_short_run_leaves_out_only_what_is_recorded_as_long() -> None:
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("make test-all")
    for target, option in (("test", "--short"), ("test-all", "--check-durations"), ("durations", "--record-durations")):
        command = ["make", "--dry-run", "--silent", target]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        tests = [line for line in printed.splitlines() if "-m pytest" in line and "tests/gpu" not in line]
        assert len(tests) == 2
        assert all(option in line for line in tests), "beside each other: JupyterLab, and all others"
        assert "tests/browser" in " ".join(tests)
        assert "tests/unit/" in " ".join(tests)
