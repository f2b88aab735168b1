"""A legend stands in a corner that no curve runs through."""

import numpy as np
import plotly.graph_objects as go
import pytest

from workbench.analysis.curve import Curve
from workbench.figures.curves_view import loss_curves
from workbench.figures.theme import LEGEND_CORNERS, corner_of, place_legend

STEPS = np.arange(1, 401, dtype=float)
FALLING = 4 + 7 * np.exp(-STEPS / 60)
RISING = 2 + STEPS / 100


def drawn(*losses: np.ndarray) -> go.Figure:
    columns = [{"step": STEPS, "tokens": 64 * STEPS, "loss": loss} for loss in losses]
    return loss_curves([Curve(f"run-{number}", value) for number, value in enumerate(columns)])


@pytest.mark.parametrize(
    ("losses", "corner"),
    [
        ((FALLING,), "top right"),
        ((FALLING, np.full(400, 10.95)), "bottom left"),
        ((RISING,), "bottom right"),
        ((RISING, np.full(400, 2.0)), "top left"),  # of the run that soon leaves the axis, an arrow stands top right
        ((RISING, np.full(400, 2.0), np.full(400, 6.0)), "top right"),  # a curve runs through every corner
    ],
)
def test_a_legend_stands_where_no_curve_runs(losses: tuple[np.ndarray, ...], corner: str) -> None:
    assert corner_of(drawn(*losses).layout.legend) == corner


def test_a_legend_stays_in_its_corner_until_a_curve_runs_through_it() -> None:
    traces = drawn(FALLING).data
    assert place_legend(traces, preferred="bottom left") == LEGEND_CORNERS["bottom left"]
    assert place_legend(traces, preferred="top left") == LEGEND_CORNERS["top right"]


def test_the_menu_for_a_logarithmic_axis_moves_the_legend_too() -> None:
    """On a logarithmic axis 150,000 is nearly as high as 200,000."""
    figure = drawn(np.where(STEPS == 1, 1.0, np.where(STEPS < 20, 2e5, 1.5e5)))
    places = [button.args[0] for button in figure.layout.updatemenus[1].buttons]
    assert [(place["legend.yanchor"], place["legend.xanchor"]) for place in places] == [
        ("top", "right"),
        ("bottom", "right"),
    ]


def test_a_plot_without_curves_has_its_legend_in_the_preferred_corner() -> None:
    assert place_legend([]) == LEGEND_CORNERS["top right"]
