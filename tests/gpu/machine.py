"""What the tests of this folder run on: one process a GPU, over NCCL.

python -m pytest -q tests/gpu                              # at most four GPUs, one test at a time
python -m pytest -q tests/gpu -n auto --dist loadgroup     # tests beside each other, some on every GPU
WORKBENCH_TEST_DEVICE=cpu python -m pytest -q tests/gpu    # a rehearsal: four processes on CPUs, over gloo

Beside each other, every worker has another GPU as its first, where its tests of one GPU run. Tests share GPUs: no
verdict is one of speed, and memory is that of a process alone.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("WORKBENCH_TEST_DEVICE", "cuda")
FOUND = int(os.environ.get("WORKBENCH_TEST_DEVICES", 4)) if DEVICE == "cpu" else torch.cuda.device_count()
DEVICES = max(size for size in (0, 1, 2, 4) if size <= FOUND)
WORKERS_OF_ONE = max(1, min(8, (os.cpu_count() or 1) // (2 * max(1, DEVICES))))
"""Tests at a time, for each GPU: most wait for processes to start and for kernels to compile, which takes cores."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


def turn(worker: str) -> None:
    """Let a worker of pytest-xdist, and what it starts, see the GPUs in an order that begins with another one."""
    named = [name for name in os.environ.get(VISIBLE, "").split(",") if name] or list(map(str, range(FOUND)))
    first = int(worker.removeprefix("gw")) % max(1, len(named))
    os.environ[VISIBLE] = ",".join(named[first:] + named[:first])


if DEVICE == "cuda" and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    turn(worker)


def needs(devices: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(devices > DEVICES, reason=f"{devices} GPUs are needed, and {DEVICES} are here")


def together(name: str) -> pytest.MarkDecorator:
    """Let tests run in one worker, because they look at what one start of processes found."""
    return pytest.mark.xdist_group(name)


def here() -> torch.device:
    """This process's device."""
    return torch.device("cuda", torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")
