"""Sweeps without processes: rules, samplers, the objective, the packing, and figures."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import workbench as wb
from tests.distributed.real_worker import DEVICE, LINK, SEQ, Words, experiment
from tests.logs import append_event
from workbench.base.errors import DataError, InvalidExperiment, UnknownParameter
from workbench.capture import captured_model
from workbench.cost.hardware import Cluster
from workbench.record.columns import COLUMNS
from workbench.record.history import History, read_tail
from workbench.record.rundir import RunDir, read_json, write_json, write_record
from workbench.runs.launching import launcher
from workbench.runs.launching.launcher import Attempt
from workbench.runs.tracking.recorder import config_of
from workbench.sweeps import queue
from workbench.sweeps import sweep as sweep_module
from workbench.sweeps.queue import (
    Entry,
    Progress,
    QueueDir,
    Result,
    label,
    plan_key,
    profile_key,
    share_done,
    thread_limit,
)
from workbench.sweeps.rules import FIRST_RUNS, Diverged, Study, objective, reports, rule_from_json
from workbench.sweeps.sweep import Axes

AXES = {"learning_rate": [1e-3, 2e-3, 4e-3], "betas": [[0.9, 0.98], [0.9, 0.95]]}


@pytest.fixture(scope="module", autouse=True)
def one_capture_of_each_length() -> Iterator[None]:
    """Capture the one model of these tests once for each length: what they look at comes after that."""
    capture, divide = captured_model.capture, captured_model.division_of
    graphs, verdicts = dict[str, Any](), dict[int, Any]()

    def captured_once(model, batch, **options):
        if str(batch) not in graphs:
            graphs[str(batch)] = capture(model, batch, **options)
        return graphs[str(batch)]

    def divided_once(graph, *given):
        if id(graph) not in verdicts:
            verdicts[id(graph)] = divide(graph, *given)
        return verdicts[id(graph)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_model, "capture", captured_once)
        patch.setattr(captured_model, "division_of", divided_once)
        yield


def study(path, sampler: str = "grid", rule=None, interval: int = 10) -> Study:
    return Study(path / "optuna.jsonl", {"axes": AXES, "seeds": [0, 1], "sampler": sampler}, rule, interval)


def entry(index: int, rate: int = 0, betas: int = 0, seed: int = 0) -> Entry:
    return Entry(index, {"learning_rate": rate, "betas": betas}, seed)


def trials(path) -> list[tuple[str, int, dict[str, Any]]]:
    """Return state, run and parameters of every trial in the journal, as Optuna's own tools read them."""
    storage = JournalStorage(JournalFileBackend(str(path / "optuna.jsonl")))
    [read] = optuna.get_all_study_names(storage)
    all_trials = optuna.load_study(study_name=read, storage=storage).get_trials()
    return [(trial.state.name, trial.user_attrs.get("run", -1), trial.params) for trial in all_trials]


def history(losses) -> History:
    steps = np.arange(1.0, len(losses) + 1)
    columns = {name: np.zeros(len(steps)) for name in COLUMNS}
    return History({**columns, "step": steps, "loss": np.asarray(losses, dtype=float)})


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_sampler_proposes_each_combination_once_and_then_none_even_over_a_restart(tmp_path, sampler):
    tried: list[dict[str, int]] = []
    for index in range(6):
        if index == 3:
            opened = study(tmp_path, sampler)  # as after a kill
        elif index == 0:
            opened = study(tmp_path, sampler)
        choice = opened.propose(index, 0, tried)
        assert choice is not None
        assert choice not in tried
        tried.append(choice)
        opened.end(index, float(choice["learning_rate"]), pruned=False)
    assert opened.propose(6, 0, tried) is None
    assert opened.ended() == set(range(6))


def test_the_median_rule_ends_a_run_that_is_behind_the_median_at_the_same_step(tmp_path):
    opened = study(tmp_path, rule="median")
    for index in range(FIRST_RUNS):
        opened.begin(entry(index))
        assert not opened.is_behind(index, [(10, 5.0 + index), (20, 4.0 + index)])
        opened.end(index, 3.0, pruned=False)
    opened.begin(entry(8, rate=1))
    opened.begin(entry(9, rate=2, betas=1))
    assert not opened.is_behind(8, [(10, 5.9)])
    assert opened.is_behind(9, [(10, 6.1)])


def test_successive_halving_ends_the_worst_runs_of_a_rung(tmp_path):
    opened = study(tmp_path, rule="halving")
    ended = []
    for index, value in enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]):
        opened.begin(entry(index))
        ended.append(opened.is_behind(index, [(10, value)]))
    assert ended[-1]
    assert not ended[0]


def test_a_supervisor_goes_on_with_the_trial_that_a_killed_one_left(tmp_path):
    first = study(tmp_path, rule="median")
    for index in range(FIRST_RUNS):
        first.begin(entry(index, seed=index % 2))
        first.is_behind(index, [(10, 5.0), (20, 4.0)])
        first.end(index, 3.0, pruned=False)
    left = entry(FIRST_RUNS, rate=2, betas=1, seed=1)
    first.begin(left)
    assert not first.is_behind(left.index, [(10, 4.9)])
    opened = study(tmp_path, rule="median")
    assert opened.ended() == set(range(FIRST_RUNS))
    opened.begin(left)
    assert opened.is_behind(left.index, [(10, 4.9), (20, 4.8)]), "its best is above the median at step 20"
    opened.end(left.index, None, pruned=True)
    params = {"learning_rate": 1e-3, "betas": "[0.9, 0.98]"}
    finished = [("COMPLETE", index, {**params, "seed": index % 2}) for index in range(FIRST_RUNS)]
    pruned = ("PRUNED", FIRST_RUNS, {"learning_rate": 4e-3, "betas": "[0.9, 0.95]", "seed": 1})
    assert trials(tmp_path) == [*finished, pruned], "one trial for each run, and none that failed"


def test_a_choice_that_was_proposed_before_a_kill_is_proposed_again(tmp_path):
    proposed = study(tmp_path, "random").propose(0, 1, [])
    assert study(tmp_path, "random").propose(0, 1, []) == proposed
    [(state, run, params)] = trials(tmp_path)
    assert (state, run, params["seed"]) == ("RUNNING", 0, 1)


def test_a_run_diverges_above_a_loss_after_a_step_or_where_its_loss_is_not_finite():
    rule = Diverged(6.5, 500)
    assert rule.reason(500, 9.0) is None
    assert rule.reason(501, 6.5) is None
    assert "above 6.5 after step 500" in str(rule.reason(501, 6.6))
    assert "nan" in str(rule.reason(1, float("nan")))
    assert rule_from_json({"above": 6.5, "after": 500}) == rule
    with pytest.raises(InvalidExperiment, match="is not a number"):
        wb.sweeps.diverged(above="high")
    with pytest.raises(InvalidExperiment, match="must be 0 or more"):
        wb.sweeps.diverged(above=6.5, after=-1)


def test_the_objective_is_the_mean_loss_of_the_last_tenth_of_the_steps():
    told = history(np.arange(100.0, 0.0, -1.0))
    assert objective(told, 100) == pytest.approx(np.arange(1, 11).mean())
    assert objective(history([]), 100) is None
    assert reports(told, 100)[0] == (10, pytest.approx(95.5))
    assert [step for step, _ in reports(history(np.ones(35)), 100)] == [10, 20, 30]


def test_the_objective_of_a_run_that_evaluates_is_its_last_held_out_loss(tmp_path):
    run = RunDir(tmp_path)
    append_event(run.events, "start", devices=1, world=1)
    for step in (1, 2, 3, 4):
        append_event(run.events, "step", step=step, loss=9.0)
    for step, loss in ((0, 9.0), (2, 5.0), (4, 4.5)):
        append_event(run.events, "evaluation", step=step, loss=loss, seconds=1.0 * step)
    tail = read_tail(run.events)
    told = tail.read()
    assert objective(told, 4, tail.evaluations) == 4.5
    assert reports(told, 4, tail.evaluations) == [(2, 5.0)], "neither before training nor at the end"
    append_event(run.events, "evaluation", step=5, loss=float("nan"), seconds=5.0)
    assert objective(told, 5, read_tail(run.events).evaluations) is None


def test_the_packing_with_the_shortest_predicted_time_is_taken():
    asked = experiment(steps=100)
    cluster = Cluster(DEVICE, 2, 2, LINK, LINK)
    best, why = sweep_module.choose_packing({"all": asked}, [("all", 100)] * 4, cluster, {"all": "all"})
    assert (best.side_by_side, best.devices_each) == (2, 1)
    assert ", 2 side by side on 1 device each, take" in why
    assert "4 runs one after another on 2 devices" in why
    alone, _ = sweep_module.choose_packing({"all": asked}, [("all", 100)], cluster, {"all": "all"})
    assert alone.seconds <= best.seconds


def test_runs_that_share_a_gpu_are_planned_for_their_part_of_its_memory():
    asked, cluster = experiment(steps=100), wb.Cluster.of("h100", gpus=1)
    runs = [("all", 100)] * 12
    alone, _ = sweep_module.choose_packing({"all": asked}, runs, cluster, {"all": "all"})
    best, why = sweep_module.choose_packing({"all": asked}, runs, cluster, {"all": "all"}, 3)
    assert (best.side_by_side, best.devices_each, best.share) == (3, 1, pytest.approx(1 / 3))
    assert best.seconds == alone.seconds
    limit = best.plans["all"].memory_limit_bytes
    assert 3 * (limit + cluster.device.reserved_bytes) <= cluster.device.memory_bytes
    assert alone.plans["all"].memory_limit_bytes is None
    assert "12 runs one after another on 1 device take" in why
    assert "3 runs share each GPU" in why


def test_a_run_that_shares_gpus_is_divided_over_as_few_as_its_memory_allows():
    asked, four = experiment(steps=100), wb.Cluster.of("h100", gpus=4)
    runs = [("all", 100)] * 9
    best, why = sweep_module.choose_packing({"all": asked}, runs, four, {"all": "all"}, 9)
    assert (best.side_by_side, best.devices_each) == (36, 1)
    assert "would not fit" not in why
    [alone] = best.plans["all"].stages
    least = alone.memory.total // 5  # more than micro-batches, checkpointing and the host's memory save
    part = dataclasses.replace(four.device, memory_bytes=9 * (least + four.device.reserved_bytes))
    best, why = sweep_module.choose_packing(
        {"all": asked}, runs, dataclasses.replace(four, device=part), {"all": "all"}, 9
    )
    assert best.devices_each == 2
    assert "1 other division would not fit in memory" in why


def test_runs_cannot_share_a_gpu_where_there_is_none():
    with pytest.raises(InvalidExperiment, match="runs_per_gpu=2 is given, and this machine has no GPU"):
        wb.sweep(experiment(), learning_rate=[1e-3, 2e-3], runs_per_gpu=2)
    with pytest.raises(InvalidExperiment, match="runs_per_gpu=0 is not a number"):
        wb.sweep(experiment(), learning_rate=[1e-3, 2e-3], runs_per_gpu=0)


def test_a_model_is_captured_once_for_all_batches_and_numbers_of_devices(monkeypatch):
    captured, capture = [], captured_model.capture
    monkeypatch.setattr(captured_model, "capture", lambda *given, **of: captured.append(of) or capture(*given, **of))
    axes = Axes(experiment(), {"global_batch": [4, 8], "seq_len": [SEQ, SEQ // 2]})
    named = {plan_key(choice): choice for choice in axes.choices()}
    asked = {key: axes.experiment_of(choice) for key, choice in named.items()}
    profiled_as = {key: profile_key(choice) for key, choice in named.items()}
    placed, _ = sweep_module.choose_packing(
        asked, [(key, 10) for key in asked], Cluster(DEVICE, 2, 2, LINK, LINK), profiled_as
    )
    assert len(captured) == 2, "one for each length"
    assert {(plan.global_batch, plan.seq_len) for plan in placed.plans.values()} == {
        (batch, length) for batch in (4, 8) for length in (SEQ, SEQ // 2)
    }


def test_the_predicted_time_of_a_sweep_counts_the_evaluations():
    cluster, runs = Cluster(DEVICE, 1, 1, LINK, LINK), [("all", 100)] * 3
    without, _ = sweep_module.choose_packing({"all": experiment()}, runs, cluster, {"all": "all"})
    asked = experiment(evaluation=wb.Evaluation(every=40), eval_data=Words())
    placed, _ = sweep_module.choose_packing({"all": asked}, runs, cluster, {"all": "all"})
    each = placed.plans["all"].prediction.evaluation_s
    assert each > 0
    assert placed.seconds == pytest.approx(without.seconds + 3 * 4 * each), "at the steps 0, 40, 80 and 100"


def test_the_predicted_time_of_a_sweep_counts_the_start_of_each_run():
    asked, runs = experiment(), [("all", 100)] * 3
    placed, why = sweep_module.choose_packing({"all": asked}, runs, Cluster(DEVICE, 1, 1, LINK, LINK), {"all": "all"})
    step_s = placed.plans["all"].prediction.step_ms / 1e3
    assert placed.seconds == pytest.approx(3 * (sweep_module.START_S["cpu"] + 100 * step_s))
    assert why.startswith("Predicted time on 1 ")
    assert "with 1.5 s to start each run: 3 runs one after another" in why


def test_axes_that_change_no_plan_share_one():
    axes = Axes(experiment(), {"learning_rate": [1e-3, 2e-3], "global_batch": [4, 8]})
    assert {plan_key(choice) for choice in axes.choices()} == {"global_batch.0", "global_batch.1"}
    chosen = axes.experiment_of({"learning_rate": 1, "global_batch": 0})
    assert (chosen.learning_rate, chosen.global_batch) == (2e-3, 4)


def test_runs_side_by_side_share_the_cores_unless_the_user_set_the_threads():
    assert thread_limit({"side_by_side": 1, "devices_each": 2}, {}) == {}
    assert thread_limit({"side_by_side": 2, "devices_each": 1}, {"OMP_NUM_THREADS": "3"}) == {}
    assert int(thread_limit({"side_by_side": 1000, "devices_each": 1}, {})["OMP_NUM_THREADS"]) == 1


@pytest.fixture
def no_processes(tmp_path, monkeypatch):
    """Let sweeps plan for two processes and start none."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(sweep_module, "local_cluster", lambda: Cluster(DEVICE, 2, 2, LINK, LINK))
    monkeypatch.setattr(queue, "start_supervisor", lambda _: None)


@pytest.mark.usefixtures("no_processes")
def test_what_no_plan_of_a_sweep_can_compute_is_refused_before_anything_is_written(tmp_path):
    asked = experiment(evaluation=wb.Evaluation(), eval_data=torch.utils.data.Subset(Words(), [0]))
    with pytest.raises(DataError, match="There are 1 held-out samples, fewer than the"):
        wb.sweep(asked, learning_rate=[1e-3, 2e-3], directory=tmp_path / "rates")
    assert not (tmp_path / "rates").exists()


@pytest.mark.usefixtures("no_processes")
def test_on_weights_and_biases_the_runs_of_a_sweep_are_one_group_whose_configs_hold_every_value(tmp_path):
    asked = experiment(steps=7).replace(project="trials")
    directory = wb.sweep(asked, learning_rate=[1e-3, 2e-3], seeds=2, directory=tmp_path / "rates").directory
    runs = []
    for entry in directory.queue():
        at, facts = directory.run(entry), {"sweep": directory.path.name}
        runs.append(
            launcher.write_attempt(Attempt(directory.experiment(entry), directory.plan(entry), at, provenance=facts))
        )
    assert {(run["project"], run["group"]) for run in (read_json(run.tracker) for run in runs)} == {("trials", "rates")}
    assert len({read_json(run.tracker)["id"] for run in runs}) == 4
    configs = [config_of(run) for run in runs]
    assert [(it["learning_rate"], it["seed"]) for it in configs] == [(1e-3, 0), (2e-3, 0), (1e-3, 1), (2e-3, 1)]
    assert all(it.keys() >= asked.to_json().keys() and it["steps"] == 7 for it in configs)
    assert all(it["environment"]["sweep"] == "rates" and it["plan"]["micro_batch"] for it in configs)


@pytest.fixture
def sweep(tmp_path) -> wb.sweeps.Sweep:
    """A sweep of two rates, two batches and two seeds, of which one configuration was not trained."""
    directory = QueueDir(tmp_path / "sweep")
    settings = {"experiment": {"evaluation": None}, "axes": {"learning_rate": [1e-3, 1e-4], "global_batch": [8, 16]}}
    settings |= {"sampler": "grid", "trials": None, "seeds": [0, 1], "stop": None, "packing": {"why": "Because."}}
    write_json(directory.settings_file, settings)
    choices = [(0, 0), (0, 1), (1, 0), (1, 1)]
    named = [{"learning_rate": rate, "global_batch": batch} for rate, batch in choices]
    queue = [Entry(4 * seed + at, choice, seed) for seed in range(2) for at, choice in enumerate(named)]
    directory.write_queue(queue)
    for entry in queue:
        if entry.index % 4 != 3:
            run = RunDir(directory.run(entry))
            write_record(run.experiment, {"steps": 3, "name": "sweep"})
            append_event(run.events, "start", devices=1, world=1)
            for step in (1, 2, 3):
                append_event(run.events, "step", step=step, loss=4.0 + entry.seed, tokens=step * 100.0)
            ended = {"gpu_hours": 0.5, "ended": [3, 2, 1, 0, 5, 6, 7][entry.index]}
            directory.write_result(entry, Result("finished", 4.0 + entry.index % 4 + entry.seed, 3, 1.0, **ended))
    early = Result("stopped early", None, 1, 2.0, 2, 4.0, "The loss was high.", gpu_hours=0.5, ended=4)
    directory.write_result(queue[3], early)
    return wb.sweeps.load_sweep(directory.path)


def test_the_table_ranks_configurations_by_their_mean_and_tells_what_stopping_saved(sweep):
    assert [row.mean for row in sweep.rows()] == [4.5, 5.5, 6.5, None]
    assert sweep.rows()[0].spread == pytest.approx(0.5**0.5)
    assert sweep.saved == "1 run was stopped early, which saved 2 steps (4.0 s of training)."
    assert [run.name[:4] for run in sweep.best(2)] == ["0000", "0004", "0001", "0005"]
    assert "7 of 8 runs have ended, not at work; resume() goes on" in repr(sweep)
    assert "1 stopped early, 1 waiting" in sweep._repr_html_()
    assert sweep.look() == ("7 of 8 runs have ended", sweep._repr_html_()), "what wait() shows below its cell"


def test_a_queue_tells_the_part_of_its_time_that_has_passed_by_the_runs_that_have_ended() -> None:
    sizes = [(10, 0.1), (20, 0.1), (10, 0.4)]
    waiting = [Progress(steps, step_s, 0, None, started=0) for steps, step_s in sizes]
    first = Progress(10, 0.1, 10, 2.0)
    assert share_done([first, *waiting], 4.0, 3.0) == pytest.approx(
        (1 + 2) / ((1 + 2) + (1 + 2) + (1 + 4) + (1 + 8))
    ), "it trained for twice its predicted second and started within one, not four"
    starting = Progress(10, 0.1, 0, None, started=0.5)
    assert share_done([first, starting, *waiting[1:]], 4.0, 3.5) == pytest.approx(3.5 / 20)
    half = [first, Progress(10, 0.1, 5, None), *waiting[1:]]
    assert share_done(half, 4.0, 5.0) == pytest.approx((3 + 2) / 20)
    assert share_done(half[:3], 4.0, 5.0, side_by_side=2) == pytest.approx(5 / (5 + 2 * 5)), "the longest will be alone"
    assert share_done([Progress(10, 0.1, 5, None), *waiting], 4.0, 4.5) == pytest.approx(4.5 / (5 + 5 + 6 + 8))
    assert share_done(waiting, 4.0, 1.0) == share_done([Progress(0, 0.0, 0, None)], 0.0, 0.0) == 0.0
    early = [Progress(10, 0.1, 2, 0.2), Progress(10, 0.1, 0, 0.0)]  # stopped early, and failed
    assert share_done(early, 4.0, 4.0) == 1.0
    assert share_done([*early, waiting[0]], 4.0, math.inf) == pytest.approx(8.2 / (8.2 + 5)), "another supervisor's"


def test_a_sweep_counts_the_runs_that_its_sampler_will_add(sweep) -> None:
    assert sweep.num_runs == 8
    sweep.directory.settings["trials"] = 5
    assert sweep.look()[0] == "7 of 10 runs have ended"
    assert not sweep.complete


@pytest.mark.usefixtures("no_processes")
def test_a_rate_of_many_digits_is_named_by_six_and_kept_whole(tmp_path):
    rate = 0.016000672168268656
    sweep = wb.sweep(experiment(), learning_rate=[rate, 1e-3], directory=tmp_path / "rates")
    entries = sweep.directory.queue()
    names = [sweep.directory.run(entry).name for entry in entries]
    assert names == ["0000-learning_rate=0.0160007-seed=0", "0001-learning_rate=0.001-seed=0"]
    assert [sweep.directory.experiment(entry).learning_rate for entry in entries] == [rate, 1e-3]
    assert [row.values["learning_rate"] for row in sweep.rows()] == [rate, 1e-3]
    assert "0.0160007 " in repr(sweep)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (None, "the sweep has no rule for it"),
        ({"above": 6.5, "after": 500}, "no loss was above 6.5 after step 500, or not finite"),
        ("median", "none was behind the others by the median rule"),
        ("halving", "none was behind the others by the halving rule"),
    ],
)
def test_a_sweep_that_stopped_no_run_says_why(sweep, rule, reason):
    directory = sweep.directory
    directory.result_file(directory.queue()[3]).unlink()  # the only run that was stopped
    write_json(directory.settings_file, {**directory.settings, "stop": rule})
    assert wb.sweeps.load_sweep(sweep.path).saved.startswith(f"No run was stopped early: {reason}")
    if rule == "median":
        for ended in directory.queue()[2:7]:
            directory.result_file(ended).unlink(missing_ok=True)
        words = (
            f"No run was stopped early: the median rule stops none before {FIRST_RUNS} runs have finished, and 2 have."
        )
        assert wb.sweeps.load_sweep(sweep.path).saved == words


def test_a_heat_map_has_a_cell_for_each_pair_of_values_and_leaves_out_what_was_not_trained(sweep):
    figure = wb.figures.heat_map(sweep)
    [cells] = figure.data
    assert (list(cells.x), list(cells.y)) == (["0.0001", "0.001"], ["8", "16"])
    np.testing.assert_array_equal(cells.z, [[6.5, 4.5], [np.nan, 5.5]])
    assert [list(line) for line in cells.text] == [["6.5", "4.5"], ["", "5.5"]]
    assert [(note.x, note.y, note.text) for note in figure.layout.annotations] == [(0, 1, "stopped early")]
    assert (cells.colorscale[-1][1], cells.reversescale) == ("#fde725", True), "the lowest loss is yellow"
    [cells] = wb.figures.heat_map(sweep, x="global_batch").data
    np.testing.assert_array_equal(cells.z, [[6.5, np.nan], [4.5, 5.5]])
    with pytest.raises(UnknownParameter, match="learning_rate"):
        wb.figures.heat_map(sweep, x="learning_rat")


def test_a_cell_of_fewer_seeds_says_how_many_it_is_the_mean_of_and_one_without_a_number_why(sweep):
    queue = sweep.directory.queue()
    sweep.directory.write_result(queue[4], Result("failed", None, 1, 1.0))
    for entry in (queue[1], queue[5]):
        sweep.directory.write_result(entry, Result("finished", None, 3, 1.0))
    figure = wb.figures.heat_map(sweep)
    assert [list(line) for line in figure.data[0].text] == [["6.5", "4<br>1 of 2 seeds"], ["", ""]]
    assert {note.text for note in figure.layout.annotations} == {"stopped early", "not finite"}
    assert "not finite" in repr(sweep)


def test_the_band_of_a_mean_curve_holds_every_finished_seed_and_other_runs_are_thin_lines(sweep):
    figure = wb.figures.seed_bands(sweep)
    parts = {part: [trace for trace in figure.data if trace.meta == part] for part in ("band", "mean", "other")}
    assert [len(traces) for traces in parts.values()] == [3, 3, 0]
    assert {trace.mode for trace in parts["band"]} == {"lines"}, "plotly marks the points of short lines without a mode"
    assert (min(parts["band"][0].y), max(parts["band"][0].y)) == (4.0, 5.0)
    assert set(parts["mean"][0].y) == {4.5}
    sweep.directory.result_file(sweep.directory.queue()[4]).unlink()  # the second seed of the best still trains
    figure = wb.figures.seed_bands(sweep)
    [thin] = [trace for trace in figure.data if trace.meta == "other"]
    assert set(thin.y) == {5.0}
    [mean] = [trace for trace in figure.data if trace.meta == "mean" and trace.legendgroup == thin.legendgroup]
    assert set(mean.y) == {4.0}
    assert mean.line.color == thin.line.color
    with pytest.raises(UnknownParameter, match="eval_loss"):
        wb.figures.seed_bands(sweep, y="eval_los")


def test_each_configuration_with_a_finished_run_is_a_line_of_the_parallel_coordinates(sweep):
    [lines] = wb.figures.parallel_coordinates(sweep).data
    rate, batch, mean = lines.dimensions
    assert (rate.label, list(rate.ticktext), list(rate.values)) == ("learning_rate", ["0.0001", "0.001"], [1, 1, 0])
    assert (batch.label, list(batch.ticktext), list(batch.values)) == ("global_batch", ["8", "16"], [0, 1, 0])
    assert list(mean.values) == list(lines.line.color) == [4.5, 5.5, 6.5]


def test_the_best_so_far_falls_with_what_every_ended_run_has_spent(sweep):
    runs, best = wb.figures.best_so_far(sweep).data
    # The fourth run to end was stopped after one step; the others trained for three.
    np.testing.assert_array_equal(runs.x, [3, 6, 9, 13, 16, 19])
    np.testing.assert_array_equal(runs.y, [6, 5, 4, 5, 6, 7])
    np.testing.assert_array_equal(best.x, [3, 6, 9, 13, 16, 19, 19])
    np.testing.assert_array_equal(best.y, [6, 5, 4, 4, 4, 4, 4])
    hours, _ = wb.figures.best_so_far(sweep, x="gpu_hours").data
    np.testing.assert_allclose(hours.x, 0.5 * np.array([1, 2, 3, 5, 6, 7]))
    with pytest.raises(UnknownParameter, match="gpu_hours"):
        wb.figures.best_so_far(sweep, x="gpu_hour")


def decay(step: int, power: float = 1.0) -> float:
    return 1 / (1 + step) ** power


def test_callables_on_an_axis_are_labelled_by_their_names_and_by_what_they_are_bound_to() -> None:
    def of_power(power: float) -> Any:
        def scheduled(step: int) -> float:
            return decay(step, power)

        return scheduled

    halved = lambda step: decay(step) / 2  # noqa: E731
    schedules = [
        *("cosine", decay, functools.partial(decay, power=2.0), of_power(0.5), of_power(0.7), halved),
        *(lambda step, rate=rate: rate / (1 + step) for rate in (1, 2)),
        *[lambda step: 2.0 + step, lambda step: 0.5 + step],
    ]
    axes = Axes(experiment().replace(warmup_steps=None), {"lr_schedule": schedules})
    assert [label(value) for value in axes.json_values("lr_schedule")] == [
        *("cosine", "decay", "decay(power=2.0)", "scheduled(power=0.5)", "scheduled(power=0.7)", "halved"),
        *("lambda step, rate: rate / (1 + step); rate=1", "lambda step, rate: rate / (1 + step); rate=2"),
        *("lambda step: 2.0 + step", "lambda step: 0.5 + step"),
    ]
    chosen = axes.experiment_of({"lr_schedule": 4})
    assert chosen.optimizer.lr_schedule(3) == decay(3, 0.7)
    models = [functools.partial(torch.nn.Linear, 2, width) for width in (3, 4)]
    axes = Axes(experiment(), {"model": models})
    assert [label(value) for value in axes.json_values("model")] == [
        f"Linear(in_features=2, out_features={n})" for n in (3, 4)
    ]
