"""The template of a measured grid, executed in miniature by papermill with real trainings."""

import nbformat
import pytest

import workbench as wb
from tests.distributed.test_sweep_template import addresses
from workbench import notebooks
from workbench.figures.pages import PLOTLY_MIME


@pytest.mark.timeout(1200)  # a minute on two cores of one's own
def test_the_template_measures_cells_and_predicts_their_order_and_the_best(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    small = {"hidden_size": 16, "seq_len": 16, "steps": 10, "micro_batches": [1, 8]}
    small["corpus"] = str(addresses(tmp_path / "addresses"))
    done = notebooks.execute(notebooks.template_path("gpt_sweep"), tmp_path, small)
    [folder] = [file.parent for file in (tmp_path / "runs").glob("*/grid.json")]
    measured = wb.sweeps.load_grid(folder)
    assert measured.complete
    assert len(measured.measured()) == 6
    assert not list(folder.glob("runs/*/checkpoints/*")), "a measured cell writes none"
    cells = [cell for cell in nbformat.read(done.notebook, 4).cells if cell.cell_type == "code"]
    shown = {cell.source.splitlines()[-1]: [output.get("data", {}) for output in cell.outputs] for cell in cells}
    assert "small-gpt on 2 × CPU process, batch 16" in str([cell.outputs for cell in cells])
    for name in ("wb.figures.heat_map(grid)", "measured"):
        assert any(PLOTLY_MIME in data for data in shown[name]), name
    printed = str(next(cell for cell in cells if "regret of the planner" in cell.source).outputs)
    assert measured.rank_correlation > 0.5, "a prediction that is the same for all cells has none"
    assert measured.regret < 0.5, "the cell that a constant prediction takes is several times slower than the fastest"
    assert measured.ratio > 2
    assert f"rank correlation of predicted and measured steps: {measured.rank_correlation:.2f}" in printed
    assert f"regret of the planner's choice: {measured.regret:.1%}" in printed
