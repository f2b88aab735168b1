"""The processor of this machine, read without starting a process, and the folders of its user."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from workbench.errors import WorkbenchError


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """Return the kernel's name of the processor, such as `"AMD EPYC 9534 64-Core Processor"`."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def cache_home() -> Path:
    """Return the cache folder, for everything that can be made again: tokenised text, measurements, the device queue.

    It is `$WORKBENCH_HOME`, or the user's cache folder by the custom of the platform.
    """
    if home := os.environ.get("WORKBENCH_HOME"):
        return Path(home).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "workbench"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workbench"


def current_folder() -> Path:
    """Return the current folder; raises `WorkbenchError` if it was deleted or may not be read."""
    try:
        return Path.cwd()
    except OSError as error:
        raise WorkbenchError(
            f"The current folder cannot be used: {error.strerror}. It was deleted or closed to you while this process "
            "was in it. Change to another one, os.chdir(...), or %cd in a notebook."
        ) from None
