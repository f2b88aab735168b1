"""Tests in forked workers: each runs once, as in one process, and the test at which a worker dies has failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE = """
import os, pytest
@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("made")
@pytest.mark.parametrize("number", range(20))
def test_passes(number, folder):
    (folder / str(number)).write_text("")
    print("said by", number)
    assert sorted(os.listdir(folder)) == sorted(map(str, range(number + 1)))
    assert os.environ["WORKBENCH_HOME"]
def test_fails():
    print("said by the one that fails")
    assert [1] == [2]
@pytest.mark.skip
def test_is_skipped(): pass
def test_misses(nothing): pass
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "tests.workers"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:terminalprogress", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_each_test_runs_once_as_in_one_process(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / f"test_{name}.py").write_text(SUITE)
    said = [run(tmp_path, *workers) for workers in ((), ("--workers", "2"))]
    counts = [re.findall(r"\d+ (?:failed|passed|skipped|error)", words.splitlines()[-1]) for _, words in said]
    assert counts == [["3 failed", "60 passed", "3 skipped", "3 error"]] * 2, said
    assert [code for code, _ in said] == [1, 1]
    failures = said[1][1].partition("FAILURES")[2]
    assert failures.count("Captured stdout call") == 3
    assert failures.count("assert [1] == [2]") >= 3
    assert "said by 7" not in failures, "each failure has what its own test printed"


@pytest.mark.parametrize("leaves", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_the_test_at_which_a_worker_dies_has_failed_and_the_others_run(leaves: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(f"import os\ndef test_leaves():\n    {leaves}\ndef test_after(): pass\n")
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    code, words = run(tmp_path, "--workers", "1")
    assert code == pytest.ExitCode.TESTS_FAILED, words
    assert re.search(r"FAILED test_it.py::test_leaves - a worker ended with exit code (3|-9)", words)
    assert "1 failed, 2 passed" in words
