"""Ranks that build models in the host's memory take turns: as many build at once as it has memory for."""

from __future__ import annotations

import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests.distributed.harness import launch
from workbench.execution import build
from workbench.execution.build import FREE_SHARE, build_lock

MODEL_BYTES = 10 << 30
CPU = torch.device("cpu")
TURN_S = 1.0


def _seen(rank: int, fitting: float, on_host: bool) -> tuple[int, float]:
    """Return the largest number of overlapping turns, and the seconds that all turns took together.

    Rank 0 sees memory for three models, the others for `fitting`.
    """
    free = (3.2 if rank == 0 else fitting) * MODEL_BYTES / FREE_SHARE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_is_built_on_host", lambda *_: on_host)
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
        with build_lock(MODEL_BYTES, CPU, rank):
            begun = time.monotonic()
            time.sleep(TURN_S)
            ended = time.monotonic()
    spans = [(0.0, 0.0)] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(spans, (begun, ended))
    most = max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)
    return most, max(end for _, end in spans) - min(begin for begin, _ in spans)


@pytest.mark.parametrize(
    ("fitting", "on_host", "map_in_threads", "turns"),
    [(2.5, True, 2, 2), (0.4, True, 1, 4), (9.0, True, 3, 2), (0.4, False, 4, 1)],
)
def test_no_more_ranks_build_at_once_than_the_host_has_room_for(
    fitting: float, on_host: bool, map_in_threads: int, turns: int
) -> None:
    most, seconds = launch(_seen, 4, fitting, on_host)
    assert most == map_in_threads
    assert seconds >= turns * TURN_S
