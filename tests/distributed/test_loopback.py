"""The ranks of one node meet where only this machine can reach them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.runs.launching.supervisor import Nodes, _accelerate_config, accelerate_command, worker_environment

WORKER = """
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


@pytest.mark.parametrize("world", [1, 2])
def test_the_store_and_gloo_of_one_node_listen_on_the_loopback_interface_only(world: int, tmp_path: Path) -> None:
    config, worker = tmp_path / "accelerate.yaml", tmp_path / "listening_worker.py"
    plan: Any = {"world": world, "device_type": "cpu", "precision": "fp32"}
    config.write_text(_accelerate_config(plan, Nodes()))
    worker.write_text(WORKER)
    rank = ["-m", worker.stem, str(tmp_path)]
    command = [*accelerate_command(config, plan), *rank] if world > 1 else [sys.executable, *rank]
    environment = worker_environment(dict(os.environ), world, "cpu", ("cpu",)) | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert answer.returncode == 0, answer.stderr
    told = re.findall("listens on (.*?)(?=listens|$)", answer.stdout, re.MULTILINE)  # two ranks may share a line
    assert told == ["127.0.0.1"] * world, answer.stdout
    assert "master_addr" not in answer.stderr, answer.stderr
