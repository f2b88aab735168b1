"""Multi-node launch: each node starts its own ranks of a prepared run.

    run = wb.runs.prepare(experiment, plan)     # writes the run directory, on a file system that every node sees
    print(run.slurm(time="12:00:00"))           # the job file, which runs on each node:

    python -m workbench.runs.launching.multi_node RUN --nodes 2 --node-rank 0 --address node-a --port 29500

The first node supervises: it writes the run's states, honours STOP and reports the error of a rank that died. The
others start their ranks and stay until these have left. `torchrun` and `accelerate launch` may start the worker
directly instead (`docs/runs.md`): then rank 0 writes the states itself.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import InvalidArgument, PlanInfeasible
from workbench.base.machine import cache_home
from workbench.execution.checkpoint.files import complete_checkpoints, step_of
from workbench.record.events import LauncherRecord
from workbench.record.rundir import (
    FINAL_STATES,
    EventTail,
    RunDir,
    read_json,
    redirect_output,
    this_process,
    write_json,
)
from workbench.runs.launching import processes, supervisor
from workbench.runs.launching.device_queue import node_devices
from workbench.runs.launching.launcher import clear_attempt, worker_path
from workbench.runs.launching.processes import record_silent_death
from workbench.runs.launching.supervisor import Nodes
from workbench.strategy import DEGREES

if TYPE_CHECKING:
    from workbench.planning.plan import Plan

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
    world = math.prod(plan[degree] for degree in DEGREES)
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
            said = {event["state"] for event in events.read() if event["type"] == "status"} & set(FINAL_STATES)
            with contextlib.suppress(OSError):  # files of an earlier start, which may still be there, do not count
                if any(path.stat().st_mtime > began for path in run.errors.glob("*.json")):
                    said.add("failed")
            if doomed_at is None and said:  # ranks that have ended in order leave by themselves, after that is told
                grace_s = supervisor.failure_grace_s() if "failed" in said else supervisor.TERMINATE_GRACE_S
                doomed_at = time.monotonic() + grace_s
            if doomed_at is not None and time.monotonic() > doomed_at:
                processes.kill_trees(processes.descendants(process.pid))
    if exit_code and doomed_at is None:
        record_silent_death(run, log.read_text(errors="replace")[printed:])
    return exit_code


# The job file of Slurm

TIME_LIMIT = re.compile(r"\d+|\d+:\d{1,2}|\d+:\d{1,2}:\d{1,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE", re.ASCII)
"""Time limits as `sbatch` takes them: minutes, minutes:seconds, hours:minutes:seconds, or days-hours and on."""
MOST_CORES = 2**16
CHECKPOINT_BEFORE_END_S = 180
"""Seconds before the time limit at which Slurm sends SIGTERM; the ranks answer it with a checkpoint."""


def job_file(
    run: RunDir, plan: Plan, words: Mapping[str, str | None], options: Sequence[str], cpus_per_node: int | None
) -> str:
    """Return the text of a job file for `sbatch`; `words` are time, partition and account of `Run.slurm`."""
    _check_values(words, options, cpus_per_node)
    nodes, per_node = plan.cluster.nodes, ranks_per_node(plan.world, plan.cluster.nodes)
    on_gpu = plan.cluster.device.type != "cpu"
    wanted = {
        "job-name": run.path.name,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": per_node if on_gpu else None,
        "cpus-per-task": cpus_per_node or (None if on_gpu else per_node),
        "signal": f"TERM@{CHECKPOINT_BEFORE_END_S}",
        **words,
        "output": str(run.log("slurm")).replace("%", "%%"),
    }
    lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in wanted.items() if value is not None]
    lines += ["#SBATCH --open-mode=append", "#SBATCH --requeue", *(f"#SBATCH {option}" for option in options)]
    launch = f"{shlex.quote(sys.executable)} -m workbench.runs.launching.multi_node {shlex.quote(str(run.path))}"
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "# Submitted again, or requeued, it continues from the last good checkpoint.",
            "set -euo pipefail",
            f"export PYTHONPATH={shlex.quote(os.pathsep.join(worker_path(run)))}",
            f"export WORKBENCH_HOME={shlex.quote(str(cache_home()))}",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
            "port=$((20000 + SLURM_JOB_ID % 10000))",
            f'srun --kill-on-bad-exit=1 {launch} --nodes {nodes} --address "$first" --port "$port"',
            "",
        ]
    )


def _check_values(words: Mapping[str, str | None], options: Iterable[str], cpus_per_node: int | None) -> None:
    """Raise `InvalidArgument` for a value that would end its line of the job file, or is no value of its option.

    Bash runs whatever stands after a line end, and Slurm reads no option after the first such line.
    """
    if not TIME_LIMIT.fullmatch(words["time"] or ""):
        raise InvalidArgument(
            f"time={words['time']!r} is no time limit of Slurm. Write it as hours:minutes:seconds, such as 24:00:00, "
            "or days-hours."
        )
    for name, value in words.items():
        if value is not None and (not re.fullmatch(r"[\w.,:@+-]+", value) or value.startswith("-")):
            raise InvalidArgument(f"{name}={value[:80]!r} is no {name} of Slurm. Give its name.")
    for option in options:
        if not option.startswith("-") or not option.isprintable():
            raise InvalidArgument(
                f"{option[:80]!r} is no option of sbatch. Write one line, such as '--constraint=h200'."
            )
    if cpus_per_node is not None and not 1 <= cpus_per_node <= MOST_CORES:
        raise InvalidArgument(f"cpus_per_node={cpus_per_node} is no number of cores. Give 1 to {MOST_CORES:,}.")


def ranks_per_node(world: int, nodes: int) -> int:
    """Return the number of ranks on each node; raises `PlanInfeasible` where it differs between nodes."""
    if world % nodes:
        raise PlanInfeasible(
            f"The plan's {world} ranks cannot be divided equally over {nodes} nodes. Plan for a cluster whose nodes "
            f"are full: Cluster.of(…, gpus={nodes * -(-world // nodes)}, nodes={nodes})."
        )
    return world // nodes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
