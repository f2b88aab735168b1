"""The templates of measured grids of a GPT, executed in miniature with real trainings."""

import json
import re

import pytest

import workbench as wb
from tests.distributed.documents import executed


def test_the_template_measures_cells_and_predicts_their_order_and_the_best(tmp_path, monkeypatch):
    small = {"hidden_size": 16, "seq_len": 16, "steps": 10, "micro_batches": [1, 8]}
    document = executed("gpt_sweep", tmp_path, monkeypatch, **small)
    [folder] = [file.parent for file in (tmp_path / "runs").glob("*/grid.json")]
    measured = wb.sweeps.load_grid(folder)
    assert measured.complete
    assert len(measured.measured()) == 6
    assert not list(folder.glob("runs/*/checkpoints/*")), "a measured cell writes none"
    assert "small-gpt on 2 × CPU process, batch 16" in document.printed("grid = wb.grid")
    assert document.figures("wb.figures.heat_map(grid)")
    assert document.figures("display(measured, ")
    check_heat_map(measured)
    printed = document.printed('print(f"regret of the planner')
    assert measured.rank_correlation > 0.5, "a prediction that is the same for all cells has none"
    # Two cells are predicted to be four times as fast as the others, and busy cores change the places of cells that are
    # alike. The choice of a constant prediction is the slowest of the six.
    chosen = min(measured.measured(), key=lambda cell: cell.predicted_ms)
    assert chosen in measured.measured()[:3]
    assert measured.ratio > 2
    assert f"rank correlation of predicted and measured steps: {measured.rank_correlation:.2f}" in printed
    assert f"regret of the planner's choice: {measured.regret:.1%}" in printed
    verdict = "confirmed" if measured.ratio > 3 else "not confirmed"
    found = document.printed("verdict = ")
    assert f"more than three times as long as the fastest: {verdict}." in found
    assert f"{measured.ratio:.2f} times over 6 cells, measured." in found


def check_heat_map(measured: wb.sweeps.MeasuredGrid) -> None:
    [cells] = wb.figures.heat_map(measured).data
    assert list(cells.x) == ["1", "8"]
    assert list(cells.y) == ["TP 1 · PP 1", "TP 1 · PP 2", "TP 2 · PP 1", "TP 2 · PP 2"]
    fastest, *_, slowest = measured.measured()
    shares = {
        (words, str(size)): value
        for words, line in zip(cells.y, cells.z, strict=True)
        for size, value in zip(cells.x, line, strict=True)
    }
    for cell in (fastest, slowest):
        where = f"TP {cell.choices['tensor']} · PP {cell.choices['pipeline']}", str(cell.choices["micro_batch"])
        assert shares[where] == pytest.approx(fastest.step_ms / cell.step_ms)
    assert sum(value != value for value in shares.values()) == 2, "TP 2 × PP 2 has no plan on two devices"


def test_a_second_execution_of_the_frontier_goes_on_with_the_first_and_sets_other_libraries_beside_it(
    tmp_path, monkeypatch
):
    small = {"hidden_size": 16, "steps": 5, "runs_folder": str(tmp_path / "runs")}
    first = executed("gpt_frontier", tmp_path, monkeypatch, **small, minutes=0.0)
    measured = wb.sweeps.load_grid(next((tmp_path / "runs").glob("ways-*")))
    assert not measured.complete
    assert "Plans of Workbench: did not run" in first.printed("def verdict")
    timed = {"tokens_per_step": 16 * 64, "round": 0, "peak_gib": 1.0, "step_ms": [95e3]}
    rounds = [{"contender": name, **timed} for name in ("deepspeed1, 1", "megatron-tp2, 1")]
    rounds[1] |= {"step_ms": [94e3], "peak_gib": 2.0}
    rounds += [{"contender": "deepspeed3, 1", "error": "out of memory"}]
    (tmp_path / "peers.json").write_text(json.dumps({"measurements": rounds}))
    second = executed("gpt_frontier", tmp_path, monkeypatch, **small, peers=str(tmp_path / "peers.json"))
    assert len(list((tmp_path / "runs").glob("ways-*"))) == 1
    assert measured.complete
    said = second.printed("found = ")
    for name in ("ZeRO 1", "ZeRO 3", "TP 2", "PP 2"):
        memory = r"[\d.]+ MiB measured, [\d.]+ [KM]iB predicted; PP"
        assert re.search(rf"^{name}: [\d.,]+ ms measured, [\d.,]+ ms predicted .*; {memory}", said, re.MULTILINE)
    assert second.figures("display(measured, ")
    assert "deepspeed3, 1: out of memory" in second.printed("others = {}")
    answer = second.printed("def verdict")
    assert re.search(r"Plans of Workbench: (not )?confirmed: [\d.,]+ ms and [\d.]+ MiB, against", answer)
    assert "DeepSpeed beside Megatron-Core: confirmed: 95,000 ms and 1.0 GiB, against 94,000 ms and 2.0 GiB" in answer
