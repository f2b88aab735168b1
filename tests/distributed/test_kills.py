"""Kernel, supervisor, Accelerate's launcher and ranks killed with -9 at random moments: nothing is lost or left behind.

A moment is a number of processes that have started, or a step, which the ranks' gate lets them reach, so that a seed
kills at the same places on every machine. Three kills by default, fifty in `make test-exhaustive`;
`WORKBENCH_KILL_SEED` repeats a sequence.
"""

import contextlib
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.distributed.own_machine import own_machine
from tests.distributed.test_launch import finished, forked_kernel, start
from tests.exhaustive import EXHAUSTIVE
from tests.patience import GATE, Gate, eventually
from workbench.record.event_log import read_events
from workbench.record.events import ProcessRecord
from workbench.record.rundir import process_alive
from workbench.runs.launching import device_queue, processes
from workbench.runs.registry import load_run
from workbench.runs.run import Run

KILLS = 50 if EXHAUSTIVE else 3
ENDLESS = 1_000_000
VICTIMS = ("kernel", "supervisor", "launcher", "rank 0", "rank 1")

EVERY = 10
"""Number of steps from checkpoint to checkpoint."""

KERNEL = f"""
import signal, sys
from tests.distributed.test_launch import start
resume = next(filter(str.strip, sys.argv[1:]), None)  # a process that is no fork has room for a longer command line
print('told', start(steps={ENDLESS}, resume=resume).path, flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def node(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_STANDIN_CHECKPOINT_EVERY", str(EVERY))
    monkeypatch.setenv(GATE, str(tmp_path / "gate"))
    yield from own_machine(tmp_path, monkeypatch)
    for process in of_this_test(tmp_path):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def of_this_test(folder: Path) -> list[psutil.Process]:
    """Return every process whose command line names something in the test's folder."""
    mine = []
    for process in psutil.process_iter(["cmdline", "status"]):
        named = any(str(folder) in word for word in process.info["cmdline"] or ())
        if named and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            mine.append(process)
    return mine


@dataclass
class Attempt:
    """One launch or resumption, from a kernel of its own."""

    kernel: ProcessRecord
    run: Run
    killed: list[str] = field(default_factory=list)

    @staticmethod
    def begin(folder: Path, resume: Path | None) -> "Attempt":
        """Start a run from a kernel that is forked from the server of this process."""
        kernel, path = forked_kernel(folder, KERNEL, *([str(resume)] if resume else []))
        return Attempt(kernel, load_run(path))

    def record_of(self, victim: str) -> ProcessRecord | None:
        """None while there is no such process yet, or any more."""
        if victim == "kernel":
            return self.kernel if process_alive(self.kernel) else None
        recorded = processes.launcher_record(self.run.directory)
        if victim.startswith("rank"):
            records = {f"rank {r['rank']}": r for r in processes.rank_records(self.run.directory)}
            record = records.get(victim)
        else:
            record = recorded.get({"supervisor": "supervisor", "launcher": "accelerate"}[victim])
        return record if process_alive(record) else None

    def kill(self, victim: str) -> None:
        record = eventually(lambda: self.record_of(victim) or self.run.status.final)
        if record is True:  # the run ended before
            return
        processes.send_signal([record], 9)
        eventually(lambda: not process_alive(record))
        self.killed.append(victim)

    def settle(self) -> None:
        """Until nothing of the run is left. Ranks that lost their supervisor train on until they are asked to stop."""
        if self.killed[-1:] == ["supervisor"]:
            eventually(lambda: self.run.status.state == "running" or not self.run.alive)
            self.run.stop()
        eventually(lambda: not self.run.alive and not processes.strays(self.run.directory))
        processes.kill_trees([self.kernel])


def random_moment(attempt: Attempt, gate: Gate, reached: int, dice: random.Random) -> int:
    """Wait for a moment after the step that was reached before, and return the step up to which the gate is open.

    The ranks wait at a step, with the checkpoint of that step half written if it has one, or go on meanwhile.
    """
    step, goes_on = reached + dice.randint(1, 2 * EVERY), 2 * EVERY if dice.random() < 0.5 else 0
    if dice.random() < 0.5:
        step += -step % EVERY
    gate.open(step + goes_on)
    eventually(lambda: attempt.run.row()["step"] >= step or attempt.run.status.final)
    return step + goes_on


def random_start(attempt: Attempt, dice: random.Random) -> None:
    """Wait until some of the launcher and its ranks have started, or none of them yet."""
    ranks = dice.randint(0, 3)
    eventually(lambda: len(processes.live_workers(attempt.run.directory)) >= ranks or attempt.run.status.final)


def test_no_step_is_lost_or_doubled_and_nothing_is_left_behind(node, capsys):
    seed = int(os.environ.get("WORKBENCH_KILL_SEED") or random.SystemRandom().randrange(10**6))
    dice = random.Random(seed)
    killed: list[str] = []
    bag: list[str] = []
    attempts, run = 0, None
    gate, reached = Gate(node / "gate", open_to=2 * EVERY), 2 * EVERY
    while len(killed) < KILLS:
        attempt = Attempt.begin(node, resume=run.path if run else None)
        attempts, run = attempts + 1, attempt.run
        if attempts == 1:
            eventually(lambda begun=run: begun.checkpoints)
        while not attempt.killed or attempt.killed[-1] == "kernel":
            bag = bag or dice.sample(VICTIMS, len(VICTIMS))
            victim = bag.pop()
            if victim in attempt.killed:
                continue
            if attempts > 1 and dice.random() < 0.4:
                random_start(attempt, dice)
            else:
                reached = random_moment(attempt, gate, reached, dice)
            attempt.kill(victim)
            if attempt.run.status.final:
                break
        attempt.settle()
        killed += attempt.killed
        assert not of_this_test(node), f"seed {seed}: left after {attempt.killed}"
        queue = next((node / "home" / "device_queue").iterdir())
        assert not device_queue._live_tickets(queue), f"seed {seed}: the queue is blocked"
    gate.open()
    last = run.checkpoints[-1].step + 25
    history = finished(start(steps=last, resume=run.path)).history()
    assert history.step.tolist() == list(range(1, last + 1)), f"seed {seed}"
    assert history.loss.tolist() == [7 / step for step in range(1, last + 1)], f"seed {seed}"
    logged = {event["step"] for event in read_events(run.directory.events) if event["type"] == "step"}
    assert logged >= set(range(1, last + 1))
    with capsys.disabled():
        counts = ", ".join(f"{killed.count(victim)} {victim}" for victim in VICTIMS)
        print(f"\n{len(killed)} kills ({counts}) in {attempts} attempts, seed {seed}: {last} steps, each once.")
