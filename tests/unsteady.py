"""Tests that failed are repeated once, alone, after the run: one unsteady test does not cost a day's work.

    python -m pytest … --note-failures=NOTE       # a run leaves what failed in a file
    python -m tests.unsteady NOTE …               # after all runs: repeats what failed, and gives the verdict

A test that fails twice is red. One that passes alone is unsteady: it is printed with what it said both times, and
written to `tests/unsteady.md`, where the next person finds it. More than `ALLOWED` of them are red as well. Tests whose
shared set-up failed with the same words count as one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".md")
ALLOWED = "WORKBENCH_UNSTEADY_ALLOWED"
"""Environment variable: how many unsteady tests a run may have; 2 by default, 0 where a run must show that none is."""
REPEATED = 12
"""Most failures that are repeated: a change that breaks more is no matter of luck."""
HEAD = """# Unsteady tests

Each failed in a run of all tests and passed when it was repeated alone. Find out why, mend the test or the product, and
remove the line.

| when | commit | load | test | what it said when it failed |
|---|---|---|---|---|
"""


class Failure(NamedTuple):
    """A test that failed, in which phase, and what it said."""

    test: str
    phase: str
    said: str

    @property
    def reason(self) -> str:
        """The line of the error, or the last line where there is none."""
        lines = [line for line in self.said.splitlines() if line.strip()] or [""]
        return next((line[2:].strip() for line in lines if line.startswith("E  ")), lines[-1])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--note-failures", metavar="NOTE", help="write what failed to a file, for tests.unsteady")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.note_failures and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Notes(Path(config.option.note_failures)), "workbench-unsteady")


class _Notes:
    """The plugin of the process that reports."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.failures: list[Failure] = []
        self.passed = self.skipped = 0
        file.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.passed and report.when == "call"
        self.skipped += report.skipped
        if report.failed:
            said = [report.longreprtext, *(f"--- {title} ---\n{text}" for title, text in report.sections)]
            self.failures.append(Failure(report.nodeid, report.when or "call", "\n".join(said)))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        counts = {"passed": self.passed, "skipped": self.skipped}
        self.file.write_text(json.dumps({"exit": int(session.exitstatus), **counts, "failures": self.failures}))


def causes(failures: Sequence[Failure]) -> list[list[Failure]]:
    """Return failures by cause: a failed set-up that tests of a file share is one; otherwise each test is its own."""
    found = defaultdict[tuple[str, str], list[Failure]](list)
    for each in failures:
        shared = (each.test.partition("::")[0], each.reason) if each.phase == "setup" else (each.test, "")
        found[shared].append(each)
    return list(found.values())


def judge(notes: Sequence[Path], allowed: int) -> int:
    """Repeat what failed in the runs of these notes, print it, and return 0 if the runs count as passed, else 1."""
    failures: list[Failure] = []
    passed = skipped = 0
    for note in notes:
        if not note.exists():
            print(f"The run of {note.stem} did not end: it left no note of what failed. Its output is above.")
            return 1
        ended = json.loads(note.read_text())
        failures += [Failure(*each) for each in ended["failures"]]
        passed, skipped = passed + ended["passed"], skipped + ended["skipped"]
        if ended["exit"] != (pytest.ExitCode.TESTS_FAILED if ended["failures"] else pytest.ExitCode.OK):
            print(f"The run of {note.stem} ended with pytest's exit code {ended['exit']}. Its output is above.")
            return 1
    by_cause = causes(failures)
    if len(by_cause) > REPEATED:
        print(f"{len(by_cause)} tests failed. More than {REPEATED} are not repeated: this is no matter of luck.")
        return 1
    unsteady = [cause for cause in by_cause if _passes_alone(cause)]
    if unsteady:
        _write(unsteady)
        print(f"{len(unsteady)} unsteady, {allowed} allowed; written to {LIST.relative_to(ROOT)}: {_names(unsteady)}")
    twice = [cause for cause in by_cause if cause not in unsteady]
    if twice:
        print(f"{len(twice)} failed twice: {_names(twice)}")
    print(f"{passed + sum(map(len, unsteady))} passed, {sum(map(len, twice))} failed, {skipped} skipped")
    return int(bool(twice) or len(unsteady) > allowed)


def _names(some: Sequence[Sequence[Failure]]) -> str:
    return ", ".join(cause[0].test for cause in some)


def _passes_alone(cause: Sequence[Failure]) -> bool:
    """Repeat the tests of one cause in a process of their own; print what was said both times if they pass."""
    tests = [each.test for each in cause]
    print(f"Repeating alone: {' '.join(tests)}", flush=True)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *tests]
    again = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    passes = again.returncode == pytest.ExitCode.OK
    verdict = "UNSTEADY: it passes alone" if passes else "FAILED TWICE"
    print(f"{verdict}: {' '.join(tests)}\n=== when it failed ===\n{cause[0].said}\n=== alone ===\n{again.stdout}")
    return passes


def _write(unsteady: Sequence[Sequence[Failure]]) -> None:
    """Add unsteady tests to the list, and to the page of a run on GitHub."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    when, load = datetime.now(UTC).strftime("%Y-%m-%d %H:%M"), f"{os.getloadavg()[1]:.0f}"
    rows = [
        f"| {when} | {commit} | {load} | `{cause[0].test}` | {cause[0].reason[:200].replace('|', '&#124;')} |\n"
        for cause in unsteady
    ]
    before = LIST.read_text() if LIST.exists() else HEAD
    LIST.write_text(before + "".join(rows))
    if page := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(page, "a") as summary:
            summary.write(HEAD + "".join(rows))


if __name__ == "__main__":
    sys.exit(judge([Path(note) for note in sys.argv[1:]], int(os.environ.get(ALLOWED, "2"))))
