"""The second run of a process is forked from a server that imported what ranks need, and is as a new process else."""

from __future__ import annotations

import importlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import workbench as wb
from tests.distributed import real_worker, test_sweeps
from tests.distributed.harness import AtGate
from tests.distributed.test_launch import ROOT, experiment, finished, first_step, gate, launch, node, plan_for, start
from tests.patience import GATE, PATIENCE_S, Gate, eventually
from workbench.record.rundir import process_alive, process_record, read_json, runs_root
from workbench.runs.launching import fork_server, launcher
from workbench.runs.registry import load_run
from workbench.runs.run import Run

__all__ = ["gate", "node"]


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> fork_server.Client:
    """Give the test a server of its own, and its client the patience to wait for the answers of a busy machine."""
    mine = fork_server.Client()
    monkeypatch.setattr(fork_server, "client", lambda: mine)
    for limit in ("ANSWER_S", "AHEAD_S"):
        monkeypatch.setattr(fork_server, limit, PATIENCE_S)
    return mine


@pytest.fixture(autouse=True)
def waits(gate: Gate) -> Gate:
    """Let every run of these tests wait at a gate: a process is asked for its parent while it lives."""
    return gate


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder that holds a module of the user's."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (folder / "edited_module.py").write_text("VALUE = 1\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def server_of(run: Run) -> psutil.Process:
    return psutil.Process(read_json(run.directory.launcher)["supervisor"]["pid"]).parent()  # type: ignore[return-value]


def wait_for_server() -> None:
    """Wait until this process's server can be asked: a launch before would be a new process."""
    client = fork_server.client()
    eventually(lambda: client._is_ready or select.select([client._socket], [], [], 0)[0])


def told(world: int = 1) -> dict[str, Any]:
    """Launch a run that tells what its process is like, and return that, with when it was launched and by which."""
    asked, launched = experiment(), time.time()
    closed = Gate(Path(os.environ[GATE]), open_to=1)
    run = launch(asked, plan_for(asked, world), worker="telling_worker")
    parent = server_of(run).pid
    wait_for_server()
    closed.open(3)
    assert "told" in finished(run).logs("launcher"), "it prints to the run's log"
    return {**read_json(run.path / "told.json"), "launched": launched, "parent": parent}


def is_new(told: dict[str, Any]) -> bool:
    """Return True if a run was no fork: it has imported all that it uses since it was launched."""
    return bool(told["imported"] > told["launched"])


def test_a_run_is_forked_with_its_own_environment_folder_and_modules_unless_it_would_inherit_something_else(
    user: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = told(), told()
    assert first["parent"] == os.getpid() != second["parent"]
    assert second["imported"] == first["imported"] < second["launched"], (
        "what its first import was is that of the first"
    )
    assert second["modules"] <= first["modules"]
    assert second["path"] == first["path"]
    assert set(second["drawn"]).isdisjoint(first["drawn"]), "its generators are its own"
    assert second["environment"] == first["environment"], "with what imports have set"

    (user / "edited_module.py").write_text("VALUE = 'edited'\n")
    elsewhere = user / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.syspath_prepend(str(elsewhere))
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("WANDB_PROJECT", "another")
    third = told()
    assert third["imported"] == first["imported"]
    assert (first["edited"], second["edited"], third["edited"]) == (1, 1, "edited")
    assert third["directory"] == third["path"][0] == str(elsewhere)
    assert [third["environment"][name] for name in ("NCCL_DEBUG", "WANDB_PROJECT")] == ["WARN", "another"]
    assert third["environment"]["CUDA_VISIBLE_DEVICES"] == ""

    run = start(steps=10_000)
    server = server_of(run)
    assert server.cmdline()[:3] == [sys.executable, "-m", fork_server.__name__]

    def files() -> list[str]:
        return sorted(os.readlink(f"/proc/{server.pid}/fd/{name}") for name in os.listdir(f"/proc/{server.pid}/fd"))

    eventually(lambda: len(files()) == 4)  # it may serve what an earlier launch has left for a moment
    *standard, served = files()
    assert standard == [os.devnull] * 3, "it holds no file"
    assert "socket:" in served
    first_step(run)
    server.kill()
    gate.open(5)
    eventually(lambda: run.row()["step"] == 5)  # it trains on
    assert run.stop(wait=True).status.state == "stopped"

    again = told()
    assert is_new(again)
    assert told()["imported"] == again["imported"], "it has left another server"
    before = os.umask(0o077)
    try:
        assert is_new(told())
    finally:
        os.umask(before)


def test_a_server_that_was_started_ahead_serves_the_first_launch_and_one_with_other_threads_the_next(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.import_ahead()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/elsewhere")  # as an import of torch's sets it
    first, second = told(), told()
    assert first["parent"] == second["parent"] != os.getpid()
    assert first["imported"] == second["imported"]
    assert first["environment"]["TORCHINDUCTOR_CACHE_DIR"] == "/tmp/elsewhere"

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    asked = real_worker.experiment(steps=6, lr_schedule="constant", warmup_steps=1, callbacks=[AtGate(gate.file)])
    plan, parents = real_worker.plan(asked), list[int]()

    def trained(steps: int, **kwargs: Any) -> Run:
        gate.open(1)
        run = launch(asked.replace(steps=steps), plan, **kwargs)
        parents.append(server_of(run).pid)
        wait_for_server()
        gate.open()
        return finished(run)

    new, forked = trained(6), trained(3)
    resumed = trained(6, resume=forked.path)
    assert os.getpid() == parents[0] != parents[1] == parents[2]
    assert (first["threads"], told()["threads"]) == (1, 2)
    losses = new.history().loss.tolist()
    assert len(set(losses)) == 6, "it computes as a new process does, to the last bit"
    assert resumed.history().loss.tolist() == losses, "its first three steps are those of the forked run"


def test_every_run_of_a_sweep_is_forked_and_so_is_the_next_sweep_by_the_server_of_its_kernel(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_sweeps.prepare(monkeypatch.setattr)

    def parents() -> tuple[psutil.Process, set[psutil.Process]]:
        """Return the parents of a sweep's supervisor and of its runs', which train side by side until a gate opens."""
        gate.open(1)
        sweep = wb.sweep(test_sweeps.experiment(), learning_rate=[1e-3, 2e-3])
        eventually(lambda: len(sweep.runs) == 2 and all(run.row()["step"] for run in sweep.runs))
        wait_for_server()
        found = psutil.Process(read_json(sweep.directory.supervisor)["pid"]).parent(), set(map(server_of, sweep.runs))
        gate.open()
        assert [result.state for _, result in sweep.wait(PATIENCE_S).results()] == ["finished"] * 2
        return found

    first, [server] = parents()
    assert first.pid == os.getpid()
    assert server.cmdline()[:3] == [sys.executable, "-m", fork_server.__name__]
    assert parents() == (server, {server})


def test_another_package_of_the_same_name_or_an_edited_file_makes_a_server_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "served_module.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("served_module")
    sources = {"served_module": fork_server.sources()["served_module"]}
    other = tmp_path / "other"
    (other / "served_module").mkdir(parents=True)
    assert fork_server.is_current(sources, [str(other), str(tmp_path)]), "a folder without __init__.py is no module"
    (other / "served_module" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    assert not fork_server.is_current(sources, [str(other), str(tmp_path)])
    assert fork_server.is_current(sources, [str(tmp_path), str(other)])
    os.utime(tmp_path / "served_module.py", (1, 1))
    assert not fork_server.is_current(sources, [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "served_module")


KERNEL = """
import sys
import workbench as wb
from tests.distributed import real_worker, test_sweeps
from tests.distributed.harness import AtGate
from tests.distributed.test_fork_server import wait_for_server
from tests.distributed.test_launch import start
start(steps=1).wait()
wait_for_server()
print(start(steps=10_000).path, flush=True)
try:
    input()
except KeyboardInterrupt:
    input()
"""


def test_a_server_ends_with_its_killed_kernel_and_runs_train_on_after_an_interrupt_and_after_the_kill(
    gate: Gate,
) -> None:
    """Jupyter interrupts the whole process group of a kernel."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KERNEL]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes) as kernel:
        run = load_run(kernel.stdout.readline().strip())  # type: ignore[union-attr]
        server = process_record(server_of(run).pid)
        first_step(run)
        os.killpg(kernel.pid, signal.SIGINT)
        gate.open(2)
        eventually(lambda: run.row()["step"] == 2)
        assert kernel.poll() is None
        kernel.send_signal(signal.SIGKILL)
    eventually(lambda: not process_alive(server))
    gate.open(3)
    eventually(lambda: run.row()["step"] == 3)
    assert run.stop(wait=True).status.state == "stopped"
    assert run.checkpoints
    assert runs_root().exists()
