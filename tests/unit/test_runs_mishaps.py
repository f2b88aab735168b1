"""Mishaps of runs: torn and foreign files, two kernels, other hosts, unusual environments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import workbench as wb
from tests.logs import append_event
from tests.patience import Clock, eventually
from tests.unit.test_runs import make_run
from workbench.base.errors import CheckpointError, PlanMismatch, RunExists, RunNotFound, WorkbenchError
from workbench.record import event_log
from workbench.record.event_log import read_events
from workbench.record.rundir import RunDir, process_alive, process_record, this_process, write_json, write_record
from workbench.runs import environment, status
from workbench.runs.launching import device_queue, launcher, processes, supervisor
from workbench.runs.registry import ProgressReporter, list_runs, load_run
from workbench.runs.run import Run
from workbench.widgets.run_reader import RunReader

SLEEP = "import time; time.sleep(600)  # clock: it sleeps until it is killed"
FAR = {"pid": 1, "created": 0.0, "host": "another-host"}


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Yield a function that starts a sleeping process with further words on its command line."""
    started = []

    def one(*words: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", SLEEP, *words]))
        itself = psutil.Process(started[-1].pid)
        eventually(lambda: itself.cmdline()[:1] == [sys.executable])  # forked, and not yet itself
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()


def pids(records: list[dict[str, Any]]) -> set[int]:
    return {record["pid"] for record in records}


def test_only_processes_that_train_a_run_are_taken_for_its_own(tmp_path, begin):
    found = make_run(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    begin("-m", "tensorboard.main", "--logdir", str(found.path))
    begin("-m", "workbench.cli", "show", "--follow", str(found.path))
    rank = begin("-m", processes.WORKER, str(found.path))
    assert pids(processes.strays(found)) == pids(processes.survivors(found)) == {rank.pid}
    for other in (tmp_path / "link" / "bert-1", tmp_path / "x" / ".." / "bert-1"):
        assert pids(processes.strays(RunDir(other))) == {rank.pid}


def test_what_another_node_on_this_host_started_does_not_keep_the_first_from_resuming(tmp_path, begin):
    found = make_run(tmp_path)
    rank = [sys.executable, "-c", SLEEP, "-m", processes.WORKER, str(found.path)]
    starts_it = f"import subprocess, sys; subprocess.run({rank!r})"
    node = subprocess.Popen(
        [sys.executable, "-c", starts_it, "-m", "workbench.runs.launching.multi_node", str(found.path)]
    )
    try:
        eventually(lambda: processes.strays(found))
        with pytest.raises(RunExists, match="still running"):
            launcher.clear_attempt(found)
        launcher.clear_attempt(found, among_nodes=True)
        begin("-m", processes.WORKER, str(found.path))  # nobody of the run's started it
        with pytest.raises(RunExists, match="still running"):
            launcher.clear_attempt(found, among_nodes=True)
    finally:
        processes.kill_trees([process_record(node.pid), *processes.strays(found)])
        node.wait()


def test_ranks_of_other_hosts_do_not_hide_those_that_run_here(tmp_path, begin):
    found = make_run(tmp_path)
    here = process_record(begin().pid)
    write_json(found.rank(0), {**here, "rank": 0})
    write_json(found.rank(1), {**FAR, "pid": here["pid"], "rank": 1})
    assert pids(processes.live_workers(found)) == {here["pid"]}


def test_a_clock_that_is_set_ends_nobody():
    record = this_process()
    assert process_alive({**record, "created": record["created"] + 3600})
    assert not process_alive({**record, "ticks": record["ticks"] + 1})


def test_a_supervisor_that_cannot_go_on_leaves_no_rank_behind(tmp_path, begin):
    found = make_run(tmp_path)
    rank = begin("-m", processes.WORKER, str(found.path))
    with pytest.raises(OSError, match="full"), supervisor._last_words(found):
        raise OSError("full")
    assert not psutil.pid_exists(rank.pid)
    assert Run(found.path).status.state == "failed"


def checkpointed(folder: Path, step: int = 2, **facts: Any) -> RunDir:
    """Return a run that was stopped and left a checkpoint."""
    found = make_run(folder, **facts)
    write_json(found.checkpoint(step) / "complete.json", {"step": step})
    append_event(found.events, "status", state="stopped", message="")
    return found


def test_a_run_is_continued_at_once_though_its_supervisor_is_only_just_leaving(tmp_path, begin, monkeypatch):
    last, clock = begin(), Clock()
    found = checkpointed(tmp_path, supervisor=process_record(last.pid))
    monkeypatch.setattr(processes, "time", clock)

    def leaves(_: float) -> None:
        last.kill()
        last.wait()

    monkeypatch.setattr(clock, "sleep", leaves)
    assert launcher.checkpoint_of(found.path) == found.checkpoint(2)


def test_a_run_that_another_host_writes_is_not_continued_here(tmp_path, monkeypatch):
    found = make_run(tmp_path, supervisor=FAR)
    clock = Clock(found.events.stat().st_mtime)
    monkeypatch.setattr(status, "time", clock)
    with pytest.raises(RunExists, match="is still running"):
        launcher.checkpoint_of(found.path)
    clock.sleep(status.SILENCE_S)  # its machine is gone
    with pytest.raises(CheckpointError, match="no checkpoint"):
        launcher.checkpoint_of(found.path)


def test_an_earlier_attempt_that_was_deleted_stops_no_later_one(tmp_path):
    found = checkpointed(tmp_path)
    (found.path / "attempts" / "2").mkdir(parents=True)
    launcher.clear_attempt(found)
    assert (found.path / "attempts" / "3" / "launcher.json").exists()


def test_what_has_failed_is_stopped_and_killed_without_a_complaint(tmp_path):
    found = make_run(tmp_path)
    assert Run(found.path).stop(wait=True).status.state == "failed"
    assert Run(found.path).kill().status.state == "failed"


def test_events_after_a_line_that_a_full_disk_cut_short_are_read(tmp_path):
    events = tmp_path / "events.jsonl"
    append_event(events, "status", state="running", message="")
    with events.open("a") as file:
        file.write('{"type": "step", "time": 17')
    append_event(events, "status", state="failed", message="No space left on device")
    with events.open("a") as file:
        file.write("5\nnull\n")
    assert [event["state"] for event in read_events(events)] == ["running", "failed"]


def test_two_threads_may_read_one_handle(tmp_path, monkeypatch):
    found = make_run(tmp_path, supervisor=this_process())
    handle, known = Run(found.path), event_log.Status

    def interrupted(*fields: Any) -> event_log.Status:
        """The other thread's turn comes while this one digests what it has read."""
        monkeypatch.setattr(event_log, "Status", known)
        append_event(found.events, "status", state="finished", message="")
        _ = handle.status
        return known(*fields)

    monkeypatch.setattr(event_log, "Status", interrupted)
    _ = handle.status
    assert handle.status.state == "finished"


def test_one_damaged_run_does_not_hide_the_others(tmp_path):
    for name, text in (("empty", ""), ("list", "[]"), ("foreign", '{"model": "mine"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "experiment.json").write_text(text)
        os.utime(tmp_path / name / "experiment.json", (0, 0))
    found = make_run(tmp_path, "sound", supervisor=this_process())
    write_json(found.rank(0), {})
    rows = {row["name"]: row for row in list_runs(tmp_path).rows()}
    assert {name: row["state"] for name, row in rows.items()} == {
        "sound": "running",
        **dict.fromkeys(("empty", "list", "foreign"), "failed"),
    }
    assert "experiment.json cannot be read" in rows["empty"]["message"]
    assert "0 of 100" in repr(list_runs(tmp_path))
    with pytest.raises(RunNotFound, match="cannot be read"):
        repr(load_run(tmp_path / "empty"))


def test_a_run_that_is_just_being_launched_is_listed_as_queued(tmp_path, monkeypatch):
    write_record(tmp_path / "new" / "experiment.json", {"name": "new", "steps": 10})
    clock = Clock(status.created_at(tmp_path / "new"))
    monkeypatch.setattr(status, "time", clock)
    for state in ("queued", "failed"):
        (row,) = list_runs(tmp_path).rows()
        assert (row["state"], row["steps"]) == (state, 10)
        clock.sleep(status.LAUNCH_LIMIT_S)


def test_followers_are_told_that_a_run_was_deleted_and_go_on(tmp_path):
    found, other = (Run(make_run(tmp_path, name, supervisor=this_process()).path) for name in ("gone", "there"))
    follower = ProgressReporter(0.0)
    assert len(list(follower.lines([found, other]))) == 2
    shutil.rmtree(found.path)
    append_event(other.directory.events, "step", step=1, loss=2.0)
    gone, there = follower.lines([found, other])
    assert "failed" in gone
    assert "loss 2" in there


def test_a_view_says_of_a_run_that_trained_that_its_directory_was_deleted_and_shows_what_it_had_read(tmp_path):
    found = make_run(tmp_path, "gone", supervisor=this_process())
    append_event(found.events, "status", state="running", message="")
    append_event(found.events, "step", step=1, loss=2.0, tokens=4.0, seconds=1.0)
    reader = RunReader(found.path)
    assert reader.read().status.state == "running"
    shutil.rmtree(found.path)
    reader._looked_at = float("-inf")  # the next look at its processes is due
    snapshot = reader.read()
    assert (snapshot.status.state, snapshot.status.message) == ("failed", "Its directory was deleted.")
    assert str(snapshot.failure) == "Run gone failed: Its directory was deleted."
    assert snapshot.step == 1


def test_a_run_that_nobody_could_end_says_that_its_disk_is_full(tmp_path, monkeypatch):
    found = make_run(tmp_path)
    monkeypatch.setattr(status.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    assert "Its disk is full" in Run(found.path).status.message


def test_a_long_name_makes_a_directory_all_the_same_and_a_closed_folder_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    assert launcher.new_directory("x" * 300).is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "file"))
    with pytest.raises(WorkbenchError, match="Set WORKBENCH_RUNS"):
        launcher.new_directory("x")


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Return a function that sets the output of `nvidia-smi`."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def answer(text: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<END\n{text}\nEND\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return answer


def test_a_gpu_that_does_not_tell_its_memory_or_is_lost_stops_no_launch(nvidia_smi):
    nvidia_smi("0, NVIDIA GB10, GPU-a, 580.1, [N/A], [N/A]")
    assert [(gpu["name"], gpu["memory_bytes"]) for gpu in environment.gpus()] == [("NVIDIA GB10", 0)]
    nvidia_smi("Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown Error")
    assert environment.gpus() == []


def test_visible_devices_are_read_as_cuda_does(nvidia_smi, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2")
    assert device_queue.node_devices("cuda") == ("GPU-1", "GPU-2"), "as the user wrote them where nobody can be asked"
    assert device_queue.node_devices("cpu") == ("cpu",)
    nvidia_smi("GPU 0: NVIDIA H200 (UUID: GPU-aaaa-1)\nGPU 1: NVIDIA H200 (UUID: GPU-bbbb-2)")
    first, second = "GPU-aaaa-1", "GPU-bbbb-2"
    asked = {
        "1, 0": (second, first),
        "GPU-bb": (second,),
        "0,0": (first,),
        "0,-1,1": (first,),
        "1,7,0": (second,),
        **dict.fromkeys(("-1", "NoDevFiles", ""), ()),
    }
    for value, devices in asked.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert device_queue.node_devices("cuda") == devices, value


def test_the_modules_of_a_runs_own_code_are_found_from_wherever_it_goes_on(tmp_path):
    found = make_run(tmp_path)
    found.code.mkdir()
    (found.code / launcher.CODE_PATH).write_bytes(launcher.path_json([str(tmp_path / "project")]))
    assert list(launcher.worker_path(found)) == [*launcher.user_path(), str(tmp_path / "project")]


def test_a_tilde_is_the_home_folder_in_every_verb(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    checkpointed(tmp_path)
    with pytest.raises(WorkbenchError, match=str(tmp_path / "mine.ipynb")):
        wb.share("~/mine.ipynb", "~")
    with pytest.raises(PlanMismatch, match=str(tmp_path / "plan.json")):
        wb.Plan.load("~/plan.json")


def test_a_run_far_back_in_the_queue_looks_seldom_and_can_be_stopped_at_once(tmp_path, monkeypatch):
    found = make_run(tmp_path)

    class Place:
        """Behind a hundred others."""

        looks = 0

        def try_start(self) -> None:
            self.looks += 1

        def ahead(self) -> list[str]:
            return ["other"] * 100

    clock, place = Clock(), Place()
    monkeypatch.setattr(supervisor, "time", clock)
    began, turn = clock.now, clock.sleep

    def sleep(seconds: float) -> None:
        turn(seconds)
        if clock.now > began + 9:  # the next look at a queue of a hundred is due after ten seconds
            found.stop_file.touch()

    monkeypatch.setattr(clock, "sleep", sleep)
    assert supervisor._wait_for_devices(found, place) is None
    assert clock.now < began + 9.5
    assert place.looks == 1


def test_what_ends_orphaned_ranks_finds_workbench_where_this_process_does(tmp_path, begin, monkeypatch):
    found = make_run(tmp_path)
    write_json(found.rank(0), {**process_record(begin().pid), "rank": 0})
    found.logs.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "checkout"))
    started: list[dict[str, str]] = []
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, env, **__: started.append(env))
    Run(found.path).kill(wait=False)
    assert str(tmp_path / "checkout") in started[0]["PYTHONPATH"].split(os.pathsep)


def test_a_run_that_is_just_being_launched_can_be_stopped(tmp_path, monkeypatch):
    write_record(tmp_path / "new" / "experiment.json", {"name": "new", "steps": 10})
    monkeypatch.setattr(status, "time", Clock(status.created_at(tmp_path / "new")))
    found = Run(tmp_path / "new").stop()
    assert found.directory.stop_file.exists()
    assert supervisor._wait_for_devices(found.directory, device_queue.Ticket(tmp_path / "nowhere.json")) is None


def test_what_was_prepared_for_others_to_start_is_not_asked_to_stop(tmp_path):
    write_record(tmp_path / "new" / "experiment.json", {"name": "new", "steps": 10})
    write_json(tmp_path / "new" / "launcher.json", {})
    assert not Run(tmp_path / "new").stop().directory.stop_file.exists()
