"""What if there were more GPUs, less memory, another batch: sliders, and the plan that follows them.

One daemon thread plans and draws; a slider only leaves a wish and wakes it, and of several wishes the last counts.
"""

from __future__ import annotations

import html
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.cost.cluster import Cluster
from workbench.cost.profiles import Profile
from workbench.errors import WorkbenchError
from workbench.figures import plan_mimebundle, show_plan, theme
from workbench.planning import Plan, what_if
from workbench.planning.searching import uncollected
from workbench.units import GIB
from workbench.widgets.plot import Plot
from workbench.widgets.rows import fixed, heard_while_busy
from workbench.widgets.saved import Shown, hides_its_twin

AUTO = "auto"
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_GPUS = 1024
IDLE_S = 3600.0
"""Without a wish for so long the thread ends; the next wish starts another."""
SAVED_AFTER_S = 2.0
"""When no slider has moved for so long, what a saved notebook shows follows."""
TWO_ABREAST = {"flex_flow": "row wrap", "max_width": "720px"}
NO_PICTURE = go.Figure(
    layout={"height": 60, "plot_bgcolor": "white", "xaxis": {"visible": False}, "yaxis": {"visible": False}}
)
"""Where nothing fits: what was planned before is not shown below the sentence that says so."""
LOOK: dict[str, Any] = {"layout": fixed(340), "style": {"description_width": "90px"}}


class WhatIf(widgets.VBox):
    """Sliders over one model's profile; `plan` is what the picture shows, None where nothing fits."""

    def __init__(self, profile: Profile, cluster: Cluster, global_batch: int, seq_len: int) -> None:
        self._profile, self._cluster, self._seq_len = profile, cluster, seq_len
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self.plan: Plan | None = None
        self.answered_s = 0.0
        """From taking a wish to having sent its picture, for the last one."""
        self.gpus = _choice(
            "GPUs" if cluster.device.type == "cuda" else "processes", _counts(cluster.gpus), cluster.gpus
        )
        self.memory_gib = widgets.FloatSlider(
            value=cluster.device.memory_bytes / GIB,
            min=0.0,
            max=cluster.device.memory_bytes / GIB,
            step=max(0.1, round(cluster.device.memory_bytes / GIB / 140, 1)),
            description="GiB each",
            readout_format=".1f",
            **LOOK,
        )
        self.global_batch = _choice("global batch", _batches(global_batch), global_batch)
        self.micro_batch = _choice("micro-batch", (AUTO, *MICRO_BATCHES), AUTO)
        self._controls = (self.gpus, self.memory_gib, self.global_batch, self.micro_batch)
        for control in self._controls:
            control.observe(self._wished, names="value")
        heard_while_busy(*self._controls)
        self._note, self._plot = widgets.HTML(), Plot()
        self._showings: list[Shown] = []
        sliders = widgets.HBox((*self._controls, hides_its_twin()), layout=TWO_ABREAST)
        super().__init__(children=(sliders, self._note, self._plot))
        self._answer()
        self._rehearse()

    def _ipython_display_(self) -> None:
        self._showings.append(Shown(self, *self._twin()))

    def _twin(self) -> tuple[str, dict[str, Any] | None]:
        """What a saved notebook shows: the plan, or why there is none."""
        return (self._note.value, None) if self.plan is None else ("", plan_mimebundle(self.plan))

    def _wished(self, _: Any) -> None:
        with self._lock:
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="workbench-what-if", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        """What is sent leaves on other threads, so nothing is collected until the sliders rest."""
        saved = True
        with ExitStack() as moving:
            while True:
                wished = self._wake.wait(IDLE_S if saved else SAVED_AFTER_S)
                with self._lock:
                    if not wished and saved:
                        self._thread = None
                        return
                    self._wake.clear()
                if wished:
                    if saved:
                        moving.enter_context(uncollected())
                    self._answer()
                else:
                    moving.close()
                    for shown in self._showings:
                        shown.update(*self._twin())
                saved = not wished

    def _answer(self) -> None:
        """Plan what the sliders say now, and show it."""
        started = time.perf_counter()
        try:
            self.plan = self._planned(None if self.micro_batch.value == AUTO else self.micro_batch.value)
        except WorkbenchError as error:
            self.plan = None
            self._plot.show(NO_PICTURE)
            self._note.value = f'<div style="color:{theme.ALERT};padding:4px 16px">{html.escape(str(error))}</div>'
        else:
            self._draw(self.plan)
        self.answered_s = time.perf_counter() - started

    def _planned(self, micro_batch: int | None) -> Plan:
        whole = self.memory_gib.value >= self.memory_gib.max
        return what_if(
            self._profile,
            self._cluster,
            global_batch=self.global_batch.value,
            seq_len=self._seq_len,
            gpus=self.gpus.value,
            memory_limit_gib=None if whole else self.memory_gib.value,
            micro_batch=micro_batch,
        )

    def _rehearse(self) -> None:
        """The picture with most in it, before anybody asks for it."""
        with suppress(WorkbenchError):
            self._plot.rehearse(_without_heading(show_plan(self._planned(MICRO_BATCHES[0]))))

    def _draw(self, plan: Plan) -> None:
        figure = show_plan(plan)
        heading, facts = figure.layout.title.text, figure.layout.title.subtitle.text
        small = f'<span style="color:{theme.MUTED};font-size:12px">{facts}</span>'
        self._note.value = f'<div style="padding:4px 16px;line-height:1.5">{heading}<br>{small}</div>'
        self._plot.show(_without_heading(figure))


def _without_heading(figure: go.Figure) -> go.Figure:
    """It stands outside of the figure: plotly.js cannot measure a title before the figure is on the page."""
    figure.update_layout(title={"text": None, "subtitle": None}, margin={"t": 40}, autosize=True)
    figure.layout.height -= 64
    return figure


def _choice(name: str, options: Any, value: Any) -> widgets.SelectionSlider:
    return widgets.SelectionSlider(options=list(options), value=value, description=name, **LOOK)


def _counts(own: int) -> list[int]:
    """Powers of two up to `MOST_GPUS`, and the cluster's own number."""
    return sorted({own, *(2**power for power in range(MOST_GPUS.bit_length()) if 2**power <= MOST_GPUS)})


def _batches(own: int) -> list[int]:
    """The experiment's own global batch, halved and doubled a few times."""
    smaller = [own >> power for power in range(1, 6) if own % (1 << power) == 0]
    return sorted({own, *smaller, *(own << power for power in range(1, 6))})
