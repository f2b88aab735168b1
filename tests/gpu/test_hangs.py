"""A hang names the rank that is missing and the collective that the others wait in, under every kind of plan."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.real_worker import Ranks, Words, directory, experiment, plan, reach
from tests.gpu.machine import DEVICE, needs
from tests.gpu.test_runs import MACHINE
from tests.patience import eventually
from workbench.runs.event_log import read_events
from workbench.runs.launching import processes
from workbench.runs.launching.stalls import StallWatch

pytestmark = needs(2)


class Sleeps(Words):
    """A dataset whose reader on rank 1 sleeps while a file exists."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        while os.environ.get("RANK") == "1" and Path(self.file).exists():
            time.sleep(0.1)
        return super().__getitem__(index)


@pytest.mark.parametrize("how", ["sleeps", "stopped"])
@pytest.mark.parametrize(
    "degrees",
    [{"data": 2, "zero": 0}, {"data": 2, "zero": 3}, {"tensor": 2}, {"pipeline": 2}],
    ids=["replicas", "shards", "tensor", "pipeline"],
)
def test_the_missing_rank_and_the_collective_are_named(
    degrees: dict[str, Any], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "sleeps" and "data" not in degrees:
        pytest.skip("one rank reads for all where the batch is not divided")
    monkeypatch.setenv("WORKBENCH_STALL_S", "3")
    asked = experiment(data=Sleeps(str(tmp_path / "sleeps")), steps=1_000_000, checkpoint_every=None, compile=False)
    run = directory(tmp_path / "run", asked, plan(asked, device=MACHINE, **degrees))
    ranks = Ranks(run, 2, DEVICE)
    try:
        reach(run, 8)
        (one,) = [record for record in processes.rank_records(run) if record["rank"] == 1]
        if how == "stopped":
            os.kill(one["pid"], signal.SIGSTOP)
        else:
            (tmp_path / "sleeps").touch()
        watch = StallWatch(run)
        for _ in range(5):
            watch.note_step(100.0)

        def message() -> str:
            watch.look()
            statuses = [event for event in read_events(run.events) if event["type"] == "status"]
            return next((str(event["message"]) for event in statuses if event["state"] == "stalled"), "")

        said = eventually(message)
    finally:
        ranks.kill(0)
    print(said)  # what a person reads, for the record of a run on GPUs
    stage = 1 if "pipeline" in degrees else 0
    if how == "stopped":
        assert f"Rank 1 (stage {stage}) does not answer: its process is stopped (SIGSTOP)." in said
    else:
        assert re.search(r"Rank 1 \(stage 0\) is busy in \S+ at \S+test_hangs.py:\d+\.", said)
    if "pipeline" not in degrees:
        missing = "and nothing is known of rank 1" if how == "stopped" else "which rank 1 (stage 0) has not entered"
        operation = r"Rank 0 \(stage 0\) waits in (all-reduce|all-gather|reduce-scatter) [\d,]+ of \d.* in the group of"
        assert re.search(operation + r" all ranks \(ranks 0, 1\), " + re.escape(missing), said)
    elif DEVICE == "cuda":  # gloo's transfers are not recorded
        sent = r"Rank 0 \(stage 0\) waits to (send|receive) \d.* (to|from) rank 1 \(stage 1\), which does not answer\."
        assert re.search(sent, said)
