"""Where runs stand, as lines of text: for a shell, a batch job, or a notebook that nobody looks at."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from workbench.rundir import FINAL_STATES
from workbench.runs.run import Run, summary_or_why_not
from workbench.units import count, duration

POLL_S = 0.2


class Follower:
    """Knows what it has said of each run, and says what is new."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self._said: dict[str, tuple[str, str, int]] = {}

    def lines(self, runs: Sequence[Run]) -> Iterator[str]:
        """A line for each run that changed its state, or made steps since the last line, `every_s` ago."""
        everything = time.monotonic() >= self._due
        if everything:
            self._due = time.monotonic() + self._every_s
        for run in runs:
            facts = summary_or_why_not(run)
            now, before = (facts["state"], facts["message"], facts["step"]), self._said.get(facts["path"])
            if before is None or now[:2] != before[:2] or (everything and now != before):
                self._said[facts["path"]] = now
                yield progress_line(facts)

    def saw_the_end(self, runs: Sequence[Run]) -> bool:
        """Whether the last thing said of each run is that it has ended."""
        return all(self._said.get(str(run.path), ("",))[0] in FINAL_STATES for run in runs)


def follow(runs: Sequence[Run], every_s: float = 5.0) -> Iterator[str]:
    """A line a run whenever its state changes, and every `every_s` seconds while it makes steps; ends with the runs.

    Reads the runs' directories only, so that any number of followers cost the training nothing.
    """
    follower = Follower(every_s)
    while True:
        yield from follower.lines(runs)
        if follower.saw_the_end(runs):
            return
        time.sleep(POLL_S)


def progress_line(facts: dict[str, Any]) -> str:
    """`"09:41:07  bert-1  running  40 of 300 (13%)  loss 6.5  82.1 k tokens/s  MFU 41.0%  2 min 05 s left"`."""
    parts = [time.strftime("%H:%M:%S"), facts["name"], facts["state"]]
    if facts["steps"]:
        parts.append(f"{facts['step']:,} of {facts['steps']:,} ({facts['step'] / facts['steps']:.0%})")
    if facts["loss"] is not None:
        parts.append(f"loss {facts['loss']:.4g}")
    if facts["tokens_per_s"]:
        parts.append(f"{count(facts['tokens_per_s'])} tokens/s")
    if facts["mfu"]:
        parts.append(f"MFU {facts['mfu']:.1%}")
    if facts["eta_s"] is not None:
        parts.append(f"{duration(facts['eta_s'])} left")
    if facts["message"] and facts["state"] != "finished":
        parts.append(facts["message"])
    return "  ".join(parts)
