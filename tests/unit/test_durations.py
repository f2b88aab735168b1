"""The short run: which tests it leaves out, which file starts first, and when a test has grown too long for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations
from tests.durations import Duration

TESTS = Path(durations.__file__).parent
SUITE = """
import pytest
from conftest import CLOCK
@pytest.fixture(scope="module")
def made():
    CLOCK.now += 0.4
def test_first_of_two_that_share(made): pass
def test_second_of_two_that_share(made):
    CLOCK.now += 0.2
def test_short(): pass
def test_grown():
    CLOCK.now += 1.8
def test_long(): pass
@pytest.mark.representative
def test_long_and_representative(): pass
"""
CONFTEST = """
from pathlib import Path
from _pytest import timing
from tests import durations
from tests.durations import pytest_addoption, pytest_configure
from tests.patience import Clock
CLOCK = durations.time = Clock()  # how long a test takes is what it says
timing.time, timing.perf_counter = CLOCK.time, CLOCK.perf_counter
durations.FILE = Path(__file__).with_name("durations.json")
durations.ROOT = Path(__file__).parent
durations.LONG_S = 1.5
durations.RECORDED_S = 0.1
"""
RECORDED = {"test_it.py::test_long": 30.0, "test_it.py::test_long_and_representative": 30.0}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Return a folder of tests of which those of over a second and a half are long."""
    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "durations.json").write_text(json.dumps(RECORDED))
    return tmp_path


def run(suite: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "--strict-markers", "-p", "no:cacheprovider", *options]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {
        "PYTHONPATH": str(TESTS.parent),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "pytest_timeout,tests.workers",
    }
    answer = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False)
    return answer.returncode, answer.stdout + answer.stderr


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["one process", "workers"])
def test_the_short_run_leaves_out_recorded_long_tests_and_says_so(suite: Path, workers: tuple[str, ...]) -> None:
    code, said = run(suite, "--short", *workers)
    assert (code, "5 passed" in said) == (0, True), said
    assert "1 tests of over 1.5 s did not run" in said
    assert "make test-all" in said


def test_a_test_that_grew_is_named_until_it_is_recorded(suite: Path) -> None:
    code, said = run(suite)
    assert code == 0, "how long a test takes is no verdict"
    assert "1 tests took over 1.5 s" in said
    assert "test_it.py::test_grown" in said.partition("tests took over")[2].splitlines()[1]
    assert run(suite, "--record-durations")[0] == 0
    code, said = run(suite, "--short")
    assert "tests took over" not in said
    assert (code, "5 passed, 1 deselected" in said) == (0, True), "what was long and is not any more is back"


def test_a_record_names_what_a_test_shares_with_others_and_keeps_what_did_not_run(suite: Path) -> None:
    (suite / "test_other.py").write_text("")
    kept = {"test_other.py::test_it": 3.0, "test_it.py::test_long": 3.0}
    gone = {"test_it.py::test_removed": 3.0, "test_removed.py::test_it": 3.0}
    (suite / "durations.json").write_text(json.dumps({**kept, **gone}))
    run(suite, "test_it.py", "-k", "share", "--record-durations", "--workers", "1")
    recorded = durations.read(suite / "durations.json")
    assert {test for test in recorded if "share" not in test} == set(kept)
    first, second = (recorded[f"test_it.py::test_{name}_of_two_that_share"] for name in ("first", "second"))
    assert (first, second) == (Duration(0.0, 0.4), Duration(0.2, 0.4)), "the first does not pay for what both share"


def test_a_slower_machine_moves_the_limit_and_a_faster_one_does_not() -> None:
    recorded = {f"test_{index}": Duration(2.0) for index in range(20)}
    assert durations.slowness(dict.fromkeys(recorded, Duration(5.0)), recorded) == 2.5
    assert durations.slowness(dict.fromkeys(recorded, Duration(1.0)), recorded) == 1.0
    busy = recorded | {"test_0": Duration(90.0), "test_1": Duration(90.0)}
    assert durations.slowness(busy, recorded) == 1.0, "two tests say nothing of the machine"
    assert durations.slowness({"test_0": Duration(90.0)}, recorded) == 1.0


def test_fixtures_that_the_tests_of_a_file_share_count_once() -> None:
    assert durations.total([Duration(1.0, 20.0), Duration(2.0, 20.0), Duration(3.0)]) == 26.0


def test_tests_that_share_a_fixture_share_its_seconds() -> None:
    recorded = {
        "a::x": Duration(1.0, 20.0),
        "a::y": Duration(2.0, 20.0),
        "a::z": Duration(3.0),
        "b::x": Duration(0.0, 20.0),
    }
    assert durations.lengths(recorded) == {"a::x": 11.0, "a::y": 12.0, "a::z": 3.0, "b::x": 20.0}


def test_longest_files_start_first() -> None:
    assert durations.in_order({"b": 1.0, "a": 1.0, "c": 7.0}) == ["c", "a", "b"]


def test_every_recorded_test_has_a_file() -> None:
    files = {test.partition("::")[0] for test in durations.read(durations.FILE)}
    assert not [file for file in files if not (TESTS.parent / file).exists()], "make durations"


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


def printed(*targets: str) -> str:
    """Return the commands of a target, none of which runs."""
    command = ["make", "--dry-run", "--silent", *targets]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_ci_runs_all_tests_and_the_short_run_leaves_out_only_what_is_recorded_as_long() -> None:
    assert "make test-all" in (ROOT / ".ci" / "run").read_text().splitlines()
    assert "tests-elsewhere tests-in-browser RUN=--short;" in printed("test")
    assert "tests-elsewhere tests-in-browser;" in printed("test-all")
    assert "--record-durations" in printed("durations")
    elsewhere, browser = printed("tests-elsewhere", "RUN=-x"), printed("tests-in-browser", "RUN=-x")
    assert "-m pytest -x" in elsewhere
    assert "-m pytest -x" in browser
    folders = {file.parent.relative_to(TESTS).parts[0] for file in TESTS.rglob("test_*.py")} - {"gpu"}
    assert all(f"tests/{folder}" in elsewhere + browser for folder in folders)


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
