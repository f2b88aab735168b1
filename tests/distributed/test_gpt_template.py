"""The template of a measured grid, executed in miniature with real trainings."""

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
    assert document.figures("measured = grid.measure(")
    printed = document.printed('print(f"regret of the planner')
    assert measured.rank_correlation > 0.5, "a prediction that is the same for all cells has none"
    assert measured.regret < 0.5, "the cell that a constant prediction takes is several times slower than the fastest"
    assert measured.ratio > 2
    assert f"rank correlation of predicted and measured steps: {measured.rank_correlation:.2f}" in printed
    assert f"regret of the planner's choice: {measured.regret:.1%}" in printed
