"""The templates of measured grids of a GPT, executed in miniature: the steps of their plans are prescribed."""

import json
import re

import pytest

import workbench as wb
from tests.distributed import documents
from tests.distributed.documents import executed
from tests.distributed.prescribed_worker import STAND_IN, peak_mib, step_ms
from tests.patience import Gate
from workbench.base.units import gib, milliseconds


@pytest.fixture(autouse=True)
def prescribed(monkeypatch):
    monkeypatch.setattr(documents, "REGISTERS", f"{documents.REGISTERS}; {STAND_IN}")


def test_the_template_measures_cells_and_compares_their_order_and_the_best_with_what_was_predicted(
    tmp_path, monkeypatch
):
    small = {"hidden_size": 16, "seq_len": 16, "steps": 5, "micro_batches": [1, 8]}
    document = executed("gpt_sweep", tmp_path, monkeypatch, **small)
    [folder] = [file.parent for file in (tmp_path / "runs").glob("*/grid.json")]
    measured = wb.sweeps.load_grid(folder)
    assert measured.complete
    cells = measured.measured()
    assert [cell.step_ms for cell in cells] == [step_ms(cell.plan.to_json()) for cell in cells]
    assert [round(cell.step_ms) for cell in cells] == [68, 80, 96, 108, 268, 296]
    assert "small-gpt on 2 × CPU process, batch 16" in document.printed("grid = wb.grid")
    assert document.figures("wb.figures.heat_map(grid)")
    assert document.figures("display(measured, ")
    check_heat_map(measured)
    printed = document.printed('print(f"regret of the planner')
    chosen = min(cells, key=lambda cell: (cell.predicted_ms, -cell.step_ms))
    assert f"rank correlation of predicted and measured steps: {measured.rank_correlation:.2f}" in printed
    assert f"regret of the planner's choice: {chosen.step_ms / 68 - 1:.1%}" in printed
    found = document.printed("said = ")
    said = wb.sweeps.verdict(True, cells)  # or not judged, if other tests took the cores
    assert f"more than three times as long as the fastest: {said} (4.35 times over 6 measured cells, " in found
    assert document.cells[-1].metadata["tags"] == ["answer"]
    assert document.figures("said = "), "the report has a picture"


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
    gate = Gate(tmp_path / "gate")
    for name, value in gate.environment.items():
        monkeypatch.setenv(name, value)
    small = {"hidden_size": 16, "steps": 5, "runs_folder": str(tmp_path / "runs")}
    first = executed("gpt_frontier", tmp_path, monkeypatch, **small, minutes=0.0)
    measured = wb.sweeps.load_grid(next((tmp_path / "runs").glob("ways-*")))
    assert not measured.measured()
    assert "than tensor and pipeline parallelism alone: did not run." in first.printed("def verdict")
    timed = {"tokens_per_step": 16 * 64, "round": 0, "peak_gib": 1.0, "step_ms": [95e3]}
    rounds = [{"contender": name, **timed} for name in ("deepspeed1, 1", "megatron-tp2, 1")]
    rounds[1] |= {"step_ms": [94e3], "peak_gib": 2.0}
    rounds += [{"contender": "deepspeed3, 1", "error": "out of memory"}]
    (tmp_path / "peers.json").write_text(json.dumps({"measurements": rounds}))
    gate.open()
    second = executed("gpt_frontier", tmp_path, monkeypatch, **small, peers=str(tmp_path / "peers.json"))
    assert len(list((tmp_path / "runs").glob("ways-*"))) == 1
    assert measured.complete
    said = second.printed("found = ")
    whole = {"zero": 0, "tensor": 1, "pipeline": 1, "offload_optimizer": False, "micro_batch": 2}
    steps, memory = {}, {}
    for name, way in {
        "ZeRO 1": {"zero": 1},
        "ZeRO 3": {"zero": 3},
        "TP 2": {"tensor": 2},
        "PP 2": {"pipeline": 2},
    }.items():
        steps[name], memory[name] = milliseconds(step_ms(whole | way)), gib(peak_mib(whole | way) << 20)
        predicted = rf"[\d.,]+ ms predicted .*; {memory[name]} measured, [\d.]+ [KM]iB predicted; PP"
        assert re.search(rf"^{name}: {steps[name]} measured, {predicted}", said, re.MULTILINE)
    assert second.figures("display(measured, ")
    assert "deepspeed3, 1: out of memory" in second.printed("others = {}")
    answer = second.printed("def verdict")
    leaner = f"{steps['ZeRO 1']} and {memory['ZeRO 1']}, against {steps['PP 2']} and {memory['PP 2']}"
    assert f"Plans of Workbench: {wb.sweeps.verdict(True, measured.measured())}: {leaner}" in answer
    assert "DeepSpeed beside Megatron-Core: confirmed: 95,000 ms and 1.0 GiB, against 94,000 ms and 2.0 GiB" in answer
