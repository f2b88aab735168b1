"""The full preset of the BERT template, rehearsed in miniature: executed, interrupted and gone on with."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import nbformat
import pytest

import workbench as wb
from workbench import notebooks
from workbench.figures.pages import PLOTLY_MIME

STEPS = 40
needs_time = pytest.mark.skipif(
    not os.environ.get("WORKBENCH_TEST_EXHAUSTIVE"), reason="minutes of training; set WORKBENCH_TEST_EXHAUSTIVE"
)


@needs_time
@pytest.mark.timeout(1800)
def test_the_full_preset_is_interrupted_and_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    template, parameters = notebooks.template_path("bert_scaling"), {"preset": "rehearsal"}
    watcher = threading.Thread(target=stop_midway, args=(tmp_path / "runs",), daemon=True)
    watcher.start()
    first = notebooks.execute(template, tmp_path / "first", parameters)
    watcher.join()
    assert "The best rate of the pilots is" in str(outputs(first.notebook))
    pilots = [wb.sweeps.load_sweep(file.parent) for file in (tmp_path / "runs").glob("pilot-*/sweep.json")]
    assert sorted(len(pilot.rows()) for pilot in pilots if pilot.complete) == [3, 3]
    names = sorted(path.name for path in (tmp_path / "runs").glob("bert-*"))
    states = {name: wb.load_run(name).status.state for name in names}
    assert sorted(states.values()) == ["finished", "stopped"]
    stopped = next(name for name, state in states.items() if state == "stopped")
    reached = wb.load_run(stopped).history().step[-1]
    assert 0 < reached < STEPS

    done = notebooks.execute(template, tmp_path / "second", {**parameters, "continue_runs": names})
    assert sorted(path.name for path in (tmp_path / "runs").glob("bert-*")) == names
    for name in names:
        history = wb.load_run(name).history()
        assert wb.load_run(name).status.state == "finished"
        assert history.step.tolist() == list(range(1, STEPS + 1))
    shown = outputs(done.notebook)
    figures = [output.data for output in shown if PLOTLY_MIME in output.get("data", {})]
    assert len(figures) >= 7
    assert all("image/png" in data for data in figures)
    for words in (
        "2 times as wide, 2 times as deep",
        "Predicted training time, without start-up",
        "No pilots",
        "context-free prediction",
        "At equal tokens",
        "ended as finished",
    ):
        assert words in str(shown), words


def outputs(notebook: Path) -> list:
    """Return the outputs of all cells."""
    cells = [cell for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "code"]
    return [output for cell in cells for output in cell.outputs]


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
