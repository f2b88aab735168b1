"""The processor of this machine, read without starting a process."""

from __future__ import annotations

import os
import platform
from pathlib import Path


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
