"""Several runs: found by name, listed, followed as lines of text, and compared in one table."""

from __future__ import annotations

import difflib
import html
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, overload

import numpy as np

from workbench.base.arguments import MOST_CURVES, Between, checked_arguments
from workbench.base.display import STYLE, html_table, text_table
from workbench.base.errors import InvalidArgument, RunNotFound, WorkbenchError, suggestion
from workbench.base.units import count, duration, gib, time_left
from workbench.record.history import History as History
from workbench.record.history import HistoryTail, read_tail, settled_median
from workbench.record.rundir import FINAL_STATES, STATES, RunDir, runs_root
from workbench.runs.loss_basis import read_loss_basis, why_not_compared
from workbench.runs.run import OneRun, Run, progress_words, step_text
from workbench.runs.status import RunRow, created_at, read_labels, state_in_words, unreadable_row

if TYPE_CHECKING:
    from workbench.runs.tracking.delivery import Delivery

Runs = OneRun | Iterable[OneRun]
FewRuns = Annotated[Runs, Between(0, MOST_CURVES)]
"""Runs of one figure."""
HEADER = ("name", "state", "step", "loss", "tokens/s", "MFU", "left", "devices", "when", "tags")
"""Columns of a table of runs."""
SORTABLE = tuple(name for name in RunRow.__annotations__ if name not in ("gpus", "tags", "alerts"))
"""Figures of a row by which runs can be sorted."""


@dataclass(frozen=True)
class RunTable:
    """The runs of one folder, newest first; iterate over it, index it by position, slice or name, or show it."""

    root: Path
    runs: tuple[Run, ...]
    note: str | None = None
    """Sentence on why the losses by which the runs are sorted do not compare; None if they do, or in another order."""

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    @overload
    def __getitem__(self, key: int | str) -> Run: ...

    @overload
    def __getitem__(self, key: slice) -> list[Run]: ...

    def __getitem__(self, key: int | str | slice) -> Run | list[Run]:
        if isinstance(key, slice):
            return list(self.runs[key])
        return self.runs[key] if isinstance(key, int) else load_run(self.root / key)

    def rows(self) -> list[RunRow]:
        """Return `Run.row()` of each run; one that cannot be read has failed, with the reason as its message."""
        return [row_or_reason(run) for run in self.runs]

    def cells(self) -> list[tuple[str, ...]]:
        """Return the columns of `HEADER` for each run, as text."""
        return [_cells(row) for row in self.rows()]

    def sync(self) -> list[Delivery]:
        """Upload to its tracker (W&B, Trackio) whatever it lacks of each tracked run that has ended.

        Raises `WorkbenchError` if nobody is logged in, or W&B's client does not say who is.
        """
        from workbench.runs.tracking.delivery import pending, recording

        waiting = [run for run in self.runs if run.status.final and pending(run.directory)]
        return [run.sync() for run in waiting if not recording(run.directory)]

    def __repr__(self) -> str:
        if not self.runs:
            return f"No runs in {self.root}."
        return "\n".join(filter(None, (self.note, text_table([HEADER, *self.cells()]))))

    def _repr_html_(self) -> str:
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return note + html_table(HEADER, self.cells())


@checked_arguments
def list_runs(
    root: str | os.PathLike[str] | None = None,
    *,
    tag: str | None = None,
    state: str | None = None,
    text: str | None = None,
    sort: str | None = None,
    archived: bool = False,
) -> RunTable:
    """Return the runs in `root`, newest first; by default those in `$WORKBENCH_RUNS` or `./runs`.

    Args:
        root: the folder of runs.
        tag: only runs with this tag.
        state: only runs in this state, such as `"running"`.
        text: only runs with this text in their name, tags or note; case does not matter.
        sort: figure of `run.row()` by which to sort, smallest first, such as `"loss"`, which is the held-out loss of
            runs that evaluate; `"-loss"` begins with the largest. Runs without the figure come last. Above the table
            stands why these losses do not compare, where they do not.
        archived: list archived runs too.

    Examples:
        >>> wb.list_runs(state="finished", sort="-step").rows()[0]["step"]
        40
    """
    by = sort and sort.removeprefix("-")
    for name, word, choices in (("state", state, STATES), ("sort", by, SORTABLE)):
        if word is not None and word not in choices:
            raise InvalidArgument(f"{name}={word!r} does not exist. {suggestion(word, choices)}")
    folder = runs_root() if root is None else Path(root).expanduser().absolute()
    runs = [Run(path) for path in sorted(_run_folders(folder), key=created_at, reverse=True)]
    if by is None and tag is state is text is None:  # only labels need to be read
        return RunTable(folder, tuple(run for run in runs if archived or not read_labels(run.directory, {}).archived))
    chosen = [
        (row, run)
        for row, run in ((row_or_reason(run), run) for run in runs)
        if (archived or not row["archived"])
        and (tag is None or tag in row["tags"])
        and state in (None, row["state"])
        and (text or "").casefold() in "\n".join((row["name"], *row["tags"], row["notes"])).casefold()
    ]
    if by is not None:
        figures: list[Any] = [row[by] for row, _ in chosen]  # type: ignore[literal-required]
        known = [pair for pair, x in zip(chosen, figures, strict=True) if x is not None and x == x]  # NaN is not itself
        known.sort(key=lambda pair: pair[0][by], reverse=by != sort)  # type: ignore[literal-required]
        chosen = known + [pair for pair in chosen if pair not in known]
    note = None
    if by is not None and by.endswith("loss"):
        held_out = [by == "eval_loss" or (by == "loss" and row["eval_loss"] is not None) for row, _ in known]
        note = why_not_compared([read_loss_basis(run.directory) for _, run in known], held_out)
    return RunTable(folder, tuple(run for _, run in chosen), note)


@checked_arguments
def load_run(path: OneRun) -> Run:
    """Return the run in a directory, of that name under the runs folder, or at `wandb:entity/project/id`.

    The beginning of a name is enough if only one run has it. Nothing that lies in the run directory is executed.
    Raises `RunNotFound`, with near matches.

    Examples:
        >>> wb.load_run(run.path).name == run.name
        True
    """
    if isinstance(path, Run):
        return path
    if isinstance(path, str) and path.startswith("wandb:"):
        from workbench.runs.tracking.wandb_tracker import download_run

        return Run(download_run(path))
    if isinstance(path, str) and path.startswith("trackio:"):
        raise RunNotFound(f"{path!r}: runs are copied from W&B alone. Read a run of Trackio with `trackio get`.")
    for candidate in (Path(path).expanduser(), runs_root() / path):
        if _is_run(candidate):
            return Run(candidate)
    parent = Path(path).expanduser().absolute().parent
    wanted = Path(path).name
    searched = runs_root() if str(path) == wanted else parent
    close = sorted(p.name for p in _run_folders(searched) if wanted and p.name.startswith(wanted))
    if len(close) == 1:
        return Run(searched / close[0])
    names = sorted({p.name for root in (runs_root(), parent) for p in _run_folders(root)})
    close = close[-3:] or difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
    if close:
        hint = f"Did you mean {' or '.join(repr(name) for name in close)}?"
    elif names:
        hint = f"There are {', '.join(names[-5:])}."
    else:
        hint = f"There are no runs in {runs_root()} yet; set WORKBENCH_RUNS if they are elsewhere."
    raise RunNotFound(f"There is no run {str(path)!r}. {hint}")


def load_runs(runs: Runs) -> list[Run]:
    """Return the handles of one run or of several; raises `InvalidArgument` if there is none."""
    several = [runs] if isinstance(runs, Run | str | os.PathLike) else list(runs)
    if not several:
        raise InvalidArgument("No run is given. Give at least one: its handle, its name or its directory.")
    return [load_run(run) for run in several]


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """Return what tells runs apart, for legends: the names of their experiments, else the settings that differ.

    It is the names of the runs where their experiments cannot be read, or differ in no setting or in more than four.
    """
    from workbench.experiment import values_by_name

    try:
        configs = [values_by_name(run.config) for run in runs]
        names = [str(config["name"]) for config in configs]
    except (WorkbenchError, AttributeError, KeyError, TypeError):  # files that say anything
        return [run.name for run in runs]
    if len(set(names)) == len(runs):
        return names
    plain = [{k: v for k, v in config.items() if isinstance(v, int | float | str)} for config in configs]
    varied = [name for name in plain[0] if len({config.get(name) for config in plain}) > 1]
    varied.sort(key=lambda name: name != "name")
    labels = [" · ".join(f"{name} {config.get(name, '–')}" for name in varied) for config in plain]
    labels = [label.removeprefix("name ") for label in labels]
    return labels if len(set(labels)) == len(runs) and len(varied) <= 4 else [run.name for run in runs]


def row_or_reason(run: Run) -> RunRow:
    """Return `run.row()`, or why it cannot be read: one damaged or deleted run must not hide the others."""
    try:
        row = run.row()
        _cells(row)  # a word where a number belongs
    except Exception as error:  # the files of a run may hold anything
        return unreadable_row(run.directory, error)
    return row


def _run_folders(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if _is_run(path)] if root.is_dir() else []
    except OSError:  # a name that is too long, or a folder that this user may not read
        return []


def _is_run(path: Path) -> bool:
    try:
        return RunDir(path).experiment.is_file()
    except OSError:  # a folder that this user may not read
        return False


def _cells(row: RunRow) -> tuple[str, ...]:
    devices = f"GPU {', '.join(map(str, row['gpus']))}" if row["gpus"] else str(row["devices"] or "")
    return (
        row["name"],
        state_in_words(row["state"], row["step"], row["training_loss"]),
        step_text(row),
        "" if row["loss"] is None else f"{row['loss']:.4g}{' held-out' * (row['eval_loss'] is not None)}",
        "" if not row["tokens_per_s"] else count(row["tokens_per_s"]),
        "" if not row["mfu"] else f"{row['mfu']:.1%}",
        "" if row["eta_s"] is None else time_left(row["eta_s"]),
        devices,
        "" if not row["time"] else f"{duration(ago)} ago" if (ago := time.time() - row["time"]) >= 1 else "now",
        ", ".join(row["tags"]),
    )


# One table of plans, measurements and machine


def measurements(run: Run) -> dict[str, Any]:
    """Return medians over a run's settled steps, `step_ms`, `tokens_per_s` and `mfu`, and `peak_bytes` by stage.

    `mfu` is NaN on CPUs; all medians are NaN for a run without steps. Peaks are those of tensors, which plans predict:
    there are none of a run on CPUs that measured the growth of its processes.
    """
    return _measured(read_tail(run.directory.events))


def _measured(tail: HistoryTail) -> dict[str, Any]:
    history = tail.read()
    speeds = ("step_ms", "tokens_per_s", "mfu")
    medians: dict[str, Any] = {name: settled_median(history.settled(name)) for name in speeds}
    peaks: dict[int, int] = {}
    for event in tail.state.memory.values():
        if not event.get("counted", not str(event.get("device", "")).startswith("CPU")):
            continue
        peaks[event["stage"]] = max(peaks.get(event["stage"], 0), int(event["peak_bytes"]))
    return {**medians, "peak_bytes": peaks}


def data_wait(history: History) -> float:
    """Return the share of the time of settled steps in which a run waited for data; NaN if it is unknown."""
    share, step_ms = history.settled("data_wait"), history.settled("step_ms")
    finite = np.isfinite(share) & np.isfinite(step_ms)
    return float(np.average(share[finite], weights=step_ms[finite])) if finite.any() else float("nan")


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

    Args:
        runs: a run, several, or a sweep; runs are given as handles, or by name or directory. Each becomes a column in
            a notebook and a row in a shell.

    Raises `RunNotFound`.

    Examples:
        >>> wb.runs.summary(runs).columns[:4]
        ('run', 'parameters', 'plan', 'tokens')
    """
    from workbench.data.corpora import use_in_words

    runs = load_runs(runs)
    tails = [read_tail(run.directory.events) for run in runs]
    metrics = dict.fromkeys(name for tail in tails for name in tail.evaluations.metrics)
    sparse = SPARSE_COLUMNS if any(len(tail.patterns) for tail in tails) else {}
    rows = [_row(run, tail, list(metrics), sparse) for run, tail in zip(runs, tails, strict=True)]
    cells = tuple(tuple(cell for _, cell in row) for row in rows)
    uses = [(run.name, tail.state.data_use) for run, tail in zip(runs, tails, strict=True)]
    notes = (*notes_of_plans(runs), *(f"{name} has read {use_in_words(use)}." for name, use in uses if use))
    return Summary(tuple(column for column, _ in rows[0]), cells, machine(runs[0]), notes)


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
    start, steps, measured = tail.state.start, len(history), _measured(tail)
    peak = max(measured["peak_bytes"].values(), default=None)
    loss = history.final_loss
    sharding = f", ZeRO {plan.zero}" if plan.zero else ""
    recompute = ", recompute" if plan.recompute != "none" else ""
    division = f"PP {plan.pipeline} × DP {plan.data}{sharding}, {plan.num_microbatches} × {plan.micro_batch}{recompute}"
    before = {
        "run": run.name,
        "parameters": count(start["parameters"]) if start and "parameters" in start else "–",
        "plan": division,
        "tokens": count(history.tokens[-1]) if steps else "–",
        "FLOPs": f"{history.flops[-1]:.3g}" if steps else "–",
        "final loss": "not finite" if steps and not np.isfinite(loss) else _number(loss, "{:.3f}"),
        "held-out loss": _number(_last(evaluations.eval_loss), "{:.3f}"),
    }
    computed = [(name, _number(_last(evaluations.metrics.get(name)), "{:.4g}")) for name in metrics]
    computed += [(title, _number(100 * _last(patterns[name]), "{:.3g} %")) for title, name in sparse.items()]
    # A prediction for CPUs is for idle cores: how much of them a run had tells what a longer step owes to other work.
    on_cpus, used = plan.cluster.device.type == "cpu", tail.utilization.share
    had = f" with {np.nanmean(used):.0%} of the cores" if on_cpus and np.isfinite(used).any() else ""
    after = {
        "training time": duration(history.seconds[-1]) if steps else "–",
        "tokens/s": _number(measured["tokens_per_s"], "{:,.0f}"),
        "MFU": _number(100 * measured["mfu"], "{:.1f} %"),
        "waiting for data": _number(100 * data_wait(history), "{:.1f} %"),
        "step, measured": _number(measured["step_ms"], "{:.1f} ms" + had),
        "step, predicted": f"{plan.prediction.step_ms:.1f} ms" + " on idle cores" * on_cpus,
        "peak, measured": "–" if peak is None else gib(peak),
        "peak, predicted": gib(plan.peak_bytes),
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


# Progress as lines of text, for a shell, a batch job, or a notebook that runs unattended

POLL_S = 0.2


class ProgressReporter:
    """A reporter of runs that prints only what is new since its last line about each run."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self.reported: dict[str, tuple[str, str, int]] = {}
        """State, message and step in the last line of each run, by its path."""

    def lines(self, runs: Sequence[Run]) -> Iterator[str]:
        """Yield a line for each run that changed its state; every `every_s` seconds also for each that made steps."""
        steps_are_due = time.monotonic() >= self._due
        if steps_are_due:
            self._due = time.monotonic() + self._every_s
        for run in runs:
            row = row_or_reason(run)
            now, before = (row["state"], row["message"], row["step"]), self.reported.get(row["path"])
            if before is None or now[:2] != before[:2] or (steps_are_due and now != before):
                self.reported[row["path"]] = now
                yield progress_line(row)


def follow(runs: Sequence[Run], every_s: float = 5.0) -> Iterator[str]:
    """Yield a line when a run changes its state, and every `every_s` seconds while it makes steps; end with the runs.

    Only the runs' directories are read, so that any number of followers cost the training nothing.
    """
    reporter = ProgressReporter(every_s)
    while True:
        yield from reporter.lines(runs)
        if all(reporter.reported.get(str(run.path), ("",))[0] in FINAL_STATES for run in runs):
            return
        time.sleep(POLL_S)


BARS = "▁▂▃▄▅▆▇█"
CURVE_STEPS, CURVE_WIDTH = 20, 40
"""Smallest number of logged steps of which `text_curve` draws a curve, and largest number of its columns."""


def text_curve(history: History) -> str:
    """Return `"loss 7.93 █▇▆▄▃▂▁▁ 2.95 at step 600"`: the first loss, mean losses of equal stretches, and `final_loss`.

    It is empty for a run of few steps.
    """
    if len(history) < CURVE_STEPS:
        return ""
    losses = np.array(history.loss)
    means = np.array([stretch.mean() for stretch in np.array_split(losses, min(CURVE_WIDTH, len(history) // 2))])
    end = f"{history.final_loss:.4g} at step {int(history.step[-1]):,}"
    finite = np.isfinite(means)
    if not finite.any():
        return f"loss {end}"
    low, high = means[finite].min(), means[finite].max()
    levels = np.where(finite, (means - low) / max(high - low, 1e-12) * (len(BARS) - 1), 0)
    drawn = "".join(BARS[round(level)] if known else "·" for level, known in zip(levels.tolist(), finite, strict=True))
    return f"loss {losses[0]:.4g} {drawn} {end}"


def progress_line(row: RunRow) -> str:
    """Return `"09:41:07  bert-1  running  40 of 300 (13%)  loss 6.5  82.1 k tokens/s  MFU 41.0%  2 min left"`."""
    parts = [time.strftime("%H:%M:%S"), row["name"]]
    parts.append(state_in_words(row["state"], row["step"], row["training_loss"]))
    if row["steps"]:
        parts.append(f"{row['step']:,} of {row['steps']:,} ({row['step'] / row['steps']:.0%})")
    parts += progress_words(row)
    if row["eta_s"] is not None:
        parts.append(f"{time_left(row['eta_s'])} left")
    if row["message"] and row["state"] != "finished":
        parts.append(row["message"])
    return "  ".join(parts)
