"""Where runs stand, as lines of text: for a shell, a batch job, or a notebook that nobody looks at."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from workbench.runs.run import Run
from workbench.units import count, duration

POLL_S = 0.2


def follow(runs: Sequence[Run], every_s: float = 5.0) -> Iterator[str]:
    """A line a run whenever its state changes, and every `every_s` seconds while it makes steps; ends with the runs.

    Reads the runs' directories only, so that any number of followers cost the training nothing.
    """
    last: dict[Run, tuple[str, str, int]] = {}
    due = time.monotonic() + every_s
    while True:
        everything = time.monotonic() >= due
        if everything:
            due = time.monotonic() + every_s
        rows = [(run, run.summary()) for run in runs]
        for run, facts in rows:
            now, before = (facts["state"], facts["message"], facts["step"]), last.get(run)
            if before is None or now[:2] != before[:2] or (everything and now != before):
                last[run] = now
                yield progress_line(facts)
        if all(run.status.final and last[run][0] == run.status.state for run, _ in rows):
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
