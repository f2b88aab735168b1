"""Runs that belong together: which are a group, what is lost with them, and how far they are from a baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.logs import append_event
from workbench.base.errors import InvalidArgument, WorkbenchError
from workbench.lab.run_groups import difference_from, notebook_of, what_differs, what_is_lost
from workbench.record.rundir import RunDir, this_process, write_json, write_record
from workbench.record.step_table import log_steps
from workbench.runs.run import Run
from workbench.sweeps.queue import Group, group_of, groups_of


def write_run(path: Path, state: str = "finished", loss: float = 3.0, **experiment: Any) -> Run:
    path.mkdir(parents=True)
    run = RunDir(path)
    write_record(run.experiment, {"name": "small", "steps": 400, "learning_rate": 1e-3, "seed": 0, **experiment})
    write_record(run.environment, {"host": "here"})
    write_json(run.launcher, {"supervisor": this_process()} if state == "running" else {})
    append_event(run.events, "start", devices=["cpu"], world=1, resumed_from=None)
    noise = np.random.default_rng(int(100 * loss)).normal(0, 0.05, 400)
    rows = [
        {"step": step, "loss": loss + 2 / step + noise[step - 1], "time": 1e9 + step, "tokens": step * 1000}
        | {"samples": step, "flops": step * 1e9, "seconds": step / 2, "step_ms": 500.0}
        for step in range(1, 401)
    ]
    log_steps(path, rows)
    append_event(run.events, "status", state=state, message="")
    return Run(path)


def test_seeds_of_one_recipe_are_a_group_whatever_they_are_called_and_another_recipe_is_none(tmp_path: Path) -> None:
    first, second, other, unlike = (
        group_of(write_run(tmp_path / name, **changes))
        for name, changes in {
            "a": {"seed": 0},
            "b": {"seed": 1, "name": "again", "tracking": {"tags": ["x"]}},
            "c": {"seed": 1, "learning_rate": 2e-3},
            "d": {"seed": 0, "numerics": {"compile": True}},
        }.items()
    )
    assert first is not None
    assert second is not None
    assert first.id == second.id
    assert [first.labels, second.labels] == [{"seed": "0"}, {"seed": "1"}]
    assert len({each.id for each in (first, other, unlike) if each is not None}) == 3


def test_runs_of_a_sweep_and_of_a_grid_are_named_by_the_values_of_their_axes(tmp_path: Path) -> None:
    sweep, grid = tmp_path / "rates", tmp_path / "plans"
    for folder, settings in ((sweep, {"axes": {"learning_rate": [1e-3, 3e-3]}}), (grid, {})):
        folder.mkdir()
        choices = {"learning_rate": 1} if settings else {"tensor": 2, "pipeline": 1}
        write_json(folder / ("sweep.json" if settings else "grid.json"), settings)
        write_json(folder / "queue.json", [{"choices": choices, "seed": 5}])
    run = write_run(sweep / "runs" / "0000-learning_rate=0.003-seed=5")
    labels = {"learning_rate": "0.003", "seed": "5"}
    assert group_of(run) == Group(str(sweep), "rates", "sweep", labels)
    found = group_of(write_run(grid / "runs" / "0000-tensor=2-pipeline=1-seed=5"))
    assert found is not None
    assert found.labels == {"tensor": "2", "pipeline": "1", "seed": "5"}


def test_runs_fold_with_another_of_their_queue_and_seeds_only_where_they_differ(tmp_path: Path) -> None:
    queue = tmp_path / "rates"
    queue.mkdir()
    write_json(queue / "sweep.json", {"axes": {"learning_rate": [1e-3, 3e-3]}})
    write_json(queue / "queue.json", [{"choices": {"learning_rate": at}, "seed": 0} for at in (0, 1)])
    swept = [write_run(queue / "runs" / f"000{at}-learning_rate={rate}-seed=0") for at, rate in enumerate((1e-3, 3e-3))]
    twice = [write_run(tmp_path / name, batch=8) for name in ("once", "again")]
    seeds = [write_run(tmp_path / f"seed-{seed}", seed=seed) for seed in (0, 1)]
    damaged = write_run(tmp_path / "damaged", seed=2)
    damaged.directory.experiment.write_text("[")
    found = groups_of([swept[0], *twice, seeds[0], swept[1], seeds[1], damaged])
    assert [group and group.of for group in found] == ["sweep", None, None, "seeds", "sweep", "seeds", None]
    assert groups_of([swept[0], seeds[1]]) == [None, None], "no other run of their groups is shown"
    assert [bool(group) for group in groups_of([*swept, swept[1]])] == [True, True, False], "a run is in its group once"


def test_a_notebook_is_linked_if_it_lies_below_the_folder_of_the_server(tmp_path: Path) -> None:
    served, run = tmp_path / "served", write_run(tmp_path / "run").directory
    (served / "deep").mkdir(parents=True)
    for inside, link in ((served / "deep" / "a.ipynb", "deep/a.ipynb"), (tmp_path / "b.ipynb", None)):
        inside.write_text("{}")
        write_record(run.environment, {"notebook": str(inside)})
        assert notebook_of(run, served) == link
    for wrong in ("", "deep", "../b.ipynb", str(served / "gone.ipynb"), 3, None):
        write_record(run.environment, {"notebook": wrong})
        assert notebook_of(run, served) is None


def test_what_is_lost_is_told_and_what_trains_is_neither_offered_nor_deleted(tmp_path: Path) -> None:
    ended, training = write_run(tmp_path / "ended"), write_run(tmp_path / "training", "running")
    (ended.path / "large").write_bytes(bytes(3 << 20))
    said = what_is_lost([ended])
    assert said["may"]
    assert said["words"].startswith("1 run will be deleted from this disk. 0 checkpoints, curves, logs and notes, 3.")
    both = what_is_lost([ended, training])
    assert not both["may"]
    assert both["words"] == "2 runs cannot be deleted: 1 of them still trains. Stop what trains first."
    with pytest.raises(WorkbenchError, match=r"training is running\. End it with run\.stop\(wait=True\)"):
        training.delete()
    ended.delete()
    assert [path.name for path in tmp_path.iterdir()] == ["training"]


def test_the_difference_from_a_baseline_has_an_interval_that_holds_the_true_one(tmp_path: Path) -> None:
    baseline, lower = write_run(tmp_path / "baseline", loss=3.0), write_run(tmp_path / "lower", loss=2.8)
    found = difference_from(baseline, lower)
    assert found["low"] < -0.2 < found["high"]
    assert found["value"] == pytest.approx(-0.2, abs=0.03)
    assert found["words"].startswith("-0.")
    assert " ± " in found["words"]
    assert "Training loss at equal tokens, minus that of baseline" in found["said"]
    json.dumps(found, allow_nan=False)
    same = difference_from(baseline, baseline)
    assert same["value"] == pytest.approx(0.0)
    empty = Run(tmp_path / "empty")
    empty.path.mkdir()
    write_record(empty.directory.experiment, {"name": "empty", "steps": 4, "seed": 0})
    append_event(empty.directory.events, "status", state="failed", message="")
    assert difference_from(baseline, empty)["value"] is None


def test_what_differs_is_every_setting_of_experiment_plan_and_environment(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", learning_rate=2e-3)]
    write_record(runs[1].directory.environment, {"host": "there"})
    found = what_differs(runs)
    assert found["names"] == ["a", "b"]
    assert ("experiment.learning_rate", ("0.001", "0.002")) in found["rows"]
    assert found["left_out"] == 0
    with pytest.raises(InvalidArgument, match="Tick two or more"):
        what_differs(runs[:1])
