"""What `notebooks/` holds was really run, is small, and can be read again."""

import json
from pathlib import Path

import pytest

import workbench as wb
from workbench.figures.pages import PLOTLY_MIME

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RECORDED = sorted((ROOT / "notebooks" / "recorded").iterdir())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_kept_notebook_was_executed_without_an_error(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in cells]
    assert counts == sorted(counts)
    assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_kept_notebook_is_small_and_names_no_path_of_the_machine(path):
    text = path.read_text()
    assert len(text) < 5_000_000
    assert not [word for word in ("/tmp/", "/home/", "/root/", "/work/", "/opt/", "site-packages") if word in text]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_figure_of_a_kept_notebook_has_a_picture_beside_it(path):
    cells = json.loads(path.read_text())["cells"]
    shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    figures = [data for data in shown if PLOTLY_MIME in data]
    assert figures
    assert all(data.get("image/png") for data in figures)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_a_recorded_run_can_be_shown_again(path):
    run = wb.load_run(path)
    assert len(run.history()) == run.row()["step"] > 0
    assert run.plan.prediction.step_ms > 0
    assert wb.runs.summary(run).rows[0][0] == path.name
