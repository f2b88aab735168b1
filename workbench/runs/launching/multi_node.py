"""Multi-node launch: each node starts its own ranks of a prepared run.

    run = wb.runs.prepare(experiment, plan)          # writes the run directory, on a file system that every node sees
    print(run.slurm(time="12:00:00"))           # the job file, which runs on each node:

    python -m workbench.runs.launching.multi_node RUN --nodes 2 --node-rank 0 --address node-a --port 29500

The first node supervises: it writes the run's states, honours STOP and reports the error of a rank that died. The
others start their ranks and stay until these have left. `torchrun` and `accelerate launch` may start the worker
directly instead (`docs/runs.md`): then rank 0 writes the states itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from workbench.events import LauncherRecord
from workbench.execution.checkpoint.files import complete_checkpoints, step_of
from workbench.rundir import FINAL_STATES, EventTail, RunDir, read_json, redirect_output, this_process, write_json
from workbench.runs.launching import processes, supervisor
from workbench.runs.launching.device_queue import node_devices
from workbench.runs.launching.failure import record_silent_death
from workbench.runs.launching.run_directory import clear_attempt
from workbench.runs.launching.slurm import ranks_per_node
from workbench.runs.launching.supervisor import Nodes

POLL_S = 0.5


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description="Start one node of a run.")
    parser.add_argument("run", type=Path, help="the directory of a prepared run")
    parser.add_argument("--nodes", type=int, required=True)
    rank = os.environ.get("SLURM_NODEID")
    parser.add_argument("--node-rank", type=int, default=rank, help="rank of this node; node 0 supervises")
    parser.add_argument("--address", required=True, help="address of the first node")
    parser.add_argument("--port", type=int, required=True, help="a free port on the first node")
    parser.add_argument("--worker", default=processes.WORKER, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.node_rank is None:
        parser.error("give --node-rank, since this is no task of Slurm")
    run = RunDir(asked.run.absolute())
    nodes = Nodes(asked.nodes, asked.node_rank, asked.address, asked.port)
    redirect_output(run.log(nodes.log))
    signal.signal(signal.SIGTERM, lambda *_: run.stop_file.touch())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if nodes.rank == 0:
        if processes.launcher_record(run).get("supervisor"):  # an earlier start: continue from its last checkpoint
            clear_attempt(run, among_nodes=True)
            if saved := complete_checkpoints(run.checkpoints):
                write_json(run.resume, {"checkpoint": str(saved[-1]), "step": step_of(saved[-1])})
        return supervisor.supervise(run, _launcher_record(run, nodes, asked.worker), nodes)
    return _follow(run, _launcher_record(run, nodes, asked.worker), nodes)


def _launcher_record(run: RunDir, nodes: Nodes, worker: str) -> LauncherRecord:
    plan = read_json(run.plan)
    world = plan["pipeline"] * plan["data"] * plan["tensor"]
    ranks_per_node(world, nodes.count)
    device_type = plan["cluster"]["device"]["type"]
    return {
        "supervisor": this_process(),
        "plan": {"world": world, "device_type": device_type, "precision": plan["precision"]},
        "worker": worker,
        "devices": node_devices(device_type),
    }


def _follow(run: RunDir, launcher: LauncherRecord, nodes: Nodes) -> int:
    """Start this node's ranks and stay with them; end them where the run has failed or ended without them."""
    began = time.time()
    events = EventTail(run.events)
    events.read()
    log = run.log(nodes.log)
    printed = log.stat().st_size
    process = supervisor.start_ranks(run, launcher, nodes)
    doomed_at: float | None = None
    with supervisor.sample_devices(run, launcher, nodes, process.pid):
        while (exit_code := process.wait(POLL_S)) is None:
            over = any(event["type"] == "status" and event["state"] in FINAL_STATES for event in events.read())
            if doomed_at is None and (over or _failed_since(run, began)):
                doomed_at = time.monotonic() + supervisor.failure_grace_s()
            if doomed_at is not None and time.monotonic() > doomed_at:
                processes.kill_trees(processes.descendants(process.pid))
    if exit_code and doomed_at is None:
        record_silent_death(run, log.read_text(errors="replace")[printed:])
    return exit_code


def _failed_since(run: RunDir, began: float) -> bool:
    """Return True if a rank reported an error after this start; files of an earlier start may still be there."""
    for path in run.errors.glob("*.json"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime > began:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
