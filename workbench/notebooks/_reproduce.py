"""Running a shared notebook again, and saying what came out the same and what differed."""

from __future__ import annotations

import contextlib
import html
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.figures.pages import read_notebook
from workbench.notebooks._execute import execute
from workbench.notebooks._record import Record, RecordedRun, read_record
from workbench.notebooks._verdict import DIFFERENT, LossCurve, Verdict, verdict
from workbench.rundir import write_json
from workbench.runs import Run
from workbench.runs.records.environment import environment
from workbench.runs.launching.launcher import REPLAY


@dataclass(frozen=True)
class Difference:
    """Something that is not as it was recorded."""

    subject: str
    recorded: str
    here: str


@dataclass(frozen=True)
class Comparison:
    """A recorded run beside the one that repeated it."""

    name: str
    again: str
    verdict: Verdict


@dataclass(frozen=True)
class Reproduction:
    """What `reproduce` found; shows itself as a table."""

    comparisons: tuple[Comparison, ...]
    differences: tuple[Difference, ...]
    notebook: Path
    page: Path

    @property
    def same(self) -> bool:
        """Whether every run came out bitwise or within noise."""
        return all(comparison.verdict.same for comparison in self.comparisons)

    def __repr__(self) -> str:
        lines = [f"{c.name}: {c.verdict.kind} ({_facts(c.verdict)}). Repeated as {c.again}." for c in self.comparisons]
        if self.differences:
            lines += ["What differed:", *(f"  {d.subject}: {d.recorded} → {d.here}" for d in self.differences)]
        else:
            lines.append("Nothing differed in the environment, the data and the plans.")
        return "\n".join([*lines, str(self.page)])

    def _repr_html_(self) -> str:
        runs = [(c.name, c.again, c.verdict.kind, _facts(c.verdict)) for c in self.comparisons]
        differences = [(d.subject, d.recorded, d.here) for d in self.differences]
        tables = [_table(("run", "repeated as", "came out", ""), runs)]
        tables += [_table(("what differed", "recorded", "here"), differences)] if differences else []
        return "".join(tables)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag} style='text-align:left'>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line('th', header)}{''.join(line('td', row) for row in rows)}</table>"


def _facts(found: Verdict) -> str:
    if found.first_step is None:
        return found.reason
    return f"{found.reason}; first at step {found.first_step:,}, at most {found.largest_difference:.3g}"


def reproduce(
    notebook: Path,
    to: Path,
    *,
    kernel: str | None = None,
    at_commit: bool = False,
    report: Callable[[str], None] | None = None,
) -> Reproduction:
    """Execute the notebook again, with the parameters that it holds, and compare its runs with the recorded ones.

    The n-th run takes the plan of the n-th recorded one, where the model is the same and this machine can run it.
    Raises `WorkbenchError` before anything is executed if the notebook has no record or its commit is not here.
    """
    record = read_record(read_notebook(notebook), notebook.name)
    to.mkdir(parents=True, exist_ok=True)
    if (to / notebook.name).resolve() == notebook.resolve():
        raise WorkbenchError(
            f"{notebook} would be overwritten. Give another folder: workbench reproduce … --to FOLDER."
        )
    with tempfile.TemporaryDirectory() as scratch, _work_tree(record, Path(scratch), at_commit) as folder:
        replay = Path(scratch) / "replay.json"
        write_json(replay, [{"experiment": run.experiment, "plan": run.plan} for run in record.runs])
        variables = {REPLAY: str(replay)}
        if folder is not None:
            variables["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(
                os.pathsep
            )
            variables["WORKBENCH_RUNS"] = os.environ.get("WORKBENCH_RUNS") or str(Path("runs").absolute())
        done = execute(notebook, to, kernel=kernel, report=report, variables=variables, folder=folder)
    return Reproduction(
        tuple(_comparisons(record.runs, done.runs)),
        tuple(differences(record, done.runs)),
        done.notebook,
        done.page,
    )


@contextlib.contextmanager
def _work_tree(record: Record, scratch: Path, wanted: bool) -> Iterator[Path | None]:
    """The recorded commit, checked out beside this one; None (the folder at hand) unless that is wanted."""
    if not wanted:
        yield None
        return
    commit = (record.environment.get("git") or {}).get("commit")
    if commit is None:
        raise WorkbenchError("The notebook was not executed in a git repository; reproduce it without --at-commit.")
    tree = scratch / "tree"
    added = subprocess.run(["git", "worktree", "add", "--detach", str(tree), commit], capture_output=True, text=True)
    if added.returncode != 0:
        raise WorkbenchError(
            f"Commit {commit[:10]} cannot be checked out here ({added.stderr.strip().splitlines()[-1]}). Fetch it, "
            "and call this inside the repository.",
            commit=commit,
        )
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], capture_output=True, check=False)


def _comparisons(recorded: Sequence[RecordedRun], again: Sequence[Run]) -> Iterator[Comparison]:
    for index, run in enumerate(recorded):
        if index >= len(again):
            reason = "the notebook did not launch it this time"
            yield Comparison(run.name, "nothing", Verdict(DIFFERENT, float("nan"), None, reason))
        else:
            yield Comparison(run.name, again[index].name, verdict(run.curve, LossCurve.of(again[index])))


def differences(record: Record, again: Sequence[Run]) -> list[Difference]:
    """What was recorded otherwise than it is here: code, versions, machine; and each run's experiment, data, plan."""
    now = dict(again[0].environment) if again else environment()
    found = [*_of_code(record.environment, now), *_of_versions(record.environment, now)]
    found += _of_machine(record.environment, now)
    for run, repeated in zip(record.runs, map(RecordedRun.of, again), strict=False):
        found += _of_experiment(run, repeated)
    return found


def _of_code(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    left, right = then.get("git") or {}, now.get("git") or {}
    if left.get("commit") != right.get("commit"):
        yield Difference("git commit", _short(left.get("commit")), _short(right.get("commit")))
    if (left.get("dirty"), left.get("diff_sha256")) != (right.get("dirty"), right.get("diff_sha256")):
        yield Difference("uncommitted changes", _changes(left), _changes(right))


def _of_versions(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    if then.get("python") != now.get("python"):
        yield Difference("Python", str(then.get("python")), str(now.get("python")))
    left, right = then.get("packages") or {}, now.get("packages") or {}
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            yield Difference(name, str(left.get(name) or "not installed"), str(right.get(name) or "not installed"))


def _of_machine(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    for subject, key in (("processor", "cpu"), ("cores", "cores"), ("platform", "platform")):
        if then.get(key) != now.get(key):
            yield Difference(subject, str(then.get(key)), str(now.get(key)))
    left, right = (", ".join(f"{g['name']} ({g['driver']})" for g in facts.get("gpus") or ()) for facts in (then, now))
    if left != right:
        yield Difference("GPUs", left or "none", right or "none")


def _of_experiment(then: RecordedRun, now: RecordedRun) -> Iterator[Difference]:
    for field in sorted(then.experiment.keys() | now.experiment.keys()):
        left, right = then.experiment.get(field), now.experiment.get(field)
        if left != right:
            yield Difference(f"{then.name}: {field}", str(left), str(right))
    if then.data_fingerprint != now.data_fingerprint:
        left, right = _short(then.data_fingerprint), _short(now.data_fingerprint)
        yield Difference(f"{then.name}: data", left, right)
    chosen = ("pipeline", "data", "tensor", "zero", "schedule", "micro_batch", "num_microbatches", "precision")
    left, right = ({key: run.plan.get(key) for key in chosen} for run in (then, now))
    if left != right:
        changed = [key for key in chosen if left[key] != right[key]]
        described = (", ".join(f"{key} {plan[key]}" for key in changed) for plan in (left, right))
        yield Difference(f"{then.name}: plan", *described)


def _short(identity: Any) -> str:
    return str(identity)[:10] if identity else "none"


def _changes(git: Mapping[str, Any]) -> str:
    return f"some ({_short(git.get('diff_sha256'))})" if git.get("dirty") else "none"
