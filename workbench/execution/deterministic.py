"""Kernels that give the same bits every time, for `Experiment.deterministic`.

torch then uses deterministic kernels where it has them (attention other than cuDNN's, sums in a fixed order), and
raises where it has none: https://docs.pytorch.org/docs/stable/notes/randomness.html.
"""

from __future__ import annotations

import os

import torch

CUBLAS_SETTING = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Environment variable that makes matrix products on several streams deterministic. cuBLAS reads it once, with its
first handle."""
NO_DETERMINISTIC_KERNEL = "does not have a deterministic implementation"
"""Phrase by which torch's error is recognised."""


def use_deterministic_kernels() -> None:
    """Use deterministic kernels from now on; call this before the first matrix product of the process."""
    os.environ.setdefault(*CUBLAS_SETTING)
    torch.use_deterministic_algorithms(True)
    # By default torch would now fill every new tensor, in case it is read before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
