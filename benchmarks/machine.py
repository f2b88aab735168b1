"""The machine and the moment of a measurement: commit, date, versions, and the clocks and power of its GPUs."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch

LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "megatron-core",
    "deepspeed",
    "transformer-engine",
    "apex",
    "flash-attn",
)
EVERY_S = 0.2
"""Seconds between two samples of clocks and power."""


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def described() -> dict[str, Any]:
    """Return what a raw file says of the machine; null for what cannot be known, as the driver on a CPU."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "date": now(),
        "commit": _commit(),
        "devices": gpus or [f"{os.cpu_count()} CPU cores"],
        "driver": _ask("nvmlSystemGetDriverVersion"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
    }


class Clocks:
    """Samples of clocks, power and temperature of the GPUs, taken by a thread of a process that measures nothing."""

    def __init__(self, gpus: int) -> None:
        self._samples: list[tuple[float, list[dict[str, float]]]] = []
        self._stop = threading.Event()
        self._nvml = _nvml()
        self._handles = _handles(self._nvml, gpus) if self._nvml else []
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Clocks:
        if self._handles:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def between(self, start: float, end: float, busy: bool = False) -> list[dict[str, Any]] | None:
        """Return median, least and most of each quantity of each GPU between two times; None without samples.

        With `busy`, samples count in which a GPU takes at least half of the power that it may take.
        """
        chosen = [gpus for at, gpus in self._samples if start <= at <= end]
        if not chosen:
            return None
        found = []
        for gpu in range(len(self._handles)):
            samples = [gpus[gpu] for gpus in chosen if not busy or _is_busy(gpus[gpu])]
            names = dict.fromkeys(name for sample in samples for name in sample)
            told: dict[str, Any] = {"samples": len(samples)}
            for name in names:
                values = [sample[name] for sample in samples if name in sample]
                told[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
            found.append(told)
        return found

    def _sample(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._samples.append((time.time(), [self._of(handle) for handle in self._handles]))

    def _of(self, handle: Any) -> dict[str, float]:
        nvml, found = self._nvml, {}
        questions = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        for name, question in questions.items():
            try:
                found[name] = float(question())
            except nvml.NVMLError:  # this GPU or slice of a GPU does not say
                continue
        return found


def _is_busy(sample: dict[str, float]) -> bool:
    return sample.get("power_w", 0.0) >= 0.5 * sample.get("power_limit_w", 0.0)


def _handles(nvml: Any, gpus: int) -> list[Any]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name for name in visible if name][:gpus] or [str(index) for index in range(gpus)]
    by_index = nvml.nvmlDeviceGetHandleByIndex
    return [by_index(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name) for name in names]


def _nvml() -> Any:
    """Return NVML, initialised; None where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _ask(question: str) -> Any:
    nvml = _nvml()
    return None if nvml is None else getattr(nvml, question)()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of this checkout, `+` behind it if files differ from it; elsewhere `$COMMIT`."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT")
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")
