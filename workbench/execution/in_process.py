"""Rank 0 of a run in the calling process, where a breakpoint in the model stops; further ranks are processes as always.

A rank changes much of the process that it is: its environment, random numbers, torch's settings, process groups. All of
that is as before when the training has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import send_to_device

from workbench.data.datasets import StreamedDataset, untouched_generators
from workbench.errors import WorkbenchError
from workbench.execution.local_launch import LOOPBACK, loopback_interface, new_loopback_store
from workbench.execution.worker import TrainingWorker, build_model_of, train
from workbench.rundir import RunDir
from workbench.user_code import user_path

LEAVES_S = 60.0
"""Seconds in which the other ranks must have left once this one has ended in order."""


class _WorkerHere(TrainingWorker):
    """A rank in a process that lives on."""

    def run(self) -> int:
        """Call the model as it is, then train; return the number of completed steps."""
        try:
            self._call_model()
            return super().run()
        finally:
            self.heartbeat.close()

    def _call_model(self) -> None:
        """Build the model and call it with the first samples of the training.

        The training runs blocks that were captured from the model: only here does its own code compute.
        """
        dataset = self.experiment.data.dataset(self.experiment)
        if isinstance(dataset, StreamedDataset):
            samples = self.experiment.data.examples(self.experiment)
        else:
            samples = dataset.collate([dataset[index] for index in range(self.plan.micro_batch)])
        if samples is not None:
            model = build_model_of(self)
            with self.accelerator.autocast():
                model(**send_to_device(dict(samples), self.device))


def check_free() -> None:
    """Raise `WorkbenchError` if this process cannot be a rank, because it has process groups or an `Accelerator`."""
    if dist.is_initialized() or PartialState._shared_state:
        raise WorkbenchError(
            "This process has process groups or an Accelerator already, and a rank makes its own. Restart it, or "
            "launch the run in processes of its own: wb.launch(experiment, plan)."
        )


def train_here(path: Path, world: int, device_type: str) -> None:
    """Train a prepared run of `world` ranks to its end, with rank 0 in this process; raises what the rank raises."""
    run = RunDir(path)
    store = new_loopback_store()
    meeting = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
        "GLOO_SOCKET_IFNAME": loopback_interface(),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "ACCELERATE_USE_CPU": str(device_type == "cpu"),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    with _as_before(torch.device(device_type)), ExitStack() as others:
        os.environ |= meeting
        processes = [others.enter_context(_rank(run, rank)) for rank in range(1, world)]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
        try:
            train(run, _WorkerHere)
            for process in processes:
                process.wait(LEAVES_S)
        finally:
            run.rank(0).unlink(missing_ok=True)  # this process lives on, but the rank does not


@contextmanager
def _rank(run: RunDir, rank: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run another rank in a process of its own, which is ended with the block."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "PYTHONPATH": os.pathsep.join(user_path()),
    }
    command = [sys.executable, "-m", "workbench.execution.worker", str(run.path)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def _as_before(device: torch.device) -> Iterator[None]:
    """Give this process back what a rank changes: environment, random numbers, torch's settings, process groups."""
    environment = dict(os.environ)
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        with untouched_generators(device):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision(precision)
        if torch.cuda.is_initialized():
            torch.cuda.set_per_process_memory_fraction(1.0)
        os.environ.clear()
        os.environ |= environment
