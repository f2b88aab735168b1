"""One unsteady test does not make a run red, two failures of one do, and so do three unsteady ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import unsteady
from tests.unsteady import Failure

SUITE = """
from pathlib import Path
import pytest
TRIED = Path(__file__).with_name("tried")
def first_time(name):
    seen = TRIED.read_text().split() if TRIED.exists() else []
    TRIED.write_text(" ".join([*seen, name]))
    return name not in seen
@pytest.fixture(scope="module")
def made():
    assert not first_time("made"), "nothing was made | today"
@pytest.mark.parametrize("case", range(3))
def test_of_what_is_made(made, case): pass
def test_twice(): raise ValueError("always")
def test_once():
    print("it printed this")
    assert not first_time("once")
def test_right(): pass
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of tests, in which what failed is repeated."""
    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text("from tests.unsteady import pytest_addoption, pytest_configure\n")
    monkeypatch.setattr(unsteady, "ROOT", tmp_path)
    monkeypatch.setattr(unsteady, "LIST", tmp_path / "unsteady.md")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return tmp_path


def verdict(suite: Path, chosen: str, allowed: int = 2) -> int:
    """Run the chosen tests of the suite, then return the verdict over what their run noted."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--note-failures=note.json", "-k", chosen]
    subprocess.run(command, cwd=suite, capture_output=True, check=False)
    return unsteady.judge([suite / "note.json"], allowed)


def test_a_test_that_passes_alone_is_told_with_both_outputs_and_listed(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verdict(suite, "once or right") == 0
    said = capsys.readouterr().out
    failed, alone = said.partition("=== when it failed ===")[2].split("=== alone ===")
    assert "assert not first_time" in failed
    assert "it printed this" in failed
    assert "it printed this" in alone
    assert "1 passed" in alone
    rows = (suite / "unsteady.md").read_text().splitlines()[-1:]
    assert ["`test_it.py::test_once`" in row for row in rows] == [True]
    assert said.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"


def test_a_test_that_fails_twice_is_red(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(suite, "twice or once") == 1
    *_, named, counts = capsys.readouterr().out.splitlines()
    assert named == "1 failed twice: test_it.py::test_twice"
    assert counts == "1 passed, 1 failed, 0 skipped"


def test_tests_that_share_a_failed_set_up_count_as_one(suite: Path) -> None:
    assert verdict(suite, "made or once", allowed=2) == 0
    rows = [line for line in (suite / "unsteady.md").read_text().splitlines() if "test_it.py" in line]
    assert len(rows) == 2
    assert sum("nothing was made &#124; today" in row for row in rows) == 1


def test_more_unsteady_tests_than_allowed_are_red(suite: Path) -> None:
    assert verdict(suite, "made or once", allowed=1) == 1


def test_a_run_without_failures_passes_and_one_that_did_not_end_does_not(suite: Path) -> None:
    assert verdict(suite, "right") == 0
    assert unsteady.judge([suite / "missing.json"], 2) == 1
    assert verdict(suite, "no_such_test") == 1, "pytest ran nothing"
    (suite / "test_it.py").write_text("import nothing_of_this_name")
    assert verdict(suite, "right") == 1, "a file that cannot be imported is not repeated"


def test_many_failures_are_red_without_being_repeated(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [Failure(f"test_it.py::test_{index}", "call", "E   wrong") for index in range(unsteady.REPEATED + 1)]
    (suite / "note.json").write_text(json.dumps({"exit": 1, "passed": 0, "skipped": 0, "failures": failures}))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a test was repeated"))
    assert unsteady.judge([suite / "note.json"], 2) == 1
