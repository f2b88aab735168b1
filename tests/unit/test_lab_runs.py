"""The sidebar's rows and curves, and the endpoints that answer for a user's own runs only."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
from figure_values import plan

from tests.logs import append_event
from tests.unit.test_figures_live import end, eventually, start_run, train
from tests.unit.test_lab import ask, server  # noqa: F401
from workbench.base.errors import RunNotFound
from workbench.lab import handlers
from workbench.lab.handlers import RunIndex, dashboard_of, user_run
from workbench.record.rundir import RunDir, known_runs_roots, note_runs_root, write_json, write_record
from workbench.runs.launching.device_queue import Sample, write_sample
from workbench.runs.run import Run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train(start_run(tmp_path / "runs" / "a <img src=x>"), 1, 40)
    finished = start_run(tmp_path / "runs" / "b")
    train(finished, 1, 100)
    end(finished, "finished")
    return tmp_path / "runs"


def names(answer: dict) -> set[str]:
    return {row["name"] for row in answer["rows"]}


def test_a_reading_holds_what_changed_since_the_last_one(folder: Path) -> None:
    index = RunIndex(folder.parent)
    first = index.read([folder])
    rows = {row["name"]: row for row in first["rows"]}
    assert (rows["b"]["state"], rows["b"]["step"], rows["b"]["losses"][-1]) == ("finished", 100, (100, 0.1))
    assert (rows["b"]["place"], rows["b"]["written"]["step"]) == ("runs/b", "100 of 100")
    assert "2 k tokens/s" in rows["a <img src=x>"]["facts"]
    assert names(index.read([folder], first["version"])) == set()
    train(RunDir(folder / "a <img src=x>"), 41, 50)
    second = index.read([folder], first["version"])
    assert [(row["step"], row["losses"][-1][0]) for row in second["rows"]] == [(50, 50)]
    Run(folder / "b").tag("paper").archive()
    third = index.read([folder], second["version"])
    assert [(row["name"], row["tags"], row["archived"]) for row in third["rows"]] == [("b", ["paper"], True)]
    (folder / "b").rename(folder.parent / "elsewhere")
    assert index.read([folder], third["version"])["gone"] == [str(folder / "b")]


def test_a_run_in_the_place_of_another_of_its_name_is_read_from_its_beginning(folder: Path) -> None:
    index, path = RunIndex(), folder / "a <img src=x>"
    append_event(RunDir(path).events, "status", state="running", message="x" * 500)
    assert index.read([folder])["rows"]
    written = RunDir(path).experiment.stat().st_mtime
    shutil.rmtree(path)
    run = start_run(path)
    os.utime(run.experiment, (written + 1, written + 1))
    train(run, 1, 3)
    append_event(run.events, "alert", alert="plateau", message="The loss stays.", step=3)
    append_event(run.events, "status", state="running", message="y" * 1000)
    row = next(row for row in index.read([folder])["rows"] if row["name"] == path.name)
    assert (row["step"], row["alerts"]) == (3, ["The loss stays."])


def test_a_reading_that_takes_too_long_names_all_runs_and_the_next_ones_read_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "READING_S", 0.0)
    index = RunIndex()
    first = index.read([folder])
    assert (len(first["rows"]), first["unread"]) == (2, 1)
    second = index.read([folder], first["version"])
    while second["unread"]:
        second = index.read([folder], second["version"])
    assert all("state" in row for row in index.read([folder])["rows"])


def test_runs_without_a_finite_loss_and_damaged_ones_are_rows_that_json_can_hold(folder: Path) -> None:
    run = RunDir(folder / "a <img src=x>")
    append_event(run.events, "step", step=41, loss=float("nan"), tokens_per_s=1.0)
    (folder / "b" / "experiment.json").write_text("{")
    rows = {row["name"]: row for row in RunIndex().read([folder])["rows"]}
    json.dumps(list(rows.values()), allow_nan=False)
    assert "not finite" in rows["a <img src=x>"]["words"]
    assert "cannot be read" in rows["b"]["message"]


def test_the_losses_of_a_row_are_spread_over_the_last_attempt(tmp_path: Path) -> None:
    run = start_run(tmp_path / "long")
    train(run, 1, 600)
    append_event(run.events, "start", devices=["cpu"], world=1, resumed_from="step-00000300")
    train(run, 301, 900)
    [row] = RunIndex().read([tmp_path])["rows"]
    steps = [step for step, _ in row["losses"]]
    assert steps == sorted(set(steps))
    assert 30 < len(steps) <= 61
    assert steps[-1] > 850


def test_only_a_users_own_runs_below_a_folder_of_runs_are_found(folder: Path, tmp_path: Path) -> None:
    assert user_run(str(folder / "b"), [folder]).name == "b"
    outside = start_run(tmp_path / "outside" / "c")
    (folder / "link").symlink_to(outside.path)
    write_json(folder / "b" / "inner" / "experiment.json", {})
    refused = [outside.path, folder / "link", folder / "b" / "inner", folder / "b" / ".." / ".." / "outside" / "c"]
    for path in [*map(str, refused), str(folder), "/etc/passwd", "", "b\0", "none"]:
        with pytest.raises(RunNotFound):
            user_run(path, [folder])
    assert names(RunIndex().read([folder])) == {"a <img src=x>", "b"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_runs_of_another_account_are_neither_listed_nor_found(folder: Path) -> None:
    os.chown(folder / "b", 12345, 12345)
    assert names(RunIndex().read([folder])) == {"a <img src=x>"}
    with pytest.raises(RunNotFound):
        user_run(str(folder / "b"), [folder])


def test_folders_in_which_runs_were_launched_are_known_until_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "none"))
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two, one):
        root.mkdir(exist_ok=True)
        note_runs_root(root)
    assert known_runs_roots() == [one, two]
    one.rmdir()
    assert known_runs_roots() == [two]


def test_curves_are_named_by_what_differs_and_a_diverged_run_flattens_none(tmp_path: Path) -> None:
    runs = []
    for name, rate, seed in (("x", 1e-3, 0), ("y", 1e-4, 0), ("z", 1e-4, 1)):
        run = start_run(tmp_path / name)
        write_record(run.experiment, {"name": "small", "steps": 200, "learning_rate": rate, "seed": seed})
        train(run, 1, 200)
        runs.append(Run(run.path))
    for step in range(201, 260):
        append_event(runs[0].directory.events, "step", step=step, loss=2.0 ** min(step - 200, 40), tokens=step * 1000)
    figure, panels = map(json.loads, dashboard_of(runs)["figures"])
    names = {trace["name"] for trace in figure["data"] if trace["showlegend"]}
    assert names == {
        "learning_rate 0.001 · seed 0",
        "learning_rate 0.0001 · seed 0",
        "learning_rate 0.0001 · seed 1",
    }
    assert panels["data"]
    _, high = figure["layout"]["yaxis"]["range"]
    assert high < 100
    assert any("diverges" in json.dumps(trace) for trace in figure["data"])


def test_the_dashboard_of_one_run_has_its_gpus_its_prediction_and_why_it_failed(tmp_path: Path) -> None:
    run = start_run(tmp_path / "run")
    plan(2, 8, 4).save(run.plan)
    for first, share in ((1, 0.5), (41, 0.9)):
        train(run, first, first + 39)
        write_sample(run, "cuda", Sample(("GPU 0", "GPU 3"), (share, None), (2**30, None)))
    train(run, 81, 120)
    end(run, "failed", "rank 1 vanished")
    dashboard = dashboard_of([Run(run.path)])
    curves, panels, prediction = map(json.loads, dashboard["figures"])
    assert curves["data"]
    titles = [annotation["text"] for annotation in panels["layout"]["annotations"]]
    assert any("GPU" in title for title in titles), titles
    assert any(trace.get("meta") == "utilization" and trace["y"] for trace in panels["data"])
    assert "Predicted and measured" in prediction["layout"]["title"]["text"]
    assert "rank 1 vanished" in dashboard["failures"]


def test_the_sidebar_shows_how_busy_the_gpus_of_the_server_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        def sample(self) -> Sample:
            return Sample(("GPU 0", "GPU 1"), (0.83, None), (2**30, None))

    index = RunIndex()
    monkeypatch.setattr(index, "_meter", Two())
    _, *gpus = index.read([folder])["devices"]
    assert gpus == [
        {"name": "GPU 0", "share": 0.83, "used_bytes": 2**30},
        {"name": "GPU 1", "share": None, "used_bytes": None},
    ]


def test_the_share_of_the_cpu_is_that_of_the_cores_that_runs_may_use_and_of_their_time_that_was_not_idle(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = namedtuple("Times", "user idle")
    looks = iter([[times(0.0, 0.0)] * 3, [times(0.0, 12.0), times(9.0, 3.0), times(7.0, 5.0)]])
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: next(looks) if percpu else None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2}, raising=False)
    [cpu, *_] = RunIndex().read([folder])["devices"]
    assert (cpu["name"], cpu["share"]) == ("CPU, 2 cores", pytest.approx(16 / 24))


@pytest.mark.representative
def test_the_endpoints_show_and_change_own_runs_and_refuse_paths_outside(
    server: tuple[str, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    url, root = server
    run = start_run(root / "runs" / "<b>run")
    train(run, 1, 30)
    outside = start_run(tmp_path / "outside")
    status, answer = ask(f"{url}/workbench/runs")
    assert status == 200
    assert "<b>run" in names(answer)
    post = {"path": str(run.path), "action": "note", "value": "seen"}
    assert ask(f"{url}/workbench/run", post)[0] == 200
    assert Run(run.path).labels.notes == "seen"
    for path in (str(outside.path), f"{run.path}/../../../../etc"):
        assert ask(f"{url}/workbench/run", {**post, "path": path})[0] == 404
        assert ask(f"{url}/workbench/curves", {"paths": [path]})[0] == 404
    both = {"paths": [str(run.path), str(outside.path)]}
    status, answer = ask(f"{url}/workbench/curves", both)
    assert status == 200, "one that was deleted hides no other"
    assert "<b>run" in json.loads(answer["figures"][0])["layout"]["title"]["text"].replace("&lt;", "<").replace(
        "&gt;", ">"
    )
    assert not outside.labels.exists()
    for wrong in ({"action": "delete"}, {"action": "tag", "value": 3}, {"action": "tag", "value": ""}):
        status, answer = ask(f"{url}/workbench/run", {"path": str(run.path), **wrong})
        assert status in (400, 409), answer
    status, answer = ask(f"{url}/workbench/curves", {"paths": [str(run.path)]})
    assert status == 200
    assert json.loads(answer["figures"][0])["data"]
    status, answer = ask(f"{url}/workbench/curves", {"paths": [str(run.path)], "seen": answer["seen"]})
    assert answer["figures"] is None
    assert ask(f"{url}/workbench/run", {"path": str(run.path), "action": "stop"})[0] == 200
    eventually(run.stop_file.exists)
