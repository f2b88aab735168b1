"""Sliders for GPUs, memory, global batch and micro-batch, and a picture of the plan that follows them.

A slider only wakes the widget's thread, which reads the sliders when it starts to plan: it skips the positions in
between of a slider that moves on.
"""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.base.arguments import checked_arguments
from workbench.base.errors import WorkbenchError
from workbench.base.units import GIB
from workbench.cost.hardware import Cluster
from workbench.cost.profile import Profile
from workbench.experiment import Experiment
from workbench.figures import theme
from workbench.figures.figure import Figure, mimebundle
from workbench.figures.plan_view import show_plan
from workbench.planning.plan import Plan
from workbench.planning.planner import profile_and_cluster
from workbench.planning.search import on_fewer_devices, uncollected
from workbench.planning.search import what_if as plan_again
from workbench.widgets.dashboard import fixed_width
from workbench.widgets.live_widget import LiveWidget, Plot, respond_while_busy

AUTO = "auto"
"""Position of the micro-batch slider that leaves the micro-batch to the planner."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
MAX_GPUS = 1024
"""Largest number of GPUs that the slider offers."""
AT_REST_S = 2.0
"""Seconds after the last move of a slider at which garbage is collected and the static twin drawn again."""
TWO_COLUMNS = {"flex_flow": "row wrap", "max_width": "720px"}
NO_PICTURE = Figure().laid_out(height=60, xaxis={"visible": False}, yaxis={"visible": False})
"""Picture below the planner's sentence where nothing fits."""
MARGIN_TOP = 40
"""Room in pixels above a plan without its title."""
SLIDER_STYLE: dict[str, Any] = {"layout": fixed_width(340), "style": {"description_width": "90px"}}


class WhatIf(LiveWidget):
    """Sliders over the profile of one model; `plan` is the plan that the picture shows, None where nothing fits."""

    def __init__(self, profile: Profile, cluster: Cluster, global_batch: int, seq_len: int) -> None:
        super().__init__(AT_REST_S)
        self.twins.every_s = AT_REST_S
        self._profile, self._cluster, self._seq_len = profile, cluster, seq_len
        self._moving, self._is_moving = ExitStack(), False
        self._twin: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None
        self._advised: Plan | None = None
        self._fewer: Plan | None = None
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
        halves = [global_batch >> power for power in range(1, 6) if global_batch % (1 << power) == 0]
        batches = sorted({global_batch, *halves, *(global_batch << power for power in range(1, 6))})
        self.global_batch = _slider("global batch", batches, global_batch)
        self.micro_batch = _slider("micro-batch", (AUTO, *MICRO_BATCHES), AUTO)
        self._controls = (self.gpus, self.memory_gib, self.global_batch, self.micro_batch)
        for control in self._controls:
            control.observe(lambda _: self.wake(), names="value")
        respond_while_busy(*self._controls)
        self._plot = Plot()
        self.children = (widgets.HBox((*self._controls, self.hider), layout=TWO_COLUMNS), self.note, self._plot)
        self._answer()
        with suppress(WorkbenchError):  # the smallest micro-batch gives the picture with the most parts
            self._plot.rehearse(_without_title(show_plan(self._make_plan(MICRO_BATCHES[0]))))
        self.follow()

    def update(self) -> bool:
        """Answer a move. No garbage is collected until the sliders rest: other threads send what is drawn."""
        if self._positions != self._answered:
            if not self._is_moving:
                self._moving.enter_context(uncollected())
            self._is_moving = True
            self._answer()
        else:
            self._moving.close()
            self._is_moving = False
            if self.plan is not None and self._advised is not self.plan:
                self._describe(self._with_advice(self.plan))
        return False

    def _with_advice(self, plan: Plan) -> Figure:
        """Return the figure of a plan that says how much faster it is than on fewer devices, which plans once more."""
        if self._advised is not plan:
            self._advised, self._fewer = plan, on_fewer_devices(plan)
        return show_plan(plan, self._fewer)

    def twin(self) -> tuple[Any, ...]:
        """Return the reason why there is no plan, or the plan's figure, of the sliders' last rest."""
        if self._twin is None or not (self._is_moving or self._twin[0] == self._answered):
            shown: tuple[str, dict[str, Any] | None] = (self.note.value, None)
            if self.plan is not None:
                shown = ("", {**mimebundle(self._with_advice(self.plan)), "text/plain": repr(self.plan)})
            self._twin = (self._answered, shown)
        return self._twin[1]

    def ended(self) -> None:
        """Collect garbage again if the sliders still moved."""
        self._moving.close()

    @property
    def _positions(self) -> tuple[Any, ...]:
        return tuple(control.value for control in self._controls)

    def _answer(self) -> None:
        """Plan for the positions of the sliders, and show the plan."""
        started, self._answered = time.perf_counter(), self._positions
        try:
            self.plan = self._make_plan(None if self.micro_batch.value == AUTO else self.micro_batch.value)
        except WorkbenchError as error:
            self.plan = None
            self._plot.show(NO_PICTURE)
            self.note.value = (
                f'<div style="border-left:3px solid {theme.ALERT};padding:4px 16px">{html.escape(str(error))}</div>'
            )
        else:
            figure = show_plan(self.plan)
            self._describe(figure)
            self._plot.show(_without_title(figure))
        self.answered_s = time.perf_counter() - started

    def _describe(self, figure: go.Figure) -> None:
        """Show the words of a plan's figure."""
        title = figure.layout.title
        heading, facts = (part.text.replace("<br>", " ") for part in (title, title.subtitle))
        facts = f'<span style="color:{theme.MUTED_CSS};font-size:12px">{facts}</span>'
        self.note.value = f'<div style="padding:4px 16px;line-height:1.5">{heading}<br>{facts}</div>'

    def _make_plan(self, micro_batch: int | None) -> Plan:
        unlimited = self.memory_gib.value >= self.memory_gib.max
        return plan_again(
            self._profile,
            self._cluster,
            global_batch=self.global_batch.value,
            seq_len=self._seq_len,
            gpus=self.gpus.value,
            memory_limit_gib=None if unlimited else self.memory_gib.value,
            micro_batch=micro_batch,
        )


@checked_arguments
def what_if(experiment: Experiment, cluster: Cluster | None = None) -> WhatIf:
    """Return sliders for GPUs, memory, global batch and micro-batch, with the figure of the plan that follows them.

    The model is captured and profiled once, for devices of `cluster`, by default of this machine.

    Examples:
        >>> sliders = wb.what_if(experiment, wb.Cluster.of("h200", gpus=2))
        >>> sliders.close()
    """
    profile, cluster = profile_and_cluster(experiment, cluster)
    return WhatIf(profile, cluster, experiment.largest_batch, experiment.seq_len)


def _without_title(figure: go.Figure) -> go.Figure:
    """Return the figure without its title, whose size plotly.js cannot measure before the figure is on the page."""
    figure.layout.height -= figure.layout.margin.t - MARGIN_TOP
    figure.update_layout(title={"text": None, "subtitle": None}, margin={"t": MARGIN_TOP}, autosize=True)
    return figure


def _slider(name: str, options: Sequence[Any], value: Any) -> widgets.SelectionSlider:
    return widgets.SelectionSlider(options=options, value=value, description=name, **SLIDER_STYLE)
