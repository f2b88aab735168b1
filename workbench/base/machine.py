"""The processor of this machine, read without starting a process, its user's folders, and how a launch is ended."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from workbench.base.errors import WorkbenchError

ELASTIC_GRACE_S = 40.0
"""Seconds in which `torch.distributed.run` ends its workers after SIGTERM: it kills after 30 s those that stay."""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(core_numbers())


def core_numbers() -> Collection[int]:
    """Return the numbers of the cores that this process may use, as the kernel counts them."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


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


def end_elastic_launch(launcher: subprocess.Popen[bytes]) -> None:
    """End `torch.distributed.run` with all of its workers, and return when they are gone.

    A signal to the launcher's process group misses the workers, each of which leads a session of its own, and SIGKILL
    to the launcher leaves them running, with all that they hold on their GPUs. Nothing happens where the launcher has
    already exited, since it ends its workers before.
    """
    import psutil  # the sidebar and the shell import this module, and end no launch

    workers: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        workers = psutil.Process(launcher.pid).children(recursive=True)
    launcher.terminate()  # does nothing after its end
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(ELASTIC_GRACE_S)
    finally:  # also where the user interrupts the wait
        launcher.kill()
        launcher.wait()
        for worker in workers:
            with contextlib.suppress(psutil.Error):
                worker.kill()
        psutil.wait_procs(workers, timeout=10)
