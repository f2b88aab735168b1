"""The real worker without a launcher, on gloo or GPUs: `Ranks(run, world)`, to be waited for, or killed with -9.

What trains is small, has dropout, and reads a dataset of its own; the run directory is as `launch` writes it.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest
import torch

from tests.distributed.harness import environment, meeting, start_method
from tests.patience import PATIENCE_S, eventually
from workbench import models
from workbench.cost.hardware import Cluster, Device, Link
from workbench.execution.heartbeat import STACK_SIGNAL
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.planner import plan as make_plan
from workbench.record.event_log import read_events
from workbench.record.history import HistoryTail
from workbench.record.rundir import RunDir, write_json, write_record
from workbench.runs.launching.launcher import user_code

VOCAB, SEQ = 96, 16
ENDLESS = 10**8
"""Number of steps that no machine takes before patience has ended."""
DEVICE = Device("CPU", "cpu", 4 << 30, {"fp32": 5e10, "bf16": 5e10}, 1e10)
LINK = Link(1e9, 1e-5)


class Words:
    """A dataset of masked words that depend only on their index."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        labels = torch.randint(0, VOCAB, (SEQ,), generator=generator)
        hidden = torch.rand(SEQ, generator=generator) < 0.3
        return {"input_ids": labels.masked_fill(hidden, 4), "labels": labels.masked_fill(~hidden, -100)}


def experiment(dropout: float = 0.1, **changes: Any) -> Experiment:
    """A BERT of two layers."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB, "max_positions": SEQ}
    model = models.bert(**sizes, dropout=dropout, next_sentence=False)
    fields = {"data": Words(), "steps": 40, "global_batch": 8, "seq_len": SEQ, "learning_rate": 3e-3, "warmup_steps": 5}
    return Experiment.of(**{"model": model, "name": "small", "project": "", **fields, **changes})


def plan(asked: Experiment, tensor: int = 1, device: Device = DEVICE, **degrees: Any) -> Plan:
    """Plan for as many devices as the degrees make; `tensor` multiplies their number."""
    world = degrees.get("pipeline", 1) * degrees.get("data", 1)
    chosen = make_plan(asked, Cluster(device, world, world, LINK, LINK), **{"micro_batch": 2, **degrees})
    return dataclasses.replace(chosen, tensor=tensor)


def directory(path: Path, asked: Experiment, chosen: Plan, resume: Path | None = None) -> RunDir:
    """Return a run directory to start from; one that exists is continued."""
    run = RunDir(path)
    for folder in (run.logs, run.ranks, run.errors, run.code, run.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    write_record(run.experiment, asked.to_json())
    write_json(run.plan, chosen.to_json())
    for name, content in user_code(asked).items():
        (run.code / name).write_bytes(content)
    run.resume.unlink(missing_ok=True)
    if resume is not None:
        write_json(run.resume, {"checkpoint": str(resume), "step": int(resume.name.removeprefix("step-"))})
    return run


class Ranks:
    """The processes of one start, each on a CPU or on a GPU of its own. A `with` block ends those that still run."""

    def __init__(self, run: RunDir, world: int, device: str = "cpu") -> None:
        context = multiprocessing.get_context(start_method(device))
        self.run = run
        self._meeting = meeting()
        meets = environment(self._meeting)
        self.processes = [
            context.Process(target=_rank, args=(rank, world, meets, str(run.path), device)) for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, error: type[BaseException] | None, _value: object, _traceback: TracebackType | None) -> None:
        if error is not None:
            self._print_stacks()
        self.kill(0)

    def wait(self) -> None:
        """Wait until all ranks have ended with exit code 0."""
        with self:
            for process in self.processes:
                process.join(PATIENCE_S)
            codes = [process.exitcode for process in self.processes]
            assert codes == [0] * len(codes), (codes, *(path.read_text() for path in self.run.logs.glob("*.log")))

    def kill(self, first: int) -> None:
        """Kill one rank with SIGKILL and then the others with all that they started, as if their machine went down.

        A process that reads data for a rank, and hangs, would keep open what it has from the rank: the GPU, and the
        pipe by which `join` learns that a rank has ended.
        """
        started: list[psutil.Process] = []
        for pid in self._alive():
            with suppress(psutil.Error):
                started += psutil.Process(pid).children(recursive=True)
        for process in (self.processes[first], *self.processes):
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        for child in started:
            with suppress(psutil.Error):
                child.kill()
        for process in self.processes:
            process.join(PATIENCE_S)

    def _alive(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid is not None and process.is_alive()]

    def _print_stacks(self) -> None:
        """Print the logs of all ranks, and the stacks of those that still run."""
        if alive := self._alive():
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)
            time.sleep(1)  # clock: the test has failed already, and stacks that come later are not shown
        for file in sorted([*self.run.logs.glob("*.log"), *self.run.stacks.glob("*.txt")]):
            print(f"{file}:\n{file.read_text()}")


def _rank(rank: int, world: int, meets: dict[str, str], path: str, device: str) -> None:
    gc.freeze()  # as for a rank that is forked from the server of a kernel
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= meets
    os.environ["ACCELERATE_USE_CPU"] = str(device == "cpu").lower()
    from workbench.execution import worker

    os._exit(worker.main(path))


def trained(path: Path, asked: Experiment, chosen: Plan, resume: Path | None = None, device: str = "cpu") -> RunDir:
    """Train from the start, or from a checkpoint, to the end."""
    run = directory(path, asked, chosen, resume)
    Ranks(run, chosen.world, device).wait()
    return run


def reach(run: RunDir, step: int) -> None:
    """Wait until the events tell of that step."""
    eventually(lambda: last_step(run) >= step)


def last_step(run: RunDir) -> int:
    return max((int(event["step"]) for event in read_events(run.events) if event["type"] == "step"), default=0)


def assert_goes_on(run: RunDir, whole: RunDir) -> None:
    """Assert that a run that went on under another plan has the curve of the run that never stopped, up to rounding."""
    found, expected = curve(run), curve(whole)
    assert found.keys() == expected.keys()
    for step, (loss, norm, rate) in expected.items():
        assert found[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4), rate), step


def curve(run: RunDir) -> dict[int, tuple[float, float, float]]:
    """Map each logged step to its exact loss, gradient norm and learning rate."""
    found = HistoryTail(run.events).read()
    return {
        int(step): (loss, norm, rate)
        for step, loss, norm, rate in zip(found.step, found.loss, found.grad_norm, found.learning_rate, strict=True)
    }
