"""Every test of this folder is skipped where there is no GPU, and no rehearsal on CPUs was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.machine import needs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(needs(1))
