"""Every test of this folder is skipped where there is no GPU, and no rehearsal on CPUs was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.machine import DEVICE, DEVICES, WORKERS_OF_ONE, needs

LONGEST = ("test_runs.py", "test_hangs.py", "test_cuda_graphs.py", "test_non_finite.py")
"""Files whose tests begin first, so that no worker is left with one of them at the end."""


def pytest_xdist_auto_num_workers() -> int:
    return WORKERS_OF_ONE * DEVICES if DEVICE == "cuda" else 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(needs(1))
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
