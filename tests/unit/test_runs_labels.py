"""Tags, notes and the archive of runs, and the table that is filtered by them."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from tests.unit.test_figures_live import end, start_run, train
from workbench.base.errors import InvalidArgument, WorkbenchError
from workbench.base.user_code import user_path
from workbench.record.rundir import RunDir, runs_root, write_record
from workbench.runs.registry import list_runs
from workbench.runs.run import Run


def test_labels_are_read_by_every_handle_and_leave_what_is_trained_alone(tmp_path: Path) -> None:
    directory = start_run(tmp_path / "a")
    before = directory.experiment.read_bytes()
    Run(directory.path).tag("baseline", "paper").untag("paper").note("first <b>try</b>").archive()
    labels = Run(directory.path).labels
    assert (labels.tags, labels.notes, labels.archived) == (("baseline",), "first <b>try</b>", True)
    assert directory.experiment.read_bytes() == before
    assert not Run(directory.path).archive(False).labels.archived


def test_a_run_begins_with_the_tags_of_its_experiment_and_can_lose_them(tmp_path: Path) -> None:
    run = start_run(tmp_path / "a")
    write_record(run.experiment, {"steps": 100, "tracking": {"tags": ["from the start"]}})
    assert Run(run.path).labels.tags == ("from the start",)
    assert Run(run.path).tag("later").labels.tags == ("from the start", "later")
    assert Run(run.path).untag("from the start").labels.tags == ("later",)
    assert Run(run.path).row()["tags"] == ["later"]


def test_labels_that_are_given_at_once_are_all_kept(tmp_path: Path) -> None:
    run = start_run(tmp_path / "a")
    threads = [threading.Thread(target=Run(run.path).tag, args=(f"tag {index}",)) for index in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Run(run.path).labels.tags) == 20


@pytest.mark.parametrize("text", ["{", "[]", '{"tags": 3, "notes": 4, "archived": 5}', '{"tags": [1], "notes": ""}'])
def test_a_damaged_file_of_labels_says_nothing_and_can_be_written_again(tmp_path: Path, text: str) -> None:
    run = start_run(tmp_path / "a")
    run.labels.write_text(text)
    assert Run(run.path).labels.tags == ()
    assert Run(run.path).tag("new").labels.tags == ("new",)
    assert json.loads(run.labels.read_text())["tags"] == ["new"]


@pytest.mark.parametrize("tag", ["", "  ", "two\nlines", "x" * 65])
def test_a_tag_is_one_line(tmp_path: Path, tag: str) -> None:
    with pytest.raises(InvalidArgument, match="1 to 64 letters"):
        Run(start_run(tmp_path / "a").path).tag(tag)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, steps in (("slow", 10), ("quick", 40), ("hidden", 20), ("begun", 0)):
        train(start_run(tmp_path / name), 1, steps)
    end(RunDir(tmp_path / "quick"), "finished")
    Run(tmp_path / "quick").tag("paper").note("the best of Tuesday")
    Run(tmp_path / "hidden").archive()
    return tmp_path


def names(table: object) -> list[str]:
    return [run.name for run in table]  # type: ignore[attr-defined]


def test_lists_are_filtered_by_tag_state_and_text_and_hide_the_archive(folder: Path) -> None:
    assert set(names(list_runs(folder))) == {"slow", "quick", "begun"}
    assert set(names(list_runs(folder, archived=True))) == {"slow", "quick", "hidden", "begun"}
    assert names(list_runs(folder, tag="paper")) == ["quick"]
    assert names(list_runs(folder, state="finished")) == ["quick"]
    assert names(list_runs(folder, text="TUESDAY")) == ["quick"]
    assert names(list_runs(folder, text="hidden")) == []
    assert "paper" in repr(list_runs(folder))


def test_lists_are_sorted_by_any_figure_and_runs_without_it_come_last(folder: Path) -> None:
    assert names(list_runs(folder, sort="loss")) == ["quick", "slow", "begun"]
    assert names(list_runs(folder, sort="-loss")) == ["slow", "quick", "begun"]
    with pytest.raises(InvalidArgument, match="'loss'"):
        list_runs(folder, sort="los")
    with pytest.raises(InvalidArgument, match="'finished'"):
        list_runs(folder, state="finish")


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "Free some space"), (errno.EROFS, "read-only"), (errno.EACCES, "writable")]
)
def test_labels_that_cannot_be_written_are_as_before_and_the_way_out_is_told(
    number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(start_run(tmp_path / "a").path).tag("before")

    def refuse(path: Path, _: str) -> None:
        path.touch()  # what a full disk leaves of a file
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", refuse)
        with pytest.raises(
            WorkbenchError, match=f"The labels of a cannot be written .*{os.strerror(number)}.*{remedy}"
        ):
            run.tag("after")
    assert run.labels.tags == ("before",)
    assert not list(run.path.glob("*.part"))


def test_a_current_folder_that_was_deleted_is_told_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.delenv("WORKBENCH_RUNS", raising=False)
    (tmp_path / "gone").rmdir()
    for looks in (runs_root, user_path, list_runs):
        with pytest.raises(WorkbenchError, match=r"The current folder cannot be used: .* os.chdir"):
            looks()
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    assert runs_root() == tmp_path
