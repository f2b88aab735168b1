"""Pictures without a browser: every figure of the package has one, with its parts where they belong."""

from __future__ import annotations

import base64
import io
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from figure_values import curve, plan
from PIL import Image

from workbench.analysis.contrast import difference
from workbench.analysis.pareto import ParetoPoint
from workbench.figures import theme
from workbench.figures.curves_view import loss_curves
from workbench.figures.figure import NOTEBOOK_PX, PLOTLY_MIME, has_twin, picture
from workbench.figures.panels_view import panels
from workbench.figures.plan_view import draw_partition, show_plan
from workbench.figures.run_views import LOOKS, differences, draw_pareto, draw_pattern
from workbench.figures.timeline_view import draw_timeline, prediction
from workbench.notebooks.pages import add_pictures
from workbench.record.history import Patterns

CELLS = go.Heatmap(
    x=["1e-3", "2e-3"], y=["8", "16"], z=[[1.0, 2.0], [3.0, None]], text=[["1", "2"], ["3", ""]], colorscale="Viridis"
)
ROWS = go.Parcoords(
    dimensions=[{"label": "rate", "values": [0, 1], "tickvals": [0, 1]}, {"label": "loss", "values": [3.0, 2.0]}],
    line={"color": [3.0, 2.0], "colorscale": "Viridis"},
)


def pixels(figure: go.Figure) -> Any:
    image = Image.open(io.BytesIO(picture(figure))).convert("RGB")
    assert image.size == (NOTEBOOK_PX, figure.layout.height or 480)
    return np.asarray(image).astype(int)


def where(image: Any, color: str, tolerance: int = 12) -> Any:
    """Return row and column of the pixels of a colour, shape (n, 2)."""
    return np.argwhere(np.abs(image - np.array(theme.rgb(color))).max(axis=2) <= tolerance)


@pytest.mark.parametrize(
    "figure",
    [
        panels([curve("a"), curve("b", seed=1)], [None, None]),
        draw_partition(plan()),
        draw_timeline(plan(stages=8, chunks=2, microbatches=16)),
        prediction(plan(), {"step_ms": 790.0, "tokens_per_s": 1e5}),
        differences([difference(curve("a"), curve("b", seed=1))]),
        go.Figure(CELLS),
        go.Figure(ROWS),
        go.Figure(),
    ],
    ids=["panels", "partition", "timeline", "prediction", "differences", "heat map", "parallel", "empty"],
)
def test_every_figure_has_a_picture(figure: go.Figure) -> None:
    image = pixels(figure)
    drawn = (image < 250).any(axis=2)
    assert drawn.mean() > 0.005 or not figure.data


def test_cells_that_plotly_packed_into_bytes_have_the_picture_that_lists_have() -> None:
    packed = go.Figure(CELLS).update_traces(z=np.array([[1.0, 2.0], [3.0, np.nan]]))
    data = {PLOTLY_MIME: json.loads(packed.to_json())}
    assert data[PLOTLY_MIME]["data"][0]["z"]["shape"] == "2, 2"
    notebook = SimpleNamespace(cells=[{"outputs": [{"data": data}]}])
    assert add_pictures(notebook) == ""
    assert base64.b64decode(data["image/png"]) == picture(go.Figure(CELLS))


def test_a_cell_without_a_value_may_still_say_why() -> None:
    silent = picture(go.Figure(CELLS))
    speaking = go.Figure(CELLS).update_traces(text=[["1", "2"], ["3", "+ 2.7 GiB"]])
    assert picture(speaking) != silent
    assert len(where(pixels(speaking), theme.INK, 60)) > len(where(pixels(go.Figure(CELLS)), theme.INK, 60))


def test_a_falling_curve_falls_in_the_picture_and_a_dashed_line_has_gaps() -> None:
    figure = loss_curves([curve("a")], x="step", smoothing=0.0)
    image = pixels(figure.add_hline(8.0, line={"dash": "dash", "color": "#808080"}))
    place = where(image, theme.PALETTE[0])
    left, right = place[place[:, 1] < 120], place[place[:, 1] > 700]
    assert left[:, 0].min() + 150 < np.median(right[:, 0])
    rows, columns = where(image, "#808080", 6).T
    row = np.bincount(rows).argmax()
    along = columns[rows == row]
    assert np.ptp(along) > 500
    assert 0.4 < len(along) / np.ptp(along) < 0.8


def test_bars_are_as_long_as_their_values_and_stack() -> None:
    lying = {"orientation": "h", "y": [0]}
    bars = [
        go.Bar(x=[1.0], marker={"color": "#0072B2"}, **lying),
        go.Bar(x=[3.0], marker={"color": "#D55E00"}, **lying),
    ]
    image = pixels(go.Figure(bars, {"barmode": "stack", "height": 300}))
    first, second = where(image, "#0072B2")[:, 1], where(image, "#D55E00")[:, 1]
    assert np.ptp(second) / np.ptp(first) == pytest.approx(3, rel=0.05)
    assert 0 < second.min() - first.max() < 4


def test_a_line_beyond_the_range_of_its_axis_is_cut_off() -> None:
    figure = go.Figure(go.Scatter(y=[0, 100, 0], line={"color": "#D55E00"}))
    image = pixels(figure.update_layout(yaxis={"range": [0, 1]}))
    rows = where(image, "#D55E00")[:, 0]
    assert rows.min() >= 24
    assert rows.max() <= 480 - 54


def test_the_stages_of_a_plan_stand_below_one_another_above_its_timeline() -> None:
    image = pixels(show_plan(plan()))
    middles = [np.median(where(image, theme.stage_color(stage, 4))[:, 0]) for stage in range(4)]
    assert middles == sorted(middles)
    assert np.median(where(image, theme.BACKWARD)[:, 0]) > middles[-1]


def test_a_trace_of_another_type_has_no_picture_without_a_browser() -> None:
    assert not has_twin(go.Figure(go.Pie(values=[1, 2])))


@pytest.mark.parametrize(
    "trace",
    [
        go.Heatmap(x=CELLS.x, y=CELLS.y, z=CELLS.z, coloraxis="coloraxis"),
        go.Heatmap(z=CELLS.z, colorscale="Viridis"),
        go.Scatter(y=[1, 2], mode="markers", marker={"color": [1.0, 2.0], "coloraxis": "coloraxis"}),
        go.Bar(y=[1, 2], marker={"color": np.array([1, 2])}),
        go.Parcoords(dimensions=[{"label": "a", "values": [1, 2]}]),
    ],
    ids=["heat map of a shared colour axis", "heat map without places", "points", "bars", "parallel coordinates"],
)
def test_a_figure_that_leaves_its_colours_to_plotly_has_no_picture_where_there_is_no_browser(
    trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = go.Figure(trace)
    assert not has_twin(figure)
    output = {"data": {PLOTLY_MIME: json.loads(figure.to_json())}}
    notebook = SimpleNamespace(cells=[{"outputs": [output]}])

    def without_a_browser(*_: Any, **__: Any) -> None:
        raise ValueError("no browser")

    monkeypatch.setattr(go.Figure, "to_image", without_a_browser)
    assert "No picture could be drawn: no browser" in add_pictures(notebook)
    assert output["data"].keys() == {PLOTLY_MIME}


POINTS = [
    ParetoPoint("dense", "dense", "dense", 1, 10.0, 50.0, (2.0, 2.2)),
    ParetoPoint("static", "static", "static", 1, 2.0, 60.0, (2.5,)),
    ParetoPoint("dynamic", "dynamic", "dynamic", 1, 2.0, 55.0, (2.3, 2.4)),
]


def test_both_panels_of_the_pareto_figure_have_one_loss_axis_and_bars_over_the_seeds() -> None:
    image = pixels(draw_pareto(POINTS, published={"elsewhere": (10.0, 2.3)}))[:380]  # without the legend
    found = where(image, theme.series_color(0))
    for panel in (found[found[:, 1] < NOTEBOOK_PX // 2], found[found[:, 1] >= NOTEBOOK_PX // 2]):
        assert np.ptp(panel[:, 0]) > np.ptp(panel[:, 1]), "the bar is taller than the mark is wide"
    rows = {
        int(found[found[:, 1] < NOTEBOOK_PX // 2][:, 0].min()),
        int(found[found[:, 1] >= NOTEBOOK_PX // 2][:, 0].min()),
    }
    assert max(rows) - min(rows) <= 1


def test_the_picture_of_a_pattern_has_its_blocks_where_they_are() -> None:
    step = np.array([0.0, 3.0])
    before, after = np.array([[True, False], [True, False]]), np.array([[True, True], [False, False]])
    moved = Patterns(*[step] * 8, "layer.0.weight", (before, after))
    image = pixels(draw_pattern(moved, "run"))
    cells = image[:, : NOTEBOOK_PX * 3 // 4]  # without the colour bar
    places = {name: where(cells, color).mean(axis=0) for name, color in LOOKS.items()}
    assert places["stayed"][0] < places["pruned"][0], "rows are counted from above"
    assert places["stayed"][1] < places["regrown"][1]
    assert abs(places["stayed"][0] - places["regrown"][0]) < 2
