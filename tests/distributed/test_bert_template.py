"""The full preset of the BERT template, rehearsed in miniature: executed, interrupted and gone on with."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench as wb
from tests.distributed.documents import Document, executed

STEPS = 40


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Document, Path]]:
    """Execute the template, stop the second of its pair midway, and return it with its folder."""
    folder = tmp_path_factory.mktemp("interrupted")
    watcher = threading.Thread(target=stop_midway, args=(folder / "runs",), daemon=True)
    watcher.start()
    with pytest.MonkeyPatch.context() as patch:
        yield executed("bert_scaling", folder, patch, preset="rehearsal"), folder


def pair(runs: Path) -> dict[str, str]:
    """Return the states of the two runs that are compared, by their names."""
    return {path.name: wb.load_run(path).status.state for path in sorted(runs.glob("bert-*"))}


def test_the_full_preset_chooses_rates_by_pilots_and_is_interrupted(interrupted: tuple[Document, Path]) -> None:
    document, folder = interrupted
    assert "The best rate of the pilots is" in document.printed("if pilots:")
    pilots = [wb.sweeps.load_sweep(file.parent) for file in (folder / "runs").glob("pilot-*/sweep.json")]
    assert sorted(len(pilot.rows()) for pilot in pilots if pilot.complete) == [3, 3]
    assert sorted(pair(folder / "runs").values()) == ["finished", "stopped"]


def test_what_was_interrupted_is_gone_on_with(
    interrupted: tuple[Document, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = interrupted
    before = pair(folder / "runs")
    stopped = next(name for name, state in before.items() if state == "stopped")
    reached = wb.load_run(folder / "runs" / stopped).history().step[-1]
    assert 0 < reached < STEPS

    document = executed("bert_scaling", folder, monkeypatch, preset="rehearsal", continue_runs=list(before))
    assert pair(folder / "runs") == dict.fromkeys(before, "finished")
    for name in before:
        assert wb.load_run(name).history().step.tolist() == list(range(1, STEPS + 1))
    assert len(document.figures("")) >= 7
    shown = str([cell.outputs for cell in document.cells])
    for words in (
        "2 times as wide, 2 times as deep",
        "Predicted training time, without start-up",
        "No pilots",
        "context-free prediction",
        "At equal tokens",
        "ended as finished",
    ):
        assert words in shown, words


def stop_midway(runs: Path) -> None:
    """Stop the second of the two runs once it has trained for a few steps."""
    while True:
        for file in runs.glob("bert-scaled*/experiment.json"):  # a directory without it is no run yet
            run = wb.load_run(file.parent)
            history = run.history()
            if len(history) and history.step[-1] >= 3:
                run.stop()
                return
        time.sleep(0.05)
