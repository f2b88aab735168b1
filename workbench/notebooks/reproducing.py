"""Reproduction of a shared notebook: a second execution, the verdict on each run, and what differed."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.arguments import checked_arguments
from workbench.display import html_table
from workbench.errors import WorkbenchError
from workbench.figures.figure import read_notebook
from workbench.notebooks.executing import Record, RecordedRun, check_not_overwritten, execute, recorded_in
from workbench.notebooks.verdict import DIFFERENT, LossCurve, Verdict, verdict
from workbench.rundir import write_json
from workbench.runs.environment import environment
from workbench.runs.launching.launcher import REPLAY
from workbench.runs.run import Run

PathLike = str | os.PathLike[str]
PLAN_FIELDS = ("pipeline", "data", "tensor", "zero", "schedule", "micro_batch", "num_microbatches", "precision")
"""Fields of a plan that are compared."""


@dataclass(frozen=True)
class RecordedDifference:
    """One fact that is not as it was recorded."""

    subject: str
    recorded: str
    here: str


@dataclass(frozen=True)
class Comparison:
    """A recorded run beside the run that repeated it."""

    name: str
    again: str
    verdict: Verdict


@dataclass(frozen=True)
class Reproduction:
    """The result of `reproduce`; a notebook shows it as tables."""

    comparisons: tuple[Comparison, ...]
    differences: tuple[RecordedDifference, ...]
    notebook: Path
    page: Path

    @property
    def same(self) -> bool:
        """True if every run came out bitwise or within noise."""
        return all(comparison.verdict.same for comparison in self.comparisons)

    def __repr__(self) -> str:
        lines = [
            f"{c.name}: {c.verdict.outcome} ({_describe(c.verdict)}). Repeated as {c.again}." for c in self.comparisons
        ]
        if self.differences:
            lines += ["What differed:", *(f"  {d.subject}: {d.recorded} → {d.here}" for d in self.differences)]
        else:
            lines.append("Nothing differed in the environment, the data and the plans.")
        return "\n".join([*lines, str(self.page)])

    def _repr_html_(self) -> str:
        runs = [(c.name, c.again, c.verdict.outcome, _describe(c.verdict)) for c in self.comparisons]
        differences = [(d.subject, d.recorded, d.here) for d in self.differences]
        table = html_table(("run", "repeated as", "came out", ""), runs)
        return table + (html_table(("what differed", "recorded", "here"), differences) if differences else "")


def _describe(result: Verdict) -> str:
    if result.first_step is None:
        return result.reason
    return f"{result.reason}; first at step {result.first_step:,}, at most {result.largest_difference:.3g}"


@checked_arguments
def reproduce(
    notebook: PathLike,
    to: PathLike = "reproduced",
    *,
    kernel: str | None = None,
    at_commit: bool = False,
    report: Callable[[str], None] | None = None,
    trust: bool = False,
) -> Reproduction:
    """Execute a shared notebook again, with the parameters that it holds, and compare its runs with the recorded ones.

    Its cells run as you: without `trust=True` nothing is executed, and the error shows what would be. The n-th run
    takes the plan of the n-th recorded run, if the model is the same and this machine can run the plan.

    Args:
        notebook: a notebook with a record, as `workbench execute` or `workbench share` made it.
        to: folder of the notebook as executed again, and its page.
        kernel: name of the kernel; the notebook's own by default.
        at_commit: True executes the code of the recorded git commit, checked out in a temporary folder.
        report: function that gets a line of progress every few seconds while runs train.
        trust: True executes the cells; False raises `WorkbenchError` with what would run.

    Raises `WorkbenchError` before anything is executed without `trust`, if the notebook has no record, if `to` holds
    the notebook itself, or if the commit is not in this repository.

    Examples:
        >>> again = wb.reproduce("shared/training.ipynb", trust=True)
        >>> again.same
        True
    """
    notebook, to = Path(notebook).expanduser(), Path(to).expanduser()
    record = recorded_in(read_notebook(notebook), notebook.name)
    check_not_overwritten(notebook, to, "reproduce")
    if not trust:
        raise WorkbenchError(
            f"Reproducing executes code, and nothing was executed yet. {what_runs(notebook, at_commit)}\n"
            "Read it. If you trust it, call wb.reproduce(..., trust=True)."
        )
    if at_commit:
        recorded_commit(record)  # raises for what is no commit
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, _work_tree(record, Path(scratch), at_commit) as folder:
        replay = Path(scratch) / "replay.json"
        write_json(replay, [{"experiment": run.experiment, "plan": run.plan} for run in record.runs])
        variables = {REPLAY: str(replay)}
        if folder is not None:
            path = [str(folder), os.environ.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, path))
            variables["WORKBENCH_RUNS"] = os.environ.get("WORKBENCH_RUNS") or str(Path("runs").absolute())
        done = execute(notebook, to, kernel=kernel, report=report, variables=variables, folder=folder)
    comparisons = [
        Comparison(run.name, again.name, verdict(run.curve, LossCurve.of(again)))
        for run, again in zip(record.runs, done.runs, strict=False)
    ]
    missing = Verdict(DIFFERENT, float("nan"), None, "the notebook did not launch it this time")
    comparisons += [Comparison(run.name, "nothing", missing) for run in record.runs[len(done.runs) :]]
    return Reproduction(tuple(comparisons), tuple(differences(record, done.runs)), done.notebook, done.page)


@contextlib.contextmanager
def _work_tree(record: Record, scratch: Path, wanted: bool) -> Iterator[Path | None]:
    """Check out the recorded commit in a temporary work tree; yield None, the folder at hand, unless it is wanted."""
    if not wanted:
        yield None
        return
    commit = recorded_commit(record)
    if commit is None:
        raise WorkbenchError("The notebook was not executed in a git repository; reproduce it without --at-commit.")
    tree = scratch / "tree"
    command = ["git", "worktree", "add", "--detach", "--", str(tree), commit]
    added = subprocess.run(command, capture_output=True, text=True)
    if added.returncode != 0:
        raise WorkbenchError(
            f"Commit {commit[:10]} cannot be checked out here ({added.stderr.strip().splitlines()[-1]}). Fetch it, and "
            "run this command inside the repository."
        )
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], capture_output=True, check=False)


def recorded_commit(record: Record) -> str | None:
    """Return the commit of a record, None without one; raises `WorkbenchError` for what is no commit.

    Git would read a text such as `--upload-pack=…` as an option.
    """
    git = record.environment.get("git")
    commit = git.get("commit") if isinstance(git, Mapping) else None
    if commit is not None and not re.fullmatch(r"[0-9a-f]{7,64}", str(commit)):
        raise WorkbenchError(
            f"The record names {str(commit)[:40]!r} as its commit, which is none. Reproduce the notebook without "
            "at_commit, once you have read its cells."
        )
    return None if commit is None else str(commit)


def what_runs(notebook: Path, at_commit: bool = False) -> str:
    """Return what `reproduce` would execute, and from where: the code of each cell, and the folder of its imports.

    Raises `WorkbenchError` for a notebook without a record.
    """
    value = read_notebook(notebook)
    record = recorded_in(value, notebook.name)
    cells = [cell.source for cell in value.cells if cell.cell_type == "code"]
    commit = recorded_commit(record)
    where = f"with the code of commit {commit}" if at_commit and commit else f"with the code in {Path.cwd()}"
    lines = [f"{notebook.absolute()} has {len(cells)} cells of code, which run as you, {where}:"]
    for number, source in enumerate(cells, start=1):
        lines += [f"[{number}]", *(f"    {line}" for line in source.expandtabs().splitlines())]
    return "\n".join("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line) for line in lines)


def differences(record: Record, again: Sequence[Run]) -> list[RecordedDifference]:
    """Return what differs from the record: code, versions, machine, and each run's experiment, data and plan."""
    now = dict(again[0].environment) if again else environment()
    then, here = _machine(record.environment), _machine(now)
    subjects = [subject for subject in {**then, **here} if then.get(subject) != here.get(subject)]
    missing = "not installed"
    changed = [RecordedDifference(each, then.get(each, missing), here.get(each, missing)) for each in subjects]
    for run, repeated in zip(record.runs, map(RecordedRun.of, again), strict=False):
        changed += _run_differences(run, repeated)
    return changed


def _machine(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return code, versions and hardware of an environment in words, by what they are."""
    git, packages = environment.get("git") or {}, environment.get("packages") or {}
    dirty = f"some ({_short(git.get('diff_sha256'))})" if git.get("dirty") else "none"
    said = {"git commit": _short(git.get("commit")), "uncommitted changes": dirty}
    said |= {
        "Python": str(environment.get("python")),
        **{name: str(packages[name]) for name in sorted(packages) if packages[name]},
    }
    hardware = {"processor": "cpu", "cores": "cores", "platform": "platform"}
    gpus = ", ".join(f"{gpu['name']} ({gpu['driver']})" for gpu in environment.get("gpus") or ())
    return {**said, **{name: str(environment.get(key)) for name, key in hardware.items()}, "GPUs": gpus or "none"}


def _run_differences(then: RecordedRun, now: RecordedRun) -> Iterator[RecordedDifference]:
    for field in sorted(then.experiment.keys() | now.experiment.keys()):
        left, right = then.experiment.get(field), now.experiment.get(field)
        if left != right:
            yield RecordedDifference(f"{then.name}: {field}", str(left), str(right))
    if then.data_fingerprint != now.data_fingerprint:
        yield RecordedDifference(f"{then.name}: data", _short(then.data_fingerprint), _short(now.data_fingerprint))
    changed = [key for key in PLAN_FIELDS if then.plan.get(key) != now.plan.get(key)]
    if changed:
        described = (", ".join(f"{key} {run.plan.get(key)}" for key in changed) for run in (then, now))
        yield RecordedDifference(f"{then.name}: plan", *described)


def _short(identity: Any) -> str:
    return str(identity)[:10] if identity else "none"
