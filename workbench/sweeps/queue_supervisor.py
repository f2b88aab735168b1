"""The process that sees a queue through: it launches the runs, ends the hopeless ones, and writes down how each ended.

Started detached as `python -m workbench.sweeps.queue_supervisor QUEUE_DIR`. Every decision is on disk before it takes
effect, so that a supervisor that was killed is replaced by another, which adopts the runs that still train.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from workbench.base.errors import WorkbenchError
from workbench.record.history import Evaluations, History, HistoryTail
from workbench.record.rundir import locked, this_process, write_json
from workbench.runs.launching import fork_server, launcher, processes
from workbench.runs.launching.launcher import Attempt
from workbench.runs.launching.supervisor import import_ahead
from workbench.runs.run import Run
from workbench.sweeps.queue import Entry, QueueDir, Result, first_plan, ranks_environment, thread_limit
from workbench.sweeps.rules import PRUNERS, Diverged, Study, objective, reports, rule_from_json

POLL_S = 0.3


@dataclass
class _Active:
    """A run that was launched and has not ended, as far as the supervisor has seen it."""

    entry: Entry
    run: Run
    tail: HistoryTail = field(init=False)
    steps: int = 0
    seen: int = 0
    """Logged steps that the divergence rule has looked at."""
    verdict: str = ""
    """Why the rule ends the run; empty while it may go on."""

    def __post_init__(self) -> None:
        self.tail = HistoryTail(self.run.directory.events)
        self.steps = self.run.experiment.total_steps


class QueueSupervisor:
    """One pass through a queue."""

    def __init__(self, directory: QueueDir) -> None:
        self.directory = directory
        settings = directory.settings
        self.rule = rule_from_json(settings.get("stop"))
        self.evaluates = bool(settings["experiment"].get("evaluation"))
        self.slots = int(settings["packing"]["side_by_side"])
        self.ahead = int(settings["ahead"])
        self.trials = int(settings.get("trials") or 0)
        """Configurations that a sampler chooses; 0 without a sampler."""
        self.study: Study | None = None
        if self.trials or self.rule in PRUNERS:
            interval = max(1, int(settings["experiment"]["steps"]) // 10)
            self.study = Study(directory.journal, settings, self.rule, interval)
        self.active: dict[int, _Active] = {}

    def work(self) -> None:
        """Train what is missing; return when every run has ended, or a stop was asked for."""
        if self.study:  # a killed supervisor may have written down an end that it did not tell the study
            concluded = self.study.ended()
            for entry in self.directory.queue():
                result = self.directory.result(entry)
                if result and entry.index not in concluded and result.state in ("finished", "stopped early"):
                    self.study.begin(entry)
                    self.study.end(entry.index, result.objective, pruned=result.state == "stopped early")
        while not self.directory.stop_file.exists():
            self._look()
            if not self._fill() and not self.active:
                return
            time.sleep(POLL_S)
        for active in self.active.values():
            active.run.stop()
        while self.active:
            time.sleep(POLL_S)
            self._look(stopping=True)

    def _fill(self) -> bool:
        """Launch runs while there is room; return True if more are to come."""
        while len(self.active) < self.slots + self.ahead:
            queue = self.directory.queue()
            left = (e for e in queue if e.index not in self.active and self.directory.result(e) is None)
            entry = next(left, None)
            if entry is None and self.study and self.trials:
                entry = self._sample(self.study, queue)
            if entry is None:
                return False
            try:
                self._start(entry)
            except WorkbenchError as error:  # a run that cannot start must not end the others
                self.directory.write_result(entry, Result("failed", None, 0, 0.0, reason=str(error)))
        return True

    def _sample(self, study: Study, queue: list[Entry]) -> Entry | None:
        """Let the sampler choose the next configuration, and queue it with every seed."""
        seeds = self.directory.settings["seeds"]
        if len(queue) >= self.trials * len(seeds):
            return None
        choices = study.propose(len(queue), seeds[0], [entry.choices for entry in queue])
        if choices is None:
            return None
        added = [Entry(len(queue) + position, choices, seed) for position, seed in enumerate(seeds)]
        self.directory.write_queue([*queue, *added])
        return added[0]

    def _start(self, entry: Entry) -> None:
        """Launch a run, adopt it if it still trains, or continue it if it was interrupted."""
        run = Run(self.directory.run(entry))
        status, launched = run.status, run.directory.launcher.exists()
        if not launched or (status.final and status.state != "finished"):
            resume = run.path if launched and run.checkpoints else None
            if resume is None and run.path.exists():  # it was killed before its first checkpoint, and moves aside
                processes.wait_left(run.directory)
                folder = self.directory.path / "interrupted"
                folder.mkdir(exist_ok=True)
                run.path.rename(folder / f"{run.name}.{len(list(folder.iterdir())) + 1}")
            settings = self.directory.settings
            attempt = Attempt(
                self.directory.experiment(entry),
                self.directory.plan(entry),
                self.directory.run(entry),
                resume=resume,
                code={} if resume else self.directory.code(entry),
                provenance={"sweep": self.directory.path.name},
            )
            launcher.start_attempt(attempt, worker=settings["worker"], share=settings["packing"]["share"])
        if self.study:
            self.study.begin(entry)
        # A new handle: the old one remembers the status of a directory that may have been set aside.
        self.active[entry.index] = _Active(entry, Run(run.path))

    def _look(self, stopping: bool = False) -> None:
        for active in list(self.active.values()):
            status = active.run.status  # asked before the history, which is complete once the run has ended
            history = active.tail.read()
            if status.final:
                del self.active[active.entry.index]
                if stopping and status.state == "stopped" and not active.verdict:
                    continue  # `resume` goes on with it
                self._conclude(active, history, status.state, status.message)
            elif not active.verdict and not stopping:
                active.verdict = self._verdict(active, history)
                if active.verdict:
                    active.run.stop()

    def _verdict(self, active: _Active, history: History) -> str:
        """Return why the rule ends the run now, or an empty text."""
        if isinstance(self.rule, Diverged):
            new = zip(history.step[active.seen :], history.loss[active.seen :], strict=True)
            active.seen = len(history)
            reasons = (self.rule.reason(int(step), float(loss)) for step, loss in new)
            return next((reason for reason in reasons if reason), "")
        if self.study and self.rule:
            values = reports(history, active.steps, self._evaluations(active))
            if self.study.is_behind(active.entry.index, values):
                return f"Behind the other runs by the {self.rule} rule."
        return ""

    def _evaluations(self, active: _Active) -> Evaluations | None:
        """Return the held-out losses of a run; None if the experiment does not evaluate."""
        return active.tail.evaluations if self.evaluates else None

    def _conclude(self, active: _Active, history: History, state: str, message: str) -> None:
        """Write the result of a run that has ended, and close its trial."""
        steps = int(history.step[-1]) if len(history) else 0
        seconds = float(history.seconds[-1]) if len(history) else 0.0
        # A run whose loss is not finite ends itself, perhaps before the rule could stop it.
        if isinstance(self.rule, Diverged) and state == "failed" and len(history) and not np.isfinite(history.loss[-1]):
            active.verdict = active.verdict or message
        early = bool(active.verdict) and state != "finished"
        value = objective(history, active.steps, self._evaluations(active)) if state == "finished" else None
        left = active.steps - steps if early else 0
        named = "stopped early" if early else state
        reason = active.verdict if early else "" if state == "finished" else message
        saved_s = left * seconds / steps if steps else 0.0
        gpu_hours = float(np.nan_to_num(history.gpu_hours[-1])) if len(history) else 0.0
        result = Result(named, value, steps, seconds, left, saved_s, reason, gpu_hours, ended=time.time())
        self.directory.write_result(active.entry, result)
        if self.study:
            self.study.end(active.entry.index, value, pruned=early)


def supervise(directory: QueueDir) -> int:
    """Work through the queue of a directory, unless another process does; return the exit code."""
    with locked(directory.lock, wait=False) as alone:
        if alone:  # else another supervisor is at work
            write_json(directory.supervisor, this_process())
            environment = ranks_environment(directory)
            os.environ.update(thread_limit(directory.settings["packing"], os.environ))
            if not fork_server.client().is_served:
                on_cpu = first_plan(directory).cluster.device.type == "cpu"
                imports = partial(import_ahead, directory.settings["experiment"], on_cpu=on_cpu)
                fork_server.leave_server(environment, imports, is_served=True)
            QueueSupervisor(directory).work()
    return 0


if __name__ == "__main__":
    fork_server.leave(supervise(QueueDir(Path(sys.argv[1]))))
