"""Ranks of one node: forked from a launcher that has imported what they need, and met where no other machine can."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from workbench.rundir import process_record
from workbench.runs.launching.processes import wait_gone
from workbench.runs.launching.supervisor import Nodes, _accelerate_config, accelerate_command, worker_environment

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
    assert launcher.wait(60) == 1
    assert re.search(r"exitcode\s*:\s*3|non-zero exit status 3", output), output


def test_forked_ranks_outlive_a_launcher_that_was_killed_but_not_their_work(tmp_path: Path) -> None:
    launcher = launched(tmp_path, 2)
    assert launcher.stdout is not None
    ranks = [process_record(int(launcher.stdout.readline().split()[2])) for _ in range(2)]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(60)
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
