"""What if there were more GPUs, less memory, another batch: sliders, and the plan that follows them.

One daemon thread plans and draws; a slider only leaves a wish and wakes it, and of several wishes the last counts.
"""

from __future__ import annotations

import html
import threading
import time
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.cost.cluster import Cluster
from workbench.cost.profiles import Profile
from workbench.errors import WorkbenchError
from workbench.figures import show_plan, theme
from workbench.planning import Plan, what_if
from workbench.units import GIB
from workbench.widgets.drawing import refit
from workbench.widgets.rows import heard_while_busy

AUTO = "auto"
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_GPUS = 1024
IDLE_S = 3600.0
"""Without a wish for so long the thread ends; the next wish starts another."""


FIT_AFTER_S = (0.2, 1.0)
"""When a new figure takes the page's width, which plotly.js did not know when it drew it."""
LOOK: dict[str, Any] = {"layout": {"width": "340px"}, "style": {"description_width": "90px"}}


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
            "GPUs" if cluster.device.kind == "cuda" else "processes", _counts(cluster.gpus), cluster.gpus
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
        self._note = widgets.HTML()
        self._picture = widgets.VBox()
        rows = (widgets.HBox(self._controls[:2]), widgets.HBox(self._controls[2:]))
        super().__init__(children=(*rows, self._note, self._picture))
        self._answer()

    def _wished(self, _: Any) -> None:
        with self._lock:
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="workbench-what-if", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        while True:
            wished = self._wake.wait(IDLE_S)
            with self._lock:
                if not wished:
                    self._thread = None
                    return
                self._wake.clear()
            self._answer()

    def _answer(self) -> None:
        """Plan what the sliders say now, and show it."""
        started = time.perf_counter()
        whole = self.memory_gib.value >= self.memory_gib.max
        try:
            self.plan = what_if(
                self._profile,
                self._cluster,
                global_batch=self.global_batch.value,
                seq_len=self._seq_len,
                gpus=self.gpus.value,
                memory_limit_gib=None if whole else self.memory_gib.value,
                micro_batch=None if self.micro_batch.value == AUTO else self.micro_batch.value,
            )
        except WorkbenchError as error:
            self.plan = None
            self._note.value = f'<div style="color:{theme.ALERT};padding:4px 16px">{html.escape(str(error))}</div>'
        else:
            self._draw(self.plan)
        self.answered_s = time.perf_counter() - started

    def _draw(self, plan: Plan) -> None:
        """The heading stands outside the figure: plotly.js cannot measure a title before the figure is on the page."""
        figure = go.FigureWidget(show_plan(plan))
        heading, facts = figure.layout.title.text, figure.layout.title.subtitle.text
        figure.update_layout(title={"text": None, "subtitle": None}, margin={"t": 40}, autosize=True)
        figure.layout.height -= 64
        figure._config = {"responsive": True, "displayModeBar": False}  # plotly's own way to set a widget's config
        small = f'<span style="color:{theme.MUTED};font-size:12px">{facts}</span>'
        self._note.value = f'<div style="padding:4px 16px;line-height:1.5">{heading}<br>{small}</div>'
        old = self._picture.children
        self._picture.children = (figure,)
        for widget in old:
            widget.close()
        for wait_s in FIT_AFTER_S:
            timer = threading.Timer(wait_s, refit, (figure,))
            timer.daemon = True
            timer.start()


def _choice(name: str, options: Any, value: Any) -> widgets.SelectionSlider:
    return widgets.SelectionSlider(options=list(options), value=value, description=name, **LOOK)


def _counts(own: int) -> list[int]:
    """Powers of two up to `MOST_GPUS`, and the cluster's own number."""
    return sorted({own, *(2**power for power in range(MOST_GPUS.bit_length()) if 2**power <= MOST_GPUS)})


def _batches(own: int) -> list[int]:
    """The experiment's own global batch, halved and doubled a few times."""
    smaller = [own >> power for power in range(1, 6) if own % (1 << power) == 0]
    return sorted({own, *smaller, *(own << power for power in range(1, 6))})
