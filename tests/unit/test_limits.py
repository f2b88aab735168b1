"""Calls beyond what can be computed, drawn or read: each is refused at once, by a sentence that says the limits."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

import workbench as wb
from tests.unit.test_runs import make_run
from workbench.base.errors import LONGEST, DataError, InvalidArgument, RunNotFound, UnknownParameter, WorkbenchError
from workbench.data import tokenizer
from workbench.measure import detection
from workbench.record.history import Evaluations
from workbench.runs.launching import launcher

FIGURE = go.Figure(go.Scatter(x=[1, 2], y=[1, 2]))
LONG = "x" * 10**6


def small(folder: Path) -> wb.Experiment:
    (folder / "a.txt").write_text("a few words\n" * 300)
    data = wb.data.corpus(folder / "a.txt", vocab_size=300)
    model = wb.models.bert(hidden_size=64, num_heads=2, num_layers=1, vocab_size=300)
    return wb.Experiment.of(model=model, data=data, steps=1, global_batch=2)


def history() -> Any:
    return wb.runs.History({"step": np.arange(3.0), "loss": np.ones(3)})


def evaluations() -> Any:
    return Evaluations(*(np.zeros(2) for _ in range(8)), metrics={"accuracy": np.ones(2)})


REFUSED: dict[str, tuple[Callable[[Path], Any], type[WorkbenchError], str]] = {
    **{
        f"width={width}": (
            lambda folder, width=width: wb.figures.save(FIGURE, folder / "a.png", width=width),
            InvalidArgument,
            r"width=-?\d+. Give a whole number from 1 to 10,000",
        )
        for width in (0, -5, 10**6)
    },
    **{
        f"scale={scale}": (
            lambda folder, scale=scale: wb.figures.save(FIGURE, folder / "a.svg", scale=scale),
            InvalidArgument,
            r"scale=-?[\d.]+. Give a number from 0.1 to 20",
        )
        for scale in (0.0, -1.0, 1e4)
    },
    "10⁹ pixels": (
        lambda folder: wb.figures.save(FIGURE, folder / "a.png", width=10_000, scale=20),
        InvalidArgument,
        "has 40,000 million pixels, and at most 200 million",
    ),
    "3000 runs": (
        lambda folder: wb.compare([make_run(folder)] * 3000),
        InvalidArgument,
        "Give .*, 500 at most",
    ),
    "3000 live runs": (lambda _: wb.live(["a"] * 3000), InvalidArgument, "500 at most"),
    "no columns": (lambda _: wb.runs.History({}), InvalidArgument, "loss and step are missing"),
    "no loss": (lambda _: wb.runs.History({"step": np.ones(1)}), InvalidArgument, "loss is missing"),
    "a column of a history": (lambda _: history()["los"], UnknownParameter, "Did you mean 'loss'"),
    "a column of evaluations": (lambda _: evaluations()["acuracy"], UnknownParameter, "Did you mean 'accuracy'"),
    "10⁹ samples": (
        lambda folder: wb.planning.graph(small(folder), micro_batch=10**9),
        InvalidArgument,
        "no number of samples to capture. Give 1 to 4,096",
    ),
    "10,000 layers": (lambda _: wb.models.bert(num_layers=10_000), WorkbenchError, "at most 1,000"),
    "a long name of a run": (lambda _: wb.load_run(LONG), RunNotFound, "xxx…xxx"),
    "long data": (
        lambda _: wb.Experiment.of(model=wb.models.bert(hidden_size=64, num_heads=2), data=LONG),
        DataError,
        "xxx…xxx",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_call_beyond_a_limit_is_refused_with_the_limit(what: str, tmp_path: Path) -> None:
    call, error, words = REFUSED[what]
    with pytest.raises(error, match=words) as refused:
        call(tmp_path)
    assert len(str(refused.value)) <= LONGEST + 3


def test_a_message_of_many_words_keeps_its_begin_and_its_end() -> None:
    said = str(WorkbenchError("It begins. " + "so " * 10**6 + "Do this."))
    assert said.startswith("It begins.")
    assert said.endswith("Do this.")
    assert len(said) <= LONGEST + 3


def test_a_history_can_be_copied_and_says_by_hasattr_what_it_has() -> None:
    again = copy.deepcopy(history())
    assert again.loss.tolist() == [1, 1, 1]
    assert not hasattr(again, "los")
    assert evaluations()["perplexity"].tolist() == [1, 1]


@pytest.mark.parametrize("inside", [False, True])
def test_text_without_an_end_is_refused(tmp_path: Path, inside: bool) -> None:
    sizes = {"hidden_size": 64, "num_heads": 2, "num_layers": 1, "vocab_size": 300}
    folder = tmp_path / "texts"
    folder.mkdir()
    os.mkfifo(folder / "a.txt")
    for path in [folder] if inside else [folder / "a.txt", Path("/dev/zero")]:
        data = wb.data.corpus(path, vocab_size=300)
        asked = wb.Experiment.of(model=wb.models.bert(**sizes), data=data, steps=1, global_batch=2)
        with pytest.raises(DataError, match="is no file with an end: it is a device, a pipe or a socket"):
            asked.data.reads(asked).check()


def test_a_python_without_docstrings_is_told_and_not_a_fault_of_transformers() -> None:
    build = "import workbench as wb; wb.models.bert(hidden_size=64, num_heads=2).build()"
    ended = subprocess.run([sys.executable, "-OO", "-c", build], capture_output=True, text=True, check=False)
    assert "InvalidExperiment: Python runs with -OO" in ended.stderr


def test_a_word_of_megabytes_is_cut_for_the_trainer_and_words_of_a_text_are_not() -> None:
    longest = tokenizer.LONGEST_WORD
    given = ["a short text", "b" * (2 * longest + 7) + " and c", "d" * (longest - 1) + " " + "e" * longest]
    shown = ["a short text", " ".join(["b" * longest, "b" * longest, "b" * 7]) + " and c", given[2]]
    assert list(tokenizer._counted(given, lambda _: None)) == [shown]


def test_ranks_that_cannot_meet_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError(101, "Network is unreachable")

    launcher._check_loopback()
    monkeypatch.setattr("socket.create_connection", unreachable)
    with pytest.raises(WorkbenchError, match=r"127\.0\.0\.1 cannot be reached: Network is unreachable"):
        launcher._check_loopback()


def test_a_measurement_in_a_home_that_cannot_be_written_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", "/proc/nowhere")
    assert detection._cached("a device", lambda: {"bf16": 1.0})["bf16"] == 1.0
