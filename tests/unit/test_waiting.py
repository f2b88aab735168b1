"""What a long call says while it is waited for: in a terminal and in a kernel, nothing of it for a short one."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from workbench.rundir import RunDir, write_json, write_record
from workbench.runs.event_log import LogTail, read_events
from workbench.runs.launching import supervisor

REPOSITORY = Path(__file__).parents[2]
WAITS = """
import time
from workbench import display
display.SHOWN_AFTER_S, display.EVERY_S, display.LOOK_S = 0.3, 0.05, 0.05

def work(seconds, **options):
    with display.waiting("planning <b>", **options) as say:
        say("first")
        with display.waiting("capturing it") as nested:
            nested("half")
            time.sleep(seconds)
        say("last")
        time.sleep(seconds)
"""


def in_terminal(code: str) -> str:
    """Return what a terminal of 80 columns is sent on stderr."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "80"}
    process = subprocess.Popen([sys.executable, "-c", WAITS + code], stderr=theirs, env=environment)
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
    assert process.wait() == 0
    return seen.decode()


def test_a_terminal_shows_one_line_that_changes_and_is_gone_at_the_end() -> None:
    seen = in_terminal("work(0.6)")
    lines = seen.split("\r\x1b[2K")
    assert any(re.fullmatch(r"Planning <b>: capturing it: half \(\d+ (ms|s)\)", line) for line in lines), seen
    assert any(line.startswith("Planning <b>: last (") for line in lines), seen
    assert lines[-1] == ""
    assert "\n" not in seen


def test_a_plan_and_a_grid_say_how_many_plans_they_have_weighed() -> None:
    seen = in_terminal(
        """
import workbench as wb
display.SHOWN_AFTER_S, display.EVERY_S = 0.01, 0.01
model = wb.models.gpt2(256, 4, 4, vocab_size=512, max_positions=128, name="tiny")
small = wb.Experiment(model=model, data=wb.data.corpus("demo", vocab_size=512), global_batch=64, seq_len=128)
wb.plan(small, wb.Cluster.of("h200", gpus=256))
wb.grid(small, wb.Cluster.of("h200", gpus=4), tensor=[1, 2], pipeline=[1, 2, 4], micro_batch=[2, 32])
"""
    )
    assert re.search(r"Planning tiny: [^\r]*capturing", seen), seen
    assert re.search(r"Planning tiny: weighing plans for 256 × H200[^\r]*: [^\r]*\d", seen), seen
    assert re.search(r"Planning a grid of tiny: [^\r]*\d", seen), seen


def test_a_short_wait_shows_nothing_and_neither_does_a_file() -> None:
    assert in_terminal("work(0.01)") == ""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", WAITS + "work(0.5)"], env=environment, capture_output=True, check=True)
    assert done.stdout + done.stderr == b""


def test_a_notebook_shows_one_output_that_changes_and_is_empty_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    manager, client = start_new_kernel()
    shown: dict[str, list[dict[str, str]]] = {"display_data": [], "update_display_data": []}

    def note(message: dict[str, object]) -> None:
        if message["msg_type"] in shown:
            shown[str(message["msg_type"])].append(message["content"]["data"])  # type: ignore[index]

    try:
        client.execute_interactive(WAITS + "work(0.6, look=lambda: ('3 of 4', '<table></table>'))", output_hook=note)
        assert len(shown["display_data"]) == 1
        updates = shown["update_display_data"]
        assert len(updates) > 5
        assert updates[-2]["text/html"].startswith('<small class="workbench-waiting">Planning &lt;b&gt;: 3 of 4 (')
        assert updates[-2]["text/html"].endswith("</small><table></table>")
        assert updates[-1] == {"text/plain": "", "text/html": ""}
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


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
