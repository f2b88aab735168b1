"""The full preset of the BERT template, rehearsed in miniature: executed, interrupted and gone on with."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import workbench as wb
from tests.distributed.documents import executed

STEPS = 40


@pytest.mark.timeout(300)  # ten trainings or so, beside other tests
def test_the_full_preset_is_interrupted_and_gone_on_with(tmp_path, monkeypatch):
    watcher = threading.Thread(target=stop_midway, args=(tmp_path / "runs",), daemon=True)
    watcher.start()
    first = executed("bert_scaling", tmp_path, monkeypatch, preset="rehearsal")
    watcher.join()
    assert "The best rate of the pilots is" in first.printed("if pilots:")
    pilots = [wb.sweeps.load_sweep(file.parent) for file in (tmp_path / "runs").glob("pilot-*/sweep.json")]
    assert sorted(len(pilot.rows()) for pilot in pilots if pilot.complete) == [3, 3]
    names = sorted(path.name for path in (tmp_path / "runs").glob("bert-*"))
    states = {name: wb.load_run(name).status.state for name in names}
    assert sorted(states.values()) == ["finished", "stopped"]
    stopped = next(name for name, state in states.items() if state == "stopped")
    reached = wb.load_run(stopped).history().step[-1]
    assert 0 < reached < STEPS

    document = executed("bert_scaling", tmp_path, monkeypatch, preset="rehearsal", continue_runs=names)
    assert sorted(path.name for path in (tmp_path / "runs").glob("bert-*")) == names
    for name in names:
        history = wb.load_run(name).history()
        assert wb.load_run(name).status.state == "finished"
        assert history.step.tolist() == list(range(1, STEPS + 1))
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
        for path in runs.glob("bert-scaled*"):
            run = wb.load_run(path)
            history = run.history()
            if len(history) and history.step[-1] >= 3:
                run.stop()
                return
        time.sleep(0.05)
