"""A schedule, a column and an optimiser are each added in one place: a module with two records and one row.

The test runs `one_place.py` in a process of its own, in which that module is imported first, as if its statements stood
in `workbench/strategy.py`, `workbench/record/columns.py` and `workbench/algorithms.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ADDITIONS = '''
import os

import torch

from workbench.algorithms import ALGORITHMS, ELEMENT, Algorithm
from workbench.optimizers.parameters import local, momentum_of
from workbench.record.columns import COLUMNS, Axis, Column, Panel
from workbench.strategy import SCHEDULES, Action, PipelineSchedule


def breadth_first(ranks, num_microbatches, chunks):
    """Return the forwards of all micro-batches, stage by stage, then their backwards (arXiv:2211.05953)."""
    def lane(rank):
        stages, batches = [rank + ranks * chunk for chunk in range(chunks)], range(num_microbatches)
        yield from (Action("F", stage, i) for stage in stages for i in batches)
        yield from (Action("B", stage, i) for stage in reversed(stages) for i in reversed(batches))
    return tuple(tuple(lane(rank)) for rank in range(ranks))


SCHEDULES["breadth_first"] = PipelineSchedule(
    words="breadth-first pipelining",
    order=breadth_first,
    runtime="torch.distributed.pipelining:ScheduleLoopedBFS",
    chunks=(2, 3),
    runs=lambda ranks, num_microbatches: num_microbatches > 1,
    needs="two micro-batches or more",
    remedy="smaller micro-batches",
    holds_every_microbatch=True,
)
COLUMNS["sample_pairs"] = Column(
    words="half the samples of a step",
    label="Pairs of samples",
    value=lambda step: step.samples_per_step / 2,
    panel=Panel(title="Ten a pair", scale=10.0),
    axis=Axis("sample_pairs", "pairs", ((1.0, "Pairs"),), lambda value: f"{value} pairs"),
    wandb=("system/pairs",),
)


class DecoupledSGD(torch.optim.Optimizer):
    """SGDW (arXiv:1711.05101, algorithm 1), over this rank's shards."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                weight, momentum = local(parameter), local(momentum_of(self, parameter))
                momentum.mul_(0.9).add_(local(parameter.grad))
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * momentum)


def sgdw(groups, experiment, setting):
    return DecoupledSGD(groups, {"lr": experiment.learning_rate})


ALGORITHMS["sgdw"] = Algorithm(build="additions:sgdw", reach=ELEMENT, updates_stored_blocks=True)
'''


def test_a_schedule_a_column_and_an_optimizer_are_added_in_one_place(tmp_path: Path) -> None:
    (tmp_path / "additions.py").write_text(ADDITIONS)
    here = Path(__file__)
    paths = (str(tmp_path), str(here.parents[2]), str(here.parents[1] / "unit"), os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [sys.executable, str(here.with_name("one_place.py")), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
