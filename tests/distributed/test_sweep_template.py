"""The template of a sweep, executed in miniature in a kernel that is started as a user's is."""

import pytest

import workbench as wb
from tests.distributed.documents import executed


@pytest.mark.representative
def test_the_template_trains_compares_and_judges_by_held_out_loss(tmp_path, monkeypatch):
    small = {"learning_rates": [1e-3, 1e-2], "batches": [32], "steps": 8, "hidden_size": 16, "num_layers": 1}
    document = executed("sweep", tmp_path, monkeypatch, forked=False, **small)
    [folder] = [file.parent for file in (tmp_path / "runs").glob("*/sweep.json")]
    sweep = wb.sweeps.load_sweep(folder)
    assert sweep.complete
    assert sweep.objective == "held-out loss"
    for row in sweep.rows():
        last = [float(run.evaluations().eval_loss[-1]) for run in row.finished]
        assert row.mean == pytest.approx(sum(last) / 2)
    [live] = [cell for cell in document.cells if "curve" in cell.metadata.get("tags", ())]
    assert "4 of 4 runs have ended, complete" in str(live.outputs)
    [heat_map] = document.figures("wb.figures.heat_map(sweep)")
    assert all(text for row in heat_map["data"][0]["text"] for text in row)
    [bands] = document.figures("wb.figures.seed_bands(sweep)")
    assert {trace["meta"] for trace in bands["data"]} == {"band", "mean"}
    assert document.figures("wb.live(sweep.best()[0])")
    assert "My fellow" in str(document.cell("wb.live(sweep.best()[0])").outputs)
    assert "90% interval" in str(document.cell("contrast = wb.contrast(sweep)").outputs)
