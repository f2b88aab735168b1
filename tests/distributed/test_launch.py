"""Launches with real processes: detached supervisors, Accelerate's launcher, two ranks on gloo."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import worlds
from tests.distributed.own_machine import own_machine
from tests.patience import GATE, PATIENCE_S, Gate, eventually
from tests.unit.figure_values import plan as hand_made_plan
from workbench import data, models
from workbench.base import machine
from workbench.base.errors import (
    InvalidExperiment,
    PlanInfeasible,
    PlanMismatch,
    RunExists,
    RunFailed,
    UnknownParameter,
    WorkbenchError,
)
from workbench.cost.hardware import Cluster, Device, Link
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.record.event_log import read_events
from workbench.record.events import ProcessRecord
from workbench.record.rundir import RunDir, process_alive, process_record, read_json, write_json
from workbench.runs.launching import fork_server, launcher, processes, supervisor
from workbench.runs.launching.launcher import Attempt
from workbench.runs.launching.supervisor import Nodes, _accelerate_config, accelerate_command, worker_environment
from workbench.runs.registry import load_run
from workbench.runs.run import Run

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
worlds.preload()


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


@pytest.fixture
def gate(node: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Return the gate of every run of the test, which lets them begin their first step."""
    gate = Gate(node / "gate", open_to=1)
    monkeypatch.setenv(GATE, str(gate.file))
    return gate


def finished(run: Run) -> Run:
    """Wait for a run, and return it if it has finished."""
    assert run.wait(PATIENCE_S).status.state == "finished", run.logs("launcher")
    return run


def forked_kernel(folder: Path, code: str, *arguments: str) -> tuple[ProcessRecord, str]:
    """Run code in a process that is forked from this process's server, and return it with the first line it prints.

    What it launches is forked from the same server, so that nothing is imported anew.
    """
    log, environment = folder / "kernel.log", {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    log.write_text("")
    (folder / "forked_kernel.py").write_text(code)
    launcher.import_ahead()
    start = fork_server.client().start
    pid = start("forked_kernel", *arguments, log=log, environment=environment, ranks="1", is_served=True)
    told = eventually(lambda: re.findall(r"^told (.*)\n", log.read_text(), re.MULTILINE), log.read_text)
    return process_record(pid), told[0]


def first_step(run: Run) -> None:
    eventually(lambda: run.row()["step"] >= 1 or run.status.final)
    assert run.status.state == "running", f"{run}\n{run.logs('launcher')}"


def test_two_ranks_train_to_the_end_and_leave_their_whole_story(node, gate):
    run = start(steps=3)
    assert not run.status.final, "launch returns at once"
    gate.open()
    finished(run)
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


def test_stop_leaves_a_checkpoint_and_resume_continues_in_the_same_directory(gate):
    run = start(steps=10_000)
    first_step(run)
    with pytest.raises(RunExists, match="still running"):
        start(steps=10_000, resume=run.path)
    eventually(lambda: any(event["type"] == "device" for event in run.events()))  # its cores are sampled meanwhile
    status = run.stop(wait=True).status
    assert status.state == "stopped"
    reached = run.checkpoints[-1].step
    assert status.message == f"Stopped at step {reached} of 10000."
    gate.open()
    again = start(steps=reached + 2, resume=run.path)
    assert again.path == run.path
    assert finished(again).history().step.tolist() == list(range(1, reached + 3))
    assert read_json(run.path / "attempts" / "1" / "experiment.json")["steps"] == 10_000


@pytest.mark.representative
def test_a_failing_rank_is_reported_with_its_own_traceback(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_FAIL_RANK", "1")
    run = start()
    with pytest.raises(RunFailed) as caught:
        run.wait(PATIENCE_S)
    assert (caught.value.facts["rank"], caught.value.facts["stage"]) == (1, 1)
    assert caught.value.facts["type"] == "FloatingPointError"
    assert "rank 1 (stage 1): FloatingPointError: the loss of rank 1 is NaN" in str(caught.value)
    assert "standin_worker.py" in caught.value.facts["traceback"]
    assert "rank 1 of 2 built None" in caught.value.facts["log"], "what it printed last"
    assert str(caught.value).count("Traceback (most recent call last)") == 1
    assert not run.alive
    assert str(load_run(run.path).error()) == str(caught.value)


def test_ranks_that_wait_for_a_failed_one_are_ended(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_FAIL_RANK", "1")
    monkeypatch.setenv("WORKBENCH_STANDIN_HANG_RANK", "0")
    monkeypatch.setenv("WORKBENCH_FAILURE_GRACE_S", "0")
    run = start()
    with pytest.raises(RunFailed, match="the loss of rank 1 is NaN"):
        run.wait(PATIENCE_S)
    assert not processes.live_workers(run.directory)


def test_a_rank_killed_without_a_word_is_named_and_the_others_are_ended(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_KILL_RANK", "1")
    run = start(steps=10_000)
    with pytest.raises(RunFailed, match="killed by SIGKILL") as caught:
        run.wait(PATIENCE_S)
    assert (caught.value.facts["rank"], caught.value.facts["stage"]) == (1, 1)
    assert not processes.live_workers(run.directory)


def test_a_killed_rank_is_named_also_where_the_launcher_is_too_slow_to_end_the_others(gate, monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_KILL_RANK", "1")
    monkeypatch.setenv("WORKBENCH_STANDIN_LINGER_RANK", "0")
    monkeypatch.setenv("WORKBENCH_FAILURE_GRACE_S", "0")
    run = start(steps=10_000)
    first_step(run)  # the launcher holds the store in which the ranks meet
    launcher = processes.launcher_record(run.directory)["accelerate"]["pid"]
    os.kill(launcher, signal.SIGSTOP)
    gate.open()
    lingering = processes.rank_records(run.directory)[0]
    eventually(lambda: not process_alive(lingering))  # killed by the supervisor, after it had told its error
    assert run.directory.error(0).exists()
    os.kill(launcher, signal.SIGCONT)
    with pytest.raises(RunFailed, match="killed by SIGKILL") as caught:
        run.wait(PATIENCE_S)
    assert caught.value.facts["rank"] == 1


@pytest.fixture
def orphaned(gate: Gate) -> Run:
    """Return a run that trains on, up to its gate, after its supervisor was killed with -9."""
    gate.open(1)
    run = start(steps=10_000)
    first_step(run)
    os.kill(read_json(run.path / "launcher.json")["supervisor"]["pid"], signal.SIGKILL)
    eventually(lambda: "vanished" in run.status.message)
    return run


def test_ranks_without_a_supervisor_can_be_killed(orphaned):
    orphaned.kill()
    assert orphaned.status.message.startswith("Killed")
    assert not processes.live_workers(orphaned.directory)


@pytest.mark.usefixtures("gate")
@pytest.mark.representative
def test_runs_that_need_the_same_devices_queue_in_order_and_a_killed_one_frees_them_at_once():
    first, second, third = start(steps=10_000), start(steps=1), start(steps=1)
    eventually(lambda: first.name in second.status.message)
    assert second.status.state == third.status.state == "queued"
    third.stop(wait=True)
    assert third.status.message == "Stopped before it started."
    first_step(first)
    first.kill()
    assert (first.status.state, first.alive, first.checkpoints) == ("stopped", False, ())
    assert first.status.message.startswith("Killed")
    assert finished(second).history().time[0] > first.status.time
    assert first.kill().status.state == "stopped"


def test_a_supervisor_killed_with_9_leaves_ranks_that_are_shown_and_can_be_stopped(orphaned):
    run = orphaned
    assert run.status.state == "running"
    assert run.alive
    waiting = start(steps=1)
    eventually(lambda: run.name in waiting.status.message)  # the orphaned ranks keep their devices
    run.stop(wait=True)
    assert run.status.state == "stopped"
    assert not run.alive
    finished(waiting)


def test_what_ends_the_ranks_without_a_supervisor_has_its_last_word_before_the_run_goes_on(orphaned, gate):
    run = orphaned.stop()
    eventually(lambda: processes.supervisors(run.directory))
    eventually(lambda: not run.alive)
    gate.open()
    finished(start(steps=run.row()["step"] + 3, resume=run.path))
    states = [event["state"] for event in read_events(run.directory.events) if event["type"] == "status"]
    told = [state for state in states if state != "running"]  # which a supervisor killed early has not written
    assert told == ["queued", "starting", "stopped", "queued", "starting", "finished"]


@pytest.mark.usefixtures("gate")
def test_an_accelerate_launcher_killed_with_9_takes_no_rank_into_limbo():
    run = start(steps=10_000)
    first_step(run)
    ranks = processes.rank_records(run.directory)
    os.kill(read_json(run.path / "launcher.json")["accelerate"]["pid"], signal.SIGKILL)
    with pytest.raises(RunFailed, match="SIGKILL"):
        run.wait(PATIENCE_S)
    assert not any(process_alive(record) for record in ranks)


@pytest.mark.usefixtures("gate")
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
    child = "import signal, sys; sys.argv[1:2] == ['child'] and signal.pause()\n"
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
    monkeypatch.setenv("WORKBENCH_STOP_GRACE_S", "0")
    monkeypatch.setenv("WORKBENCH_TERMINATE_GRACE_S", "0")
    run = start(steps=10)
    eventually(lambda: run.row()["step"] == 2 or run.status.final)  # the other rank hangs in it
    assert run.stop(wait=True).status.state == "stopped", run.status
    assert run.status.message == "Stopped; the ranks did not leave by themselves and were ended."
    assert not run.alive


def test_a_model_defined_in_a_cell_travels_to_its_one_rank_and_to_a_changed_clone(node, monkeypatch):
    monkeypatch.syspath_prepend(str(node))  # `beside.py` lies beside the notebook
    (node / "beside.py").write_text("def word():\n    return 'built'\n")
    (node / "cell.py").write_text("import beside\ndef build_my_net():\n    return beside.word() + ' from the cell'\n")
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile((node / "cell.py").read_text(), node / "cell.py", "exec"), cell)
    asked = experiment(1).replace(model=cell["build_my_net"], name="own")
    run = finished(launch(asked, plan_for(asked, 1), worker="standin_worker"))
    assert "rank 0 of 1 built built from the cell" in run.logs(), run.logs("launcher")
    assert "def build_my_net" in (run.path / "code" / "model.py").read_text()
    assert json.loads((run.path / "experiment.json").read_text())["model"]["name"] == "build_my_net"

    changes = {"learning_rate": 5e-5, "steps": 4}
    clone = Run(launcher.clone(run.directory, run.plan, changes, worker="standin_worker"))
    assert "built built from the cell" in finished(clone).logs()
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
import ctypes, json, os, signal, sys
from pathlib import Path
import imported
import psutil, torch, torch.distributed as dist
from tests.patience import eventually
from workbench.execution.worker import _complete_environment

def listening(process):
    return [c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"]

def getppid(asked=os.getppid):
    (folder / f"asked-{rank}").touch()
    return asked()

if __name__ == "__main__":  # the launcher imports it, too
    folder, rank, death = Path(sys.argv[1]), os.environ.get("RANK", "0"), ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death))  # PR_GET_PDEATHSIG
    handlers = [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP)]
    signal.signal(signal.SIGTERM, lambda *_: None)  # a rank answers it with a checkpoint
    _complete_environment()
    dist.init_process_group("gloo", rank=int(rank), world_size=int(os.environ.get("WORLD_SIZE", 1)))
    dist.all_reduce(torch.ones(1))
    facts = {"pid": os.getpid(), "leads": os.getpgrp() == os.getpid(), "handlers": all(handlers), "death": death.value}
    facts["listens"] = [*listening(psutil.Process()), *listening(psutil.Process(os.getppid()))]
    (folder / "new").mkdir(exist_ok=True)
    (folder / "new" / rank).write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()
    os.rename(folder / "new" / rank, folder / f"rank-{rank}")
    eventually(lambda: (folder / f"leave-{rank}").exists())
    (folder / f"left-{rank}").touch()
    os.getppid = getppid  # which is asked when the rank dies with its launcher, from then on
    sys.exit(3 if (folder / "fail").exists() else 0)
"""
"""A worker that tells what its process is like, on which addresses it and its launcher listen, and when it leaves."""

STUBBORN = """
import os, pathlib, signal, sys

if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = pathlib.Path(sys.argv[1])
(folder / f"pid-{os.getpid()}").touch()
while True:
    signal.pause()
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


def launched(folder: Path, world: int) -> BaseProcess:
    """Start the launcher of ranks that tell what they are like, in a process that has imported torch."""
    plan: Any = {"world": world, "device_type": "cpu", "precision": "fp32"}
    config = folder / "accelerate.yaml"
    config.write_text(_accelerate_config(plan, Nodes()))
    (folder / "scripted_rank.py").write_text(RANK)
    (folder / "imported.py").write_text(f"open({str(folder / 'imports')!r}, 'a').write('once ')")
    environment = worker_environment(dict(os.environ), world, "cpu", ("cpu",)) | {"OMP_NUM_THREADS": "1"}
    command = [*accelerate_command(config, plan), "-m", "scripted_rank", str(folder)]
    environment["PYTHONPATH"] = str(folder)
    return forked(command, environment, folder / "log")


def forked(command: list[str], environment: dict[str, str], log: Path) -> BaseProcess:
    """Run `python -m MODULE …` in a process that has imported what ranks need, so that it starts at once."""
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(command, environment, log))
    process.start()
    return process


def _run(command: list[str], environment: dict[str, str], log: Path) -> None:
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    _, _, module, *sys.argv[1:] = command
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def told(folder: Path, launcher: BaseProcess, world: int) -> list[ProcessRecord]:
    """Wait for what the ranks tell, assert that it is so for each, and return their processes."""
    files = [folder / f"rank-{rank}" for rank in range(world)]
    eventually(lambda: all(file.exists() for file in files), (folder / "log").read_text)
    ranks = [json.loads(file.read_text()) for file in files]
    assert {psutil.Process(rank["pid"]).ppid() for rank in ranks} == {launcher.pid}
    for rank in ranks:
        assert (rank["leads"], rank["handlers"], rank["death"]) == (True, True, 0)
        assert set(rank["listens"]) == {"127.0.0.1"}, "the store, and gloo"
    assert (folder / "imports").read_text() == "once ", "what the launcher imported is not imported again"
    assert "master_addr" not in (folder / "log").read_text()
    return [process_record(rank["pid"]) for rank in ranks]


def test_a_forked_rank_leads_its_session_listens_on_the_loopback_alone_and_fails_its_launcher(tmp_path: Path) -> None:
    launcher = launched(tmp_path, 1)
    told(tmp_path, launcher, 1)
    (tmp_path / "fail").touch()
    (tmp_path / "leave-0").touch()
    launcher.join(PATIENCE_S)
    output = (tmp_path / "log").read_text()
    assert launcher.exitcode == 1
    assert re.search(r"exitcode\s*:\s*3|non-zero exit status 3", output), output


def test_forked_ranks_outlive_a_launcher_that_was_killed_but_not_their_work(tmp_path: Path) -> None:
    launcher = launched(tmp_path, 2)
    ranks = told(tmp_path, launcher, 2)
    launcher.kill()
    launcher.join(PATIENCE_S)
    for rank in range(2):
        (tmp_path / f"leave-{rank}").touch()
    eventually(lambda: not any(map(process_alive, ranks)))
    assert all((tmp_path / f"left-{rank}").exists() for rank in range(2)), "they had worked on"


def test_a_launcher_that_is_told_to_end_leaves_at_once_and_its_ranks_when_they_have_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ELASTIC_SHUTDOWN_S", str(int(2 * PATIENCE_S)))
    launcher = launched(tmp_path, 2)
    ranks = told(tmp_path, launcher, 2)
    assert launcher.pid is not None
    for pid in (launcher.pid, *(rank["pid"] for rank in ranks)):
        os.kill(pid, signal.SIGTERM)  # as a scheduler does
    launcher.join(PATIENCE_S)
    assert launcher.exitcode == -signal.SIGTERM, "it waits for no rank, as each would wait for it"
    assert all(map(process_alive, ranks)), "they save"
    for rank in range(2):
        (tmp_path / f"leave-{rank}").touch()
    eventually(lambda: not any(map(process_alive, ranks)))
    assert all((tmp_path / f"left-{rank}").exists() for rank in range(2))


def test_a_forked_rank_that_has_ended_its_work_dies_with_its_launcher(tmp_path: Path) -> None:
    launcher = launched(tmp_path, 2)
    ranks = told(tmp_path, launcher, 2)
    (tmp_path / "leave-0").touch()
    eventually((tmp_path / "asked-0").exists)
    assert process_alive(ranks[0]), "it waits for the second, which works on"
    launcher.kill()
    eventually(lambda: not process_alive(ranks[0]))
    assert process_alive(ranks[1])
    (tmp_path / "leave-1").touch()
    eventually(lambda: not process_alive(ranks[1]))
