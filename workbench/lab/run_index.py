"""The rows of JupyterLab's sidebar: a user's own runs, of which each reading looks only at what has changed."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from workbench.errors import RunNotFound, WorkbenchError
from workbench.rundir import FINAL_STATES, RunDir
from workbench.runs.event_log import spread_steps
from workbench.runs.launching.device_queue import GpuMeter, waiting_and_training
from workbench.runs.loss_basis import read_loss_basis
from workbench.runs.registry import row_or_reason
from workbench.runs.run import Run, progress_words, step_text
from workbench.runs.status import state_in_words
from workbench.units import count, gib, time_left
from workbench.widgets.run_reader import state_color

SPARKLINE_POINTS = 60
READING_S = 0.3
"""Seconds after which a reading answers with what it has; the rest comes with the next one."""

Signature = tuple[tuple[int, int], ...]


@dataclass
class _Entry:
    """One run as it was last read."""

    run: Run
    version: int
    signature: Signature = ()
    """Size and time of change of the files that a row is made of."""
    row: dict[str, Any] = field(default_factory=dict)


class RunIndex:
    """Rows of all runs below some folders; one index serves every page of a server.

    `folder` is the user's, in relation to which a page names a run's place.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path.cwd()
        self._entries: dict[Path, _Entry] = {}
        self._gone: dict[str, int] = {}
        self._version = 0
        self._lock = threading.Lock()
        self._meter: GpuMeter | None = None
        with contextlib.suppress(Exception):  # no driver, or one of another version
            import pynvml

            pynvml.nvmlInit()
            if num_gpus := pynvml.nvmlDeviceGetCount():
                self._meter = GpuMeter([str(index) for index in range(num_gpus)])
        self._cpu_times, self._cpu_share = psutil.cpu_times(), 0.0

    def read(self, roots: Iterable[Path], since: int = 0) -> dict[str, Any]:
        """Return the rows that changed after version `since`, the paths that are gone, the queue and the devices.

        `unread` is the number of runs whose row has a name only, because there was no time to read more.
        """
        with self._lock:
            unread = self._update(own_runs(roots))
            times = psutil.cpu_times()  # psutil.cpu_percent() begins anew in each thread of the server
            passed, idle = sum(times) - sum(self._cpu_times), times.idle - self._cpu_times.idle
            if passed > 1.0:
                self._cpu_times, self._cpu_share = times, max(0.0, 1 - idle / passed)
            devices = [{"name": "CPU", "share": self._cpu_share, "used_bytes": None}]
            if self._meter is not None:
                sample = self._meter.sample()
                columns = zip(sample.names, sample.shares, sample.used_bytes, strict=True)
                devices += [{"name": name, "share": share, "used_bytes": used} for name, share, used in columns]
            try:
                queue = [row for row in waiting_and_training() if row["waits_for"] or row["devices"] is None]
            except (OSError, WorkbenchError):  # no run was ever launched here, or the folder cannot be written
                queue = []
            return {
                "version": self._version,
                "rows": [entry.row for entry in self._entries.values() if entry.version > since],
                "gone": [path for path, version in self._gone.items() if version > since],
                "unread": unread,
                "queue": queue,
                "devices": devices,
            }

    def _update(self, found: Sequence[Path]) -> int:
        for path in self._entries.keys() - set(found):
            del self._entries[path]
            self._version += 1
            self._gone[str(path)] = self._version
        waiting = list[tuple[_Entry, Signature]]()
        for path in found:
            directory, stats = RunDir(path), list[tuple[int, int]]()
            for file in (directory.experiment, directory.events, directory.labels):
                try:
                    at = file.stat()
                    stats.append((at.st_size, at.st_mtime_ns))
                except OSError:
                    stats.append((0, 0))
            signature, entry = tuple(stats), self._entries.get(path)
            if entry is None:
                self._version += 1
                self._gone.pop(str(path), None)
                entry = self._entries[path] = _Entry(Run(path), self._version)
                inside = path.is_relative_to(self._folder)
                place = path.relative_to(self._folder) if inside else Path("…", *path.parts[-2:])
                made = {"path": str(path), "name": path.name, "created": signature[0][1] / 1e9}
                entry.row = {**made, "place": str(place)}
            # Nothing but a change of its files can change the row of a run that has ended.
            if signature != entry.signature or entry.row.get("state") not in FINAL_STATES:
                waiting.append((entry, signature))
        waiting.sort(key=lambda pair: (bool(pair[0].signature), pair[1][0][1]), reverse=True)  # then the newest first
        deadline, read = time.monotonic() + READING_S, 0
        for entry, signature in waiting:
            row = {**entry.row, **_row(entry.run, signature != entry.signature)}
            entry.signature = signature
            if row != entry.row:
                self._version += 1
                entry.row, entry.version = row, self._version
            read += 1
            if time.monotonic() > deadline:
                break
        return sum(not entry.signature for entry, _ in waiting[read:])


def own_runs(roots: Iterable[Path]) -> list[Path]:
    """Return the directories of this user's runs in some folders; neither those of other users nor links."""
    found = []
    for root in roots:
        with contextlib.suppress(OSError), os.scandir(root) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    is_own = entry.is_dir(follow_symlinks=False) and entry.stat().st_uid == os.getuid()
                    if is_own and RunDir(Path(entry.path)).experiment.is_file():
                        found.append(Path(entry.path))
    return found


def own_run(path: str, roots: Iterable[Path]) -> Run:
    """Return the run of this user at a path that a page names; raises `RunNotFound` for every other path."""
    with contextlib.suppress(OSError, ValueError):
        real = Path(path).resolve(strict=True)
        if real.parent in {root.resolve() for root in roots} and real in own_runs([real.parent]):
            return Run(real)
    raise RunNotFound(f"You have no run {path!r:.200} in a folder of runs.")


def _row(run: Run, has_changed: bool) -> dict[str, Any]:
    """Return a run's row; its curve and its settings only if it `has_changed`."""
    from workbench.experiment import values_by_name

    row = row_or_reason(run)
    shown: dict[str, Any] = {
        name: row[name]
        for name in ("state", "message", "step", "steps", "tokens_per_s", "eta_s", "time", "tags", "notes", "archived")
    }
    for name in ("loss", "eval_loss", "training_loss", "tokens", "mfu", "devices", "peak_bytes"):
        value: Any = row[name]
        shown[name] = value if isinstance(value, int | float) and math.isfinite(value) else None
    shown["held_out"] = row["eval_loss"] is not None
    shown["words"] = state_in_words(row["state"], row["step"], row["training_loss"])
    shown["color"], shown["ended"] = state_color(shown["words"]), row["state"] in FINAL_STATES
    pace = list[str]()  # time left, and devices
    if row["state"] not in FINAL_STATES:
        pace += [] if row["eta_s"] is None else [f"{time_left(row['eta_s'])} left"]
        several = [f"{row['devices']} devices"] if (row["devices"] or 0) > 1 else []
        pace += [f"GPU {', '.join(map(str, row['gpus']))}"] if row["gpus"] else several
    shown["pace"] = " · ".join([*(word for word in progress_words(row) if "tokens" in word), *pace])
    shown["facts"] = " · ".join([f"step {step_text(row)}", *progress_words(row), *pace])
    spelt: dict[str, Callable[[float], str]] = {
        "tokens": count,
        "tokens_per_s": count,
        "mfu": "{:.1%}".format,
        "peak_bytes": gib,
        "eta_s": time_left,
    }
    spelt |= dict.fromkeys(("loss", "eval_loss", "training_loss"), "{:.4g}".format)
    shown["written"] = {"step": step_text(row)}
    shown["written"] |= {n: spell(shown[n]) for n, spell in spelt.items() if shown[n] is not None}
    shown["resumable"] = row["state"] in ("stopped", "failed") and bool(run.checkpoints)
    if has_changed:
        events: list[Any] = list(spread_steps(run.directory.events, SPARKLINE_POINTS))
        losses = [(event["step"], event.get("loss")) for event in events]
        known = [(step, value) for step, value in losses if isinstance(value, int | float) and math.isfinite(value)]
        shown["losses"] = [(step, float(f"{value:.4g}")) for step, value in known]
        basis = read_loss_basis(run.directory)
        shown["basis"] = [] if basis is None else basis.of(shown["held_out"])
        # The numbers and words of the experiment by their short names are columns of the table.
        values = dict[str, Any]()
        with contextlib.suppress(WorkbenchError, ValueError, AttributeError, TypeError):  # a damaged file
            values = values_by_name(run.config)
            for group in ("model", "data"):
                values |= {f"{group}.{name}": value for name, value in (values.get(group) or {}).items()}
        shown["settings"] = {
            name: value
            for name, value in values.items()
            if isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))
        }
    return shown
