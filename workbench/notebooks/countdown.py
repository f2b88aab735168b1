"""The cell of an executed notebook that runs now, what it waits for, and the time that the rest takes.

A cell is timed in parts: the first begins with the cell, each further one where the cell begins to wait for other runs.
A template states the seconds of each part (`expected_s` in a cell's metadata), and an executed notebook states those of
its execution. They are multiplied by the factor by which the parts that have ended took longer on this machine. Of the
part that runs, the call which it waits for tells how far it is. JupyterLab's countdown (`countdown.js`) computes the
same.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from workbench.base.units import time_left

MOST_TIMES = 12.0
"""Largest factor by which a machine is taken to be slower than the one on which a template was timed."""
LEAST_TIMES = 0.25
"""Smallest factor. A cell that took less was spared its work by what was stored, and tells nothing of the others."""
PRIOR_S = 4.0
"""Weight of the assumption that there is no difference, as that of a cell which is expected to take so many seconds."""
OVERRUN = 0.25
"""Part of its time so far that a cell still takes which has taken longer than expected."""
LEAST_SHARE = 0.1
"""Part of its work that a call must have done while it was heard until its pace is believed."""
RECENT_SHARE = 0.5
"""Part of its work by which a call's pace is judged, the last: a wait that happened before is forgotten."""
LAUNCHED = "Waiting for "
"""Beginning of the words of a call that waits for runs; it is their name until the next colon."""
STATED_S = 0.1
"""Shortest time of a cell in s that an executed notebook states."""
FINISH_S = 4.0
"""Seconds from the end of the last cell until the kernel has left and the page is written, for some ten figures."""
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


def slowness(ended: Sequence[tuple[float, float]]) -> float:
    """Return the factor by which what has ended took longer than expected, from pairs of expected and real seconds.

    It is the median of their factors, each with the weight of its expected seconds: one cell that had to wait, as for a
    device, tells nothing of those to come.
    """
    factors = [(took / expected, expected) for expected, took in ended if took > LEAST_TIMES * expected > 0]
    factors.append((1.0, PRIOR_S))
    factors.sort()
    heavier = np.cumsum([weight for _, weight in factors]) >= sum(weight for _, weight in factors) / 2
    return min(float(factors[int(np.argmax(heavier))][0]), MOST_TIMES)


def part_left(
    factor: float, expected: float, running_s: float, call: tuple[float, float] | None, is_alone: bool
) -> float:
    """Return the seconds until a part of a cell has ended.

    Args:
        factor: by which parts take longer here than expected.
        expected: seconds that the part is expected to take; 0 where that is unknown.
        running_s: seconds that it has run.
        call: part of its work that the call which it waits for has done, and the seconds that are left of it, as it
            tells; None where it does not.
        is_alone: True if no other call is waited for in this part. One that may be followed by others only lengthens
            what is left; one that is alone also shortens it, entirely from half of its work on: of several runs, the
            first may be the shortest.
    """
    left = max(factor * expected - running_s, OVERRUN * running_s)
    if call is None:
        return left
    share, call_s = call
    if call_s >= left or not expected:
        return call_s
    trust = min(1.0, 2 * share) if is_alone else 0.0
    return float(left ** (1 - trust) * call_s**trust)


def told_progress(words: str) -> tuple[str, float, float] | None:
    """Return name, share and seconds of a call that tells all three, else None.

    Of `"Waiting for a: step 30 of 40 (75%) (12.0 s)"` they are `"Waiting for a"`, 0.75 and 12. A number counts what is
    done: of what follows it, half is done on average.
    """
    lasted = re.search(r"\((?:(\d+) h )?(?:(\d+) min ?)?(?:([\d.]+) (ms|s))?\)$", words)
    percents = list(re.finditer(r"(\d+(?:\.\d+)?) ?%", words))
    told = (percents or list(re.finditer(r"([\d,]*\d) of ([\d,]*\d)", words)))[-1:]
    if lasted is None or not told:
        return None
    hours, minutes, seconds, unit = lasted.groups()
    passed = 3600 * int(hours or 0) + 60 * int(minutes or 0) + float(seconds or 0) / (1000 if unit == "ms" else 1)
    done, total = (float(each.replace(",", "")) for each in (told[0].groups() if not percents else (told[0][1], "100")))
    if not percents and 0 < done < total:
        done += 0.5
    return (words[: told[0].start()].rpartition(": ")[0], min(1.0, done / total), passed) if total else None


class Pace:
    """The pace of a call, by the words in which it tells its progress.

    What a call did before its first progress, as to start, does not happen again, and other calls of the same cell
    have a pace of their own.
    """

    def __init__(self) -> None:
        self._name, self._heard = "", list[tuple[float, float]]()
        self.call: tuple[float, float] | None = None
        """Part of its work that the call had done when it was heard last, and the seconds that were left of it."""

    def hear(self, words: str) -> None:
        """Note what the call says."""
        told = told_progress(words)
        if told is None:
            return
        name, share, seconds = told
        if name != self._name or share < self._heard[-1][0] or not self._heard[0][0]:
            self._name, self._heard = name, []
        self._heard.append((share, seconds))
        while len(self._heard) > 1 and self._heard[1][0] <= share - RECENT_SHARE:
            del self._heard[0]
        since, began = self._heard[0]
        done = share - since
        self.call = (share, (1 - share) * (seconds - began) / done) if done >= LEAST_SHARE else None


class Parts:
    """The parts of the cell that runs, by what it says at times in s: which have ended, and how far the last is."""

    def __init__(self, now: float) -> None:
        self.took = list[float]()
        """Seconds of the parts that have ended."""
        self.said, self._waited, self._pace = "", list[str](), Pace()
        self._since = self._heard = now

    def hear(self, words: str, now: float) -> None:
        """Note what the call says that the cell waits for; "" when it has ended."""
        if words == self.said:
            return
        call, before = (re.sub(r" \([^()]*\)$", "", each).partition(":")[0] for each in (words, self.said))
        if call.startswith(LAUNCHED) and call not in self._waited:
            if self._waited:
                self.end(now)
            self._waited.append(call)
        if call != before:
            self._pace = Pace()
        self._pace.hear(words)
        self.said, self._heard = words, now

    def end(self, now: float) -> None:
        """Note that the last part has ended."""
        self.took.append(now - self._since)
        self._since = now

    def call(self, now: float) -> tuple[float, float] | None:
        """Return the part of its work that the call has done, and the seconds that are left of it; None if unknown."""
        told = self._pace.call
        return told and (told[0], max(0.0, told[1] - (now - self._heard)))

    def left(
        self, ended: Sequence[tuple[float, float]], stated: float | list[float], later: Sequence[float], now: float
    ) -> float:
        """Return the seconds until this cell and those after it have ended.

        Args:
            ended: expected and real seconds of each cell that has ended.
            stated: seconds that this cell is expected to take, or those of each of its parts; 0 where that is unknown.
            later: seconds that each cell after it is expected to take.
            now: the time.
        """
        compared, running_s, call = list(ended), now - self._since, self.call(now)
        if isinstance(stated, list):
            parts = stated[len(self.took) :] or [0.0]
            compared += zip(stated, self.took, strict=False)
        else:
            parts = [stated]
            running_s += sum(self.took)
        is_alone = isinstance(stated, list) and bool(self._waited)
        if is_alone and not self.said:
            call = 1.0, 0.0  # the runs have ended, and what follows is short
        left = part_left(slowness(compared), parts[0], running_s, call, is_alone)
        if is_alone and call is not None:
            compared.append((parts[0], running_s + left))
        return left + slowness(compared) * (sum(parts[1:]) + sum(later))


class Countdown:
    """The cells of a notebook that is executed: which of them runs, what it says, and how long the rest takes."""

    def __init__(self, cells: Sequence[Any], is_as_timed: bool = True) -> None:
        """Take the cells of a notebook; `is_as_timed` says that its parameters are those with which it was timed."""
        self._cells, self._is_as_timed = [cell for cell in cells if cell.cell_type == "code"], is_as_timed
        self._stated = [believed(cell.metadata.get("expected_s") if is_as_timed else 0.0) for cell in self._cells]
        self._totals = [sum(each) if isinstance(each, list) else each for each in self._stated]
        if any(self._totals):
            self._totals.append(FINISH_S)
        self._ended, self._parts, self._output = list[list[float]](), Parts(time.monotonic()), ""
        self._headings = dict[int, str]()
        heading = ""
        for cell in cells:
            if cell.cell_type == "markdown" and (found := re.search(r"^#+ (.*)", cell.source, re.MULTILINE)):
                heading = found[1]
            self._headings[id(cell)] = heading

    def begin(self, cell: Any) -> None:
        """Note that a cell begins to run, and with it that those before it have ended."""
        if cell.cell_type == "code":
            if cell is not self._cells[0]:
                self._parts.end(time.monotonic())
                self._ended.append(self._parts.took)
            self._parts = Parts(time.monotonic())

    def hear(self, message: Mapping[str, Any]) -> None:
        """Note what a kernel's message says of the call that the running cell waits for."""
        if message["msg_type"] in ("display_data", "update_display_data"):
            data = message["content"].get("data", {})
            output = str((message["content"].get("transient") or {}).get("display_id"))
            if "workbench-waiting" in str(data.get("text/html", "")):
                self._parts.hear(str(data.get("text/plain", "")), time.monotonic())
                self._output = output
            elif output == self._output:
                self._parts.hear("", time.monotonic())

    def end(self, is_whole: bool) -> None:
        """Note that no further cell runs, and state the seconds of the parts of each for the next execution.

        Of one that failed they are not stated, and times of other parameters are removed.
        """
        self._parts.end(time.monotonic())
        self._ended += [self._parts.took, *([] for _ in self._cells[len(self._ended) + 1 :])]
        self._parts = Parts(time.monotonic())
        for cell, took in zip(self._cells, self._ended, strict=False):
            if is_whole or not self._is_as_timed:
                cell.metadata.pop("expected_s", None)
            if is_whole and sum(took) >= STATED_S:
                cell.metadata["expected_s"] = [round(each, 1) for each in took]

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds until the notebook has been executed; None if nothing is known of its cells."""
        if not any(self._totals):
            return None
        at = len(self._ended)
        stated = [*self._stated, FINISH_S][at]
        ended = list(zip(self._totals, map(sum, self._ended), strict=False))
        return self._parts.left(ended, stated, self._totals[at + 1 :], time.monotonic())

    def __str__(self) -> str:
        """Return `"cell 17 of 23: Train both: waiting for bert: step 30 of 40 (75%), about 40 s left"`.

        Where the time of the cells is unknown, it says how long the call still takes: `"about 40 s of it left"`.
        """
        if not self._cells:
            return "no cells"
        at, said = len(self._ended), re.sub(r" \([^()]*\)$", "", self._parts.said)
        words = ["writing its page"]
        if at < len(self._cells):
            heading = self._headings[id(self._cells[at])]
            words = [f"cell {at + 1} of {len(self._cells)}", heading, said[:1].lower() + said[1:]]
        left, call = self.seconds_left, self._parts.call(time.monotonic())
        about = "" if left is None else f", about {time_left(left)} left"
        if left is None and call is not None:
            about = f", about {time_left(call[1])} of it left"
        return ": ".join(filter(None, words)) + about


def believed(stated: Any) -> float | list[float]:
    """Return the stated seconds of a cell, or of each of its parts, with 0 for what is no time of a cell."""
    if isinstance(stated, list):
        return [each if isinstance(each, float) else 0.0 for each in map(believed, stated)]
    return float(stated) if type(stated) in (int, float) and 0 < stated < LONGEST_S else 0.0


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
        countdown: Countdown

        def papermill_execute_cells(self) -> None:
            is_curve = any("curve" in cell.metadata.get("tags", ()) for cell in self.nb.cells)
            if is_curve and self.km.kernel_spec.language == "python":
                self.kc.execute(AHEAD, silent=True, store_history=False, stop_on_error=False)
            super().papermill_execute_cells()
            self.countdown.end(is_whole=not self.nb.metadata.papermill.exception)

        def process_message(self, *args: Any, **kwargs: Any) -> Any:
            self.countdown.hear(args[0])
            return super().process_message(*args, **kwargs)

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
                    client = Client(nb_man, kernel_name=kernel_name, startup_timeout=STARTUP_S, config=config)
                    client.countdown = countdown
                    return client.execute()
            finally:
                nb_man.save = save  # the last one, of papermill's own end

    return Engine
