"""Optuna's part in a sweep: it samples choices, prunes runs, and keeps a journal of both.

One Optuna trial is one run. A trial that was running when the supervisor was killed is told as failed, and the run that
goes on gets a new trial with the same values.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from workbench.sweeps.rules import Rule

DRAWS = 100
"""Draws of a sampler that were tried before, after which the first combination that was not is taken."""
FIRST_RUNS = 3
"""Complete runs before the median rule stops any."""
RUN = "run"
"""User attribute of a trial: position of its run in the queue."""


class Study:
    """The Optuna study of one sweep; only the sweep's supervisor opens it."""

    def __init__(
        self, journal: Path, axes: Mapping[str, Sequence[Any]], sampler: str, rule: Rule, interval: int
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        Path(f"{journal}.lock").unlink(missing_ok=True)  # left by a supervisor that was killed
        self._axes = {name: [_plain(value) for value in values] for name, values in axes.items()}
        self._space: dict[str, BaseDistribution] = {n: CategoricalDistribution(v) for n, v in self._axes.items()}
        storage = JournalStorage(JournalFileBackend(str(journal)))
        self._study = optuna.create_study(
            storage=storage,
            study_name="sweep",
            direction="minimize",
            load_if_exists=True,
            pruner=_pruner(rule, interval),
        )
        self._study.sampler = _sampler(sampler, seed=len(self._study.get_trials(deepcopy=False)))
        self._trials: dict[int, Trial] = {}
        self._reported: dict[int, int] = {}
        self._abandon()

    def _abandon(self) -> None:
        """Tell every trial that a killed supervisor left behind as failed."""
        for _ in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self._study.ask()
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)

    def known(self) -> set[int]:
        """Return the runs whose end the study has."""
        ended = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        return {trial.user_attrs[RUN] for trial in ended}

    def begin(self, index: int, choice: Mapping[str, int]) -> None:
        """Open the trial of a run, unless `propose` did."""
        if index not in self._trials:
            self._study.enqueue_trial({name: self._axes[name][at] for name, at in choice.items()})
            self._attach(index, self._study.ask(self._space))

    def _attach(self, index: int, trial: Trial) -> None:
        trial.set_user_attr(RUN, index)
        self._trials[index] = trial

    def propose(self, index: int, tried: Iterable[Mapping[str, int]]) -> dict[str, int] | None:
        """Return a choice that was not tried, and open its trial for the run `index`; None if all were tried."""
        before = [dict(choice) for choice in tried]
        ranges = (range(len(values)) for values in self._axes.values())
        grid = (dict(zip(self._axes, at, strict=True)) for at in itertools.product(*ranges))
        untried = next((choice for choice in grid if choice not in before), None)
        if untried is None:
            return None
        for _ in range(DRAWS):
            trial = self._study.ask(self._space)
            choice = {name: values.index(trial.params[name]) for name, values in self._axes.items()}
            if choice not in before:
                self._attach(index, trial)
                return choice
            self._study.tell(trial, state=TrialState.FAIL)
        self.begin(index, untried)
        return untried

    def is_behind(self, index: int, values: Iterable[tuple[int, float]]) -> bool:
        """Report values of a run, as (step, value), and return True if the pruner ends the run."""
        trial = self._trials[index]
        for step, value in values:
            if step > self._reported.get(index, 0):
                self._reported[index] = step
                trial.report(value, step)
                if trial.should_prune():
                    return True
        return False

    def end(self, index: int, value: float | None, pruned: bool) -> None:
        """Close the trial of a run; without a value it has failed."""
        trial = self._trials.pop(index)
        if pruned:
            self._study.tell(trial, state=TrialState.PRUNED)
        elif value is None:
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, value)


def _plain(value: Any) -> Any:
    """Return a value that Optuna's categories accept: plain values as they are, others as JSON text."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value, sort_keys=True)


def _sampler(name: str, seed: int) -> BaseSampler:
    return TPESampler(seed=seed) if name == "tpe" else RandomSampler(seed=seed)


def _pruner(rule: Rule, interval: int) -> BasePruner:
    if rule == "median":
        return MedianPruner(n_startup_trials=FIRST_RUNS)
    return SuccessiveHalvingPruner(min_resource=interval) if rule == "halving" else NopPruner()
