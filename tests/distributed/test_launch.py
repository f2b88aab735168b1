"""Launches with real processes: detached supervisors, Accelerate's launcher, two ranks on gloo."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from workbench import data, models
from workbench.cost.cluster import Cluster
from workbench.cost.device import Device, Link
from workbench.errors import (
    InvalidExperiment,
    PlanInfeasible,
    PlanMismatch,
    RunExists,
    RunFailed,
    UnknownParameter,
    WorkbenchError,
)
from workbench.experiment import Experiment
from workbench.planning.plan import Memory, Plan, Prediction, Stage
from workbench.rundir import RunDir, process_alive, read_events, read_json, write_json
from workbench.runs.launching import launcher, processes
from workbench.runs.launching.run_directory import Attempt
from workbench.runs.registry import load_run
from workbench.runs.run import Run

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


def plan_for(experiment: Experiment, world: int = 2, device_type: str = "cpu") -> Plan:
    device = Device("CPU", device_type, 2**33, {"fp32": 1e11}, 1e10)
    memory = Memory(1, 1, 1, 1, 1)
    stages = tuple(Stage(i, i, i + 1, 100, 1.0, 2.0, 64, "none", memory) for i in range(world))
    link = Link(1e9, 1e-5)
    return Plan(
        model=str(experiment.name),
        signature="none",
        cluster=Cluster(device, world, world, link, link),
        global_batch=experiment.global_batch,
        seq_len=experiment.seq_len,
        precision="fp32",
        pipeline=world,
        data=1,
        tensor=1,
        zero=0,
        schedule="1f1b",
        micro_batch=1,
        num_microbatches=experiment.global_batch,
        block_names=tuple(f"block{i}" for i in range(world)),
        stages=stages,
        flops_per_step=10**6,
        memory_limit_bytes=None,
        prediction=Prediction(3.0, 3.0, 0.0, 0.0, 0.0, 0.0, 1e3, None),
    )


def experiment(steps: int = 3) -> Experiment:
    return Experiment(
        model=models.bert(hidden_size=8, num_layers=2, num_heads=2), data=data.corpus("demo"), steps=steps, name="tiny"
    )


@pytest.fixture(autouse=True)
def node(tmp_path, monkeypatch):
    """Give the test a device queue and a runs folder of its own, and end the processes that it leaves."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(HERE))
    yield tmp_path
    for path in (tmp_path / "runs").glob("*"):
        run = Run(path)
        supervisor = processes.launcher_record(run.directory).get("supervisor")
        processes.kill_trees([*([supervisor] if supervisor else []), *processes.live_workers(run.directory)])


def launch(*args, worker: str = processes.WORKER, **kwargs) -> Run:
    """Return the handle of a run that the launcher has started."""
    return Run(launcher.launch(Attempt(*args, **kwargs), worker=worker))


def start(steps: int = 3, world: int = 2, **kwargs) -> Run:
    asked = experiment(steps)
    return launch(asked, plan_for(asked, world), worker="standin_worker", **kwargs)


def eventually(truth, seconds: float = 100.0):
    deadline = time.monotonic() + seconds
    while not (value := truth()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return value


def first_step(run: Run) -> None:
    eventually(lambda: run.row()["step"] >= 1 or run.status.final)
    assert run.status.state == "running", f"{run}\n{run.logs('launcher')}"


def test_two_ranks_train_to_the_end_and_leave_their_whole_story(node):
    before = time.monotonic()
    run = start(steps=3)
    assert time.monotonic() - before < 30, "launch returns at once"
    assert run.wait(timeout=60).status.state == "finished", run.logs("launcher")
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert not [path.name for path in files if path.suffix == ".html" or path.stat().st_size > 500_000], "no plotly.js"
    states = [e["state"] for e in run.events() if e["type"] == "status"]
    assert states == ["queued", "starting", "running", "finished"]
    assert run.history().loss.tolist() == [7.0, 3.5, 7 / 3]
    assert run.history().gpu_hours[-1] == pytest.approx(0.03 * 2 / 3600)
    assert "rank 1 of 2" in run.logs(rank=1)
    assert "with 1 threads" in run.logs(rank=0)
    assert [c.step for c in run.checkpoints] == [3]
    assert not run.alive
    assert run.error() is None
    assert read_json(run.path / "environment.json")["packages"]["torch"]
    assert not list((node / "home").rglob("0*.json")), "it has left the queue"


def test_stop_leaves_a_checkpoint_and_resume_continues_in_the_same_directory(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_STEP_S", "0.05")
    run = start(steps=10_000)
    first_step(run)
    with pytest.raises(RunExists, match="still running"):
        start(steps=10_000, resume=run.path)
    eventually(lambda: any(event["type"] == "device" for event in run.events()))  # its cores are sampled meanwhile
    status = run.stop(wait=True).status
    assert status.state == "stopped"
    reached = run.checkpoints[-1].step
    assert status.message == f"Stopped at step {reached} of 10000."
    monkeypatch.setenv("WORKBENCH_STANDIN_STEP_S", "0")
    again = start(steps=reached + 2, resume=run.path)
    assert again.path == run.path
    assert again.wait(timeout=60).status.state == "finished", again.logs("launcher")
    assert again.history().step.tolist() == list(range(1, reached + 3))
    assert read_json(run.path / "attempts" / "1" / "experiment.json")["steps"] == 10_000


def test_a_failing_rank_is_reported_with_its_own_traceback(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_FAIL_RANK", "1")
    run = start()
    with pytest.raises(RunFailed) as caught:
        run.wait(timeout=60)
    assert (caught.value.facts["rank"], caught.value.facts["stage"]) == (1, 1)
    assert caught.value.facts["type"] == "FloatingPointError"
    assert "rank 1 (stage 1): FloatingPointError: the loss of rank 1 is NaN" in str(caught.value)
    assert "standin_worker.py" in caught.value.facts["traceback"]
    assert "rank 1 of 2 built None" in caught.value.facts["log"], "what it printed last"
    assert str(caught.value).count("Traceback (most recent call last)") == 1
    assert not run.alive
    assert str(load_run(run.path).error()) == str(caught.value)


def test_ranks_that_wait_for_a_failed_one_are_gone_soon(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_FAIL_RANK", "1")
    monkeypatch.setenv("WORKBENCH_STANDIN_HANG_RANK", "0")
    run = start()
    eventually(lambda: run.directory.error(1).exists())
    failed_at = read_json(run.directory.error(1))["time"]
    eventually(lambda: not processes.live_workers(run.directory))
    assert time.time() - failed_at < 100
    with pytest.raises(RunFailed, match="the loss of rank 1 is NaN"):
        run.wait(timeout=60)


def test_a_rank_killed_without_a_word_is_named_and_the_others_are_ended(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_KILL_RANK", "1")
    run = start(steps=10_000)
    with pytest.raises(RunFailed, match="killed by SIGKILL") as caught:
        run.wait(timeout=60)
    assert (caught.value.facts["rank"], caught.value.facts["stage"]) == (1, 1)
    assert not processes.live_workers(run.directory)


def test_a_killed_run_ends_at_once_and_frees_its_devices(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_STEP_S", "0.05")
    run, waiting = start(steps=10_000), start(steps=2)
    first_step(run)
    begun = time.monotonic()
    run.kill()
    assert time.monotonic() - begun < 60
    assert (run.status.state, run.alive) == ("stopped", False)
    assert run.status.message.startswith("Killed")
    assert not run.checkpoints
    assert waiting.wait(timeout=60).status.state == "finished", waiting.logs("launcher")
    assert run.kill().status.state == "stopped"


def orphaned(monkeypatch):
    """Return a run that trains on after its supervisor was killed with -9."""
    monkeypatch.setenv("WORKBENCH_STANDIN_STEP_S", "0.05")
    run = start(steps=10_000)
    first_step(run)
    os.kill(read_json(run.path / "launcher.json")["supervisor"]["pid"], signal.SIGKILL)
    eventually(lambda: "vanished" in run.status.message)
    return run


def test_ranks_without_a_supervisor_can_be_killed(monkeypatch):
    run = orphaned(monkeypatch)
    run.kill()
    assert run.status.message.startswith("Killed")
    assert not processes.live_workers(run.directory)


def test_runs_that_need_the_same_devices_queue_in_order(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_STEP_S", "0.05")
    first, second, third = start(steps=10_000), start(steps=2), start(steps=2)
    eventually(lambda: first.name in second.status.message)
    assert second.status.state == third.status.state == "queued"
    third.stop(wait=True)
    assert third.status.message == "Stopped before it started."
    first_step(first)
    first.stop()
    assert second.wait(timeout=60).status.state == "finished", second.logs("launcher")
    assert second.history().time[0] > first.status.time


def test_a_supervisor_killed_with_9_leaves_ranks_that_are_shown_and_can_be_stopped(monkeypatch):
    run = orphaned(monkeypatch)
    assert run.status.state == "running"
    assert run.alive
    waiting = start(steps=1)
    eventually(lambda: run.name in waiting.status.message)  # the orphaned ranks keep their devices
    run.stop(wait=True)
    assert run.status.state == "stopped"
    assert not run.alive
    assert waiting.wait(timeout=60).status.state == "finished"


def test_what_ends_the_ranks_without_a_supervisor_has_its_last_word_before_the_run_goes_on(monkeypatch):
    run = orphaned(monkeypatch)
    run.stop()
    eventually(lambda: processes.supervisors(run.directory))
    while run.alive:
        time.sleep(0.01)
    again = start(steps=run.row()["step"] + 3, resume=run.path).wait(timeout=60)
    assert again.status.state == "finished"
    states = [event["state"] for event in read_events(run.directory.events) if event["type"] == "status"]
    told = [state for state in states if state != "running"]  # which a supervisor killed early has not written
    assert told == ["queued", "starting", "stopped", "queued", "starting", "finished"]


def test_an_accelerate_launcher_killed_with_9_takes_no_rank_into_limbo(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_STEP_S", "0.05")
    run = start(steps=10_000)
    first_step(run)
    ranks = processes.rank_records(run.directory)
    os.kill(read_json(run.path / "launcher.json")["accelerate"]["pid"], signal.SIGKILL)
    with pytest.raises(RunFailed, match="SIGKILL"):
        run.wait(timeout=60)
    assert not any(process_alive(record) for record in ranks)


def test_ranks_that_had_only_just_started_do_not_outlive_their_launcher():
    run = start(steps=500)
    launcher = eventually(lambda: processes.launcher_record(run.directory).get("accelerate"))
    eventually(lambda: len(processes.strays(run.directory)) > 2)  # the supervisor, the launcher, and a rank
    os.kill(launcher["pid"], 9)
    eventually(lambda: run.status.final)
    assert run.status.state == "failed"
    assert processes.survivors(run.directory) == []
    eventually(lambda: not run.alive)


def test_what_has_its_launcher_is_no_survivor_though_no_file_knows_it(tmp_path, monkeypatch):
    """Two nodes of a run may share a host: the ranks of the other node have a live launcher."""
    child = "import sys, time; sys.argv[1:2] == ['child'] and time.sleep(60)\n"
    spawn = "import subprocess; subprocess.run([sys.executable, '-m', 'node', 'child', sys.argv[-1]])\n"
    (tmp_path / "node.py").write_text(child + spawn)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = RunDir(tmp_path / "run")
    write_json(run.launcher, {"worker": "node"})
    launcher = subprocess.Popen([sys.executable, "-m", "node", str(run.path)])
    rank = [record["pid"] for record in eventually(lambda: two_strays(run)) if record["pid"] != launcher.pid]
    assert [record["pid"] for record in processes.survivors(run)] == [launcher.pid]
    launcher.kill()
    launcher.wait()
    assert [record["pid"] for record in processes.survivors(run)] == rank
    processes.kill_trees(processes.survivors(run))
    assert processes.strays(run) == []


def two_strays(run):
    found = processes.strays(run)
    return found if len(found) == 2 else None


def test_ranks_that_hang_are_ended_by_force_after_a_stop(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_HANG_RANK", "1")
    monkeypatch.setenv("WORKBENCH_STOP_GRACE_S", "1")
    monkeypatch.setenv("WORKBENCH_TERMINATE_GRACE_S", "1")
    run = start(steps=10)
    eventually(lambda: len(processes.rank_records(run.directory)) == 2)
    eventually(lambda: run.status.state == "running" or run.status.final)
    assert run.stop(wait=True).status.state == "stopped", run.status
    assert not run.alive


def test_a_model_defined_in_a_cell_travels_to_its_one_rank_and_to_a_changed_clone(node, monkeypatch):
    monkeypatch.syspath_prepend(str(node))  # `beside.py` lies beside the notebook
    script = node / "cell.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(HERE)!r})
            import beside
            from test_launch import experiment, launch, plan_for
            def build_my_net():
                return beside.word() + " from the cell"
            if __name__ == "__main__":
                asked = experiment(1).replace(model=build_my_net, name="own")
                print(launch(asked, plan_for(asked, 1), worker="standin_worker").wait(60).path)
            """
        )
    )
    (node / "beside.py").write_text("def word():\n    return 'built'\n")
    answer = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    run = load_run(answer.stdout.strip())
    assert "rank 0 of 1 built built from the cell" in run.logs(), answer.stderr + run.logs("launcher")
    assert "def build_my_net" in (run.path / "code" / "model.py").read_text()
    assert json.loads((run.path / "experiment.json").read_text())["model"]["name"] == "build_my_net"

    changes = {"learning_rate": 5e-5, "steps": 4}
    clone = Run(launcher.clone(run.directory, run.plan, changes, worker="standin_worker"))
    assert clone.wait(timeout=60).status.state == "finished", clone.logs("launcher")
    assert "built built from the cell" in clone.logs()
    assert (clone.history().step.tolist(), run.history().step.tolist()) == ([1, 2, 3, 4], [1])
    assert (clone.experiment.learning_rate, run.experiment.learning_rate) == (5e-5, 1e-4)
    assert (clone.environment["cloned_from"], clone.plan) == (run.name, run.plan)
    with pytest.raises(PlanMismatch, match="global_batch"):
        run.clone(run.plan, global_batch=128)
    with pytest.raises(WorkbenchError, match="user-defined model or dataset"):
        run.clone(global_batch=128)
    with pytest.raises(UnknownParameter, match="Did you mean 'learning_rate'"):
        run.clone(learning_rat=1)


def test_a_model_that_cannot_travel_is_refused_before_a_directory_is_made(node):
    file = (node / "open").open("w")

    def build():
        return file

    asked = experiment().replace(model=build)
    with pytest.raises(InvalidExperiment, match="model cannot be sent to the workers"):
        launch(asked, plan_for(asked))
    assert not (node / "runs").exists()


def test_a_taken_directory_is_refused_before_anything_is_written(node):
    taken = node / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("precious")
    with pytest.raises(RunExists, match="is not empty"):
        start(directory=taken)
    assert [p.name for p in taken.iterdir()] == ["thesis.txt"]


def test_a_plan_for_another_batch_or_machine_is_refused_before_any_process_starts(node, monkeypatch):
    asked = experiment()
    with pytest.raises(PlanMismatch, match="global_batch=64"):
        launch(asked.replace(global_batch=32), plan_for(asked))
    with pytest.raises(PlanMismatch, match="bf16"):
        launch(asked.replace(precision="bf16"), plan_for(asked))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(PlanInfeasible, match="offers no GPUs"):
        launch(asked, plan_for(asked, 4, device_type="cuda"))
    assert not (node / "runs").exists()
    assert not any(str(node) in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
