"""Several runs in one table: plan, measurement and machine."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.arguments import checked_arguments
from workbench.data.corpora import use_in_words
from workbench.events import Event
from workbench.runs.records.history import History, HistoryTail, read_tail
from workbench.runs.registry import Runs, load_runs
from workbench.runs.run import Run
from workbench.tables import STYLE, html_table, text_table
from workbench.units import count, duration, gib

SETTLING_STEPS = 10
"""Number of steps at the start that medians leave out, because of compilation, caches and clocks."""


def measurements(run: Run) -> dict[str, Any]:
    """Return medians over a run's settled steps, `step_ms`, `tokens_per_s` and `mfu`, and `peak_bytes` by stage.

    `mfu` is NaN on CPUs; all medians are NaN for a run without steps.
    """
    return _measured(run.history(), run.milestones())


def _measured(history: History, milestones: Sequence[Event]) -> dict[str, Any]:
    columns = {name: history[name][_settled(history)] for name in ("step_ms", "tokens_per_s", "mfu")}
    medians: dict[str, Any] = {name: float(np.median(c)) if len(c) else float("nan") for name, c in columns.items()}
    peaks: dict[int, int] = {}
    for event in milestones:
        if event["type"] == "memory":
            peaks[event["stage"]] = max(peaks.get(event["stage"], 0), int(event["peak_bytes"]))
    return {**medians, "peak_bytes": peaks}


def data_wait(history: History) -> float:
    """Return the share of the time of settled steps in which a run waited for data; NaN if it is unknown."""
    settled = _settled(history)
    share, step_ms = history.data_wait[settled], history.step_ms[settled]
    finite = np.isfinite(share) & np.isfinite(step_ms)
    return float(np.average(share[finite], weights=step_ms[finite])) if finite.any() else float("nan")


def _settled(history: History) -> slice:
    return slice(min(SETTLING_STEPS, len(history) // 2), None)


@dataclass(frozen=True)
class Summary:
    """A table of runs, stored with one row a run and shown with one column a run, which fits a page."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    machine: str
    notes: tuple[str, ...] = ()
    """Sentences of the plans that a user may not expect (coupled samples, checks left out), with their runs."""

    def _transposed(self) -> list[tuple[str, ...]]:
        return list(zip(self.columns, *self.rows, strict=True))

    def __repr__(self) -> str:
        return "\n".join([text_table(self._transposed()), self.machine, *self.notes])

    def _repr_html_(self) -> str:
        head, *body = self._transposed()
        below = "<br>".join(map(html.escape, (self.machine, *self.notes)))
        table = html_table(head, body, f"{STYLE};white-space:nowrap")
        return f"<div style='overflow-x:auto'>{table}</div><p><small>{below}</small></p>"


SPARSE_COLUMNS = {"blocks present": "present", "blocks explored": "explored"}
"""Columns that tables with a sparse run have too, and the columns of `Patterns` that they show the last value of."""


@checked_arguments
def summary(runs: Runs) -> Summary:
    """Return a table of runs: plans, tokens, final loss, speed, prediction beside measurement, and the machine.

    The last value of each metric of the experiments, and what sparse runs have explored, come after the held-out loss.
    """
    runs = load_runs(runs)
    tails = [read_tail(run.directory.events) for run in runs]
    metrics = dict.fromkeys(name for tail in tails for name in tail.evaluations.metrics)
    sparse = SPARSE_COLUMNS if any(len(tail.patterns) for tail in tails) else {}
    rows = [_row(run, tail, list(metrics), sparse) for run, tail in zip(runs, tails, strict=True)]
    cells = tuple(tuple(cell for _, cell in row) for row in rows)
    notes = (*notes_of_plans(runs), *(f"{run.name} {said}" for run in runs if (said := _data_use(run))))
    return Summary(tuple(column for column, _ in rows[0]), cells, machine(runs[0]), notes)


def _data_use(run: Run) -> str:
    used = [event for event in run.milestones() if event["type"] == "data_use"]
    return f"has read {use_in_words(used[-1])}." if used else ""


def notes_of_plans(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return each note of the runs' plans once, with the names of the runs that it holds for."""
    runs_by_note: dict[str, list[str]] = {}
    for run in runs:
        for note in run.plan.notes:
            runs_by_note.setdefault(note, []).append(run.name)
    return tuple(f"{', '.join(names)}: {note}" for note, names in runs_by_note.items())


def _last(values: Any) -> float:
    return float(values[-1]) if values is not None and len(values) else float("nan")


def _row(run: Run, tail: HistoryTail, metrics: Sequence[str], sparse: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return column and cell of each figure of a run; a metric may be called like a column."""
    plan, history, evaluations, patterns = run.plan, tail.read(), tail.evaluations, tail.patterns
    milestones = run.milestones()
    start = next((event for event in milestones if event["type"] == "start"), None)
    steps, measured = len(history), _measured(history, milestones)
    peak = max(measured["peak_bytes"].values(), default=None)
    loss = history.final_loss
    sharding = f", ZeRO {plan.zero}" if plan.zero else ""
    recompute = ", recompute" if plan.recompute != "none" else ""
    division = f"PP {plan.pipeline} × DP {plan.data}{sharding}, {plan.num_microbatches} × {plan.micro_batch}{recompute}"
    # On CPUs a process is measured, whose libraries take many times the memory of a small model's tensors.
    of_process, of_tensors = (" of a process", " of tensors") if plan.cluster.device.type == "cpu" else ("", "")
    before = {
        "run": run.name,
        "parameters": count(start["parameters"]) if start else "–",
        "plan": division,
        "tokens": count(history.tokens[-1]) if steps else "–",
        "FLOPs": f"{history.flops[-1]:.3g}" if steps else "–",
        "final loss": "not finite" if steps and not np.isfinite(loss) else _number(loss, "{:.3f}"),
        "held-out loss": _number(_last(evaluations.eval_loss), "{:.3f}"),
    }
    computed = [(name, _number(_last(evaluations.metrics.get(name)), "{:.4g}")) for name in metrics]
    computed += [(title, _number(100 * _last(patterns[name]), "{:.3g} %")) for title, name in sparse.items()]
    after = {
        "training time": duration(history.seconds[-1]) if steps else "–",
        "tokens/s": _number(measured["tokens_per_s"], "{:,.0f}"),
        "MFU": _number(100 * measured["mfu"], "{:.1f} %"),
        "waiting for data": _number(100 * data_wait(history), "{:.1f} %"),
        "step, measured": _number(measured["step_ms"], "{:.1f} ms"),
        "step, predicted": f"{plan.prediction.step_ms:.1f} ms",
        "peak, measured": "–" if peak is None else gib(peak) + of_process,
        "peak, predicted": gib(plan.peak_bytes) + of_tensors,
    }
    return [*before.items(), *computed, *after.items()]


def _number(value: float, form: str) -> str:
    return "–" if np.isnan(value) else form.format(value)


def machine(run: Run) -> str:
    """Return one line about the machine: devices, processor, versions, and the commit that was launched."""
    environment = run.environment
    if "gpus" not in environment:
        return f"{run.name} does not say which machine it ran on"
    try:
        gpus = [gpu["name"] for gpu in environment["gpus"]]
        devices = f"{len(gpus)} × {gpus[0]}, driver {environment['gpus'][0]['driver']}" if gpus else "no GPU"
        packages = ", ".join(
            f"{name} {environment['packages'][name]}"
            for name in ("torch", "accelerate", "transformers", "wandb")
            if environment["packages"].get(name)
        )
        commit = f", commit {environment['git']['commit'][:10]}" if environment.get("git") else ""
        cores = f"{environment['cores']} cores {environment['cpu']}"
        return f"{devices}; {cores}; Python {environment['python']}, {packages}{commit}"
    except (AttributeError, LookupError, TypeError):
        return f"the environment.json of {run.name} is damaged, and does not say which machine it ran on"
