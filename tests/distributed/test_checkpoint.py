"""A run that was interrupted goes on as if it had not been."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.distributed import real_worker
from tests.distributed.real_worker import Ranks, curve, directory, experiment, plan, trained
from workbench.execution import checkpoint
from workbench.planning.plan import Plan
from workbench.rundir import RunDir

STEPS, EVERY = 40, 6
KILLS = 12 if os.environ.get("WORKBENCH_TEST_ALL") else 2
DIVISIONS = {"pipeline": {"pipeline": 2}, "data": {"data": 2, "zero": 0}, "sharded": {"data": 2, "zero": 3}}
DEFAULT = ("pipeline",) if not os.environ.get("WORKBENCH_TEST_ALL") else tuple(DIVISIONS)


def complete(run: RunDir) -> list[Path]:
    return sorted(path.parent for path in run.checkpoints.glob(f"*/{checkpoint.COMPLETE}"))


def killed_and_resumed(path: Path, chosen: Plan, kills: int, seed: int) -> tuple[RunDir, list[int]]:
    """Train to the end, killed with -9 as often as asked, each time at a random step of what is left."""
    asked = experiment(steps=STEPS, checkpoint_every=EVERY)
    draw, killed_at = random.Random(seed), []
    run = directory(path, asked, chosen)
    for number in range(kills):
        ranks = Ranks(run, chosen.world)
        left = STEPS - max(killed_at, default=0)
        real_worker.reach(run, max(killed_at, default=0) + draw.randint(1, max(1, left // (kills - number + 1))))
        ranks.kill(first=draw.randrange(chosen.world))
        killed_at.append(real_worker.last_step(run))
        assert killed_at[-1] < STEPS, "it had ended before it was killed"
        saved = complete(run)
        run = directory(path, asked, chosen, saved[-1] if saved else None)
    Ranks(run, chosen.world).wait()
    return run, killed_at


@pytest.mark.parametrize("division", DEFAULT)
def test_a_run_killed_at_random_steps_has_the_loss_curve_of_an_unbroken_one_to_the_last_bit(
    division: str, tmp_path: Path
) -> None:
    chosen = plan(experiment(steps=STEPS), **DIVISIONS[division])
    unbroken = curve(trained(tmp_path / "unbroken", experiment(steps=STEPS), chosen))
    assert len(unbroken) == STEPS
    run, killed_at = killed_and_resumed(tmp_path / "killed", chosen, KILLS, seed=len(division))
    assert curve(run) == unbroken, f"killed at {killed_at}"
