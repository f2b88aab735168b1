"""`Run`, the handle of a training that lives in its own processes and directory, and the verbs that make one."""

from __future__ import annotations

import contextlib
import fcntl
import html
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from workbench.base.arguments import checked_arguments
from workbench.base.display import Html, html_table
from workbench.base.errors import InvalidArgument, PlanInfeasible, PlanMismatch, RunFailed, RunNotFound, WorkbenchError
from workbench.base.units import count, gib
from workbench.record.event_log import FREQUENT, UNREAD, Status, read_events
from workbench.record.events import Event
from workbench.record.rundir import LAUNCHES, EventTail, RunDir, check_unedited, read_json, remedy_for, write_json
from workbench.runs.launching import processes
from workbench.runs.launching.device_queue import devices_for
from workbench.runs.launching.processes import log_tail, run_failed
from workbench.runs.status import (
    Checkpoint,
    Labels,
    RunRow,
    complete_checkpoints,
    read_described,
    read_experiment,
    read_labels,
    read_status,
    row_of,
    wait_for_end,
)

if TYPE_CHECKING:
    from workbench.data import Prepared
    from workbench.experiment import Experiment
    from workbench.planning.plan import Plan
    from workbench.record.history import Evaluations, History, HistoryTail, Patterns, TextSamples, Utilization
    from workbench.record.norms import Norms
    from workbench.runs.evaluating import EvaluationResult
    from workbench.runs.tracking.delivery import Delivery

LONGEST_TAG, LONGEST_NOTE = 64, 10_000
"""Most letters of a tag and of a note."""
PLANNED_FIELDS = frozenset({"model", "data", "global_batch", "seq_len", "precision", "optimizer"})
"""Fields of an experiment that a plan depends on: a clone that changes one of them is planned anew."""


class Labelled:
    """The part of `Run` that keeps tags, a note and the archive in the run directory."""

    directory: RunDir

    if TYPE_CHECKING:

        @property
        def config(self) -> dict[str, Any]: ...

    @property
    def labels(self) -> Labels:
        """Return the run's tags, its note, and whether it is archived."""
        return read_labels(self.directory, {} if self.directory.labels.exists() else self.config)

    @checked_arguments
    def tag(self, *tags: str) -> Self:
        """Add tags to the run: `run.tag("baseline", "paper")`. An experiment's own tags are there from the start."""
        for tag in tags:
            if not isinstance(tag, str) or not tag.strip() or len(tag) > LONGEST_TAG or not tag.isprintable():
                raise InvalidArgument(f"{tag!r:.80} is no tag. Give one line of 1 to {LONGEST_TAG} letters.")
        return self._relabel(tags=lambda labels: tuple(dict.fromkeys([*labels.tags, *map(str.strip, tags)])))

    @checked_arguments
    def untag(self, *tags: str) -> Self:
        """Remove tags from the run, those of its experiment too; W&B keeps the tags with which the run began."""
        return self._relabel(tags=lambda labels: tuple(tag for tag in labels.tags if tag not in tags))

    @checked_arguments
    def note(self, text: str) -> Self:
        """Write a note about the run, in place of an earlier one; an empty text removes it."""
        if len(text) > LONGEST_NOTE:
            raise InvalidArgument(f"A note has at most {LONGEST_NOTE:,} letters, and this one {len(text):,}.")
        return self._relabel(notes=lambda _: text)

    @checked_arguments
    def archive(self, archived: bool = True) -> Self:
        """Hide the run from lists, which show it again with `archived=True`; `archive(False)` brings it back."""
        return self._relabel(archived=lambda _: archived)

    def _relabel(self, **changes: Any) -> Self:
        try:
            with _locked(self.directory):
                labels = self.labels
                new = replace(labels, **{name: change(labels) for name, change in changes.items()})
                write_json(self.directory.labels, asdict(new))
        except OSError as error:
            raise WorkbenchError(
                f"The labels of {self.directory.path.name} cannot be written in {self.directory.path}: "
                f"{error.strerror}. They are as before. {remedy_for(error)}"
            ) from None
        return self


@contextlib.contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    """Hold a lock on the run's directory itself, so that two kernels that label a run at once lose nothing."""
    descriptor = os.open(run.path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Run(Labelled):
    """The handle of one training: reads its directory, and asks its processes for something, from any kernel."""

    @checked_arguments
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory = RunDir(Path(path).absolute())
        """The names of everything inside the run directory."""
        self._progress = UNREAD

    @property
    def path(self) -> Path:
        """Return the run directory."""
        return self.directory.path

    @property
    def name(self) -> str:
        """Return the name of the run directory."""
        return self.path.name

    @property
    def experiment(self) -> Experiment:
        """Return what was asked for; user-defined code is only named in it, because reading a run executes nothing."""
        from workbench.experiment import Experiment

        return Experiment.from_json(self.config)

    @property
    def config(self) -> dict[str, Any]:
        """Return what was asked for, as JSON: that of the experiment, or the config of a W&B run."""
        return read_experiment(self.directory)

    @property
    def plan(self) -> Plan:
        """Return the plan with its prediction; raises `RunNotFound` for a W&B run that Workbench did not plan."""
        from workbench.planning.plan import Plan

        if not self.directory.plan.exists():
            raise RunNotFound(f"{self.name} was not planned by Workbench; it has a curve and a config only.")
        return Plan.load(self.path)

    @property
    def environment(self) -> dict[str, Any]:
        """Return machine, versions and git state of the launch."""
        return read_described(self.directory.environment)

    @property
    def alive(self) -> bool:
        """Return True if a process of the run is left: supervisor, launcher or rank."""
        return processes.run_alive(self.directory)

    @property
    def status(self) -> Status:
        """Return the last recorded state, corrected by the processes that are really there."""
        status, self._progress = read_status(self.directory, self._progress)
        return status

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return the complete checkpoints, oldest first."""
        return complete_checkpoints(self.directory)

    @checked_arguments
    def stop(self, wait: bool = False) -> Run:
        """Ask the ranks to write a checkpoint and leave; with `wait`, return when they have.

        Does nothing to a run that has ended. Ranks that hang are ended by force after a few minutes, also when the
        launcher is gone.
        """
        return self._end(self.directory.stop_file, wait)

    @checked_arguments
    def kill(self, wait: bool = True) -> Run:
        """End the ranks at once; what was trained since the last checkpoint is lost.

        Does nothing to a run that has ended. Processes of another host are ended by their own supervisor, if it lives.
        """
        return self._end(self.directory.kill_file, wait)

    def _end(self, request: Path, wait: bool) -> Run:
        from workbench.runs.launching.launcher import request_end

        status = self.status
        request_end(self.directory, request, status)
        return self.wait() if wait and not status.final else self

    @checked_arguments
    def wait(self, timeout: float | None = None) -> Run:
        """Block until the run has ended, or until `timeout` seconds have passed.

        An interrupt leaves the run training, and is raised again. Raises `RunFailed`, with the worker's own traceback,
        if the run failed.
        """
        try:
            _, self._progress = wait_for_end(self.directory, self._progress, timeout)
        except KeyboardInterrupt:
            print(f"{self.name} trains on; stop() ends it.")
            raise
        return self

    def delete(self) -> None:
        """Delete the run's directory with its checkpoints, curves and logs; what W&B has stays there.

        Raises `WorkbenchError` while a process of the run is left, and if the directory cannot be deleted.
        """
        if not (status := self.status).final or self.alive:
            raise WorkbenchError(
                f"{self.name} is {status.state}. End it with run.stop(wait=True) before it is deleted."
            )
        # Renamed first, and no run from the next moment on: whoever lists runs meanwhile sees all of it or nothing.
        doomed = RunDir(self.path.with_name(f".{self.name}.{os.getpid()}.deleted"))
        try:
            self.path.rename(doomed.path)
            doomed.experiment.unlink(missing_ok=True)
            shutil.rmtree(doomed.path)
        except OSError as error:
            why = error.strerror or error
            raise WorkbenchError(f"{self.path} cannot be deleted: {why}. {remedy_for(error)}") from None

    def error(self) -> RunFailed | None:
        """Return the exception that describes why the run failed, or None if it did not fail."""
        status = self.status
        return run_failed(self.directory, status.message) if status.state == "failed" else None

    @checked_arguments
    def resume(self, plan: Plan | None = None, *, steps: int | None = None, accept_changed_data: bool = False) -> Run:
        """Continue a stopped or failed run from its last checkpoint, in the same directory.

        `plan` may differ from the run's own, because checkpoints do not depend on the plan. `steps` extends the
        training. A model or user-defined dataset is the code that the run stored, which is not loaded here.
        `accept_changed_data` goes on although the text or the dataset's code has changed since. Raises `PlanMismatch`
        for a plan of another model and for files or code edited since the start, `CheckpointError` without a
        checkpoint, and `DataError` for a changed text.
        """
        _resume(self, plan, steps, accept_changed_data)
        return self

    @checked_arguments
    def clone(self, plan: Plan | None = None, **changes: Any) -> Run:
        """Launch this run's experiment again with some fields changed: `run.clone(learning_rate=1e-4)`.

        The clone has the run's plan, unless another is given or a change asks for a new one (model, data,
        global_batch, seq_len, precision, optimizer). A model, dataset or function of the user's own goes along as the
        code that the run stored, without being loaded here.
        """
        from workbench.runs.launching.launcher import clone

        if plan is None and changes.keys() & PLANNED_FIELDS:
            from workbench.planning.planner import plan as make_plan

            experiment = _buildable_experiment(self, changes)
            experiment.reading.check()
            plan = make_plan(experiment)
        return Run(clone(self.directory, self.plan if plan is None else plan, changes))

    @checked_arguments
    def export(self, to: str | os.PathLike[str], step: int | None = None) -> tuple[Path, ...]:
        """Write the model as `safetensors` into the folder `to`, under its own names and tied weights once.

        The weights are those of the last checkpoint, or of the checkpoint of `step`. A `transformers` model gets its
        `config.json`, so that `from_pretrained(to)` loads it. Nothing of the user's code is executed. Returns the
        files. Raises `CheckpointError` for a checkpoint that is missing or damaged, and for a folder that already
        holds a model.
        """
        from workbench.execution.checkpoint.model_export import export_step

        return export_step(self.directory.checkpoints, Path(to).expanduser(), step)

    @checked_arguments
    def slurm(
        self,
        *,
        time: str = "24:00:00",
        partition: str | None = None,
        account: str | None = None,
        cpus_per_node: int | None = None,
        options: Sequence[str] = (),
    ) -> str:
        """Return the text of a Slurm job file that trains this prepared or stopped run on the nodes of its plan.

        `options` are further `#SBATCH` options, such as `"--constraint=h200"`. The job writes a checkpoint before its
        time is up; submitted or requeued again, it continues from the last good one. The run directory, the Python
        environment and `$WORKBENCH_HOME` must be on a file system that every node sees. Raises `PlanInfeasible` where
        the plan's devices do not fill its nodes equally.
        """
        from workbench.runs.launching.multi_node import job_file

        words = {"time": time, "partition": partition, "account": account}
        return job_file(self.directory, self.plan, words, options, cpus_per_node)

    def sync(self) -> Delivery:
        """Upload to its tracker (W&B, Trackio) whatever it lacks of this run, from what the run left on disk.

        Raises `WorkbenchError` if the run is not tracked, nobody is logged in at W&B, its client does not say who is,
        Trackio is not installed or its server not writable, or the recorder is still at work.
        """
        from workbench.runs.tracking.delivery import sync

        return sync(self.directory)

    def events(self) -> list[Event]:
        """Return every event and every logged step so far; `workbench.record.events` lists their fields."""
        return read_events(self.directory.events)

    def milestones(self) -> list[Event]:
        """Return every event so far but steps, device samples and `actions`: quick to read, however long the run."""
        return EventTail(self.directory.events).read(without=FREQUENT)

    def history(self) -> History:
        """Return the logged steps as NumPy columns, one row a step."""
        return self._tail().read()

    @property
    def records_norms(self) -> bool:
        """Return True if its experiment asks for norms (`wb.Tracking(norms_every=…)`)."""
        try:
            tracking = self.config.get("tracking")
        except RunNotFound:  # a damaged record
            return False
        return isinstance(tracking, dict) and bool(tracking.get("norms_every"))

    def norms(self) -> Norms:
        """Return the norms of weights, gradients and updates by parameter and step, with what the optimiser expects.

        Raises `InvalidArgument` for a run without `wb.Tracking(norms_every=…)`, or before its first step.
        """
        from workbench.record.norms import read_norms

        return read_norms(self.directory.events, self.name)

    def _tail(self) -> HistoryTail:
        from workbench.record.history import read_tail

        return read_tail(self.directory.events)

    @checked_arguments
    def evaluate(self, data: Any = None, step: int | None = None) -> EvaluationResult:
        """Return the loss of a checkpoint on held-out samples, once this run has ended; blocks, and records the result.

        `data` replaces the samples that the run held out, and `step` names a checkpoint other than the last one;
        `workbench.runs.evaluating.evaluate` says what is refused.
        """
        from workbench.runs.evaluating import evaluate

        return evaluate(self.directory, data, step)

    @checked_arguments
    def evaluations(self, data: str | None = None) -> Evaluations:
        """Return the held-out losses, or those on `data` by its name, as NumPy columns, one row an evaluation."""
        return self._tail().evaluations if data is None else self._tail().evaluations_on(data)

    def samples(self) -> TextSamples:
        """Return the text that the model wrote while it trained; empty without `samples`."""
        return self._tail().texts

    def patterns(self) -> Patterns:
        """Return the patterns of sparse weights as NumPy columns, one row an update; empty for dense weights."""
        return self._tail().patterns

    def utilization(self) -> Utilization:
        """Return how busy the devices were as NumPy columns, one row per sample of one device."""
        return self._tail().utilization

    @checked_arguments
    def logs(self, rank: int | str = 0, tail: int | None = 100) -> str:
        """Return the last `tail` lines (None: all) that a rank printed, or that `"launcher"` printed."""
        return log_tail(self.directory, rank, tail)

    def row(self) -> RunRow:
        """Return the row of `wb.list_runs()`, as JSON: state, step, loss, speed, time left, devices, peak memory."""
        status = self.status
        return row_of(self.directory, status, self._progress)

    def __repr__(self) -> str:
        return f"Run({self.name}: {_in_words(self.row())})"

    def _repr_html_(self) -> str:
        from workbench.data.corpora import use_in_words
        from workbench.runs.tracking.delivery import tracking_note

        row = self.row()
        used, start = use_in_words(self._progress.data_use), self._progress.start
        data = {"data": used, "held out": start.get("held_out", "") if start else ""}
        return _run_html(row, data, self._progress.problems, tracking_note(self.directory))


def _in_words(row: RunRow) -> str:
    parts = [row["state"], f"step {step_text(row)}", *_figures(row)]
    message = f" ({row['message']})" if row["message"] and row["state"] != "finished" else ""
    return f"{', '.join(parts)}{message}"


def _buildable_experiment(run: Run, changes: Mapping[str, Any]) -> Experiment:
    """Return the run's experiment with `changes`; raises `WorkbenchError` for stored code, which is never loaded."""
    experiment = run.experiment.replace(**changes)
    parts: dict[str, Any] = {"model": experiment.model, "data": experiment.data, "eval_data": experiment.eval_data}
    if any(part is not None and part.is_user_defined and name not in changes for name, part in parts.items()):
        raise WorkbenchError(
            f"{run.name} trains a user-defined model or dataset, which is stored as code in {run.directory.code} and "
            "is not loaded from there. Build the Experiment again and launch it."
        )
    return experiment


def _resume(run: Run, plan: Plan | None, steps: int | None, accept_changed_data: bool) -> None:
    """Launch the run again from its last checkpoint; what it passed before it started is not checked again."""
    from workbench.experiment import USER_PARTS
    from workbench.optimizers.parameters import leap_of_rate
    from workbench.planning.runnable import facts_for
    from workbench.runs.launching.launcher import Attempt, continued_provenance, require_stored_code, start_attempt

    check_unedited(run.directory)
    require_stored_code(run.directory, [part for part in USER_PARTS if not (accept_changed_data and "data" in part)])
    launched = run.experiment
    experiment = launched if steps is None else launched.replace(steps=steps)
    facts = None if plan is None else facts_for(experiment, plan)
    if plan is not None and facts is None and plan.signature != run.plan.signature:
        raise PlanMismatch(
            f"The plan was made for {plan.model} (signature {plan.signature}), and {run.name} trains "
            f"{run.plan.model} ({run.plan.signature}). Plan the run's own experiment."
        )
    computed = None if plan is None else plan.computation
    if computed is not None and (then := run.plan.computation) and computed.first_difference(then) is not None:
        raise PlanMismatch(
            f"The plan was made for a model that computes something else than {run.plan.model}, which {run.name} "
            "trains. Undo what was changed, or train the changed model from the start: wb.launch(experiment)."
        )
    provenance = continued_provenance(run.directory, experiment, accept_changed_data)
    attempt = Attempt(experiment, plan or run.plan, resume=run.path, code={}, provenance=provenance)
    reached = max((at.step for at in run.checkpoints), default=0)
    if steps is not None and (leap := leap_of_rate(launched, experiment, reached)):
        warnings.warn(leap, stacklevel=5)
    start_attempt(attempt, facts, progress=None if plan is None else False)


def step_text(row: RunRow) -> str:
    """Return `"40 of 100"`, or `"40"` where the number of steps is unknown."""
    return f"{row['step']:,} of {row['steps']:,}" if row["steps"] else f"{row['step']:,}"


def progress_words(row: RunRow) -> list[str]:
    """Return `["loss 6.91", "82.1 k tokens/s", "MFU 41.0%"]`, as far as known; the held-out loss stands first."""
    held_out, training = row["eval_loss"], row["training_loss"]
    words = [] if held_out is None else [f"held-out loss {held_out:.4g}"]
    words += [] if training is None else [f"{'loss' if held_out is None else 'training loss'} {training:.4g}"]
    words += [f"{count(row['tokens_per_s'])} tokens/s"] if row["tokens_per_s"] else []
    return [*words, f"MFU {row['mfu']:.1%}"] if row["mfu"] else words


def _figures(row: RunRow) -> list[str]:
    figures = progress_words(row)
    if row["peak_bytes"]:
        figures.append(f"{gib(row['peak_bytes'])} at most on a device")
    if row["damaged_lines"]:
        figures.append(f"{row['damaged_lines']:,} damaged events and steps skipped")
    return figures


def _run_html(row: RunRow, data: Mapping[str, str], problems: Sequence[str], tracking: tuple[str, str]) -> str:
    done = min(1.0, row["step"] / row["steps"]) if row["steps"] else 0.0
    rows = [
        ("status", f"{row['state']}. {row['message']}" if row["message"] else row["state"]),
        ("step", Html(f"{step_text(row)} <progress value='{done:.4f}' max='1'></progress>")),
        ("now", ", ".join(_figures(row)) or "no step yet"),
        ("directory", Html(f"<code>{html.escape(row['path'])}</code>")),
        *((name, words) for name, words in data.items() if words),
        *(("problem", problem) for problem in problems),
        tracking,
    ]
    titled = ((Html(f"<b>{html.escape(name)}</b>"), words) for name, words in rows)
    return f"<b>{html.escape(row['name'])}</b>{html_table((), titled)}"


# The verbs that make a run

REPLAY = "WORKBENCH_REPLAY"
"""Environment variable that names a JSON list of `{experiment, plan}`: the launches that a notebook is to repeat."""
_SAME_PLAN = ("model", "global_batch", "seq_len", "precision", "optimizer")
PathLike = str | os.PathLike[str]
OneRun = Run | str | os.PathLike[str]
"""A run, or its directory or name."""
MOST_WORKERS = 1024
"""Largest number of processes that `tokenize` starts."""


@checked_arguments
def launch(
    experiment: Experiment, plan: Plan | None = None, *, directory: PathLike | None = None, progress: bool = True
) -> Run:
    """Start a training in processes of its own, and return its `Run` at once.

    The experiment and the plan are checked before a process starts. A corpus that was never tokenised is tokenised
    here. Runs that need the same devices queue. A run outlives this process; `wb.load_run` finds it again.

    Args:
        experiment: what to train.
        plan: how to divide a step; by default the fastest plan for this machine.
        directory: the run directory; by default `<name>-<time>` in `$WORKBENCH_RUNS` or `./runs`.
        progress: show a progress bar while a corpus is tokenised.

    Raises `PlanMismatch` for a plan of another model, `PlanInfeasible` if no plan fits, `CaptureError` if the model
    cannot be captured, and `DataError` if the data cannot feed it.

    Examples:
        >>> run = wb.launch(experiment.replace(seed=2))
        >>> run.wait().status.state
        'finished'
        >>> len(run.history())
        40
    """
    from workbench.planning.planner import plan as make_plan
    from workbench.planning.runnable import facts_for
    from workbench.runs.launching import launcher

    experiment.reading.check()
    chosen = replayed_plan(experiment) or plan or make_plan(experiment)
    attempt = launcher.Attempt(experiment, chosen, directory)
    return Run(launcher.start_attempt(attempt, facts_for(experiment, chosen), progress=progress))


def replayed_plan(experiment: Experiment) -> Plan | None:
    """Return the plan that `workbench reproduce` gives this run of a notebook, if it fits model and machine."""
    from workbench.planning.plan import Plan
    from workbench.planning.runnable import facts_for

    file, launches = os.environ.get(REPLAY), os.environ.get(LAUNCHES)
    if not file or not launches:
        return None
    recorded = read_json(Path(file))
    done = len(set(Path(launches).read_text().splitlines()))  # a run that was continued counts once
    if done >= len(recorded):
        return None
    asked, then = json.loads(json.dumps(experiment.to_json())), recorded[done]["experiment"]
    if any(asked.get(field) != then.get(field) for field in _SAME_PLAN):
        return None
    plan = Plan.from_json({**recorded[done]["plan"], "candidates": []})
    with contextlib.suppress(PlanInfeasible):
        devices_for(plan)
        facts = facts_for(experiment, plan)
        return plan if facts is not None and facts.signature == plan.signature else None
    return None


@checked_arguments
def prepare(
    experiment: Experiment,
    plan: Plan,
    *,
    directory: PathLike | None = None,
    resume: OneRun | None = None,
    progress: bool = True,
) -> Run:
    """Write the run directory as `launch` does and start nothing, for a plan whose nodes are elsewhere.

    `run.slurm()` makes a job file of it; `torchrun` and `accelerate launch` start it too. `resume` continues another
    run or a checkpoint. The directory and `$WORKBENCH_HOME` must be on a file system that every node sees. The other
    arguments and the errors are those of `launch`.
    """
    from workbench.planning.runnable import facts_for
    from workbench.runs.launching import launcher

    experiment.reading.check()
    continued = None if resume is None else resume.path if isinstance(resume, Run) else Path(resume).expanduser()
    attempt = launcher.Attempt(experiment, plan, directory, continued)
    return Run(launcher.write_attempt(attempt, facts_for(experiment, plan), progress=progress))


@checked_arguments
def debug(
    experiment: Experiment,
    plan: Plan | None = None,
    *,
    directory: PathLike | None = None,
    resume: OneRun | None = None,
    progress: bool = True,
) -> Run:
    """Train in this process, for debugging, and return the `Run` when the training has ended.

    The model is called as it is with the first samples, then captured and trained. A breakpoint in it stops here, what
    it prints appears here, and an exception is raised here with its own traceback, so that `%debug` opens it. Rank 0 is
    this process; the other ranks of a plan are processes of their own. The run directory is that of `launch`, and the
    figures in it have the same values to the last bit. Nobody supervises the run: it does not queue for its devices,
    and an interrupt ends it without a checkpoint.

    The arguments are those of `prepare`; `plan` is by default the fastest plan for one device of this machine. Raises
    what `launch` raises, what the training raises, and `WorkbenchError` in a process that has a process group or an
    `Accelerator`.

    Examples:
        >>> run = wb.runs.debug(experiment.replace(steps=2))
        >>> run.status.state
        'finished'
    """
    from workbench.execution.worker import check_free, train_here
    from workbench.measure.calibration import local_cluster
    from workbench.planning.planner import plan as make_plan

    check_free()
    chosen = plan or make_plan(experiment, local_cluster(1))
    run = prepare(experiment, chosen, directory=directory, resume=resume, progress=progress)
    train_here(run.path, chosen.world, chosen.cluster.device.type)
    return run


@checked_arguments
def tokenize(experiment: Experiment, *, workers: int | None = None, progress: bool = True) -> Prepared:
    """Tokenise the text of an experiment now rather than when it is launched; nothing is done twice.

    `workers` is the number of processes, one per core by default. Work that was killed goes on where it stopped. Raises
    `DataError` for data that cannot feed the experiment.
    """
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise InvalidArgument(f"workers={workers} lies outside 1 to {MOST_WORKERS:,}.")
    experiment.reading.check()
    return experiment.reading.prepare(progress=progress, workers=workers)
