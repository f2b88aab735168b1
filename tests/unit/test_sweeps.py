"""Sweeps without processes: rules, samplers, the objective, the placement, and figures."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import workbench as wb
from tests.distributed.real_worker import DEVICE, LINK, experiment
from workbench.cost.cluster import Cluster
from workbench.errors import InvalidExperiment
from workbench.runs.records.history import History
from workbench.sweeps import placement
from workbench.sweeps.axes import Axes
from workbench.sweeps.directory import plan_key
from workbench.sweeps.objective import objective, reports
from workbench.sweeps.rules import Diverged, rule_from_json, rule_to_json
from workbench.sweeps.study import FIRST_RUNS, Study
from workbench.sweeps.supervisor import thread_limit

AXES = {"learning_rate": [1e-3, 2e-3, 4e-3], "betas": [[0.9, 0.98], [0.9, 0.95]]}


def study(path, sampler: str = "grid", rule=None, interval: int = 10) -> Study:
    return Study(path / "optuna.jsonl", AXES, sampler, rule, interval)


def history(losses) -> History:
    steps = np.arange(1.0, len(losses) + 1)
    columns = {field.name: np.zeros(len(steps)) for field in dataclasses.fields(History)}
    return History(**{**columns, "step": steps, "loss": np.asarray(losses, dtype=float)})


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_sampler_proposes_each_combination_once_and_then_none_even_over_a_restart(tmp_path, sampler):
    tried: list[dict[str, int]] = []
    for index in range(6):
        if index == 3:
            opened = study(tmp_path, sampler)  # as after a kill
        elif index == 0:
            opened = study(tmp_path, sampler)
        choice = opened.propose(index, tried)
        assert choice is not None
        assert choice not in tried
        tried.append(choice)
        opened.end(index, float(choice["learning_rate"]), pruned=False)
    assert opened.propose(6, tried) is None
    assert opened.known() == set(range(6))


def test_the_median_rule_ends_a_run_that_is_behind_the_median_at_the_same_step(tmp_path):
    opened = study(tmp_path, rule="median")
    for index in range(FIRST_RUNS):
        opened.begin(index, {"learning_rate": 0, "betas": 0})
        assert not opened.is_behind(index, [(10, 5.0 + index), (20, 4.0 + index)])
        opened.end(index, 3.0, pruned=False)
    opened.begin(8, {"learning_rate": 1, "betas": 0})
    opened.begin(9, {"learning_rate": 2, "betas": 1})
    assert not opened.is_behind(8, [(10, 5.9)])
    assert opened.is_behind(9, [(10, 6.1)])


def test_successive_halving_ends_the_worst_runs_of_a_rung(tmp_path):
    opened = study(tmp_path, rule="halving")
    ended = []
    for index, value in enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]):
        opened.begin(index, {"learning_rate": 0, "betas": 0})
        ended.append(opened.is_behind(index, [(10, value)]))
    assert ended[-1]
    assert not ended[0]


def test_a_trial_that_a_killed_supervisor_left_is_begun_again(tmp_path):
    study(tmp_path).begin(0, {"learning_rate": 2, "betas": 1})
    opened = study(tmp_path)
    assert opened.known() == set()
    opened.begin(0, {"learning_rate": 2, "betas": 1})
    opened.end(0, 1.0, pruned=False)
    assert opened.known() == {0}


def test_a_run_diverges_above_a_loss_after_a_step_or_where_its_loss_is_not_finite():
    rule = Diverged(6.5, 500)
    assert rule.reason(500, 9.0) is None
    assert rule.reason(501, 6.5) is None
    assert "above 6.5 after step 500" in str(rule.reason(501, 6.6))
    assert "nan" in str(rule.reason(1, float("nan")))
    assert rule_from_json(rule_to_json(rule)) == rule
    assert rule_from_json(rule_to_json("median")) == "median"
    with pytest.raises(InvalidExperiment, match="is not a number"):
        wb.diverged(above="high")
    with pytest.raises(InvalidExperiment, match="is not a step"):
        wb.diverged(above=6.5, after=-1)


def test_the_objective_is_the_mean_loss_of_the_last_tenth_of_the_steps():
    told = history(np.arange(100.0, 0.0, -1.0))
    assert objective(told, 100, evaluates=False) == pytest.approx(np.arange(1, 11).mean())
    assert objective(history([]), 100, evaluates=False) is None
    assert reports(told, 100, evaluates=False)[0] == (10, pytest.approx(95.5))
    assert [step for step, _ in reports(history(np.ones(35)), 100, evaluates=False)] == [10, 20, 30]


def test_the_placement_with_the_shortest_predicted_time_is_taken():
    asked = experiment(steps=100)
    cluster = Cluster(DEVICE, 2, 2, LINK, LINK)
    best, why = placement.choose({"all": asked}, [("all", 100)] * 4, cluster)
    assert (best.side_by_side, best.devices_each) == (2, 1)
    assert "2 runs side by side on 1 device each" in why
    assert "4 runs one after another on 2 devices" in why
    alone, _ = placement.choose({"all": asked}, [("all", 100)], cluster)
    assert alone.seconds <= best.seconds


def test_axes_that_change_no_plan_share_one():
    axes = Axes(experiment(), {"learning_rate": [1e-3, 2e-3], "global_batch": [4, 8]})
    assert {plan_key(choice) for choice in axes.choices()} == {"global_batch.0", "global_batch.1"}
    chosen = axes.experiment_of({"learning_rate": 1, "global_batch": 0})
    assert (chosen.learning_rate, chosen.global_batch) == (2e-3, 4)


def test_runs_side_by_side_share_the_cores_unless_the_user_set_the_threads():
    assert thread_limit({"side_by_side": 1, "devices_each": 2}, {}) == {}
    assert thread_limit({"side_by_side": 2, "devices_each": 1}, {"OMP_NUM_THREADS": "3"}) == {}
    assert int(thread_limit({"side_by_side": 1000, "devices_each": 1}, {})["OMP_NUM_THREADS"]) == 1
