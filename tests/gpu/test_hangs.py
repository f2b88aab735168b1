"""A hang names the rank that is missing and the collective that the others wait in, under every kind of plan."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.real_worker import Ranks, Words, directory, experiment, plan, reach
from tests.gpu.machine import DEVICE, needs
from tests.gpu.test_runs import MACHINE
from tests.patience import LOOK_S, Clock, eventually
from workbench.record.event_log import read_events
from workbench.runs.launching import processes, stalls
from workbench.runs.launching.stalls import StallWatch

pytestmark = needs(2)


class Sleeps(Words):
    """A dataset whose reader on rank 1 sleeps when a file exists."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if os.environ.get("RANK") == "1" and Path(self.file).exists():
            time.sleep(600)  # clock: it hangs until it is killed
        return super().__getitem__(index)


class Answered(Clock):
    """A clock that passes a pause only when the ranks have written their stacks, to the last line of a main thread."""

    def __init__(self, stacks: Sequence[Path]) -> None:
        super().__init__()
        self.stacks = stacks

    def sleep(self, seconds: float) -> None:  # clock: a pause of the product, which lasts no time
        eventually(lambda: all(file.read_text().endswith("in <module>\n") for file in self.stacks))
        time.sleep(
            LOOK_S
        )  # clock: processes that read data answer after their rank, and are asked again if they have not
        self.now += seconds


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
    asked = experiment(data=Sleeps(str(tmp_path / "sleeps")), steps=1_000_000, checkpoint_every=None, compile=False)
    run = directory(tmp_path / "run", asked, plan(asked, device=MACHINE, **degrees))
    with Ranks(run, 2, DEVICE):
        reach(run, 8)
        (one,) = [record for record in processes.rank_records(run) if record["rank"] == 1]
        if how == "stopped":
            os.kill(one["pid"], signal.SIGSTOP)
        else:
            (tmp_path / "sleeps").touch()
        expected = _expected(degrees, how)

        def said() -> str:
            """What a watch says after a minute; the ranks may not have come to the hang yet."""
            for rank in (0, 1):
                run.stack(rank).write_text("")
            answering = [run.stack(0)] if how == "stopped" else [run.stack(0), run.stack(1)]
            monkeypatch.setattr(stalls, "time", clock := Answered(answering))
            watch = StallWatch(run)
            for _ in range(5):
                watch.note_step(100.0)
            for _ in range(2):
                clock.now += stalls.STALL_S
                watch.look()
            states = [event for event in read_events(run.events) if event["type"] == "status"]
            told = [str(event["message"]) for event in states if event["state"] == "stalled"]
            heard.append(told[-1] if told else "nothing")
            return heard[-1]

        heard: list[str] = []
        eventually(lambda: (text := said()) and all(re.search(words, text) for words in expected), lambda: heard[-1])
    print(heard[-1])  # what a person reads, for the record of a run on GPUs


def _expected(degrees: dict[str, Any], how: str) -> list[str]:
    """What the message says of the rank that is missing, and of the collective."""
    stage = 1 if "pipeline" in degrees else 0
    words = [rf"Rank 1 \(stage {stage}\) does not answer: its process is stopped \(SIGSTOP\)\."]
    if how == "sleeps":
        words = [r"Rank 1 \(stage 0\) is busy in \S+ at \S+test_hangs.py:\d+\."]
    if "pipeline" not in degrees:
        missing = "and nothing is known of rank 1" if how == "stopped" else "which rank 1 (stage 0) has not entered"
        operation = r"Rank 0 \(stage 0\) waits in (all-reduce|all-gather|reduce-scatter) [\d,]+ of \d.* in the group of"
        words.append(operation + r" all ranks \(ranks 0, 1\), " + re.escape(missing))
    elif DEVICE == "cuda":  # gloo's transfers are not recorded
        words.append(
            r"Rank 0 \(stage 0\) waits to (send|receive) \d.* (to|from) rank 1 \(stage 1\), which does not answer\."
        )
    return words
