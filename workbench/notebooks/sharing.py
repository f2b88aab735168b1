"""Sharing of an executed notebook, and its reproduction.

Shared are a page that is interactive offline and a notebook that shows without a kernel. A reproduction is a second
execution, with a verdict on each run by its loss curve and with what differed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from workbench.base.arguments import checked_arguments
from workbench.base.display import Say, html_table, waiting
from workbench.base.errors import WorkbenchError
from workbench.base.secrets import MASK, masked_json, secrets
from workbench.figures.figure import HIDE_DEAD_WIDGET, PLOTLY_MIME, WIDGET_MIME, written
from workbench.notebooks.executing import (
    KEY,
    Column,
    LossCurve,
    Record,
    RecordedRun,
    check_not_overwritten,
    execute,
    recorded_in,
    runs_shown_in,
)
from workbench.notebooks.pages import (
    add_pictures,
    harmless_html,
    harmless_markdown,
    notebook_text,
    notebook_to_html,
    read_notebook,
    runs_something,
)
from workbench.record.rundir import write_json
from workbench.runs.environment import environment
from workbench.runs.registry import Runs, load_runs
from workbench.runs.run import REPLAY, Run

PathLike = str | os.PathLike[str]
MAX_BYTES = 5_000_000
"""Largest size of a shared notebook: mail and code hosts take no more, or do not render it."""


SHOWN = frozenset(
    {PLOTLY_MIME, "text/plain", "text/latex", "application/json", "image/png", "image/jpeg", "image/gif", "image/webp"}
)
"""Types of outputs that hold nothing to run."""
CLEANED = frozenset({"text/html", "text/markdown"})
"""Types of outputs that are sanitised."""


@dataclass(frozen=True)
class Shared:
    """The two files of a shared notebook, and notes for the person who sends them."""

    notebook: Path
    page: Path
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([str(self.notebook), str(self.page), *self.notes])


@checked_arguments
def share(notebook: PathLike, to: PathLike = "shared", *, runs: Runs | None = None) -> Shared:
    """Make an HTML page that is interactive offline, and a notebook under 5 MB that shows without a kernel.

    Both go into the folder `to`. The notebook keeps what `wb.reproduce` needs of its runs: the record that `workbench
    execute` made, else one of `runs`, by default of the runs whose names its outputs show. Secrets become `***`, as far
    as their names or their form tell, and scripts in texts and outputs are removed. Raises `WorkbenchError` if `to`
    holds the notebook itself.

    Examples:
        >>> shared = wb.share("curves.ipynb", to="shared")
        >>> shared.page.name
        'curves.html'
    """
    notebook, to = Path(notebook).expanduser(), Path(to).expanduser()
    check_not_overwritten(notebook, to, "share")
    with waiting(f"sharing {notebook.name}") as say:
        return _share(notebook, to, runs, say)


def _share(notebook: Path, to: Path, runs: Runs | None, say: Say) -> Shared:
    import nbformat

    target = (to / notebook.name).absolute()
    value = read_notebook(notebook)
    known, notes = value.metadata.get(KEY), list[str]()
    if runs is not None or not (isinstance(known, Mapping) and known.get("runs")):
        recorded = runs_shown_in(value) if runs is None else load_runs(runs)
        value.metadata[KEY] = nbformat.from_dict(Record.of(recorded).to_json())
        if not recorded:
            notes.append(
                "No run of this notebook was found here, so it cannot be reproduced. Name its runs with --run."
            )
    # Of a widget nothing stays: what is left of its output may be the name of its class.
    value.metadata.pop("widgets", None)
    for cell in (cell for cell in value.cells if "outputs" in cell):
        kept = []
        for output in cell["outputs"]:
            data = output.get("data", {})
            data.pop(WIDGET_MIME, None)
            if "text/html" in data:
                data["text/html"] = "".join(data["text/html"]).replace(HIDE_DEAD_WIDGET, "")
            shown = {mime: content for mime, content in data.items() if content not in ("", [], [""])}
            text = "".join(shown.pop("text/plain", ""))
            is_text = text != "" and not text.startswith(("FigureWidget(", "VBox(", "HBox(", "Output("))
            kept += [output] if shown or is_text or "data" not in output else []
        cell["outputs"] = kept
    say("drawing its figures")
    reason = add_pictures(value)
    if reason:
        notes.append(reason)
    say("removing scripts and secrets")
    notes += _remove_scripts(value)
    value = masked_json(value)  # before JSON escapes the quotes and line ends of a secret
    text, left_out = _shrunk(value)
    notes += left_out
    for secret in secrets():  # in names
        text = text.replace(secret, MASK)
    say("writing its page")
    page = notebook_to_html(written(target, text.encode()), target.with_suffix(".html"))
    return Shared(target, page, tuple(notes))


def _shrunk(notebook: Any) -> tuple[str, list[str]]:
    """Remove outputs, the largest first, until a notebook is below `MAX_BYTES`; return its text and a note for each."""
    notes = list[str]()
    while (size := len((text := notebook_text(notebook)).encode())) > MAX_BYTES:
        outputs = [
            (len(json.dumps(content)), output["data"], mime)
            for cell in notebook.cells
            for output in cell.get("outputs", ())
            for mime, content in output.get("data", {}).items()
            if mime != "text/plain"
        ]
        if not outputs:
            raise WorkbenchError(
                f"The notebook's text alone is {size:,} bytes, and {MAX_BYTES:,} may be shared. Clear the outputs that "
                "print so much."
            )
        num_bytes, data, mime = max(outputs, key=lambda output: output[0])
        del data[mime]
        data.setdefault("text/plain", "(left out: too large)")
        what = "an interactive figure (its picture stays)" if mime == PLOTLY_MIME else f"an output of type {mime}"
        notes.append(f"Left out {what} of {num_bytes / 1e6:.1f} MB.")
    return text, notes


def _remove_scripts(notebook: Any) -> list[str]:
    """Remove what a browser would run from texts and outputs; return a note if there was any."""
    removed = 0
    for cell in notebook.cells:
        for name, attachment in list(cell.get("attachments", {}).items()):
            if not all(mime.startswith("image/") for mime in attachment):
                del cell.attachments[name]
                removed += 1
        if cell.cell_type != "code":
            before = cell.source
            cell.source = harmless_markdown(before)
            removed += cell.source != before
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            for mime in [mime for mime in data if mime not in SHOWN and mime not in CLEANED]:
                del data[mime]
                removed += 1
            for mime in CLEANED & data.keys():
                before = "".join(data[mime])
                data[mime] = harmless_html(before) if mime == "text/html" else harmless_markdown(before)
                removed += runs_something(before) if mime == "text/html" else data[mime] != before
    return [f"Removed from {removed} places what a browser would run, or no viewer shows."] if removed else []


# The verdict on a repeated run compares its loss curve with the recorded one, step by step.

BITWISE, NOISE, DIFFERENT = "bitwise", "within noise", "different"
"""Outcomes of a comparison."""
MAX_STRETCHES, MIN_STRETCH = 20, 20
"""Largest number of stretches that a curve is cut into, and smallest number of steps in a stretch."""
NEIGHBOURS = 2
"""Number of stretches on each side whose values also enter the estimate of a stretch's noise."""
SIGNIFICANCE = 0.01
"""Probability that two runs which differ by batch noise alone are called different."""
ROUNDING = 1e-6
"""Relative difference of two mean losses below which they count as equal."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison, with the numbers behind it."""

    outcome: str
    """`bitwise`, `within noise` or `different`."""
    largest_difference: float
    """Largest absolute difference of two losses at the same step; NaN if the curves cannot be compared."""
    first_step: int | None
    """The first step at which the losses differ; None if there is none."""
    reason: str

    @property
    def same(self) -> bool:
        """True unless the runs are different."""
        return self.outcome != DIFFERENT


def verdict(recorded: LossCurve, again: LossCurve) -> Verdict:
    """Compare two curves; they are equal bit by bit, or differ by no more than batch noise explains, or differ.

    The curve is cut into at most 20 stretches of at least 20 steps. Around each, the batch noise σ is estimated from
    the recorded curve alone, from the median difference of neighbouring losses: σ = median|Δ| / (0.6745 √2), which a
    trend hardly changes. The mean difference of two runs over n different batches has the standard error σ √(2 / n).
    The largest ratio of difference to standard error is compared with the two-sided normal quantile of 1 %, divided by
    the number of stretches (Bonferroni's correction).
    """
    if recorded.digest == again.digest:
        return Verdict(BITWISE, 0.0, None, f"all {recorded.steps:,} losses are equal to the last bit")
    if recorded.steps != again.steps:
        reason = f"{again.steps:,} steps were logged instead of {recorded.steps:,}"
        return Verdict(DIFFERENT, float("nan"), None, reason)
    common, left, right = np.intersect1d(recorded.step, again.step, return_indices=True)
    old, new = recorded.loss[left], again.loss[right]
    finite = np.isfinite(old)
    if not len(common) or not np.array_equal(finite, np.isfinite(new)):
        return Verdict(DIFFERENT, float("nan"), None, "the losses are not numbers at the same steps")
    return _compare_stretches(common[finite], old[finite], new[finite])


def _compare_stretches(step: Column, old: Column, new: Column) -> Verdict:
    difference = new - old
    largest = float(np.abs(difference).max(initial=0.0))
    differing = np.flatnonzero(difference)
    first = int(step[differing[0]]) if len(differing) else None
    number = max(1, min(MAX_STRETCHES, len(step) // MIN_STRETCH))
    stretches = np.array_split(np.arange(len(step)), number)
    limit = NormalDist().inv_cdf(1 - SIGNIFICANCE / (2 * number))
    ratios, jumps = list[float](), np.abs(np.diff(old))
    for index, stretch in enumerate(stretches):
        # The noise of one batch's loss, from the jumps of this stretch and its neighbours (see `verdict`).
        near = jumps[stretches[max(0, index - NEIGHBOURS)][0] : stretches[index : index + NEIGHBOURS + 1][-1][-1]]
        noise = float(np.median(near)) / (0.6745 * np.sqrt(2)) if len(near) else 0.0
        mean, error = abs(float(difference[stretch].mean())), noise * float(np.sqrt(2 / len(stretch)))
        is_rounding = mean <= ROUNDING * abs(float(old[stretch].mean()))
        ratios.append(0.0 if is_rounding else mean / error if noise > 0 else float("inf"))
    worst = int(np.argmax(ratios))
    if ratios[worst] <= limit:
        reason = f"at most {ratios[worst]:.2g} standard errors apart in any stretch ({limit:.2g} allowed)"
        return Verdict(NOISE, largest, first, reason)
    where = f"{step[stretches[worst]].mean():.0f}"
    reason = f"{ratios[worst]:.2g} standard errors apart around step {where} ({limit:.2g} allowed)"
    return Verdict(DIFFERENT, largest, first, reason)


# The reproduction executes the notebook a second time, and says what differed.

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
    return Reproduction(tuple(comparisons), tuple(differences_from(record, done.runs)), done.notebook, done.page)


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
        said = (added.stderr.strip().splitlines() or [f"git ended with exit code {added.returncode}"])[-1]
        raise WorkbenchError(
            f"Commit {commit[:10]} cannot be checked out here ({said}). Fetch it, and run this command inside the "
            "repository."
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

    Args:
        notebook: an executed notebook with its record.
        at_commit: read the code at the recorded commit rather than as it stands now.

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


def differences_from(record: Record, again: Sequence[Run]) -> list[RecordedDifference]:
    """Return what differs from the record: versions, machine, and each run's experiment, code, data and plan."""
    now = dict(again[0].environment) if again else environment()
    then, here = _machine(record.environment), _machine(now)
    subjects = [subject for subject in {**then, **here} if then.get(subject) != here.get(subject)]
    missing = "not installed"
    changed = [RecordedDifference(each, then.get(each, missing), here.get(each, missing)) for each in subjects]
    for old, new in zip(record.runs, map(RecordedRun.of, again), strict=False):
        for field in sorted(old.experiment.keys() | new.experiment.keys()):
            left, right = old.experiment.get(field), new.experiment.get(field)
            if left != right:
                changed.append(RecordedDifference(f"{old.name}: {field}", str(left), str(right)))
        if old.data_fingerprint != new.data_fingerprint:
            prints = _short(old.data_fingerprint), _short(new.data_fingerprint)
            changed.append(RecordedDifference(f"{old.name}: data", *prints))
        for part in sorted(old.code.keys() & new.code.keys()):
            if old.code[part] != new.code[part]:
                digests = _short(old.code[part]), _short(new.code[part])
                changed.append(RecordedDifference(f"{old.name}: code of {part}", *digests))
        other = [key for key in PLAN_FIELDS if old.plan.get(key) != new.plan.get(key)]
        if other:
            described = (", ".join(f"{key} {run.plan.get(key)}" for key in other) for run in (old, new))
            changed.append(RecordedDifference(f"{old.name}: plan", *described))
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


def _short(identity: Any) -> str:
    return str(identity)[:10] if identity else "none"
