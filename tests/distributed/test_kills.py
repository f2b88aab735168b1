"""Kernel, supervisor, Accelerate's launcher and ranks killed with -9 at random moments: nothing is lost or left behind.

Three kills by default, fifty in `make test-exhaustive`; `WORKBENCH_KILL_SEED` repeats a sequence.
"""

import contextlib
import os
import random
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.distributed.own_machine import own_machine
from tests.distributed.test_launch import HERE, ROOT, start
from tests.exhaustive import EXHAUSTIVE
from tests.patience import eventually
from workbench.events import ProcessRecord
from workbench.rundir import process_alive, process_record
from workbench.runs.event_log import read_events
from workbench.runs.launching import device_queue, processes
from workbench.runs.registry import load_run
from workbench.runs.run import Run

KILLS = 50 if EXHAUSTIVE else 3
ENDLESS = 1_000_000
VICTIMS = ("kernel", "supervisor", "launcher", "rank 0", "rank 1")

KERNEL = f"""
    import sys, time
    sys.path.insert(0, {str(HERE)!r})
    from test_launch import start
    resume = sys.argv[1] if len(sys.argv) > 1 else None
    print(start(steps={ENDLESS}, resume=resume).path, flush=True)
    time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def node(tmp_path, monkeypatch):
    for name, value in (("STANDIN_STEP_S", "0.02"), ("STANDIN_CHECKPOINT_EVERY", "10")):
        monkeypatch.setenv(f"WORKBENCH_{name}", value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
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

    kernel: subprocess.Popen
    run: Run
    killed: list[str] = field(default_factory=list)

    @staticmethod
    def begin(resume: Path | None) -> "Attempt":
        command = [sys.executable, "-c", textwrap.dedent(KERNEL), *([str(resume)] if resume else [])]
        kernel = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return Attempt(kernel, load_run(kernel.stdout.readline().strip()))

    def record_of(self, victim: str) -> ProcessRecord | None:
        """None while there is no such process yet, or any more."""
        if victim == "kernel":
            return process_record(self.kernel.pid) if self.kernel.poll() is None else None
        launcher = processes.launcher_record(self.run.directory)
        if victim.startswith("rank"):
            records = {f"rank {r['rank']}": r for r in processes.rank_records(self.run.directory)}
            record = records.get(victim)
        else:
            record = launcher.get({"supervisor": "supervisor", "launcher": "accelerate"}[victim])
        return record if process_alive(record) else None

    def kill(self, victim: str) -> None:
        record = eventually(lambda: self.record_of(victim) or self.run.status.final)
        if record is True:  # the run ended before
            return
        processes.send_signal([record], 9)
        if victim == "kernel":
            self.kernel.wait()
        eventually(lambda: not process_alive(record))
        self.killed.append(victim)

    def settle(self) -> None:
        """Until nothing of the run is left. Ranks that lost their supervisor train on until they are asked to stop."""
        if self.killed[-1:] == ["supervisor"]:
            eventually(lambda: self.run.status.state == "running" or not self.run.alive)
            self.run.stop()
        eventually(lambda: not self.run.alive and not processes.strays(self.run.directory))
        if self.kernel.poll() is None:
            self.kernel.kill()
        self.kernel.wait()


def random_moment(attempt: Attempt, dice: random.Random, before_the_first_step: bool) -> None:
    """Sleep until some moment while processes start, or within a second of the attempt's first step."""
    if not before_the_first_step:
        seen = len(attempt.run.history())
        eventually(lambda: len(attempt.run.history()) > seen or attempt.run.status.final)
    time.sleep(dice.uniform(0.0, 3.0 if before_the_first_step else 1.0))


def test_no_step_is_lost_or_doubled_and_nothing_is_left_behind(node, monkeypatch, capsys):
    seed = int(os.environ.get("WORKBENCH_KILL_SEED") or random.SystemRandom().randrange(10**6))
    dice = random.Random(seed)
    killed: list[str] = []
    bag: list[str] = []
    attempts, run = 0, None
    while len(killed) < KILLS:
        attempt = Attempt.begin(resume=run.path if run else None)
        attempts, run = attempts + 1, attempt.run
        if attempts == 1:
            eventually(lambda begun=run: begun.checkpoints)
        while not attempt.killed or attempt.killed[-1] == "kernel":
            bag = bag or dice.sample(VICTIMS, len(VICTIMS))
            victim = bag.pop()
            if victim in attempt.killed:
                continue
            random_moment(attempt, dice, before_the_first_step=attempts > 1 and dice.random() < 0.4)
            attempt.kill(victim)
            if attempt.run.status.final:
                break
        attempt.settle()
        killed += attempt.killed
        assert not of_this_test(node), f"seed {seed}: left after {attempt.killed}"
        queue = next((node / "home" / "device_queue").iterdir())
        assert not device_queue._live_tickets(queue), f"seed {seed}: the queue is blocked"
    monkeypatch.setenv("WORKBENCH_STANDIN_STEP_S", "0")
    last = run.checkpoints[-1].step + 25
    final = start(steps=last, resume=run.path)
    assert final.wait(timeout=100).status.state == "finished", final.logs("launcher")
    history = final.history()
    assert history.step.tolist() == list(range(1, last + 1)), f"seed {seed}"
    assert history.loss.tolist() == [7 / step for step in range(1, last + 1)], f"seed {seed}"
    logged = {event["step"] for event in read_events(run.directory.events) if event["type"] == "step"}
    assert logged >= set(range(1, last + 1))
    with capsys.disabled():
        counts = ", ".join(f"{killed.count(victim)} {victim}" for victim in VICTIMS)
        print(f"\n{len(killed)} kills ({counts}) in {attempts} attempts, seed {seed}: {last} steps, each once.")
