"""Worlds of small processes: what was captured serves later worlds, and one that fails harms none of them."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from tests.distributed.harness import environment, launch, meeting, run_ranks
from tests.patience import GATE, Gate, wait_for_gate


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


def hanging(_rank: int, test: int, gate: str) -> None:
    os.environ[GATE] = gate
    Path(f"{gate}.pid").write_text(str(os.getpid()))
    os.kill(test, signal.SIGUSR1)
    wait_for_gate(1)


def test_ranks_of_a_test_that_is_ended_print_their_stacks_and_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks on GPUs are started so."""

    def end(*_: object) -> None:
        raise TimeoutError

    gate, store = Gate(tmp_path / "gate"), meeting()
    usual = signal.signal(signal.SIGUSR1, end)
    arguments = (1, environment(store), str(tmp_path / "result"), "cpu", hanging, (os.getpid(), str(gate.file)))
    try:
        with pytest.raises(TimeoutError):
            run_ranks(arguments, "forkserver")
    finally:
        signal.signal(signal.SIGUSR1, usual)
    assert "in hanging\n" in capsys.readouterr().out
    assert not psutil.pid_exists(int(Path(f"{gate.file}.pid").read_text()))
