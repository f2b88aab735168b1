"""Kernels for tests, reached through files: another process may take a port before a kernel opens it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.patience import PATIENCE_S


def reached_by_files(folder: Path) -> dict[str, str]:
    """Return the options of a kernel's manager whose kernel is reached through files in a folder."""
    return {"transport": "ipc", "ip": str(folder / "kernel")}


@contextlib.contextmanager
def kernel(**options: Any) -> Iterator[BlockingKernelClient]:
    """Start a kernel of Python, and end it after the block; the options are those of its process."""
    with tempfile.TemporaryDirectory() as folder:
        manager = KernelManager(**reached_by_files(Path(folder)))
        manager.start_kernel(**options)
        client = manager.blocking_client()
        try:
            client.start_channels()
            client.wait_for_ready(timeout=PATIENCE_S)
            yield client
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
