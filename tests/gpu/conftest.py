"""Every test of this folder is skipped where there is no GPU, and no rehearsal on CPUs was asked for."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.gpu.machine import DEVICE, DEVICES, WORKERS_OF_ONE, needs

LONGEST = tuple(
    f"test_{name}.py"
    for name in ("runs", "cuda_graphs", "any_model", "non_finite", "equivalence", "hangs", "norms", "adamw", "memory")
)
"""Files whose tests begin first, so that no worker is left with one of them at the end."""


def pytest_xdist_auto_num_workers() -> int:
    return WORKERS_OF_ONE * DEVICES if DEVICE == "cuda" else 2


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would begin with the groups that have most tests


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    for item in filter(_is_ours, items):
        item.add_marker(pytest.mark.gpu)
        item.add_marker(needs(1))
    yield  # `tests.durations` orders all files by their recorded seconds, and it knows none of these
    places = {name: place for place, name in enumerate(LONGEST)}
    ours = iter(sorted(filter(_is_ours, items), key=lambda item: places.get(item.path.name, len(LONGEST))))
    items[:] = [next(ours) if _is_ours(item) else item for item in items]


def _is_ours(item: pytest.Item) -> bool:
    return item.path.parent == Path(__file__).parent
