"""The full preset of the BERT template, rehearsed in miniature: executed, interrupted and gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench as wb
from tests.distributed import documents
from tests.distributed.documents import executed

STEPS, RATES = 12, [5e-3, 1e-2]  # so few that a run is evaluated after each of its steps, and yet stops
STOPS = "__import__('tests.distributed.documents', fromlist=['let_stop']).let_stop('bert-scaled')"


def pair(runs: Path) -> dict[str, str]:
    """Return the states of the two runs that are compared, by their names."""
    return {path.name: wb.load_run(path).status.state for path in sorted(runs.glob("bert-*"))}


def test_the_full_preset_chooses_rates_by_pilots_and_goes_on_with_what_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "REGISTERS", f"{documents.REGISTERS}; {STOPS}")
    small = {"preset": "rehearsal", "steps": STEPS, "pilot_steps": 4, "pilot_rates": RATES}
    document = executed("bert_scaling", tmp_path, monkeypatch, **small)
    assert "The best rate of the pilots is" in document.printed("if pilots:")
    pilots = [wb.sweeps.load_sweep(file.parent) for file in (tmp_path / "runs").glob("pilot-*/sweep.json")]
    assert sorted(len(pilot.rows()) for pilot in pilots if pilot.complete) == [len(RATES)] * 2
    before = pair(tmp_path / "runs")
    assert sorted(before.values()) == ["finished", "stopped"]
    stopped = next(name for name, state in before.items() if state == "stopped")
    assert 5 <= wb.load_run(tmp_path / "runs" / stopped).history().step[-1] < STEPS

    document = executed("bert_scaling", tmp_path, monkeypatch, **small, continue_runs=list(before))
    assert pair(tmp_path / "runs") == dict.fromkeys(before, "finished")
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
