"""The machine for training: what is recorded of it at each launch, and what the doctor finds missing.

Neither imports torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from workbench.base.arguments import checked_arguments
from workbench.base.display import html_table
from workbench.base.errors import WorkbenchError
from workbench.base.machine import available_cores, cpu_model
from workbench.base.secrets import masked_command, masked_words
from workbench.base.units import gib
from workbench.runs.tracking.wandb_tracker import logged_in

DISTRIBUTION, IMPORT_NAME = "training-workbench", "workbench"
"""The name by which pip knows this project, and that of its package, which another project on PyPI is called."""
SHOWN_PACKAGES = ("accelerate", "transformers", "datasets", "plotly", "wandb", "jupyterlab", "papermill")
TEMPLATES = Path("share/jupyter/notebook_templates/workbench")
LITTLE_DISK_BYTES = 10 * 2**30
TORCH_PROBE = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
PROBE_LIMIT_S = 120.0


@dataclass(frozen=True)
class Finding:
    """One line of the report; `remedy` says what to do if `ok` is False, or what would help."""

    subject: str
    ok: bool
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """The findings of `doctor`, shown as a table."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Return True if nothing is missing."""
        return all(finding.ok for finding in self.findings)

    @property
    def missing(self) -> tuple[Finding, ...]:
        """Return the findings that are not ok."""
        return tuple(finding for finding in self.findings if not finding.ok)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __repr__(self) -> str:
        width = max(len(finding.subject) for finding in self.findings)
        return "\n".join(
            f"{'ok     ' if each.ok else 'missing'}  {each.subject.ljust(width)}  {each.found}"
            f"{f'. {each.remedy}' if each.remedy else ''}"
            for each in self.findings
        )

    def _repr_html_(self) -> str:
        return html_table((), (("✓" if f.ok else "✗", f.subject, f.found, f.remedy) for f in self.findings))


@checked_arguments
def doctor(data: bool = False) -> Report:
    """Examine Python, PyTorch, GPUs, cores, memory, disk, packages, W&B, templates and the cache; change nothing.

    `data` also reads every tokenised text of the cache and compares it with what was written.
    """
    python = Finding("Python", True, f"{platform.python_version()} ({sys.executable})")
    packages = [_package(name) for name in SHOWN_PACKAGES]
    texts = (_texts(),) if data else ()
    machine = (python, _name(), _torch(), _gpus(), _machine(), _disk())
    return Report((*machine, *packages, _wandb(), _templates(), _cache(), *texts))


def _name() -> Finding:
    """Look for the other project whose package is called `workbench`: pip writes both into one folder."""
    here = Path(__file__).parents[1]
    for found in metadata.distributions(name=IMPORT_NAME):
        if any(str(file) == f"{IMPORT_NAME}/__init__.py" for file in found.files or ()):
            remedy = (
                f"Run pip uninstall --yes {IMPORT_NAME} {DISTRIBUTION}, then install this project again, or give it an "
                "environment of its own."
            )
            what = f"another project, {IMPORT_NAME} {found.version} of PyPI, is installed under the same import name"
            return Finding("Package", False, what, remedy)
    return Finding("Package", True, f"{IMPORT_NAME} from {here}")


def _torch() -> Finding:
    """Examine PyTorch in another process, because it takes seconds to import and may claim a GPU."""
    if package_version("torch") is None:
        return Finding("PyTorch", False, "not installed", "pip install 'torch>=2.11'.")
    try:
        answer = subprocess.run(
            [sys.executable, "-c", TORCH_PROBE], capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("PyTorch", False, f"no answer in {PROBE_LIMIT_S:.0f} s", "Look at the GPU driver: nvidia-smi.")
    if answer.returncode != 0:
        reason = answer.stderr.strip().splitlines()[-1:] or ["it cannot be imported"]
        return Finding("PyTorch", False, reason[0], "Install it again: pip install --force-reinstall torch.")
    version, cuda, available = answer.stdout.split()
    if cuda == "None":
        remedy = "Install a CUDA build to use the GPUs." if gpus() else ""
        return Finding("PyTorch", not remedy, f"{version}, built for CPUs", remedy)
    if available != "True":
        remedy = "Update the driver, or see CUDA_VISIBLE_DEVICES." if gpus() else ""
        return Finding("PyTorch", not remedy, f"{version}, built for CUDA {cuda}, sees no GPU", remedy)
    return Finding("PyTorch", True, f"{version}, CUDA {cuda}")


def _gpus() -> Finding:
    found = gpus()
    if not found:
        return Finding("GPUs", True, "none: training runs on CPU processes")
    users = _gpu_users()
    shown = []
    for gpu in found:
        uses = users.get(gpu["uuid"])
        state = f"used by {uses}" if uses else "idle"
        shown.append(f"{gpu['index']}: {gpu['name']}, {gib(gpu['memory_bytes'] - gpu['used_bytes'])} free, {state}")
    return Finding("GPUs", True, "; ".join(shown))


def _gpu_users() -> dict[str, str]:
    """Return `"alice (pid 4711), ..."` by GPU UUID, as far as this user may know."""
    users: dict[str, list[str]] = {}
    for uuid, pid in nvidia_smi("--query-compute-apps=gpu_uuid,pid"):
        try:
            name = psutil.Process(int(pid)).username()
        except (psutil.Error, ValueError):
            name = "another user"
        users.setdefault(uuid, []).append(f"{name} (pid {pid})")
    return {uuid: ", ".join(names) for uuid, names in users.items()}


def _machine() -> Finding:
    memory = psutil.virtual_memory()
    cores = f"{available_cores()} cores, {gib(memory.available)} of {gib(memory.total)} free"
    return Finding("Machine", True, f"{cpu_model()}, {cores}")


def _disk() -> Finding:
    usage = shutil.disk_usage(os.getcwd())
    ok = usage.free >= LITTLE_DISK_BYTES
    remedy = "" if ok else "Free some, or set WORKBENCH_RUNS to a larger disk: checkpoints take 12 bytes a parameter."
    return Finding("Disk here", ok, f"{gib(usage.free)} free", remedy)


def _package(name: str) -> Finding:
    needed = _needed(name)
    version = package_version(name)
    install = f"pip install '{name}{needed}'."
    if version is None:
        return Finding(name, False, "not installed", install)
    if not needed.contains(version, prereleases=True):
        return Finding(name, False, f"{version}, {needed} needed", install)
    return Finding(name, True, version)


def _needed(name: str) -> SpecifierSet:
    """Return the versions of a package that this installation needs; any version for a bare checkout."""
    try:
        requirements = map(Requirement, metadata.requires(DISTRIBUTION) or [])
    except metadata.PackageNotFoundError:
        return SpecifierSet()
    asked = (each.specifier for each in requirements if each.name == name and each.marker is None)
    return next(asked, SpecifierSet())


def _wandb() -> Finding:
    if os.environ.get("WANDB_MODE") == "disabled":
        return Finding("W&B login", True, "switched off by WANDB_MODE=disabled")
    try:
        known = logged_in()
    except WorkbenchError as problem:
        return Finding("W&B login", False, "unknown", str(problem))
    if known:
        return Finding("W&B login", True, "a key is there: runs are uploaded beside the training")
    return Finding("W&B login", True, "no key: runs are recorded offline", "`wandb login` uploads them as well.")


def _templates() -> Finding:
    """Examine the folder in which JupyterLab's launcher finds the templates."""
    installed = Path(sys.prefix) / TEMPLATES
    if installed.is_dir():
        return Finding("Templates", True, f"{len(list(installed.glob('*.ipynb')))} in {installed}")
    return Finding("Templates", False, "not in JupyterLab's launcher", "Install the package itself: pip install .")


def _cache() -> Finding:
    from workbench.base.machine import cache_home

    home = cache_home()
    sizes = {path: path.stat().st_size for path in home.rglob("*") if path.is_file()}
    captures = [size for path, size in sizes.items() if path.parent == home / "captures"]
    said = f", among it {len(captures):,} captures of models ({gib(sum(captures))})" if captures else ""
    way = "May be deleted while nothing runs." if sizes else ""
    return Finding("Cache", True, f"{gib(sum(sizes.values()))} in {home}{said}", way)


def _texts() -> Finding:
    """Read the tokenised texts of the cache, to the last byte."""
    from workbench.data.store import cached_texts, damage_of

    texts = cached_texts()
    damaged = [problem for folder in texts if (problem := damage_of(folder)) is not None]
    if not damaged:
        return Finding("Token cache", True, f"{len(texts)} texts, every file as it was written")
    damage = f"{len(damaged)} of {len(texts)} texts are damaged: {' '.join(damaged)}".removesuffix(".")
    return Finding("Token cache", False, damage, "Delete the folder: the text is then tokenised again.")


# What a launch records: machine, versions and git state

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
        "notebook": masked_words(os.environ.get("JPY_SESSION_NAME", "")) or None,  # which JupyterLab tells its kernels
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
