"""The cell of an executed notebook that runs now, what it waits for, and the time that the rest takes.

The seconds of each cell are those that its template states (`expected_s` in its metadata), times the factor by which
the cells that have ended took longer on this machine. JupyterLab's countdown (`countdown.js`) computes the same.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workbench.base.units import time_left

MOST_TIMES = 12.0
"""Largest factor, up or down, by which a machine is taken to differ from the one on which a template was timed."""
PRIOR_S = 4.0
"""Weight of the assumption that there is no difference, as that of a cell which is expected to take so many seconds."""
OVERRUN = 0.25
"""Part of its time so far that a cell still takes which has taken longer than expected."""
LEAST_SHARE = 0.1
"""Part of its work from which on a call's progress is believed: what it took before includes its start."""
LONGEST_S = 1e6
"""Longest time of a cell in s that is believed: anybody may have written the metadata of a notebook."""
LONGEST_SOCKET = 96
"""Characters of a kernel's socket without its number: the system takes a path of 104 to 108."""
STARTUP_S = 60
"""Longest wait in s for a kernel to answer for the first time, as papermill has it."""
AHEAD = "from workbench.runs.launching.launcher import import_ahead as _ahead; _ahead(); del _ahead"
"""Code that a kernel executes before the first cell, as in `curve.js`; its answer does not matter."""
SAVED_SHARE = 0.05
"""Largest part of the time of an execution that may be spent on saving the notebook meanwhile."""


def slowness(expected: Sequence[float], took: Sequence[float]) -> float:
    """Return the factor by which cells that have ended took longer than expected.

    It is the median of their factors, each with the weight of its expected seconds: one cell that had to wait, as for a
    device, tells nothing of those to come.
    """
    factors = [(now / before, before) for before, now in zip(expected, took, strict=False) if before > 0]
    factors.append((1.0, PRIOR_S))
    factors.sort()
    heavier = np.cumsum([weight for _, weight in factors]) >= sum(weight for _, weight in factors) / 2
    return float(np.clip(factors[int(np.argmax(heavier))][0], 1 / MOST_TIMES, MOST_TIMES))


def seconds_left(
    expected: Sequence[float], took: Sequence[float], running_s: float, told: tuple[float, float] | None = None
) -> float:
    """Return the seconds until the last of some cells has ended.

    A call tells its own progress, and others of the same cell may follow: what it tells can only lengthen the time
    that is left of a cell whose time is expected, and the more so the nearer the call is to its end.

    Args:
        expected: seconds that each cell is expected to take; 0 where that is unknown.
        took: seconds of the cells that have ended, which are the first ones.
        running_s: seconds that the next cell has run.
        told: part of its work that the call which this cell waits for has done, and the seconds that it took for it.
    """
    factor, (now, *later) = slowness(expected, took), expected[len(took) :]
    left = max(factor * now - running_s, OVERRUN * running_s)
    if told is not None and told[0] >= LEAST_SHARE:
        share, seconds = told
        of_call = seconds * (1 - share) / share
        left = left + share * max(0.0, of_call - left) if now else of_call
    return left + factor * sum(later)


def told_progress(words: str) -> tuple[float, float] | None:
    """Return share and seconds of `"Waiting for a: step 30 of 40 (75%) (12.0 s)"`: 0.75 and 12; None without both."""
    lasted = re.search(r"\((?:(\d+) h )?(?:(\d+) min ?)?(?:([\d.]+) (ms|s))?\)$", words)
    percents, counts = re.findall(r"(\d+(?:\.\d+)?) ?%", words), re.findall(r"([\d,]*\d) of ([\d,]*\d)", words)
    if lasted is None or not (percents or counts):
        return None
    hours, minutes, seconds, unit = lasted.groups()
    passed = 3600 * int(hours or 0) + 60 * int(minutes or 0) + float(seconds or 0) / (1000 if unit == "ms" else 1)
    done, total = (float(percents[-1]), 100) if percents else (int(each.replace(",", "")) for each in counts[-1])
    return (min(1.0, done / total), passed) if total else None


class Countdown:
    """The cells of a notebook that is executed: which of them runs, what it says, and how long the rest takes."""

    def __init__(self, cells: Sequence[Any], is_as_timed: bool = True) -> None:
        """Take the cells of a notebook; `is_as_timed` says that its parameters are those with which it was timed."""
        self._cells = [cell for cell in cells if cell.cell_type == "code"]
        stated = (cell.metadata.get("expected_s") for cell in self._cells)
        self._expected = [
            float(each) if is_as_timed and isinstance(each, int | float) and 0 < each < LONGEST_S else 0.0
            for each in stated
        ]
        self._took, self._since = list[float](), time.monotonic()
        self._headings = dict[int, str]()
        heading = ""
        for cell in cells:
            if cell.cell_type == "markdown" and (found := re.search(r"^#+ (.*)", cell.source, re.MULTILINE)):
                heading = found[1]
            self._headings[id(cell)] = heading

    def begin(self, cell: Any) -> None:
        """Note that a cell begins to run, and with it that those before it have ended."""
        if cell.cell_type == "code":
            now = time.monotonic()
            if cell is not self._cells[0]:
                self._took.append(now - self._since)
            self._since = now

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds until the notebook has been executed; None if nothing is known of its cells."""
        told = told_progress(self._said())
        if not any(self._expected) and (told is None or told[0] < LEAST_SHARE):
            return None
        return seconds_left(self._expected, self._took, time.monotonic() - self._since, told)

    def __str__(self) -> str:
        """Return `"cell 17 of 23: Train both: waiting for bert: step 30 of 40 (75%), about 40 s left"`."""
        if not self._cells:
            return "no cells"
        at, said = len(self._took), re.sub(r" \([^()]*\)$", "", self._said())
        does = said[:1].lower() + said[1:]
        parts = (f"cell {at + 1} of {len(self._cells)}", self._headings[id(self._cells[at])], does)
        left = self.seconds_left
        return ": ".join(filter(None, parts)) + ("" if left is None else f", about {time_left(left)} left")

    def _said(self) -> str:
        """Return the words of the call that the running cell waits for; "" where it waits for none."""
        for output in reversed(self._cells[len(self._took)].get("outputs", ()) if self._cells else ()):
            data = output.get("data", {})
            if "workbench-waiting" in str(data.get("text/html", "")):
                return str(data.get("text/plain", ""))
        return ""


def watching_engine(watch: Callable[[Any], None], is_as_timed: bool) -> type:
    """Return an engine of papermill that gives `watch` the countdown of a notebook, and saves the notebook seldom.

    Papermill's own saves the whole notebook twice a cell, which of 450 small cells takes nine tenths of the time. Its
    kernel listens on ports of the machine; this one's has sockets in a folder that nobody else may open. A notebook
    with a cell tagged `curve` will launch runs: what their ranks need is imported from its start on, as after a click.
    """
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine
    from traitlets.config import Config

    class Client(PapermillNotebookClient):
        def papermill_execute_cells(self) -> None:
            is_curve = any("curve" in cell.metadata.get("tags", ()) for cell in self.nb.cells)
            if is_curve and self.km.kernel_spec.language == "python":
                self.kc.execute(AHEAD, silent=True, store_history=False, stop_on_error=False)
            super().papermill_execute_cells()

    class Engine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **_: Any) -> Any:
            countdown = Countdown(nb_man.nb.cells, is_as_timed)
            begin, save, saved_at, save_s = nb_man.cell_start, nb_man.save, time.monotonic(), 0.0

            def begin_and_tell(cell: Any, *args: Any, **kwargs: Any) -> None:
                countdown.begin(cell)
                begin(cell, *args, **kwargs)

            def save_seldom(*args: Any, **kwargs: Any) -> None:
                nonlocal saved_at, save_s
                now = time.monotonic()
                if now - saved_at >= save_s / SAVED_SHARE:
                    save(*args, **kwargs)
                    saved_at = time.monotonic()
                    save_s = saved_at - now

            nb_man.cell_start, nb_man.save = begin_and_tell, save_seldom
            watch(countdown)
            try:
                with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
                    sockets = os.path.join(folder, "kernel")
                    config = Config()
                    if hasattr(socket, "AF_UNIX") and len(sockets) < LONGEST_SOCKET:
                        config.KernelManager.update({"transport": "ipc", "ip": sockets})
                    return Client(nb_man, kernel_name=kernel_name, startup_timeout=STARTUP_S, config=config).execute()
            finally:
                nb_man.save = save  # the last one, of papermill's own end

    return Engine
