"""What a long call says while it is waited for: in a terminal and in a kernel, nothing of it for a short one."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import workbench as wb
from tests.kernels import kernel
from tests.patience import PATIENCE_S, eventually
from workbench.base import display
from workbench.record.event_log import LogTail, read_events
from workbench.record.rundir import RunDir, write_json, write_record
from workbench.runs.launching import supervisor

REPOSITORY = Path(__file__).parents[2]
WAITS = """
import sys, threading
from tests.patience import eventually
from workbench.base import display
display.SHOWN_AFTER_S, display.EVERY_S, display.LOOK_S = 0.0, 0.01, 0.01
pictures = 0

def counted(_):
    global pictures
    pictures += 1
    return "3 s"

display.duration = counted

def is_shown():
    "Wait until what was said before has been read and drawn."
    begun = pictures
    eventually(lambda: pictures > begun + 1)

def work(**options):
    with display.waiting("planning <b>", **options) as say:
        say("first")
        with display.waiting("capturing it") as nested:
            nested("half")
            is_shown()
        say("last")
        is_shown()
"""
SHORT = """
display.SHOWN_AFTER_S, waits, wait = 600, [], threading.Event.wait
threading.Event.wait = lambda event, timeout=None: (waits.append(timeout), wait(event, timeout))[1]
with display.waiting("a short wait"):
    eventually(lambda: 600 in waits)
display.SHOWN_AFTER_S = 0.0
"""
TO_A_FILE = """
sys.stderr = open("file", "w+")
with display.waiting("a wait whose stderr is a file"):
    assert threading.active_count() == 1, "nobody shows it"
"""


def test_a_terminal_shows_one_line_of_a_long_wait_that_changes_and_is_gone_at_the_end(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "80"}
    command = [sys.executable, "-c", f"{WAITS}{SHORT}work(){TO_A_FILE}"]
    process = subprocess.Popen(command, stderr=theirs, env=environment, cwd=tmp_path)
    os.close(theirs)
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 1000)
        except OSError:  # the other end was closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(ours)
    assert process.wait() == 0, seen.decode()
    lines = seen.decode().split("\r\x1b[2K")
    assert {"Planning <b>: capturing it: half (3 s)", "Planning <b>: last (3 s)"} <= {*lines}
    assert lines[0] == lines[-1] == ""
    assert b"short" not in seen
    assert b"\n" not in seen


class Terminal(io.StringIO):
    """What a terminal is sent."""

    def isatty(self) -> bool:
        return True


def test_a_plan_and_a_grid_say_how_many_plans_they_have_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()

    class Shown(display._Wait):
        """The words of one call, which goes on when the first of each kind are shown."""

        def __init__(self) -> None:
            self.now, self.kinds = "", {""}

        @property
        def details(self) -> str:
            return self.now

        @details.setter
        def details(self, words: str) -> None:
            self.now, kind = words, re.sub("[0-9,]+", "0", words)
            if kind not in self.kinds and threading.current_thread() is threading.main_thread():
                self.kinds.add(kind)
                eventually(lambda: f": {words} (" in terminal.getvalue(), terminal.getvalue)

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in (("_Wait", Shown), ("SHOWN_AFTER_S", 0.0), ("EVERY_S", 0.001)):
        monkeypatch.setattr(display, name, value)
    model = wb.models.gpt2(64, 2, 2, vocab_size=512, max_positions=32, name="tiny")
    small = wb.Experiment(model=model, data=wb.data.corpus("demo", vocab_size=512), global_batch=8, seq_len=32)
    wb.plan(small, wb.Cluster.of("h200", gpus=4))
    wb.grid(small, wb.Cluster.of("h200", gpus=4), tensor=[1, 2], pipeline=[1, 2], micro_batch=[2])
    seen = terminal.getvalue()
    assert re.search(r"Planning tiny: [^\r]*following its forward: [1-9][^\r]* operations", seen), seen
    assert re.search(r"Planning tiny: weighing plans for 4 × H200[^\r]*: [^\r]*\d", seen), seen
    assert re.search(r"Planning a grid of tiny: [^\r]*\d", seen), seen


def test_a_notebook_shows_one_output_that_changes_and_is_empty_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    shown: dict[str, list[dict[str, str]]] = {"display_data": [], "update_display_data": []}

    def note(message: dict[str, object]) -> None:
        if message["msg_type"] in shown:
            shown[str(message["msg_type"])].append(message["content"]["data"])  # type: ignore[index]

    code = f"{WAITS}work(look=lambda: ('3 of 4', '<table></table>'))"
    with kernel() as client:
        client.execute_interactive(code, output_hook=note, timeout=PATIENCE_S)
    assert len(shown["display_data"]) == 1
    updates = shown["update_display_data"]
    assert len(updates) > 1
    assert updates[-2]["text/html"].startswith('<small class="workbench-waiting">Planning &lt;b&gt;: 3 of 4 (')
    assert updates[-2]["text/html"].endswith("</small><table></table>")
    assert updates[-1] == {"text/plain": "", "text/html": ""}


@pytest.mark.parametrize("failed_before", [False, True])
def test_a_rank_that_reports_the_loss_of_a_killed_one_does_not_make_the_run_a_failed_one(
    failed_before: bool, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    write_record(run.experiment, {"steps": 10})
    write_json(run.launcher, {})
    attempt = supervisor._Supervised(run, LogTail(run.events))
    words = {"type": "RuntimeError", "message": "Connection reset by peer.", "traceback": "", "time": time.time()}

    def report() -> None:
        write_record(run.error(1), {"rank": 1, "stage": 1, **words})
        supervisor._enforce(attempt)

    if failed_before:
        report()
    run.kill_file.touch()
    supervisor._enforce(attempt)
    report()
    supervisor._conclude(attempt, 1, "")
    ended = read_events(run.events)[-1]
    assert ended["state"] == ("failed" if failed_before else "stopped"), ended
    assert ended["message"].startswith("rank 1" if failed_before else "Killed")
