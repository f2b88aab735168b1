"""The Slurm job file of a run over several nodes."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from workbench.errors import InvalidArgument, PlanInfeasible
from workbench.home import cache_home
from workbench.rundir import RunDir
from workbench.runs.launching.run_directory import worker_path

if TYPE_CHECKING:
    from workbench.planning.plan import Plan

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
