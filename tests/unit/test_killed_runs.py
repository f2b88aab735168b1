"""How a run ends whose ranks its user had killed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from workbench.rundir import EventTail, RunDir, read_events, write_json, write_record
from workbench.runs.launching import supervisor


@pytest.mark.parametrize("failed_before", [False, True])
def test_a_rank_that_reports_the_loss_of_a_killed_one_does_not_make_the_run_a_failed_one(
    failed_before: bool, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    write_record(run.experiment, {"steps": 10})
    write_json(run.launcher, {})
    attempt = supervisor._Supervised(run, EventTail(run.events))
    words = {"type": "RuntimeError", "message": "Connection reset by peer.", "traceback": "", "time": time.time()}

    def report() -> None:
        write_record(run.error(1), {"rank": 1, "stage": 1, **words})
        supervisor._enforce_failure(attempt)

    if failed_before:
        report()
    run.kill_file.touch()
    supervisor._enforce_stop(attempt)
    report()
    supervisor._enforce_stop(attempt)
    supervisor._conclude(attempt, 1, "")
    ended = read_events(run.events)[-1]
    assert ended["state"] == ("failed" if failed_before else "stopped"), ended
    assert ended["message"].startswith("rank 1" if failed_before else "Killed")
