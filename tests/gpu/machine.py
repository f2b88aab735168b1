"""What the tests of this folder run on: one process a GPU, over NCCL.

python -m pytest -q tests/gpu                              # at most four GPUs
WORKBENCH_TEST_DEVICE=cpu python -m pytest -q tests/gpu    # a rehearsal: four processes on CPUs, over gloo
"""

from __future__ import annotations

import os

import pytest
import torch

# Looking for GPUs must not touch CUDA: processes are forked from one that has looked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

DEVICE = os.environ.get("WORKBENCH_TEST_DEVICE", "cuda")
DEVICES = 4 if DEVICE == "cpu" else max(size for size in (0, 1, 2, 4) if size <= torch.cuda.device_count())


def needs(devices: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(devices > DEVICES, reason=f"{devices} GPUs are needed, and {DEVICES} are here")


def here() -> torch.device:
    """This process's device."""
    return torch.device("cuda", torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")
