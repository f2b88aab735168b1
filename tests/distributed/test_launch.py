"""Launches with real processes: detached supervisors, Accelerate's launcher, two ranks on gloo."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.own_machine import own_machine
from tests.patience import eventually
from tests.unit.figure_values import plan as hand_made_plan
from workbench import data, machine, models
from workbench.cost.hardware import Cluster, Device, Link
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
from workbench.planning.plan import Plan
from workbench.rundir import RunDir, process_alive, process_record, read_json, write_json
from workbench.runs.event_log import read_events
from workbench.runs.launching import launcher, processes
from workbench.runs.launching.launcher import Attempt
from workbench.runs.launching.processes import wait_gone
from workbench.runs.launching.supervisor import Nodes, _accelerate_config, accelerate_command, worker_environment
from workbench.runs.registry import load_run
from workbench.runs.run import Run

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


def plan_for(experiment: Experiment, world: int = 2, device_type: str = "cpu") -> Plan:
    device, link = Device("CPU", device_type, 2**33, {"fp32": 1e11}, 1e10), Link(1e9, 1e-5)
    return replace(
        hand_made_plan(world, 2 * world),
        model=str(experiment.name),
        cluster=Cluster(device, world, world, link, link),
        global_batch=experiment.global_batch,
        seq_len=experiment.seq_len,
        precision="fp32",
        micro_batch=1,
        num_microbatches=experiment.global_batch,
        flops_per_step=10**6,
    )


def experiment(steps: int = 3) -> Experiment:
    return Experiment(
        model=models.bert(hidden_size=8, num_layers=2, num_heads=2), data=data.corpus("demo"), steps=steps, name="tiny"
    )


@pytest.fixture(autouse=True)
def node(tmp_path, monkeypatch):
    yield from own_machine(tmp_path, monkeypatch)


def launch(*args, worker: str = processes.WORKER, **kwargs) -> Run:
    """Return the handle of a run that the launcher has started."""
    return Run(launcher.start_attempt(Attempt(*args, **kwargs), worker=worker))


def start(steps: int = 3, world: int = 2, **kwargs) -> Run:
    asked = experiment(steps)
    return launch(asked, plan_for(asked, world), worker="standin_worker", **kwargs)


def first_step(run: Run) -> None:
    eventually(lambda: run.row()["step"] >= 1 or run.status.final)
    assert run.status.state == "running", f"{run}\n{run.logs('launcher')}"


def test_two_ranks_train_to_the_end_and_leave_their_whole_story(node):
    before = time.monotonic()
    run = start(steps=3)
    assert time.monotonic() - before < 30, "launch returns at once"
    assert run.wait(timeout=100).status.state == "finished", run.logs("launcher")
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
    assert again.wait(timeout=100).status.state == "finished", again.logs("launcher")
    assert again.history().step.tolist() == list(range(1, reached + 3))
    assert read_json(run.path / "attempts" / "1" / "experiment.json")["steps"] == 10_000


def test_a_failing_rank_is_reported_with_its_own_traceback(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_FAIL_RANK", "1")
    run = start()
    with pytest.raises(RunFailed) as caught:
        run.wait(timeout=100)
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
        run.wait(timeout=100)


def test_a_rank_killed_without_a_word_is_named_and_the_others_are_ended(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_KILL_RANK", "1")
    run = start(steps=10_000)
    with pytest.raises(RunFailed, match="killed by SIGKILL") as caught:
        run.wait(timeout=100)
    assert (caught.value.facts["rank"], caught.value.facts["stage"]) == (1, 1)
    assert not processes.live_workers(run.directory)


def test_a_killed_rank_is_named_also_where_the_launcher_is_too_slow_to_end_the_others(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_KILL_RANK", "1")
    monkeypatch.setenv("WORKBENCH_STANDIN_STEP_S", "1")
    monkeypatch.setenv("WORKBENCH_FAILURE_GRACE_S", "0")
    run = start(steps=10_000)
    eventually(lambda: len(run.history()))  # the launcher holds the store in which the ranks meet
    launcher = processes.launcher_record(run.directory)["accelerate"]["pid"]
    os.kill(launcher, signal.SIGSTOP)
    eventually(lambda: run.directory.error(0).exists())
    time.sleep(1)  # the supervisor looks several times a second
    os.kill(launcher, signal.SIGCONT)
    with pytest.raises(RunFailed, match="killed by SIGKILL") as caught:
        run.wait(timeout=100)
    assert caught.value.facts["rank"] == 1


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
    assert waiting.wait(timeout=100).status.state == "finished", waiting.logs("launcher")
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
    assert second.wait(timeout=100).status.state == "finished", second.logs("launcher")
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
    assert waiting.wait(timeout=100).status.state == "finished"


def test_what_ends_the_ranks_without_a_supervisor_has_its_last_word_before_the_run_goes_on(monkeypatch):
    run = orphaned(monkeypatch)
    run.stop()
    eventually(lambda: processes.supervisors(run.directory))
    while run.alive:
        time.sleep(0.01)
    again = start(steps=run.row()["step"] + 3, resume=run.path).wait(timeout=100)
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
        run.wait(timeout=100)
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
    eventually(lambda: len(processes.strays(run)) == 2)
    rank = [record["pid"] for record in processes.strays(run) if record["pid"] != launcher.pid]
    assert [record["pid"] for record in processes.survivors(run)] == [launcher.pid]
    launcher.kill()
    launcher.wait()
    assert [record["pid"] for record in processes.survivors(run)] == rank
    processes.kill_trees(processes.survivors(run))
    assert processes.strays(run) == []


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
                print(launch(asked, plan_for(asked, 1), worker="standin_worker").wait(100).path)
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
    assert clone.wait(timeout=100).status.state == "finished", clone.logs("launcher")
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
    with pytest.raises(RunExists, match=r"is not empty\. Choose another directory, or leave it out\."):
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


RANK = """
import ctypes, os, signal, sys, time
from pathlib import Path
import transformers

if __name__ == "__main__":
    rank = os.environ.get("RANK", "0")
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death))  # PR_GET_PDEATHSIG
    handlers = [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP)]
    print(f"rank {rank} {os.getpid()} {os.getpgrp() == os.getpid()} {all(handlers)} {death.value}", flush=True)
    while not Path(sys.argv[1], "leave").exists() and not (rank == "0" and Path(sys.argv[1], "first").exists()):
        time.sleep(0.05)
    sys.exit(3 if rank == "0" and Path(sys.argv[1], "fail").exists() else 0)
"""
LISTENING = """
import os, sys, psutil, torch, torch.distributed as dist
from workbench.execution.worker import _complete_environment

if __name__ == "__main__":  # the launcher imports it, too
    _complete_environment()
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    dist.all_reduce(torch.ones(1))
    processes = psutil.Process(), psutil.Process(os.getppid()) if dist.get_world_size() > 1 else psutil.Process()
    listening = {c.laddr.ip for p in processes for c in p.net_connections() if c.status == "LISTEN"}
    print("listens on " + " ".join(listening), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""
"""Ranks that print the addresses on which they and their launcher listen."""


STUBBORN = """
import os, pathlib, signal, sys, time

if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = pathlib.Path(sys.argv[1])
(folder / f"part-{os.getpid()}").touch()
(folder / f"part-{os.getpid()}").rename(folder / f"pid-{os.getpid()}")
time.sleep(600)
"""
"""A worker that is told its folder and, on the first rank, does not leave on SIGTERM."""


@pytest.mark.parametrize("grace_s", [machine.ELASTIC_GRACE_S, 0.0])
def test_no_worker_outlives_a_launch_that_is_ended(
    grace_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ELASTIC_GRACE_S", grace_s)
    (tmp_path / "worker.py").write_text(STUBBORN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    launcher = subprocess.Popen([*command, str(tmp_path / "worker.py"), str(tmp_path)], env=settings)
    eventually(lambda: len([*tmp_path.glob("pid-*")]) == 2)
    workers = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert all(os.getsid(pid) == pid for pid in workers), "a signal to the launcher's group would do"
    machine.end_elastic_launch(launcher)
    assert launcher.poll() is not None
    assert not [pid for pid in workers if psutil.pid_exists(pid)]
    machine.end_elastic_launch(launcher)  # of one that has ended


def launched(folder: Path, world: int, script: str = RANK) -> subprocess.Popen[str]:
    plan: Any = {"world": world, "device_type": "cpu", "precision": "fp32"}
    config, worker = folder / "accelerate.yaml", folder / "scripted_rank.py"
    config.write_text(_accelerate_config(plan, Nodes()))
    worker.write_text(script)
    environment = worker_environment(dict(os.environ), world, "cpu", ("cpu",)) | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), *sys.path]))
    command = [*accelerate_command(config, plan), "-m", worker.stem, str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("world", [1, 2])
def test_a_forked_rank_leads_its_session_and_has_no_handler_of_its_launcher(world: int, tmp_path: Path) -> None:
    launcher = launched(tmp_path, world)
    assert launcher.stdout is not None
    said = sorted(launcher.stdout.readline().split() for _ in range(world))
    assert [line[3:] for line in said] == [["True", "True", "0"]] * world, said
    ranks = [psutil.Process(int(line[2])) for line in said]
    assert {rank.ppid() for rank in ranks} == {launcher.pid}
    for rank in ranks:
        age = rank.create_time() - psutil.Process(launcher.pid).create_time()
        used = sum(rank.cpu_times()[:2])
        assert used < age / 2, "what the launcher imported is not imported again"
    (tmp_path / "fail").touch()
    (tmp_path / "leave").touch()
    output = launcher.stdout.read()
    assert launcher.wait(100) == 1
    assert re.search(r"exitcode\s*:\s*3|non-zero exit status 3", output), output


def test_forked_ranks_outlive_a_launcher_that_was_killed_but_not_their_work(tmp_path: Path) -> None:
    launcher = launched(tmp_path, 2)
    assert launcher.stdout is not None
    ranks = [process_record(int(launcher.stdout.readline().split()[2])) for _ in range(2)]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(100)
    assert not wait_gone(ranks, 1.0), "the supervisor ends them, after a checkpoint"
    (tmp_path / "leave").touch()
    assert wait_gone(ranks, 30.0)


def test_a_forked_rank_that_has_ended_its_work_dies_with_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "first").touch()
    launcher = launched(tmp_path, 2)
    assert launcher.stdout is not None
    ranks = [process_record(int(launcher.stdout.readline().split()[2])) for _ in range(2)]
    assert not wait_gone(ranks, 1.0), "the first rank waits for the second, which works on"
    launcher.send_signal(signal.SIGKILL)
    (tmp_path / "leave").touch()
    assert wait_gone(ranks, 30.0)


@pytest.mark.parametrize("world", [1, 2])
def test_the_store_and_gloo_of_one_node_listen_on_the_loopback_interface_only(world: int, tmp_path: Path) -> None:
    output, _ = launched(tmp_path, world, LISTENING).communicate(timeout=100)
    told = re.findall("listens on (.*?)(?=listens|$)", output, re.MULTILINE)  # two ranks may share a line
    assert told == ["127.0.0.1"] * world, output
    assert "master_addr" not in output, output
