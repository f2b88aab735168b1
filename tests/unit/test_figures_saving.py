"""Files of figures: vectors with text, tables of data, and sentences where a file cannot be written."""

from __future__ import annotations

import csv
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from figure_values import curve, plan
from PIL import Image
from plotly.io import renderers

from workbench.analysis.curve import Curve
from workbench.base.errors import DataError, InvalidArgument
from workbench.figures.curves_view import loss_curves
from workbench.figures.figure import PLOTLY_MIME, Figure, picture, save
from workbench.figures.panels_view import panels
from workbench.figures.plan_view import draw_partition, plan_mimebundle, show_plan
from workbench.figures.timeline_view import draw_timeline, prediction
from workbench.figures.twin_panel import TwinAxis, parted


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("frontend", "shown"),
    [
        ("plotly_mimetype", {PLOTLY_MIME, "image/png", "text/plain"}),  # JupyterLab; GitHub shows the PNG
        ("vscode", {PLOTLY_MIME, "image/png", "text/plain"}),
        ("colab", {"text/html"}),
    ],
)
def test_a_figure_has_something_to_show_in_each_frontend(
    frontend: str, shown: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles = list[dict[str, Any]]()
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: bundles.append(bundle))
    monkeypatch.setattr("plotly.io._renderers.ipython.get_ipython", lambda: True)
    before = renderers.default
    try:
        renderers.default = frontend
        loss_curves([curve()])._ipython_display_()
    finally:
        renderers.default = before
    [bundle] = bundles
    assert set(bundle) == shown
    assert all(bundle.values())


def test_a_plan_has_an_interactive_figure_a_picture_and_a_sentence_for_any_frontend() -> None:
    assert set(plan_mimebundle(plan())) == {PLOTLY_MIME, "image/png", "text/plain"}


def test_the_text_of_svg_and_pdf_is_text(tmp_path: Path) -> None:
    figure = loss_curves([curve("a <run> & more")], title="Loss of a run")
    svg = figure.save(tmp_path / "loss.svg").read_text()
    words = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert {"Loss of a run", "Tokens (M)", "Loss", "10"} <= set(words)
    assert "a &lt;run&gt; &amp; more" in words
    assert b"/FontFile2" in figure.save(tmp_path / "loss.pdf").read_bytes(), "letters, not outlines"


def test_equal_figures_have_equal_files(tmp_path: Path) -> None:
    for form in ("svg", "pdf", "png"):
        files = [loss_curves([curve()]).save(tmp_path / f"{number}.{form}").read_bytes() for number in (1, 2)]
        assert files[0] == files[1]


def test_a_png_has_the_pixels_that_were_asked_for(tmp_path: Path) -> None:
    figure = loss_curves([curve()])
    path = figure.save(tmp_path / "new" / "loss.PNG", width=500, scale=3)
    assert Image.open(path).size == (1500, 3 * figure.layout.height)


def test_a_table_of_curves_has_a_row_for_each_point_and_columns_named_after_the_axes(tmp_path: Path) -> None:
    figure = loss_curves([curve("a", steps=10), curve("b", steps=10)], x="step", smoothing=0.0)
    table = rows(figure.save(tmp_path / "loss.csv"))
    assert list(table[0]) == ["series", "shows", "Step", "Loss"]
    found = [float(row["Loss"]) for row in table if (row["series"], row["shows"]) == ("b", "curve")]
    assert found == pytest.approx(curve("b", steps=10).columns["loss"])


def test_a_table_of_panels_has_a_column_for_each_panel(tmp_path: Path) -> None:
    table = rows(panels([curve("a"), curve("b")], [None, None]).save(tmp_path / "panels.csv"))
    assert list(table[0]) == ["series", "shows", "Tokens (M)", "Tokens/s", "MFU (%)"]
    assert {row["series"] for row in table} == {"a", "b"}


def test_a_table_of_a_heat_map_has_a_row_for_each_cell(tmp_path: Path) -> None:
    cells = go.Heatmap(x=["1e-3", "2e-3"], y=["8"], z=[[1.0, None]], text=[["1", "failed"]], colorbar={"title": "loss"})
    save(go.Figure(cells).update_xaxes(title="rate"), tmp_path / "cells.csv")
    assert rows(tmp_path / "cells.csv") == [
        {"rate": "1e-3", "y": "8", "loss": "1.0", "note": "1"},
        {"rate": "2e-3", "y": "8", "loss": "", "note": "failed"},
    ]


def test_a_table_of_bars_says_where_each_starts_and_ends(tmp_path: Path) -> None:
    table = rows(draw_timeline(plan(stages=2, microbatches=2)).save(tmp_path / "step.csv"))
    ends = [(float(row["time (ms), from"]), float(row["time (ms)"])) for row in table if row["series"] == "forward"]
    assert ends[0][0] == 0
    assert all(start < end for start, end in ends)


@pytest.mark.parametrize(
    "make", [show_plan, draw_partition, draw_timeline, lambda p: prediction(p, {"step_ms": 700.0})]
)
def test_every_figure_can_be_saved(make: Any, tmp_path: Path) -> None:
    figure = make(plan())
    assert isinstance(figure, Figure)
    assert all(figure.save(tmp_path / f"x{suffix}").stat().st_size > 40 for suffix in (".svg", ".csv"))


@pytest.mark.parametrize("name", ["loss.jpg", "loss", "loss.html"])
def test_another_ending_is_refused_with_those_that_work(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"does not end in \.png, \.svg, \.pdf or \.csv"):
        loss_curves([curve()]).save(tmp_path / name)


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written: .*Give a path in a folder that you may write to"):
        loss_curves([curve()]).save(tmp_path / "file" / "loss.csv")


def test_threads_draw_the_same_pictures_at_the_same_time(tmp_path: Path) -> None:
    figures = [loss_curves([curve(seed=seed)]) for seed in range(4)]
    alone = [picture(figure) for figure in figures]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(picture, figures)) == alone
        pages = list(pool.map(lambda at: figures[at].save(tmp_path / f"{at}.svg").read_bytes(), range(4)))
    assert pages == [figure.save(tmp_path / "again.svg").read_bytes() for figure in figures]


def test_words_at_the_ends_of_twelve_curves_do_not_overlap(tmp_path: Path) -> None:
    names = [f"bert-scaled-hidden1920-layers54-seed{seed}-20261124-0426{seed:02d}" for seed in range(12)]
    svg = loss_curves([curve(name, seed=seed) for seed, name in enumerate(names)]).save(tmp_path / "x.svg").read_text()
    labels = re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>[^<]*0426\d\d</text>', svg)
    assert len(labels) == 12
    assert len({x for x, _ in labels}) == 1
    assert min(np.diff(sorted(float(y) for _, y in labels))) > 11, "letters are 11 pixels high"


def test_heights_are_parted_within_their_ends_and_in_their_order() -> None:
    heights = np.array([5.0, 5.0, 0.0, 99.0, 5.5])
    found = parted(heights, 10.0, 0.0, 100.0)
    assert np.diff(np.sort(found)).min() >= 10 - 1e-9
    assert found.min() >= 0
    assert found.max() <= 100
    assert np.argsort(found, kind="stable").tolist() == np.argsort(heights, kind="stable").tolist()
    assert parted(np.array([10.0, 50.0]), 10.0, 0.0, 100.0).tolist() == [10.0, 50.0]


@pytest.mark.parametrize(
    ("low", "high", "length", "labels"),
    [
        (0.008, 2.2, 200, ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"]),
        (1e-7, 1e3, 150, ["1e-6", "1e-4", "0.01", "1", "100"]),
        (3.9, 10.6, 300, ["4", "5", "6", "7", "8", "9", "10"]),
    ],
)
def test_every_label_of_a_logarithmic_axis_is_a_whole_number(
    low: float, high: float, length: int, labels: list[str]
) -> None:
    axis = TwinAxis(go.layout.YAxis(type="log"), vertical=True, names=(), low=low, high=high)
    assert axis.ticks(length)[1] == labels


def test_a_title_that_is_broken_for_a_narrow_figure_has_one_line_in_a_wide_picture(tmp_path: Path) -> None:
    title = "Loss of a run whose name is longer than a narrow figure, in one line"
    figure = loss_curves([curve()], title=title)
    assert figure.layout.title.text.count("<br>") == 1
    assert f">{title}</text>" in figure.save(tmp_path / "wide.svg").read_text()


def test_a_gap_in_a_curve_is_an_empty_cell(tmp_path: Path) -> None:
    loss = np.array([3.0, np.nan, 2.0])
    table = rows(loss_curves([Curve("a", {"step": np.arange(3), "loss": loss})], x="step").save(tmp_path / "gap.csv"))
    assert "" in [row["Loss"] for row in table if row["shows"] == "curve"]
