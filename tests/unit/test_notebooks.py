"""What `notebooks/` holds was really run, is small, and can be read again."""

import ast
import base64
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

import workbench as wb
from workbench.figures import theme
from workbench.figures.figure import PLOTLY_MIME

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
    assert not re.findall(r"/(?:tmp|home|root|work|opt)/|site-packages", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_figure_of_a_kept_notebook_can_be_shown_dark_and_has_a_picture_and_words(path):
    cells = json.loads(path.read_text())["cells"]
    shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    figures = [data for data in shown if PLOTLY_MIME in data]
    assert figures
    for data in figures:
        assert data[PLOTLY_MIME]["layout"]["template"]["layout"]["paper_bgcolor"] == theme.PAPER
        image = Image.open(io.BytesIO(base64.b64decode("".join(data["image/png"])))).convert("RGB")
        assert image.getpixel((0, 0)) == theme.rgb(theme.PAPER), "JupyterLab recognises a figure by it (figures.js)"
        assert "".join(data["text/plain"]).strip()


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_a_recorded_run_can_be_shown_again(path):
    run = wb.load_run(path)
    assert len(run.history()) == run.row()["step"] > 0
    assert run.plan.prediction.step_ms > 0
    assert wb.runs.summary(run).rows[0][0] == path.name


@pytest.mark.parametrize("path", sorted((ROOT / "templates").glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_template_ends_in_a_report_which_alone_opens_its_page(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell is cells[-1] for cell in cells if "answer" in cell["metadata"].get("tags", ())] == [True]
    [shown] = ast.parse("".join(cells[-1]["source"])).body[-1:]
    assert ast.unparse(shown).startswith("wb.figures.Report(")
    assert len(shown.value.args) >= 3, "a headline, a picture and a table"
