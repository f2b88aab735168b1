"""A disk that stays full, for real: a small file system in memory. The state and the exit code tell what is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.real_worker import directory, experiment, plan
from tests.patience import PATIENCE_S, eventually
from workbench.base.errors import RunFailed
from workbench.record import rundir
from workbench.record.rundir import RunDir, append_event, until_there_is_room
from workbench.record.step_table import log_step, num_waiting
from workbench.runs.run import Run

STEPS = 60
OUT_OF_ROOM = 320
"""KiB of a disk on which a run has room for its files and rows, and not for a checkpoint."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a disk of its own; it is skipped where no disk can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={OUT_OF_ROOM}k", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("only root can mount a disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill a disk to its last byte."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def rank_of(run: RunDir) -> int:
    """Be the only rank of a run in a process with this environment; return its exit code."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "workbench.execution.worker", str(run.path)]
    return subprocess.run(command, env=environment, timeout=PATIENCE_S, check=False).returncode


def trained(disk: Path) -> tuple[RunDir, int]:
    """Train one rank to its end; return its run and its exit code."""
    asked = experiment(steps=STEPS, checkpoint_every=20)
    run = directory(disk / "run", asked, plan(asked))
    return run, rank_of(run)


def test_a_run_whose_last_checkpoint_finds_no_room_has_failed_with_all_its_rows(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_STOP_GRACE_S", "0.01")  # clock: nothing makes room
    run, exit_code = trained(disk)
    assert exit_code == 1
    status = Run(run.path).status
    assert status.state == "failed"
    assert "The checkpoint of step 60 could not be written" in status.message
    assert "launch the experiment anew: no other checkpoint is complete" in status.message
    assert len(Run(run.path).history()) == STEPS, "what a failed checkpoint gives back is room for rows"
    assert list(run.checkpoints.iterdir()) == []
    with pytest.raises(RunFailed, match="could not be written"):
        Run(run.path).wait()


def test_the_last_checkpoint_of_a_full_disk_stands_where_the_user_says(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_SPILL", str(tmp_path / "spill"))
    run, exit_code = trained(disk)
    assert exit_code == 1
    message = Run(run.path).status.message
    assert f"It stands in {tmp_path / 'spill' / 'run' / 'step-00000060'}. Make room, move that folder to" in message
    subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
    (saved,) = (tmp_path / "spill" / "run").iterdir()
    subprocess.run(["mv", str(saved), str(run.checkpoints)], check=True)
    asked = experiment(steps=STEPS, checkpoint_every=20)
    directory(run.path, asked, plan(asked), run.checkpoint(STEPS))
    assert rank_of(run) == 0
    assert Run(run.path).status.state == "finished"


def test_the_end_of_a_run_waits_for_room_and_then_loses_nothing(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(disk / "run")
    run.path.mkdir()
    log_step(run.path, step=1, loss=1.0)
    filler = fill(disk)
    for step in range(2, 2000):
        log_step(run.path, step=step, loss=1.0)
    assert num_waiting(run.path) > 0
    tried = threading.Event()
    monkeypatch.setattr(rundir.time, "sleep", lambda _: (tried.set(), filler.unlink(missing_ok=True)))

    def end() -> None:
        if num_waiting(run.path):
            raise OSError(rundir.NO_ROOM[0], "No space left on device")
        append_event(run.events, "end", steps=1999, seconds=1.0)

    until_there_is_room(end, PATIENCE_S)
    assert tried.is_set()
    assert eventually(lambda: len(Run(run.path).history()) == 1999)


def test_a_run_that_nothing_gives_room_says_how_it_ended_by_its_reserve(disk: Path) -> None:
    run = RunDir(disk / "run")
    run.path.mkdir()
    run.reserve.write_bytes(bytes(rundir.RESERVE_BYTES))
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        append_event(run.events, "status", state="failed", message="before")
    until_there_is_room(lambda: append_event(run.events, "status", state="failed", message="told"), 0.0, run.reserve)
    assert not run.reserve.exists()
    assert b"told" in run.events.read_bytes()
    assert os.path.getsize(run.events) > 0
