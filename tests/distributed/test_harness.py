"""Worlds of small processes: what was captured serves later worlds, and one that fails harms none of them."""

from __future__ import annotations

import functools
import os

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from tests.distributed.harness import launch


@functools.cache
def captured() -> int:
    """Stand for a capture; return the process that made it."""
    return os.getpid()


def summed(rank: int) -> tuple[int, int, float]:
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return captured(), os.getppid(), total.item()


def failing(rank: int) -> None:
    if rank == 1:
        raise ValueError(f"fault of rank {rank}")
    dist.barrier()


def ending(_rank: int) -> None:
    os.kill(os.getppid(), 9)


def test_what_one_world_captured_ahead_later_worlds_of_any_size_have() -> None:
    two, four = (launch(summed, world, ahead=captured) for world in (2, 4))
    assert two[:2] == four[:2]
    assert two[0] == two[1] != os.getpid()
    assert (two[2], four[2]) == (1.0, 6.0)


def test_a_world_that_fails_is_told_and_the_next_one_starts() -> None:
    with pytest.raises(ProcessRaisedException, match="fault of rank 1"):
        launch(failing, 2)
    with pytest.raises((EOFError, ConnectionError)):
        launch(ending, 1)
    assert launch(summed, 2)[2] == 1.0
