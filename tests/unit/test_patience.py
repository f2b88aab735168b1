"""Tests wait for what happens, not for a time: what lets a verdict depend on the machine's speed is found here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience
from tests.patience import Clock, Gate, eventually

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
HOME = {"patience.py", "durations.py", "under_load.py", "test_patience.py"}
"""Files that deal with the clock: the one that waits, those that time tests, and this one."""
SUSPECT = re.compile(
    r"(?<!clock\.)(?<!def )(?<!super\(\)\.)\bsleep\([^)]"  # a pace, or a wait for a time; a test's clock has none
    r"|wait_for_timeout\("
    r"|\b(monotonic|perf_counter|process_time|thread_time)(_ns)?\(\)"  # elapsed time, which an assertion may read
    r"|\btime\.time\(\) *[-<>]|[-<>] *time\.time\(\)"
    r"|\b(timeout|limit_s)=[0-9]"  # a limit other than patience
    r"|(LIMIT|PATIENCE|TIMEOUT|WITHIN)_M?S = [0-9]"
)
REASON = re.compile(r"# clock: \S+ \S+ \S+")
"""A line that reads the clock for another purpose says why no verdict depends on the machine's speed."""


def suspects(text: str) -> list[tuple[int, str]]:
    """Return the numbers and words of lines that read the clock, wait for a time, or have a limit of their own."""
    lines = enumerate(text.splitlines(), 1)
    return [(number, line.strip()) for number, line in lines if SUSPECT.search(line) and not REASON.search(line)]


def test_no_test_waits_for_a_time_or_asserts_one() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line}"
        for file in sorted(TESTS.rglob("*.py"))
        if file.name not in HOME
        for number, line in suspects(file.read_text())
    ]
    assert not found, (
        f"{len(found)} lines may let a verdict depend on how fast the machine is. Wait with `eventually` of "
        "tests/patience.py, let processes advance through a `Gate`, and test limits of the product with a `Clock`; or "
        "say at the line why its verdict does not depend on speed, as `# clock: …`:\n" + "\n".join(found)
    )


@pytest.mark.parametrize(
    "line",
    [
        "time.sleep(0.3)",
        'code = "import time; time.sleep(60)"',
        "page.wait_for_timeout(500)",
        "assert time.monotonic() - began < 30",
        "assert time.time() - began < 30",
        "run.wait(timeout=120)",
        "GONE_WITHIN_S = 60.0",
    ],
)
def test_the_check_finds_lines_that_depend_on_speed(line: str) -> None:
    assert suspects(line) == [(1, line)]
    assert not suspects(f"{line}  # clock: nothing is asserted of it")


@pytest.mark.parametrize("line", ["run.wait(PATIENCE_S)", "time.time()", "clock.sleep(60)", "timeout=PATIENCE_S"])
def test_the_check_passes_lines_that_do_not(line: str) -> None:
    assert not suspects(line)


PASSES = """
from tests.patience import wait_for_gate
for step in (1, 2, 3):
    wait_for_gate(step)
    print(step, flush=True)
"""


def test_a_process_passes_its_gate_when_the_test_opens_it(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", open_to=2)
    command = [sys.executable, "-c", PASSES]
    with subprocess.Popen(command, env=gate.environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ["1\n", "2\n"]
        assert process.poll() is None
        gate.open()
        assert process.stdout.read() == "3\n"


def test_patience_ends_with_what_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(patience, "time", clock)
    with pytest.raises(AssertionError, match="within 300 s: nothing came"):
        eventually(lambda: False, lambda: "nothing came")
    assert eventually(lambda: clock.now) == clock.now
