"""Runs over several nodes: each node starts its own ranks of a prepared run, and Slurm can be told to do so.

    run = wb.prepare(experiment, plan)          # writes the run directory, on a file system that every node sees
    print(wb.slurm(run, time="12:00:00"))       # the job file
    python -m workbench.runs.launching.multi_node RUN --nodes 2 --node-rank 0 --address node-a --port 29500    # what it runs on each

The first node supervises: it writes the run's states, honours STOP and says what a rank died of. The others start their
ranks and stay until these have left. `torchrun` and `accelerate launch` may start the worker directly instead
(`docs/runs.md`): then rank 0 writes the states itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import PlanInfeasible
from workbench.execution.checkpoint.files import complete, step_of
from workbench.home import cache_home
from workbench.rundir import FINAL_STATES, EventTail, RunDir, read_json, this_process, write_json
from workbench.runs.launching import device_queue as turns
from workbench.runs.launching import processes, supervisor
from workbench.runs.launching.failure import record_silent_death
from workbench.runs.launching.launcher import WORKER, clear_attempt, worker_path
from workbench.runs.launching.supervisor import Nodes

if TYPE_CHECKING:
    from workbench.runs.run import Run

POLL_S = 0.5
CHECKPOINT_BEFORE_END_S = 180
"""Slurm sends SIGTERM so long before the time limit; the ranks answer it with a checkpoint."""


def slurm(
    run: Run,
    *,
    time: str = "24:00:00",
    partition: str | None = None,
    account: str | None = None,
    cpus_per_node: int | None = None,
    options: Iterable[str] = (),
) -> str:
    """The text of a job file for `sbatch` that trains a prepared (or stopped) run on the nodes of its plan.

    `options` are further `#SBATCH` options, such as `"--constraint=h200"`. The job writes a checkpoint before its time
    is up; submitted or requeued again, it continues from the last good one. The run directory, the Python environment
    and `$WORKBENCH_HOME` must be on a file system that every node sees.

    Raises `PlanInfeasible` where the plan's devices do not fill its nodes equally.
    """
    plan = run.plan
    nodes, per_node = plan.cluster.nodes, ranks_per_node(plan.world, plan.cluster.nodes)
    on_gpu = plan.cluster.device.type != "cpu"
    wanted = {
        "job-name": run.name,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": per_node if on_gpu else None,
        "cpus-per-task": cpus_per_node or (None if on_gpu else per_node),
        "time": time,
        "signal": f"TERM@{CHECKPOINT_BEFORE_END_S}",
        "partition": partition,
        "account": account,
        "output": str(run.directory.log("slurm")).replace("%", "%%"),
    }
    lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in wanted.items() if value is not None]
    lines += ["#SBATCH --open-mode=append", "#SBATCH --requeue", *(f"#SBATCH {option}" for option in options)]
    command = f"{shlex.quote(sys.executable)} -m {__name__} {shlex.quote(str(run.path))} --nodes {nodes}"
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "# Submitted again, or requeued, it continues from the last good checkpoint.",
            "set -euo pipefail",
            f"export PYTHONPATH={shlex.quote(os.pathsep.join(worker_path(run.directory)))}",
            f"export WORKBENCH_HOME={shlex.quote(str(cache_home()))}",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
            "port=$((20000 + SLURM_JOB_ID % 10000))",
            f'srun --kill-on-bad-exit=1 {command} --address "$first" --port "$port"',
            "",
        ]
    )


def ranks_per_node(world: int, nodes: int) -> int:
    """Raises `PlanInfeasible` where they are not equally many on each."""
    if world % nodes:
        raise PlanInfeasible(
            f"The plan's {world} ranks cannot be divided equally over {nodes} nodes. Plan for a cluster whose nodes "
            f"are full: Cluster.of(…, gpus={nodes * -(-world // nodes)}, nodes={nodes}).",
            world=world,
            nodes=nodes,
        )
    return world // nodes


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description="Start one node of a run.")
    parser.add_argument("run", type=Path, help="the directory of a prepared run")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int, default=os.environ.get("SLURM_NODEID"), help="0 supervises")
    parser.add_argument("--address", required=True, help="of the first node")
    parser.add_argument("--port", type=int, required=True, help="a free one on the first node")
    parser.add_argument("--worker", default=WORKER, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.node_rank is None:
        parser.error("give --node-rank, since this is no task of Slurm")
    run = RunDir(asked.run.absolute())
    nodes = Nodes(asked.nodes, asked.node_rank, asked.address, asked.port)
    _redirect_output(run.log(nodes.log))
    signal.signal(signal.SIGTERM, lambda *_: run.stop_file.touch())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if nodes.rank == 0:
        return supervisor.supervise(run, _ready(run, nodes, asked.worker))
    return _follow(run, _described(run, nodes, asked.worker))


def _redirect_output(log: Path) -> None:
    """What the launcher prints goes to a log of the run's, as for a run on one node."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _described(run: RunDir, nodes: Nodes, worker: str) -> dict[str, Any]:
    """What `launcher.json` says of a start over several nodes."""
    plan = read_json(run.plan)
    world = plan["pipeline"] * plan["data"] * plan["tensor"]
    ranks_per_node(world, nodes.count)
    kind = plan["cluster"]["device"]["type"]
    summary = {"world": world, "kind": kind, "precision": plan["precision"]}
    devices = turns.node_devices(kind)
    return {"supervisor": this_process(), "plan": summary, "worker": worker, "nodes": nodes, "devices": devices}


def _ready(run: RunDir, nodes: Nodes, worker: str) -> dict[str, Any]:
    """Put aside what an earlier start left, and continue from its last checkpoint."""
    if processes.launcher_record(run).get("supervisor"):
        clear_attempt(run, among_nodes=True)
        saved = complete(run.checkpoints)
        if saved:
            write_json(run.resume, {"checkpoint": str(saved[-1]), "step": step_of(saved[-1])})
    return _described(run, nodes, worker)


def _follow(run: RunDir, launcher: dict[str, Any]) -> int:
    """Start this node's ranks and stay with them; end them where the run has failed or ended without them."""
    began = time.time()
    events = EventTail(run.events)
    events.read()
    log = run.log(launcher["nodes"].log)
    printed = log.stat().st_size
    process = supervisor.start_ranks(run, launcher)
    doomed_at: float | None = None
    with supervisor.sample_devices(run, launcher, process.pid):
        while process.poll() is None:
            over = any(event["type"] == "status" and event["state"] in FINAL_STATES for event in events.read())
            if doomed_at is None and (over or _failed_since(run, began)):
                doomed_at = time.monotonic() + supervisor.failure_grace_s()
            if doomed_at is not None and time.monotonic() > doomed_at:
                processes.kill_trees(processes.descendants(process.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
    if process.returncode and doomed_at is None:
        record_silent_death(run, log.read_text(errors="replace")[printed:])
    return process.returncode


def _failed_since(run: RunDir, began: float) -> bool:
    """Whether a rank reported an error after this start (files of an earlier one may still be there)."""
    for path in run.errors.glob("*.json"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime > began:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
