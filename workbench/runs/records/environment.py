"""The environment of a launch: machine, versions and git state, gathered without importing torch."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from workbench.machine import available_cores, cpu_model
from workbench.secrets import masked_command, masked_words

PACKAGES = ("workbench", "torch", "accelerate", "transformers", "datasets", "tokenizers", "numpy", "wandb")
DIFF_LIMIT = 20_000
"""Characters of `git diff --stat` that are recorded."""


def environment() -> dict[str, Any]:
    """Return machine, versions and git state of this process, as JSON."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": available_cores(),
        "load_average": os.getloadavg()[0],  # of the minute before: what else the machine was doing
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: package_version(name) for name in PACKAGES},
        "command": masked_command(sys.argv),
        "directory": masked_words(os.getcwd()),
        "git": git_state(Path.cwd()),
    }


def package_version(name: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpus() -> list[dict[str, Any]]:
    """Return index, name, driver and memory of every NVIDIA GPU of the machine, visible to this process or not."""
    listed = []
    for row in nvidia_smi("--query-gpu=index,name,uuid,driver_version,memory.total,memory.used"):
        if len(row) == 6:  # other lines are error messages about a GPU that is lost
            index, name, uuid, driver, total_mib, used_mib = row
            memory = {"memory_bytes": _bytes(total_mib), "used_bytes": _bytes(used_mib)}
            listed.append({"index": int(index), "name": name, "uuid": uuid, "driver": driver, **memory})
    return listed


def _bytes(mib: str) -> int:
    """Return bytes; 0 for a GPU that reports `[N/A]`: one that shares the host's memory, or a slice of a GPU."""
    return int(mib) * 2**20 if mib.isdigit() else 0


def nvidia_smi(query: str) -> list[list[str]]:
    """Return the rows of an `nvidia-smi` query; none where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs
        return []
    if answer.returncode != 0:
        return []
    return [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]


def git_state(directory: Path) -> dict[str, Any] | None:
    """Return the commit, and the changes on top of it with their SHA-256; None outside a repository."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    status = _git(directory, "status", "--porcelain", "--untracked-files=no") or ""
    diff = _git(directory, "diff", "--stat", "HEAD") or ""
    changes = _git(directory, "diff", "HEAD") if status else None
    digest = hashlib.sha256(changes.encode()).hexdigest() if changes else None
    return {"commit": commit, "dirty": bool(status), "diff_stat": diff[:DIFF_LIMIT], "diff_sha256": digest}


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(directory), *arguments]
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
