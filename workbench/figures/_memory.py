"""Measured peak memory of each rank against what its device has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import plotly.graph_objects as go

from workbench.figures import theme
from workbench.units import GIB, gib

Peaks = Mapping[int, Mapping[str, Any]] | Iterable[Mapping[str, Any]]


def memory(peaks: Peaks, title: str = "Peak memory of each rank") -> go.Figure:
    """Peak bytes per rank: allocated in front, reserved by the allocator pale behind, the limit as a line.

    `peaks` are a run's `memory` events (`rank`, `stage`, `device`, `peak_bytes`, `reserved_bytes`,
    `limit_bytes`; others are passed over, the last of a rank counts), or a mapping of rank to such.
    """
    by_rank = latest_by_rank(peaks)
    ranks = sorted(by_rank)
    figure = go.Figure()
    for key, label, share, width in (("reserved_bytes", "reserved", 0.6, 0.7), ("peak_bytes", "allocated", 0.0, 0.45)):
        figure.add_trace(_bars([by_rank[rank] for rank in ranks], key, label, share, width))
    figure.add_trace(_labels([by_rank[rank] for rank in ranks]))
    limits = [(position, by_rank[rank].get("limit_bytes")) for position, rank in enumerate(ranks)]
    figure.add_trace(_limits([(position, limit) for position, limit in limits if limit]))
    figure.update_layout(
        template=theme.TEMPLATE,
        height=max(1, len(ranks)) * max(20, min(40, 480 // max(1, len(ranks)))) + 170,
        title=theme.title(theme.text(title), _subtitle(by_rank.values())),
        barmode="overlay",
        margin={"t": 100, "r": 48},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom", "borderwidth": 0},
        xaxis={"title": {"text": "GiB"}, "rangemode": "tozero"},
        yaxis={
            "tickmode": "array",
            "tickvals": list(range(len(ranks))),
            "ticktext": [_rank_label(by_rank[rank]) for rank in ranks],
            "range": [len(ranks) - 0.5, -0.5],
            "showgrid": False,
            "ticklabelstandoff": 6,
        },
    )
    return figure


def latest_by_rank(peaks: Peaks) -> dict[int, Mapping[str, Any]]:
    """The last `memory` event of each rank."""
    if isinstance(peaks, Mapping):
        return {int(rank): {"rank": rank, **event} for rank, event in peaks.items()}
    return {int(event["rank"]): event for event in peaks if event.get("type", "memory") == "memory"}


def _bars(events: list[Mapping[str, Any]], key: str, label: str, share: float, width: float) -> go.Bar:
    values = [float(event.get(key) or 0.0) for event in events]
    return go.Bar(
        orientation="h",
        x=[value / GIB for value in values],
        y=list(range(len(events))),
        width=width,
        name=label,
        marker={"color": theme.pale(theme.PALETTE[0], share)},
        hovertext=[f"rank {event['rank']}: {gib(value)} {label}" for event, value in zip(events, values, strict=True)],
        hoverinfo="text",
    )


def _labels(events: list[Mapping[str, Any]]) -> go.Scatter:
    ends = [max(float(event.get("peak_bytes") or 0), float(event.get("reserved_bytes") or 0)) for event in events]
    return go.Scatter(
        x=[end / GIB for end in ends],
        y=list(range(len(events))),
        mode="text",
        text=[f" {gib(event.get('peak_bytes') or 0)}" for event in events],
        textposition="middle right",
        textfont={"size": 11},
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
    )


def _limits(limits: list[tuple[int, Any]]) -> go.Scatter:
    """One short upright line per rank, as limits may differ."""
    x: list[float | None] = []
    y: list[float | None] = []
    for position, limit in limits:
        x += [limit / GIB, limit / GIB, None]
        y += [position - 0.45, position + 0.45, None]
    return go.Scatter(
        x=x,
        y=y,
        mode="lines",
        name="limit",
        line={"color": theme.ALERT, "width": 2},
        hovertemplate="limit %{x:.1f} GiB<extra></extra>",
    )


def _rank_label(event: Mapping[str, Any]) -> str:
    stage = f" · stage {event['stage']}" if event.get("stage") is not None else ""
    return f"<b>rank {event['rank']}</b>{stage}"


def _subtitle(events: Iterable[Mapping[str, Any]]) -> str | None:
    """`"61.2 of 139.8 GiB at most"`."""
    fullest = max(events, key=lambda event: event.get("peak_bytes") or 0, default=None)
    if fullest is None:
        return None
    limit = fullest.get("limit_bytes")
    of_limit = f", {fullest['peak_bytes'] / limit:.0%} of the limit" if limit else ""
    return f"at most {gib(fullest['peak_bytes'])} (rank {fullest['rank']}){of_limit}"
