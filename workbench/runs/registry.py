"""The runs of a folder: finding one by name, listing all, and showing them as a table."""

from __future__ import annotations

import difflib
import html
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from workbench.arguments import checked_arguments
from workbench.errors import InvalidArgument, RunNotFound, suggestion
from workbench.rundir import STATES, RunDir, runs_root
from workbench.runs.labels import read_labels
from workbench.runs.loss_basis import read_loss_basis, why_not_compared
from workbench.runs.run import Run, step_text
from workbench.runs.status import RunRow, created_at, state_in_words, unreadable_row
from workbench.tables import html_table, text_table
from workbench.units import count, duration, time_left

if TYPE_CHECKING:
    from workbench.runs.tracking.wandb_run import Delivery

OneRun = Run | str | os.PathLike[str]
"""A run, or its directory or name."""
Runs = OneRun | Iterable[OneRun]
HEADER = ("name", "state", "step", "loss", "tokens/s", "MFU", "left", "devices", "when", "tags")
"""Columns of a table of runs."""
SORTABLE = tuple(name for name in RunRow.__annotations__ if name not in ("gpus", "tags"))
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
        """Upload to W&B whatever it lacks of the tracked runs that have ended.

        Raises `WorkbenchError` if nobody is logged in.
        """
        from workbench.runs.tracking.wandb_run import pending, recording

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
        known = [pair for pair in chosen if _is_known(pair[0][by])]  # type: ignore[literal-required]
        known.sort(key=lambda pair: pair[0][by], reverse=by != sort)  # type: ignore[literal-required]
        chosen = known + [pair for pair in chosen if pair not in known]
    note = None
    if by is not None and by.endswith("loss"):
        held_out = [by == "eval_loss" or (by == "loss" and row["eval_loss"] is not None) for row, _ in known]
        note = why_not_compared([read_loss_basis(run.directory) for _, run in known], held_out)
    return RunTable(folder, tuple(run for _, run in chosen), note)


def _is_known(figure: Any) -> bool:
    return not (figure is None or (isinstance(figure, float) and math.isnan(figure)))


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
        from workbench.runs.tracking.remote import download_run

        return Run(download_run(path))
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
    except (RunNotFound, KeyError):
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
        f"{duration(max(0.0, time.time() - row['time']))} ago" if row["time"] else "",
        ", ".join(row["tags"]),
    )
