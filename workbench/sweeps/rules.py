"""The number that a sweep minimises, the rules that end hopeless runs early, and the Optuna study that does so.

The objective is the held-out loss where the experiment evaluates, else the mean of the last training losses.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.base.validation import FromZero, Real, checked_value
from workbench.record.history import Evaluations, History
from workbench.sweeps.queue import Entry

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.trial import Trial

TAIL = 0.1
"""Share of the steps, at the end, whose mean training loss is the objective of a run without evaluation."""
HELD_OUT = "held-out loss"
TRAINING = "mean training loss of the last 10 % of the steps"
"""The objective in words, with evaluation and without."""
PRUNERS = ("median", "halving")
"""Rules that compare a run with the others: Optuna's `MedianPruner` and `SuccessiveHalvingPruner`."""
FIRST_RUNS = 3
"""Complete runs before the median rule stops any."""


def objective(history: History, steps: int, evaluations: Evaluations | None = None) -> float | None:
    """Return the objective of a run of this number of steps; None if nothing was measured or the loss is not finite.

    `evaluations` holds the held-out losses of an experiment that evaluates.
    """
    if evaluations is None:
        return window_mean(history, (1 - TAIL) * steps, steps)
    last = float(evaluations.eval_loss[-1]) if len(evaluations) else math.nan
    return last if math.isfinite(last) else None


def window_mean(history: History, after: float, until: float) -> float | None:
    """Return the mean training loss of the steps after `after`, up to `until`; None without a logged step there."""
    losses = history.loss[(history.step > after) & (history.step <= until)]
    if not len(losses):
        losses = history.loss[history.step <= until][-1:]
    mean = float(losses.mean()) if len(losses) else math.nan
    return mean if math.isfinite(mean) else None


def reports(history: History, steps: int, evaluations: Evaluations | None = None) -> list[tuple[int, float]]:
    """Return (step, value) pairs at which runs are compared while they train.

    They are the evaluations, or the mean training loss of each tenth of the steps.
    """
    if evaluations is not None:
        pairs = zip(evaluations.step.tolist(), evaluations.eval_loss.tolist(), strict=True)
        return [(int(step), value) for step, value in pairs if math.isfinite(value) and 0 < step < steps]
    tenth = max(1, steps // 10)
    reached = int(history.step[-1]) if len(history) else 0
    means = [(end, window_mean(history, end - tenth, end)) for end in range(tenth, min(reached, steps - 1) + 1, tenth)]
    return [(end, mean) for end, mean in means if mean is not None]


@checked_value()
class Diverged:
    """Rule that ends a run whose training loss is above a value after a step, or is not finite."""

    above: Real
    after: FromZero = 0

    def reason(self, step: int, loss: float) -> str | None:
        """Return why a run with this loss at this step ends, or None if it goes on."""
        if not math.isfinite(loss):
            return f"The loss was {loss} at step {step}."
        if step > self.after and loss > self.above:
            return f"The loss was {loss:.4g} at step {step}, above {self.above:g} after step {self.after}."
        return None


Rule = Diverged | str | None


def diverged(above: Any, after: Any = 0) -> Diverged:
    """Return the rule that ends a run whose training loss is above `above` after step `after`, or is not finite."""
    return Diverged(above, after)


def rule_from_json(value: Any) -> Rule:
    """Return the rule in the settings of a sweep."""
    return Diverged(**value) if isinstance(value, Mapping) else value


def why_none(rule: Rule, finished: int) -> str:
    """Return why a rule has stopped no run, as the end of a sentence, after so many runs that finished."""
    if rule is None:
        return ": the sweep has no rule for it (stop=)"
    if isinstance(rule, Diverged):
        return f": no loss was above {rule.above:g} after step {rule.after}, or not finite"
    if rule == "median" and finished < FIRST_RUNS:
        return f": the median rule stops none before {FIRST_RUNS} runs have finished, and {finished} have"
    return f": none was behind the others by the {rule} rule"


# Optuna's part in a queue: it samples choices, prunes runs, and keeps a journal of both. One trial is one run, with the
# seed among its parameters. A supervisor that follows a killed one goes on with the trials that it finds. Optuna is
# imported by the first study, because it would delay the start of queues that have none.

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
        import optuna
        from optuna.distributions import CategoricalDistribution, IntDistribution
        from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner
        from optuna.samplers import RandomSampler, TPESampler
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
        from optuna.trial import Trial, TrialState

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._states = TrialState
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
        ended = self._study.get_trials(deepcopy=False, states=(self._states.COMPLETE, self._states.PRUNED))
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
            self._study.tell(trial, state=self._states.FAIL)
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
            self._study.tell(trial, state=self._states.PRUNED)
        elif value is None:
            self._study.tell(trial, state=self._states.FAIL)
        else:
            self._study.tell(trial, value)
