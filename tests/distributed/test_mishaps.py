"""Mishaps with real processes: two starts of one run at once, a model in another folder."""

import importlib
import os
import signal
import sys
import threading

import pytest

from tests.distributed.test_launch import experiment, finished, first_step, gate, launch, node, plan_for, start
from tests.patience import PATIENCE_S, eventually
from workbench.base.errors import CheckpointError, RunExists, WorkbenchError
from workbench.runs.launching import device_queue, launcher, processes
from workbench.runs.registry import list_runs, load_run
from workbench.runs.run import Run

__all__ = ["gate", "node"]  # the second is a fixture of every test here, too


def test_two_buttons_pressed_at_once_continue_a_run_once(monkeypatch):
    run = finished(start(steps=2, world=1))
    asked_twice, described = threading.Barrier(2), launcher.environment

    def slowly():
        asked_twice.wait(PATIENCE_S)
        return described()

    monkeypatch.setattr(launcher, "environment", slowly)
    first = threading.Thread(target=start, args=(4, 1), kwargs={"resume": run.path})
    first.start()
    eventually(lambda: (run.path / "attempts").exists() and not run.directory.launcher.exists())
    with pytest.raises(RunExists, match="being started by somebody else"):
        start(steps=4, world=1, resume=run.path)
    assert len(list_runs()) == 1
    asked_twice.wait(PATIENCE_S)
    first.join()
    assert finished(load_run(run.path)).history().step.tolist() == [1, 2, 3, 4]
    states = [event["state"] for event in run.events() if event["type"] == "status"]
    assert states.count("finished") == 2
    with pytest.raises(CheckpointError, match="is of step 4, after the 3 steps"):
        start(steps=3, world=1, resume=run.path)


def test_a_run_is_listed_while_another_kernel_is_describing_it(monkeypatch):
    listed, described = threading.Event(), launcher.environment
    monkeypatch.setattr(launcher, "environment", lambda: (listed.wait(PATIENCE_S), described())[1])
    launching = threading.Thread(target=start, args=(1, 1))
    launching.start()
    (row,) = eventually(lambda: list_runs().rows())
    listed.set()
    launching.join()
    assert (row["state"], row["message"]) == ("queued", "")
    finished(list_runs()[0])


def test_a_model_beside_the_notebook_is_found_when_its_run_goes_on_from_another_folder(node, monkeypatch):
    project = node / "project"
    project.mkdir()
    (project / "my_net.py").write_text("def build():\n    return 'my net'\n")
    with monkeypatch.context() as beside:
        beside.syspath_prepend(str(project))
        asked = experiment(1).replace(model=importlib.import_module("my_net").build, name="own")
        run = finished(launch(asked, plan_for(asked, 1), worker="standin_worker"))
    del sys.modules["my_net"]
    assert str(project) not in sys.path
    again = launch(run.experiment.replace(steps=2), run.plan, resume=run.path, code={}, worker="standin_worker")
    assert finished(again).logs().count("built my net") == 2
    clone = Run(launcher.clone(run.directory, run.plan, {}, worker="standin_worker")).kill()
    assert str(project) in launcher.worker_path(clone.directory)


def test_a_home_that_cannot_be_written_is_told_before_anything_is_made(node, monkeypatch):
    (node / "file").touch()
    monkeypatch.setenv("WORKBENCH_HOME", str(node / "file"))
    with pytest.raises(WorkbenchError, match="Set WORKBENCH_HOME"):
        start()
    assert not (node / "runs").exists()


@pytest.mark.usefixtures("gate")
def test_a_run_whose_every_process_is_told_to_end_has_stopped_in_order():
    run = start(steps=10_000)
    first_step(run)
    launcher_pid = processes.launcher_record(run.directory)["accelerate"]["pid"]
    for pid in (launcher_pid, *(record["pid"] for record in processes.rank_records(run.directory))):
        os.kill(pid, signal.SIGTERM)  # as a scheduler does
    status = run.wait(PATIENCE_S).status
    assert str(status) == f"stopped: Stopped at step {run.checkpoints[-1].step} of 10000."


def test_a_run_has_finished_once_its_ranks_have_logged_their_end_and_keeps_its_devices_until_they_left(
    monkeypatch, gate
):
    monkeypatch.setenv("WORKBENCH_STANDIN_LINGER_RANK", "1")
    run = start(steps=1)
    eventually(lambda: run.status.final, lambda: run.logs("launcher"))
    assert str(run.status) == "finished: 1 steps."
    assert run.alive, "a rank still frees its device, and the supervisor has its ticket"
    assert list(device_queue.queue_folder().glob("*.json")), "the next run waits for that device"
    gate.open()
    assert not run.wait(PATIENCE_S).alive
    assert [event["state"] for event in run.events() if event["type"] == "status"][-1] == "finished"
