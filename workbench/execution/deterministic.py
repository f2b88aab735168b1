"""Kernels that give the same bits every time, for `Experiment.deterministic`.

See https://docs.pytorch.org/docs/stable/notes/randomness.html: torch then takes deterministic kernels where it has them
(attention other than cuDNN's, sums in a fixed order), and raises where it has none.
"""

from __future__ import annotations

import os

import torch

WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""What cuBLAS wants for matrix products on several streams; read when its first handle is made."""
REFUSAL = "does not have a deterministic implementation"
"""In the words of torch's error."""


def make_repeatable() -> None:
    """From now on, in this process; before its first matrix product."""
    os.environ.setdefault(*WORKSPACE)
    torch.use_deterministic_algorithms(True)
    # Else torch fills every new tensor, in case somebody reads it before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
