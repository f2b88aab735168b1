"""A widget that follows something: one daemon thread updates it, and a static twin stands below each of its displays.

The thread is the only writer of the widget. It ends with what it follows, when the widget is closed or forgotten, and
when the page has closed the widget's comm. It must not print: its output would land in whichever cell runs. Below it
stand the plots that it draws, and the two figures of a dashboard.
"""

from __future__ import annotations

import atexit
import base64
import gzip
import html
import itertools
import json
import math
import threading
import time
import weakref
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import anywidget
import ipywidgets as widgets
import numpy as np
import plotly.graph_objects as go
import traitlets
from IPython import get_ipython
from IPython.display import display
from ipywidgets.widgets.widget import _instances
from plotly.utils import PlotlyJSONEncoder
from traitlets import MetaHasTraits

from workbench.analysis.curve import Curve, Look, shared_axes
from workbench.base.errors import in_words
from workbench.figures import theme
from workbench.figures.curves_view import NO_STEP, curve_traces, hover_title, loss_layout, mark_key, settled_range
from workbench.figures.figure import (
    HIDE_DEAD_WIDGET,
    PLOTLY_MIME,
    TWIN_CLASS,
    Figure,
    accessible_name,
    mimebundle,
    page_json,
    plotly_js,
)
from workbench.figures.panels_view import PANEL_POINTS, Window, panel, panel_names, panels, rank_title
from workbench.figures.prepared_curve import (
    TRACE_ROLES,
    Preparation,
    PreparedCurve,
    map_in_threads,
    points_per_trace,
    with_means,
)
from workbench.record.columns import AxisUnit
from workbench.widgets.run_reader import Snapshot, panel_inputs

# Static twins of widgets: ordinary outputs of the same cell, which a saved notebook shows when the kernel is gone.

WIDGET_CLASS, ROWS_CLASS = "workbench-live", "workbench-rows"
"""CSS classes of a widget with a static twin, of the twin's HTML, and of what a widget in its place shows already."""
EMPTY: Mapping[str, str] = {"text/html": "", "text/plain": ""}
"""MIME bundle of an output that shows nothing."""
ONE_LINE = "display:block;overflow:hidden;text-overflow:ellipsis;white-space:nowrap"
"""CSS of a text that ends in an ellipsis where it does not fit."""
TWIN_S = 30.0
"""Seconds between two updates of a static twin, for a notebook that is saved while its widget changes."""

_CHILD = ".jp-OutputArea-child"
_DEAD = ".jupyter-widgets-disconnected"
_TWIN = f"{_CHILD}:has(.{WIDGET_CLASS}:not({_DEAD})) + {_CHILD}:has(.{TWIN_CLASS})"
HIDE_TWIN = (
    f"<style>{_TWIN}, {_TWIN} + {_CHILD}, {_TWIN} + {_CHILD} + {_CHILD}, {_CHILD}:has(.{WIDGET_CLASS}{_DEAD}) "
    "{ visibility: hidden; height: 0; min-height: 0; margin: 0; padding: 0; overflow: hidden; pointer-events: none; } "
    f".{WIDGET_CLASS} .widget-html-content {{ min-width: 0; }}</style>"
)
"""Style in the widget that hides the three outputs below it, or the widget itself once its kernel has ended."""
HIDE_ROWS = (
    f"<style>{_CHILD}:has(.{WIDGET_CLASS}-rows:not({_DEAD})) + {_CHILD} .{ROWS_CLASS}, .{WIDGET_CLASS}-rows{_DEAD} "
    "{ display: none; }</style>"
)
"""Style in what remains of a widget, of the class `workbench-live-rows`, that hides its rows in the twin below."""
_LAST = f"{_CHILD}:has(.{TWIN_CLASS}-last)"
GREY_LAST_STATE = (
    f"<style>{_LAST} + {_CHILD}, {_LAST} + {_CHILD} + {_CHILD}, .{TWIN_CLASS}-last + * "
    "{ filter: grayscale(0.8); opacity: 0.7; }</style>"
)
"""Style in the static twin of a widget that has not ended."""


class StaticTwins:
    """The displays of one widget with their static twins; one thread updates them while another displays.

    `contents` returns a piece of HTML and up to two figures as MIME bundles; `remains` the bundle that takes the
    widget's place at its end. `again` is the call that shows the widget anew, by default its cell.
    """

    def __init__(
        self,
        widget: widgets.DOMWidget,
        contents: Callable[[], tuple[Any, ...]],
        remains: Callable[[], Mapping[str, Any]] = lambda: EMPTY,
        again: str = "",
    ) -> None:
        widget.add_class(WIDGET_CLASS)
        self._widget, self._contents, self._remains = widget, contents, remains
        self._again = again
        self._displays: list[list[Any]] = []
        self._lock = threading.Lock()  # a display that comes while the last twin is written must keep the last one
        self._left = False
        self._bundles: list[dict[str, Any]] = []
        self._next_at = 0.0
        self.every_s = TWIN_S
        self._cell: int | None = 0
        """A number of the cell that runs; None while none runs."""
        self._numbers = itertools.count(1)
        self._is_dropped = False
        """True if something was sent between two cells, and not again since."""

    def display(self) -> None:
        """Display the widget in the running cell, or its last twin if the widget has ended."""
        with self._lock:
            bundle = dict(self._remains()) if self._left else {**self._widget._repr_mimebundle_(), **EMPTY}
            self._bundles = []  # the displays before this one may hold an earlier state
            shown = [bundle, *self._twin()]
            self._displays.append([display(each, raw=True, display_id=True) for each in shown])

    def hasten(self) -> None:
        """Bring the twins up to date with the next `update`, however soon that is."""
        self._next_at = 0.0

    def update(self) -> None:
        """Bring the twins up to date, unless that was done less than `every_s` seconds ago."""
        with self._lock:
            if self._displays and time.monotonic() >= self._next_at:
                self._next_at = time.monotonic() + self.every_s
                self._show()

    def leave(self) -> None:
        """Remove the widget from the page, so that the updated twins show."""
        with self._lock:
            self._left = True
            self._show()

    def restore(self) -> None:
        """Show the widget again after `leave`."""
        with self._lock:
            self._left = False
            for widget, *_ in self._displays:
                widget.update({**self._widget._repr_mimebundle_(), **EMPTY}, raw=True)

    def cell_begins(self) -> None:
        """Note that a cell runs from now on, and send again what was sent between two cells.

        `nbclient`, which executes notebooks without a page, drops what comes between the end of a cell and the next.
        """
        self._cell = next(self._numbers)
        self._send_again()

    def cell_ends(self) -> None:
        """Note that the cell ends, and send again what was sent before it began."""
        self._send_again()
        self._cell = None

    def _send_again(self) -> None:
        if self._is_dropped:
            with self._lock:
                self._is_dropped = False
                if self._bundles:
                    self._send()

    def _show(self) -> None:
        before, self._bundles = self._bundles, self._twin()
        self._send(before)

    def _send(self, before: Sequence[Mapping[str, Any]] = ()) -> None:
        """Send what differs from `before` to every display."""
        cell = self._cell
        for widget, *outputs in self._displays:
            for output, bundle, old in zip(outputs, self._bundles, before or [{}] * len(outputs), strict=True):
                if bundle == old:  # a figure is replaced in two messages, between which a notebook may end
                    continue
                if PLOTLY_MIME in bundle:
                    output.update(dict(EMPTY), raw=True)
                output.update(bundle, raw=True)
            if self._left:
                widget.update(dict(self._remains()), raw=True)
        if cell is None or self._cell != cell:
            self._is_dropped = True

    def _twin(self) -> list[dict[str, Any]]:
        """Return always three outputs, because the styles above count them."""
        shown, *figures = self._contents()
        if not self._left:
            call = html.escape(self._again)  # of many runs it is long: one line, which copies as a whole
            look = f"{ONE_LINE};display:inline-block;max-width:100%;vertical-align:bottom"
            how = f'<code title="{call}" style="{look}">{call}</code>' if call else "this cell again"
            said = f"<b>The last state before the kernel ended.</b> To attach to the present one, run {how}"
            shown = f'{GREY_LAST_STATE}<div class="{TWIN_CLASS}-last">{said}</div><div>{shown}</div>'
        text = {"text/html": f'<div class="{TWIN_CLASS}">{HIDE_DEAD_WIDGET}{shown}</div>', "text/plain": ""}
        first, second = (*figures, None, None)[:2]
        return [text, dict(first or EMPTY), dict(second or EMPTY)]


REST_FACTOR = 3.0
"""Smallest ratio of the thread's rest to the kernel's computation while it drew: the kernel has other work."""
LAST_TRIES = 5
"""Number of failed updates in a row after which a widget gives up: files may be moved while they are read."""
LOOK_S = 0.025
"""Seconds between two looks for news, each of which costs microseconds."""
IDLE_FACTOR = 3.0
"""Ratio of the time between two updates without news, in which only states of processes change, to that with news."""
UNSEEN_FACTOR = 10.0
"""Factor by which the time between two updates is longer while no page shows the widget, as in `workbench execute`."""
EXIT_S = 10.0
"""Longest time that the end of the process, or of a cell, waits for an update."""

# What keeps a view: ipywidgets registers every widget until it is closed, so that nothing of a view would ever be
# freed. Here a view that no cell shows belongs to whoever refers to it, and one that is shown to its cells: it is
# closed when these have run again without showing it.

_following: weakref.WeakSet[LiveWidget] = weakref.WeakSet()
_shown: dict[LiveWidget, set[str]] = {}
"""Views that a page may ask for, with the cells that showed them: their ids, or their source where a page has none."""
_displayed: weakref.WeakSet[LiveWidget] = weakref.WeakSet()
"""Views that the running cell has shown."""


@atexit.register
def _end() -> None:
    """End the threads before the interpreter does: it aborts if it stops one inside a C++ library."""
    for widget in list(_following):
        widget.stop()


def _open_views() -> list[LiveWidget]:
    """Return the views that follow something, without those that were closed and whose threads have yet to end."""
    return [view for view in _following if "twins" in vars(view)]


def _cell_begins(_: Any) -> None:
    _displayed.clear()
    for view in _open_views():
        view.cell_begins()


def _cell_ends(result: Any) -> None:
    cell = str(getattr(result.info, "cell_id", None) or result.info.raw_cell)
    for view in _open_views():
        view.cell_ends()
    for view, cells in list(_shown.items()):
        if view in _displayed:
            cells.add(cell)
        elif cell in cells:
            cells.remove(cell)
            if not cells:
                view.close()
    _displayed.clear()


def widgets_of(view: Any) -> Iterator[widgets.Widget]:
    """Yield the widgets that a view is made of, itself included, and those that it does not show at present."""
    seen, left = set[int](), [view]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, PlotlyLibrary):  # which belongs to the kernel
            continue
        seen.add(id(one))
        if isinstance(one, list | tuple):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, widgets.Widget):
            yield one
            left += [*one._trait_values.values(), *vars(one).values()]
        elif type(one).__module__.startswith(__package__) and hasattr(one, "__dict__"):
            left += vars(one).values()


def close_widgets(view: Any) -> None:
    """Close all widgets that a view is made of, so that neither page nor kernel hold them."""
    for widget in list(widgets_of(view)):
        widgets.Widget.close(widget)


class _Abstract(ABCMeta, MetaHasTraits):
    """Lets a widget have abstract methods."""


class LiveWidget(widgets.VBox, metaclass=_Abstract):
    """A column of widgets that updates itself. `close()` ends it; the runs go on.

    `again` is the call that shows it anew after a restart of the kernel, where that is not its cell's.

    A subclass draws in `update`, says in `twin` what stands in a saved notebook, and calls `follow` when it is made.
    """

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        view: Self = super().__new__(cls, *arguments, **options)
        view._made_of = arguments, options
        return view

    def __init__(self, every_s: float, again: str = "", **options: Any) -> None:
        super().__init__(_view_count=0, **options)  # with a number instead of None the page counts the widget's views
        self.observe(self._on_views, names="_view_count")
        self._had_page = False
        self._in_a_hurry = False
        self._every_s = every_s
        self._wake, self._closed, self._drawing = threading.Event(), threading.Event(), threading.RLock()
        self._thread: threading.Thread | None = None
        self._lasting = {*vars(self), "_lasting"}
        """Names of what is left of a view that was closed."""
        self.note, self.hider = widgets.HTML(), widgets.HTML(HIDE_TWIN, layout={"display": "none"})
        self.twins = StaticTwins(self, self.twin, self.remains, again)

    def __getattr__(self, name: str) -> Any:
        if "_closed" in vars(self) and self._closed.is_set():
            raise AttributeError(f"This {type(self).__name__} was closed and has no {name!r} any more. Show it again.")
        raise AttributeError(f"{type(self).__name__} has no {name!r}.")

    @abstractmethod
    def update(self) -> bool:
        """Draw what is new; return True if nothing more will come."""

    @abstractmethod
    def twin(self) -> tuple[Any, ...]:
        """Return what a saved notebook shows: HTML, and up to two MIME bundles of figures."""

    def has_news(self) -> bool:
        """Return True if an update would draw something new. It is asked often, so it must cost microseconds."""
        return True

    def is_over(self) -> bool:
        """Return True if what is followed has ended, so that the next update is the last."""
        return False

    def remains(self) -> dict[str, Any]:
        """Return the MIME bundle of what stands above the twin at the end, in place of the widget."""
        return dict(EMPTY)

    def ended(self) -> None:
        """Undo, in the thread that ends, what lasts from one update to the next."""

    def bundle(self, figure: go.Figure) -> dict[str, Any]:
        """Return a figure for the twin.

        While a cell waits for the widget to show there is no picture: loading matplotlib takes a third of a second, and
        the next update adds it.
        """
        return mimebundle(figure, with_picture=not self._in_a_hurry)

    @property
    def following(self) -> bool:
        """True while the widget updates itself."""
        return self._thread is not None and self._thread.is_alive()

    def follow(self) -> None:
        """Update the widget from now on; at once if it is updated already."""
        if self.following:
            self.wake()
            return
        if (shell := get_ipython()) is not None:  # a cell such as sweep.wait() may have waited for the end
            shell.events.register("pre_run_cell", _cell_begins)
            shell.events.register("post_run_cell", _cell_ends)
        for widget in widgets_of(self):
            if widget.has_trait("tooltip") and widget.tooltip is None:
                widget.tooltip = ""  # a page would show the word "null"
        self._belong()
        # The thread has a weak reference: it would keep a view that everybody else has forgotten.
        arguments, name = (weakref.ref(self),), f"workbench-{type(self).__name__}"
        self._thread = threading.Thread(target=self._follow, args=arguments, name=name, daemon=True)
        self._thread.start()
        _following.add(self)

    def wake(self) -> None:
        """Update the widget at once."""
        self._wake.set()

    def _on_views(self, _: Any) -> None:
        self._had_page = True
        if self._view_count:
            _shown.setdefault(self, set())
        elif not _shown.get(self, True):  # it stood in a widget of the user's, and in no cell
            del _shown[self]
        self._belong()
        self.wake()

    def _belong(self) -> None:
        """Register all widgets while a page may ask for them, and otherwise none, which the user then alone keeps."""
        is_shown = self in _shown
        for widget in widgets_of(self):
            if widget.comm is None:
                continue
            if is_shown:
                _instances[widget.model_id] = widget
            elif _instances.pop(widget.model_id, None) is not None:
                widget.comm.on_msg(_weakly(widget._handle_msg))

    # A page receives what comes between two cells, and would lose the zoom of figures that are sent again.

    def cell_begins(self) -> None:
        """Note that a cell runs from now on."""
        if not self._had_page:
            self.twins.cell_begins()

    def cell_ends(self) -> None:
        """Wait for the last update if what is followed has ended, and note that no cell runs."""
        thread = self._thread
        if self._view_count:
            self.wake()
        elif thread is not None and thread.is_alive() and self.is_over():
            self.wake()
            thread.join(EXIT_S)  # a notebook that is executed is saved after its last cell
        if not self._had_page:
            self.twins.cell_ends()
        if not self.following:
            _following.discard(self)
            if self.comm is None:
                _shown.pop(self, None)

    def stop(self) -> None:
        """Stop updating, and wait for an update that has begun."""
        self._closed.set()
        self.wake()
        if self._thread is not None:
            self._thread.join(EXIT_S)

    def close(self) -> None:
        """Stop updating, remove the widget from the page and free what it holds; the runs go on.

        A view that is shown after that is made anew.
        """
        if "_lasting" not in vars(self):  # its constructor raised
            super().close()
            return
        self._closed.set()
        self.wake()
        _shown.pop(self, None)
        is_free = self._drawing.acquire(timeout=EXIT_S)
        try:
            if "twins" in vars(self):  # it is not closed yet
                self.ended()
            close_widgets(self)
            self.set_trait("children", ())
            for name in vars(self).keys() - self._lasting:
                if name.startswith("_") or isinstance(getattr(self, name), widgets.Widget | StaticTwins):
                    delattr(self, name)
        finally:
            if is_free:
                self._drawing.release()

    @staticmethod
    def _follow(forgettable: weakref.ref[LiveWidget]) -> None:
        view = forgettable()
        assert view is not None
        wake, pause_s, failures = view._wake, view._every_s, 0
        del view
        while True:
            # After the pause it waits for news, or until it is woken; without any it looks again after a while.
            is_news = wake.wait(pause_s)
            begun = time.monotonic()
            while (view := forgettable()) is not None and not view._closed.is_set():
                is_news = is_news or view.has_news()
                if is_news or time.monotonic() - begun >= IDLE_FACTOR * view._rarity * view._every_s:
                    break
                look_s = LOOK_S * view._rarity
                del view
                is_news = wake.wait(look_s)
            wake.clear()
            if view is None:
                return
            with view._drawing:
                if view._closed.is_set() or view.comm is None:
                    if "twins" in vars(view):  # it was stopped, or its comm closed, and not all of it
                        view.ended()
                    return
                started, computed = time.monotonic(), time.process_time()
                try:
                    if view.update():
                        view.twins.leave()
                        view.ended()
                        if view.remains() == EMPTY:  # plain outputs have taken the place of its widgets
                            close_widgets(view)
                            if get_ipython() is None:
                                _shown.pop(view, None)
                        return
                    view.twins.update()
                except Exception as error:  # a widget that no longer updates must say so
                    failures += 1
                    if failures == LAST_TRIES:
                        reason = html.escape(in_words(error))
                        said = f"<b>This view stopped updating</b> ({reason}). The runs go on; show it again."
                        view.note.value = said
                        view.ended()
                        return
                else:
                    failures = 0
                if view not in _shown:
                    view._belong()
            # Waiting for a busy machine is no computation: to rest for it too would let the figures fall behind.
            work_s = min(time.monotonic() - started, time.process_time() - computed)
            pause_s = max(view._rarity * view._every_s if is_news else 0.0, REST_FACTOR * work_s)
            del view

    @property
    def _rarity(self) -> float:
        return 1.0 if self._view_count else UNSEEN_FACTOR

    def _ipython_display_(self) -> None:
        if self._closed.is_set():
            arguments, options = self._made_of
            type(self)(*arguments, **options)._ipython_display_()
            return
        _displayed.add(self)
        if self.comm is not None:
            _shown.setdefault(self, set())
            self._belong()
        self._in_a_hurry = self.following
        self.twins.display()
        self._in_a_hurry = False
        self.twins.hasten()  # an update meanwhile was in a hurry, too
        self.wake()


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a method as long as its object lives."""
    reference = weakref.WeakMethod(method)
    return lambda message: (found := reference()) and found(message)


def respond_while_busy(*controls: widgets.Widget) -> None:
    """Let controls respond while a cell runs; their callbacks then run in another thread than the cell's.

    JupyterLab addresses a widget's messages to a subshell of the kernel for this reason, and ipykernel 7.1 to 7.3
    deliver them there. ipykernel 7.4 delivers them to the shell that last published for the widget, which is the main
    one and busy. Where it does so, the address that JupyterLab wrote is restored.
    """
    for control in controls:
        if hasattr(control.comm, "_reply_subshell_for"):
            control.comm._reply_subshell_for = lambda _data, address: address


# Plotly figures are widgets whose whole figure is state: the page draws the last state it has, whenever it can.
# Plotly's `FigureWidget` sends changes instead. A page that is not ready for one (it is still drawing for the first
# time, or was loaded again) never learns of it, and every change is answered with all that plotly.js made of it. Here
# the state is sent again with the next change, and the page draws many changes in a row as one (`plot.js`).
#
# anywidget allows the module of a widget two seconds to load; a page on a busy machine that also has to receive and
# parse plotly.js (4.8 MB) exceeds them, and shows no figure at all. Therefore the module of a plot is `plot.js` alone,
# and plotly.js is the state of one hidden widget per kernel, to which all plots refer.

PLOT_JS = Path(__file__).with_name("plot.js")
"""The module that draws a figure in the page: a link to that of JupyterLab's extension, which the sidebar uses. The
server serves no link that leads out of the extension's folder, so that the file itself stands there."""
COLUMNS = ("x", "y", "customdata")
"""Fields of a trace that are sent as bytes where they are arrays of numbers."""


class PlotlyLibrary(widgets.Widget):
    """A widget without a view that holds plotly.js for all plots of a kernel. `plotly_library` makes it."""

    packed = traitlets.Bytes().tag(sync=True)
    """The source of plotly.js, compressed with gzip."""


def plotly_library() -> PlotlyLibrary:
    """Return this kernel's only holder of plotly.js; a new one if the last was closed (`Widget.close_all`)."""
    library = _holder()
    if library.comm is None:
        _holder.cache_clear()
        library = _holder()
    return library


@cache
def packed_plotly() -> bytes:
    """Return the source of plotly.js, compressed: the lowest level takes a third of the time for a sixth more bytes."""
    return gzip.compress(plotly_js().encode(), compresslevel=1)


@cache
def _holder() -> PlotlyLibrary:
    return PlotlyLibrary(packed=packed_plotly())


class Plot(anywidget.AnyWidget):
    """A widget that shows the last figure given to `show`, as wide as the room it has."""

    _esm = PLOT_JS.read_text(encoding="utf-8")

    library = traitlets.Instance(PlotlyLibrary).tag(sync=True, **widgets.widget_serialization)
    """The holder of plotly.js, which the first plot of a page loads."""
    figure = traitlets.Unicode("{}").tag(sync=True)
    """The figure as JSON."""
    visible = traitlets.Any(None).tag(sync=True)
    """Low and high end of the zoomed first x axis (powers of ten on a log axis); None shows the whole axis."""
    tells_hover = traitlets.Bool(False).tag(sync=True)
    """True if `hovered` follows the pointer."""
    hovered = traitlets.Any(None).tag(sync=True)
    """Value of the x axis under the pointer, or None before the pointer was over a point."""
    rehearsal = traitlets.Unicode("").tag(sync=True)
    """A figure that the page draws once out of sight; the page empties it afterwards."""

    def __init__(self, **options: Any) -> None:
        super().__init__(library=plotly_library(), **options)

    def show(self, figure: go.Figure) -> None:
        """Draw a figure in place of the last one."""
        self.figure = page_json(figure, displayModeBar=False)

    def rehearse(self, figure: go.Figure) -> None:
        """Draw a figure once, out of sight and soon after the first one.

        Code that a browser has not run yet takes several times as long; a rehearsal spares the user that wait.
        """
        self.rehearsal = page_json(figure, displayModeBar=False)


class GrowingPlot(Plot):
    """A plot with a fixed number of traces, of which only the changed ones are sent. `growing_plot` makes one."""

    def redraw(self, layout: go.Layout, traces: Mapping[int, Any]) -> None:
        """Draw the figure with this layout and these traces, by their index; the others stay as they are."""
        frame = json.loads(self.figure)
        with self.hold_sync():
            self.figure = _frame_json(layout, frame["traces"], frame["config"])
            for index, trace in traces.items():
                setattr(self, f"trace_{index}", _trace_json(trace))


def growing_plot(layout: go.Layout, shown: Sequence[Any], **config: Any) -> GrowingPlot:
    """Return a widget that holds the whole figure, its layout and the traces shown, from its first message on.

    `config` holds options of plotly.js, which override those of `theme.CONFIG`.
    """
    traces = {f"trace_{index}": _trace_json(trace) for index, trace in enumerate(shown)}
    widget_class = type("GrowingPlot", (GrowingPlot,), {name: traitlets.Unicode().tag(sync=True) for name in traces})
    frame = _frame_json(layout, len(traces), {**theme.CONFIG, **config})
    widget: GrowingPlot = widget_class(figure=frame, **traces)
    return widget


def _frame_json(layout: go.Layout, traces: int, config: dict[str, Any]) -> str:
    """Return all of a figure but its traces, of which it says the number."""
    shown = layout.to_plotly_json()
    frame = {"traces": traces, "layout": shown, "config": config, "name": accessible_name(shown)}
    return json.dumps(frame, cls=PlotlyJSONEncoder)


def _trace_json(trace: Any) -> str:
    """Return a trace as `plot.js` reads it: columns of numbers are base64 of float64, tables with their row width."""
    fields = trace.to_plotly_json()
    for name in COLUMNS:
        values = fields.get(name)
        if isinstance(values, np.ndarray) and values.dtype.kind in "fiu":
            column: dict[str, Any] = {
                "float64": base64.b64encode(np.ascontiguousarray(values, dtype="<f8").tobytes()).decode()
            }
            fields[name] = column if values.ndim == 1 else {**column, "width": values.shape[1]}
    return json.dumps(fields, cls=PlotlyJSONEncoder)


# The two figures of a dashboard compute and send again only what has changed since the last update.

PANELS_S = 1.0
"""Seconds between two updates of the panels, whose rates and memory change slowly."""
LIVE_POINTS = 6_000
"""Number of points in the raw traces of all runs together that a browser redraws smoothly while the user drags."""
CHANGING = ("x", "y", "customdata")
"""Fields of a panel's traces that change as a run goes on."""
ZOOMED_ROLES = ("raw", "line")
"""Traces that have other points in another part of the x axis."""
WIDTH_STEP = 1.02
"""Factor by which the smoothing width must grow before the averages of all runs are computed again."""


class CurveSettings(NamedTuple):
    """The user's choice of how a dashboard draws its curves."""

    x: str
    """Name of the x axis, one of `workbench.analysis.curve.X_AXES`."""
    smoothing: float
    """Width of the average as a share of the longest run; 0 shows raw values only."""
    log_x: bool = False
    log_y: bool = False


def shared_axis(curves: Sequence[Curve], wanted: str) -> tuple[str, AxisUnit]:
    """Return the wanted x axis with its unit, or the step axis if a run did not record the wanted one."""
    axes = shared_axes(curves)
    name = wanted if wanted in axes else "step"
    return name, axes[name]


class CurveCache:
    """The prepared curves of all runs; those of a run that has not changed are kept."""

    def __init__(self) -> None:
        self._cached: dict[tuple[str, int], tuple[Any, PreparedCurve]] = {}

    def prepare(
        self, snapshots: Sequence[Snapshot], y: str, x: str, unit: AxisUnit, smoothing: float, max_points: int
    ) -> list[PreparedCurve]:
        """Return column `y` of every run over the axis `x`; an unchanged run gets the same object as before."""
        curves = [snapshot.curve for snapshot in snapshots]
        preparation = Preparation.of(curves, smoothing, {x: unit.scale}, max_points)
        if preparation.width > 0:
            width = WIDTH_STEP ** math.ceil(math.log(preparation.width, WIDTH_STEP))
            preparation = replace(preparation, width=width)
        shared = (x, unit.scale, preparation.width, preparation.along, preparation.held_out)
        states = [(len(s.history), s.step, s.marks, len(s.evaluations or ()), s.look, *shared) for s in snapshots]
        changed = [index for index, state in enumerate(states) if self._cached.get((y, index), (None,))[0] != state]
        fresh = map_in_threads(lambda index: preparation.prepare(curves[index], index, y), changed)
        for index, curve in zip(changed, fresh, strict=True):
            self._cached[y, index] = (states[index], curve)
        return [self._cached[y, index][1] for index in range(len(curves))]


class LiveLossFigure:
    """The loss curves of all runs; `on_zoom` is called when the user looks at another part or point of the x axis."""

    def __init__(self, snapshots: Sequence[Snapshot], settings: CurveSettings, on_zoom: Callable[[], None]) -> None:
        self._cache = CurveCache()
        self._latest: list[PreparedCurve] = []
        curves = [snapshot.curve for snapshot in snapshots]
        x, unit = shared_axis(curves, settings.x)
        self._x_title = unit.title
        self._layout = loss_layout(curves, x).layout
        margin, height = self._layout.margin, self._layout.height - 80  # plotly's buttons need the top
        self._layout.update(margin={"t": 36, "b": margin.b - 12}, height=height, autosize=True)
        prepared, smooth = self._prepare(snapshots, x, unit, settings.smoothing), settings.smoothing > 0
        top = _upper_end(prepared, settings.log_y)
        self._traces = curve_traces(prepared, x, "loss", smooth=smooth, complete=True, top=top)
        self._shown: list[tuple[PreparedCurve, Window, bool]] = [(curve, None, smooth) for curve in prepared]
        self.widget = growing_plot(self._layout, self._traces)
        self._x = x
        self.widget.observe(lambda _: on_zoom(), names=("visible", "hovered"))
        respond_while_busy(self.widget)

    @property
    def figure(self) -> Figure:
        """The curves as they were last drawn."""
        return Figure(self._traces, self._layout)

    @property
    def window(self) -> Window:
        """The part of the x axis that the user zoomed into, in the axis' unit; None is the whole axis."""
        if self.widget.visible is None:
            return None
        low, high = sorted(self.widget.visible)
        return (10**low, 10**high) if self._layout.xaxis.type == "log" else (low, high)

    def hovered_step(self, index: int) -> float:
        """Return the step of a run under the pointer; infinity before the pointer was over the figure."""
        position, curve = self.widget.hovered, self._latest[index]
        if position is None:
            return math.inf
        before = int(np.searchsorted(curve.x[self._x], position, side="right"))
        return float(curve.step[before - 1]) if before else 0.0

    def draw(self, snapshots: Sequence[Snapshot], settings: CurveSettings) -> None:
        """Update every run's curve, with points chosen for the visible part of the x axis."""
        x, unit = shared_axis([snapshot.curve for snapshot in snapshots], settings.x)
        if unit.title != self._x_title or (self._layout.xaxis.type == "log") != settings.log_x:
            self.widget.visible = None
        window = self.window
        whole = self._prepare(snapshots, x, unit, settings.smoothing)
        top = _upper_end(whole, settings.log_y)
        smooth = settings.smoothing > 0
        visible = with_means([c.focused(x, window, _live_points(len(snapshots))) for c in whole[: len(snapshots)]])
        before, self._shown = self._shown, [(curve, window, smooth) for curve in whole]
        grown = [old is not new or was != smooth for (old, _, was), new in zip(before, whole, strict=True)]
        made = TRACE_ROLES if any(grown) else ZOOMED_ROLES
        fresh = iter(curve_traces(visible, x, "loss", smooth=smooth, complete=True, top=top, roles=made))
        redrawn = {}
        for at, old in enumerate(self._traces):
            if old.meta in made:
                self._traces[at] = next(fresh)
                run = at % len(whole)
                moved = ZOOMED_ROLES if before[run][1] != window else ("end",)  # labels leave those of others room
                if grown[run] or old.meta in moved:
                    redrawn[at] = self._traces[at]
        # plotly.js keeps a zoom as long as the `uirevision` of its axis stays the same.
        self._x_title, x_ticks = unit.title, theme.LOG_TICKS if settings.log_x else None
        self._layout.xaxis.update(
            title={"text": unit.title},
            unifiedhovertitle={"text": hover_title(unit.title)},
            type="log" if settings.log_x else "linear",
            tickformat=x_ticks,
            uirevision=f"{unit.title}, {settings.log_x}",
        )
        y_range = settled_range(self._latest, settings.log_y)
        self._layout.yaxis.update(
            type="log" if settings.log_y else "linear",
            uirevision=f"{unit.title}, {settings.log_y}",
            range=y_range,
            autorange=y_range is None,
            tickformat=theme.LOG_TICKS if settings.log_y else None,
        )
        has_values = any(len(curve.raw) for curve in whole)  # else plotly.js would draw axes from -1 to 4
        self._layout.annotations = () if has_values else (theme.in_the_middle(NO_STEP),)
        self._layout.update(xaxis_showticklabels=has_values, yaxis_showticklabels=has_values)
        legend = self._layout.legend
        if legend.orientation is None and window is None:
            preferred = theme.corner_of(legend)  # the legend moves only if a curve has come to run through it
            place = theme.place_legend(self._traces, log_x=settings.log_x, log_y=settings.log_y, preferred=preferred)
            legend.update(place)
        self._x = x
        self.widget.tells_hover = any(len(snapshot.texts) for snapshot in snapshots)
        self.widget.redraw(self._layout, redrawn)

    def static_figure(self, snapshots: Sequence[Snapshot], settings: CurveSettings) -> Figure:
        """Return a new figure with the whole curves as they were last drawn."""
        curves = [snapshot.curve for snapshot in snapshots]
        x, _ = shared_axis(curves, settings.x)
        figure = loss_layout(curves, x)
        y_range, top = settled_range(self._latest, settings.log_y), _upper_end(self._latest, settings.log_y)
        figure.add_traces(curve_traces(self._latest, x, "loss", smooth=settings.smoothing > 0, top=top))
        figure.layout.legend = self._layout.legend
        figure.update_layout(yaxis={"type": "log" if settings.log_y else "linear", "range": y_range})
        figure.update_xaxes(type="log" if settings.log_x else "linear", tickformat=self._layout.xaxis.tickformat)
        return figure

    @property
    def key(self) -> str | None:
        """The explanation of the symbols on the curves; None if there are none."""
        return mark_key(self._latest)

    def _prepare(self, snapshots: Sequence[Snapshot], x: str, unit: AxisUnit, smoothing: float) -> list[PreparedCurve]:
        points = _live_points(len(snapshots))
        self._latest = with_means(self._cache.prepare(snapshots, "loss", x, unit, smoothing, points), self._latest)
        return self._latest


def _upper_end(curves: Sequence[PreparedCurve], log_y: bool) -> float | None:
    """Return the value at the upper end of a linear y axis that leaves curves out; None if it leaves none out."""
    y_range = None if log_y else settled_range(curves, False)
    return None if y_range is None else y_range[1]


def _live_points(num_runs: int) -> int:
    """Return the largest number of points of each raw trace."""
    return min(points_per_trace(num_runs), max(600, LIVE_POINTS // max(1, num_runs)))


class LivePanelsFigure:
    """Speed, gradient norm, learning rate, utilisation and memory of all runs; rebuilt when a panel is added."""

    def __init__(self) -> None:
        self.box = widgets.VBox()
        self._cache = CurveCache()
        self._drawn_as: tuple[list[str], list[Look | None]] = ([], [])
        self._state: Any = None
        self._drawn_at = -PANELS_S
        self.figure: Figure | None = None
        self._widget: GrowingPlot | None = None

    def draw(self, snapshots: Sequence[Snapshot], settings: CurveSettings, window: Window, now: bool) -> None:
        """Update every panel, but no more often than every `PANELS_S` seconds unless `now` is true."""
        sizes = ((len(s.history), len(s.memory), len(s.utilization or ()), len(s.evaluations or ())) for s in snapshots)
        looks = [s.look for s in snapshots]
        state = (settings.x, settings.smoothing, settings.log_x, window, looks, *sizes)
        if state == self._state or not (now or time.monotonic() - self._drawn_at >= PANELS_S):
            return
        self._state, self._drawn_at = state, time.monotonic()
        curves, peaks, usage = panel_inputs(snapshots)
        names = panel_names(curves, peaks, usage)
        x, unit = shared_axis(curves, settings.x)

        def prepare(name: str) -> list[PreparedCurve]:
            return self._cache.prepare(snapshots, name, x, unit, settings.smoothing, PANEL_POINTS)

        if (names, looks) != self._drawn_as or self._widget is None:
            figure = panels(curves, peaks, x, settings.smoothing, names, window, usage, prepare)
            old, self._drawn_as, self._widget, self.figure = self._widget, (names, looks), None, None
            if names:
                self.figure, self._widget = figure, growing_plot(figure.layout, figure.data, displayModeBar=False)
                respond_while_busy(self._widget)
            self.box.children = (self._widget,) if self._widget is not None else ()
            if old is not None:
                close_widgets(old)
        if self.figure is None or self._widget is None:
            return
        preparation = Preparation.of(curves, settings.smoothing, {x: unit.scale}, PANEL_POINTS)
        made = (panel(name, curves, peaks, usage, x, preparation, window, prepare)[0] for name in names)
        for trace, fresh in zip(self.figure.data, itertools.chain.from_iterable(made), strict=True):
            for field in CHANGING:
                if fresh[field] is not None:
                    trace[field] = fresh[field]
        for position, name in enumerate(names):
            axis = self.figure.layout[f"xaxis{position + 1 if position else ''}"]
            if name == "memory":  # whose bars stand over ranks
                axis.title.text = rank_title(peaks)
                continue
            if axis.title.text:
                axis.title.text = unit.title
            axis.type = "log" if settings.log_x else "linear"
            axis.tickformat = theme.LOG_TICKS if settings.log_x else None
            if window is None:
                axis.autorange = True
            else:
                axis.range = [math.log10(max(end, 1e-12)) if settings.log_x else end for end in window]
        self._widget.redraw(self.figure.layout, dict(enumerate(self.figure.data)))
