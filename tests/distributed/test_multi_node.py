"""One run over two nodes: two network namespaces of this machine that share the run directory, on gloo."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed import real_worker
from tests.distributed.real_worker import DEVICE, ENDLESS, LINK, curve, experiment, plan, trained
from tests.exhaustive import EXHAUSTIVE, exhaustive
from tests.patience import PATIENCE_S
from workbench.base.errors import PlanInfeasible
from workbench.cost.hardware import Cluster
from workbench.planning.plan import Plan
from workbench.planning.planner import plan as make_plan
from workbench.record.event_log import read_events
from workbench.record.rundir import (
    append_event,
    read_json,
    read_record,
    this_process,
    what_was_started,
    write_json,
    write_record,
)
from workbench.runs.launching import launcher
from workbench.runs.launching.launcher import Attempt
from workbench.runs.run import Run

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = ("10.77.31.1", "10.77.31.2")
PORT = 29417
STARTS = ("slurm", "torchrun", "accelerate") if EXHAUSTIVE else ("slurm",)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Yield two network namespaces that only a virtual cable joins, like two machines."""
    names = tuple(f"wb{os.getpid()}-{number}" for number in (0, 1))
    cables = tuple(f"wb{os.getpid() % 10**6}e{number}" for number in (0, 1))
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            for device in (cable, "lo"):
                ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(names)
        pytest.skip(f"network namespaces are not permitted here: {getattr(error, 'stderr', error)}")
    yield names[0], names[1]
    _remove(names)


def _remove(names: tuple[str, ...]) -> None:
    for name in names:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            ip("netns", "del", name)


def prepare(*args, **kwargs) -> Run:
    """Return the handle of a run directory that nobody has started."""
    return Run(launcher.write_attempt(Attempt(*args, **kwargs)))


def two_nodes(steps: int) -> Plan:
    """Return a plan with one stage on each node."""
    cluster = Cluster(DEVICE, 2, 1, LINK, LINK)
    return make_plan(experiment(steps=steps), cluster, pipeline=2, micro_batch=2)


def environment(number: int) -> dict[str, str]:
    inherited = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORKBENCH_FAILURE_GRACE_S": "2"}
    return inherited | {"GLOO_SOCKET_IFNAME": f"wb{os.getpid() % 10**6}e{number}", "ACCELERATE_USE_CPU": "true"}


def on_each(namespaces: tuple[str, str], command: list[str]) -> list[subprocess.Popen[str]]:
    """Start `command` on both nodes; `{rank}` in it is the node's."""
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *(part.format(rank=number) for part in command)],
            env=environment(number),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, name in enumerate(namespaces)
    ]


WORKER = ["-m", "workbench.execution.worker"]
COMMANDS = {
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "{rank}"),
        *("--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", str(PORT)),
    ],
    "accelerate": [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "2"),
        *("--machine_rank", "{rank}", "--num_processes", "2", "--main_process_ip", ADDRESSES[0]),
        *("--main_process_port", str(PORT), "--mixed_precision", "no", "--dynamo_backend", "no"),
    ],
}


def started(how: str, namespaces: tuple[str, str], run: Run, tmp_path: Path) -> list[subprocess.Popen[str]]:
    if how != "slurm":
        return on_each(namespaces, [*COMMANDS[how], *WORKER, str(run.path)])
    return [job(namespaces, run, tmp_path)]


def job(namespaces: tuple[str, str], run: Run, tmp_path: Path) -> subprocess.Popen[str]:
    """Run the job file under a `srun` that knows two nodes: these namespaces."""
    script = tmp_path / "job.sh"
    script.write_text(run.slurm())
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    tasks = "\n".join(
        f"SLURM_NODEID={number} GLOO_SOCKET_IFNAME={environment(number)['GLOO_SOCKET_IFNAME']} "
        f'ip netns exec {name} "$@" & tasks="$tasks $!"'
        for number, name in enumerate(namespaces)
    )
    _executable(
        tools / "srun", f'shift\ntasks=""\ntrap "kill -TERM \\$tasks" TERM\n{tasks}\nwait $tasks\nwait $tasks\n'
    )
    # slow: whoever stops reading after the first line ends it with SIGPIPE
    _executable(tools / "scontrol", f"echo {ADDRESSES[0]}; sleep 0.2; echo {ADDRESSES[1]}\n")
    asked = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid())}
    return subprocess.Popen(
        ["bash", str(script)],
        env=environment(0) | asked | {"SLURM_JOB_NODELIST": "node[0-1]"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def ended(processes: list[subprocess.Popen[str]]) -> list[int]:
    codes = []
    for process in processes:
        output, _ = process.communicate(timeout=PATIENCE_S)
        print(output)
        codes.append(process.returncode)
    return codes


@pytest.mark.parametrize("how", STARTS)
def test_a_run_over_two_nodes_is_the_run_on_one(how: str, namespaces: tuple[str, str], tmp_path: Path) -> None:
    asked = experiment(steps=6)
    run = prepare(asked, two_nodes(6), directory=tmp_path / "run")
    assert run.status.state == "queued"
    codes = ended(started(how, namespaces, run, tmp_path))
    assert not any(codes), (codes, run.logs("launcher"), run.logs(0), run.logs(1))
    assert run.status.state == "finished"
    assert run.status.message == "6 steps."
    states = [event["state"] for event in run.events() if event["type"] == "status"]
    assert states[:2] == ["queued", "starting"]
    assert states[-1] == "finished"
    assert curve(run.directory) == curve(trained(tmp_path / "one", asked, plan(asked, pipeline=2)))


@exhaustive
def test_a_job_that_is_stopped_and_submitted_again_goes_on(namespaces: tuple[str, str], tmp_path: Path) -> None:
    run = prepare(experiment(steps=ENDLESS), two_nodes(ENDLESS), directory=tmp_path / "run")
    process = job(namespaces, run, tmp_path)
    real_worker.reach(run.directory, 3)
    assert run.status.state == "running"
    for child in children(process.pid, "srun"):
        os.kill(child, signal.SIGTERM)  # as Slurm does before the time limit
    ended([process])
    assert run.status.state == "stopped", (run.status, run.logs("launcher"))
    reached = run.checkpoints[-1].step
    assert reached >= 3
    write_record(run.directory.experiment, {**read_record(run.directory.experiment), "steps": reached + 2})
    write_json(run.directory.started, what_was_started(run.directory))  # a shorter run, and no edit that is refused
    assert ended([job(namespaces, run, tmp_path)]) == [0]
    assert run.status.state == "finished", (run.status, run.logs("launcher"))
    assert run.history().step.tolist() == list(range(1, reached + 3))


@exhaustive
def test_a_rank_that_dies_on_another_node_ends_the_run_on_both(namespaces: tuple[str, str], tmp_path: Path) -> None:
    run = prepare(experiment(steps=ENDLESS), two_nodes(ENDLESS), directory=tmp_path / "run")
    process = job(namespaces, run, tmp_path)
    real_worker.reach(run.directory, 3)
    os.kill(read_json(run.directory.rank(1))["pid"], signal.SIGKILL)
    assert any(ended([process])), "the other node does not wait for it"
    assert run.status.state == "failed"
    assert not run.alive


def children(pid: int, name: str) -> list[int]:
    import psutil

    return [
        child.pid for child in psutil.Process(pid).children(recursive=True) if name in " ".join(child.cmdline()[:2])
    ]


def test_the_job_file_is_bash_and_asks_for_the_plans_nodes(tmp_path: Path) -> None:
    asked = experiment(steps=6)
    wide = Cluster.of("h200", gpus=16, nodes=2)
    chosen = replace(two_nodes(6), cluster=wide, data=8, micro_batch=1, num_microbatches=asked.global_batch // 8)
    run = prepare(asked, replace(chosen, global_batch=asked.global_batch), directory=tmp_path / "a run")
    text = run.slurm(time="12:00:00", partition="gpu", options=["--constraint=nvlink"])
    options = shlex.split(text.replace("#SBATCH", ""), comments=True)
    wanted = ["--nodes=2", "--gpus-per-node=8", "--ntasks-per-node=1", "--time=12:00:00", "--partition=gpu"]
    assert [option for option in wanted if option not in options] == []
    assert "--constraint=nvlink" in options
    assert str(run.path) in options, "a path with a space stays one word"
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    odd = replace(chosen, cluster=replace(wide, gpus=15))
    write_json(run.directory.plan, replace(odd, pipeline=1, data=15, global_batch=15).to_json())
    with pytest.raises(PlanInfeasible, match="15 ranks cannot be divided equally over 2 nodes"):
        Run(run.path).slurm()


def test_a_run_on_other_hosts_is_believed_and_can_be_stopped_from_here(tmp_path: Path) -> None:
    run = prepare(experiment(steps=6), two_nodes(6), directory=tmp_path / "run")
    write_json(run.directory.launcher, {"supervisor": {**this_process(), "host": "another"}})
    write_json(run.directory.rank(0), {**this_process(), "host": "another", "rank": 0})
    assert run.status.state == "queued"
    assert run.status.message.startswith("Prepared")
    assert not run.alive, "nothing of it runs here"
    run.stop()
    assert run.directory.stop_file.exists()
    assert not [event for event in read_events(run.directory.events) if event.get("state") == "failed"]


def test_states_of_ranks_that_nobody_supervises_are_believed(tmp_path: Path) -> None:
    run = prepare(experiment(steps=6), two_nodes(6), directory=tmp_path / "run")
    append_event(run.directory.events, "status", state="starting", message="")
    write_json(run.directory.rank(0), {**this_process(), "rank": 0})
    assert run.status.state == "starting", "torchrun started it here"
    write_json(run.directory.rank(0), {"pid": 1, "created": 0.0, "rank": 0})
    assert run.status.state == "failed", "and then nothing was left of it"
