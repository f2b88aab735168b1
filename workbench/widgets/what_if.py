"""Sliders for GPUs, memory, global batch and micro-batch, and a picture of the plan that follows them.

One daemon thread plans and draws; a slider only wakes it. The thread reads the sliders when it starts to plan, so it
skips the positions in between of a slider that moves on.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.cost.cluster import Cluster
from workbench.cost.profile import Profile
from workbench.errors import WorkbenchError
from workbench.figures import plan_mimebundle, show_plan, theme
from workbench.planning import Plan, what_if
from workbench.planning.search import uncollected
from workbench.units import GIB
from workbench.widgets.plot import Plot
from workbench.widgets.run_row import fixed_width, respond_while_busy
from workbench.widgets.static_copy import DisplayedWidget, copy_hider

AUTO = "auto"
"""Position of the micro-batch slider that leaves the micro-batch to the planner."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
MAX_GPUS = 1024
"""Largest number of GPUs that the slider offers."""
IDLE_S = 3600.0
"""Seconds without a move of a slider after which the thread ends; the next move starts another."""
STATIC_COPY_AFTER_S = 2.0
"""Seconds after the last move of a slider at which the static copy is updated."""
TWO_COLUMNS = {"flex_flow": "row wrap", "max_width": "720px"}
NO_PICTURE = go.Figure(
    layout={"height": 60, "plot_bgcolor": "white", "xaxis": {"visible": False}, "yaxis": {"visible": False}}
)
"""Picture below the planner's sentence where nothing fits."""
SLIDER_STYLE: dict[str, Any] = {"layout": fixed_width(340), "style": {"description_width": "90px"}}


class WhatIf(widgets.VBox):
    """Sliders over the profile of one model; `plan` is the plan that the picture shows, None where nothing fits."""

    def __init__(self, profile: Profile, cluster: Cluster, global_batch: int, seq_len: int) -> None:
        self._profile, self._cluster, self._seq_len = profile, cluster, seq_len
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self.plan: Plan | None = None
        self.answered_s = 0.0
        """Seconds that the last answer took, from reading the sliders to having sent its picture."""
        memory_gib = cluster.device.memory_bytes / GIB
        devices = "GPUs" if cluster.device.type == "cuda" else "processes"
        powers = [2**power for power in range(MAX_GPUS.bit_length()) if 2**power <= MAX_GPUS]
        self.gpus = _slider(devices, sorted({cluster.gpus, *powers}), cluster.gpus)
        self.memory_gib = widgets.FloatSlider(
            value=memory_gib,
            min=0.0,
            max=memory_gib,
            step=max(0.1, round(memory_gib / 140, 1)),
            description="GiB each",
            readout_format=".1f",
            **SLIDER_STYLE,
        )
        self.global_batch = _slider("global batch", _batches(global_batch), global_batch)
        self.micro_batch = _slider("micro-batch", (AUTO, *MICRO_BATCHES), AUTO)
        self._controls = (self.gpus, self.memory_gib, self.global_batch, self.micro_batch)
        for control in self._controls:
            control.observe(self._on_move, names="value")
        respond_while_busy(*self._controls)
        self._note, self._plot = widgets.HTML(), Plot()
        self._displays: list[DisplayedWidget] = []
        sliders = widgets.HBox((*self._controls, copy_hider()), layout=TWO_COLUMNS)
        super().__init__(children=(sliders, self._note, self._plot))
        self._answer()
        with suppress(WorkbenchError):  # the smallest micro-batch gives the picture with the most parts
            self._plot.rehearse(_without_title(show_plan(self._make_plan(MICRO_BATCHES[0]))))

    def _ipython_display_(self) -> None:
        self._displays.append(DisplayedWidget(self, *self._static_copy()))

    def _static_copy(self) -> tuple[str, dict[str, Any] | None]:
        """Return what a saved notebook shows: the reason why there is no plan, or the plan's figure."""
        return (self._note.value, None) if self.plan is None else ("", plan_mimebundle(self.plan))

    def _on_move(self, _: Any) -> None:
        with self._lock:
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="workbench-what-if", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        """Answer every move. No garbage is collected until the sliders rest: other threads send what is drawn."""
        saved = True
        with ExitStack() as moving:
            while True:
                moved = self._wake.wait(IDLE_S if saved else STATIC_COPY_AFTER_S)
                with self._lock:
                    if not moved and saved:
                        self._thread = None
                        return
                    self._wake.clear()
                if moved:
                    if saved:
                        moving.enter_context(uncollected())
                    self._answer()
                else:
                    moving.close()
                    for shown in self._displays:
                        shown.update(*self._static_copy())
                saved = not moved

    def _answer(self) -> None:
        """Plan for the positions of the sliders, and show the plan."""
        started = time.perf_counter()
        try:
            self.plan = self._make_plan(None if self.micro_batch.value == AUTO else self.micro_batch.value)
        except WorkbenchError as error:
            self.plan = None
            self._plot.show(NO_PICTURE)
            self._note.value = f'<div style="color:{theme.ALERT};padding:4px 16px">{html.escape(str(error))}</div>'
        else:
            figure = show_plan(self.plan)
            title = figure.layout.title
            facts = f'<span style="color:{theme.MUTED};font-size:12px">{title.subtitle.text}</span>'
            self._note.value = f'<div style="padding:4px 16px;line-height:1.5">{title.text}<br>{facts}</div>'
            self._plot.show(_without_title(figure))
        self.answered_s = time.perf_counter() - started

    def _make_plan(self, micro_batch: int | None) -> Plan:
        unlimited = self.memory_gib.value >= self.memory_gib.max
        return what_if(
            self._profile,
            self._cluster,
            global_batch=self.global_batch.value,
            seq_len=self._seq_len,
            gpus=self.gpus.value,
            memory_limit_gib=None if unlimited else self.memory_gib.value,
            micro_batch=micro_batch,
        )


def _without_title(figure: go.Figure) -> go.Figure:
    """Return the figure without its title, whose size plotly.js cannot measure before the figure is on the page."""
    figure.update_layout(title={"text": None, "subtitle": None}, margin={"t": 40}, autosize=True)
    figure.layout.height -= 64
    return figure


def _slider(name: str, options: Sequence[Any], value: Any) -> widgets.SelectionSlider:
    return widgets.SelectionSlider(options=options, value=value, description=name, **SLIDER_STYLE)


def _batches(own: int) -> list[int]:
    """Return the experiment's own global batch, and up to five halvings and five doublings of it."""
    smaller = [own >> power for power in range(1, 6) if own % (1 << power) == 0]
    return sorted({own, *smaller, *(own << power for power in range(1, 6))})
