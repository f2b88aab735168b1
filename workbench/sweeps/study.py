"""Optuna's part in a queue: it samples choices, prunes runs, and keeps a journal of both.

One Optuna trial is one run, with the seed among its parameters. A supervisor that follows a killed one goes on with the
trials that it finds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from workbench.sweeps.queue import Entry
from workbench.sweeps.rules import FIRST_RUNS, Rule

DRAWS = 100
"""Draws of a sampler that were tried before, after which the first combination that was not is taken."""
RUN = "run"
"""User attribute of a trial: position of its run in the queue."""
SEED = "seed"
NAME = "sweep"
"""Name of the study in the journal."""


class Study:
    """The Optuna study of one queue; only the queue's supervisor opens it."""

    def __init__(self, journal: Path, settings: Mapping[str, Any], rule: Rule, interval: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        Path(f"{journal}.lock").unlink(missing_ok=True)  # left by a supervisor that was killed
        # Optuna's categories take plain values as they are, and others as JSON text.
        self._axes = {
            name: [
                v if v is None or isinstance(v, bool | int | float | str) else json.dumps(v, sort_keys=True)
                for v in values
            ]
            for name, values in settings["axes"].items()
        }
        self._space: dict[str, BaseDistribution] = {n: CategoricalDistribution(v) for n, v in self._axes.items()}
        self._space[SEED] = IntDistribution(min(settings["seeds"]), max(settings["seeds"]))
        storage = JournalStorage(JournalFileBackend(str(journal)))
        pruners: dict[Any, BasePruner] = {"median": MedianPruner(n_startup_trials=FIRST_RUNS)}
        pruners["halving"] = SuccessiveHalvingPruner(min_resource=interval)
        pruner = pruners.get(rule, NopPruner())
        self._study = optuna.create_study(storage=storage, study_name=NAME, load_if_exists=True, pruner=pruner)
        before = self._study.get_trials(deepcopy=False)
        sampler = TPESampler if settings["sampler"] == "tpe" else RandomSampler
        self._study.sampler = sampler(seed=len(before))
        self._trials: dict[int, Trial] = {}
        self._reported: dict[int, int] = {}
        study_id = storage.get_study_id_from_name(NAME)
        for left in before:
            if left.state == TrialState.WAITING:  # the supervisor was killed between two calls of `_ask`
                self._study.tell(self._study.ask(), state=TrialState.FAIL)
            elif left.state == TrialState.RUNNING and RUN not in left.user_attrs:
                self._study.tell(left.number, state=TrialState.FAIL)
            elif left.state == TrialState.RUNNING:
                trial = Trial(self._study, storage.get_trial_id_from_study_id_trial_number(study_id, left.number))
                self._trials[left.user_attrs[RUN]] = trial
                self._reported[left.user_attrs[RUN]] = max(left.intermediate_values, default=0)

    def ended(self) -> set[int]:
        """Return the runs whose end the study was told."""
        ended = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        return {trial.user_attrs[RUN] for trial in ended}

    def begin(self, entry: Entry) -> None:
        """Open the trial of a run, unless `propose` or a killed supervisor did."""
        if entry.index not in self._trials:
            chosen = {name: self._axes[name][at] for name, at in entry.choices.items()}
            self._attach(entry.index, self._ask({**chosen, SEED: entry.seed}))

    def _ask(self, fixed: Mapping[str, Any]) -> Trial:
        """Open a trial with some parameters fixed, and let the sampler choose the others."""
        self._study.enqueue_trial(dict(fixed))
        return self._study.ask(self._space)

    def _attach(self, index: int, trial: Trial) -> None:
        trial.set_user_attr(RUN, index)
        self._trials[index] = trial

    def propose(self, index: int, seed: int, tried: Iterable[Mapping[str, int]]) -> dict[str, int] | None:
        """Return a choice that was not tried, and open its trial for the run `index`; None if all were tried."""
        before = [dict(choice) for choice in tried]
        ranges = (range(len(values)) for values in self._axes.values())
        grid = (dict(zip(self._axes, at, strict=True)) for at in itertools.product(*ranges))
        untried = next((choice for choice in grid if choice not in before), None)
        if untried is None:
            return None
        for _ in range(DRAWS):
            trial = self._trials.pop(index, None) or self._ask({SEED: seed})  # opened, but never queued, before a kill
            choice = {name: values.index(trial.params[name]) for name, values in self._axes.items()}
            if choice not in before:
                self._attach(index, trial)
                return choice
            self._study.tell(trial, state=TrialState.FAIL)
        self.begin(Entry(index, untried, seed))
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
