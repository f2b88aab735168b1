"""The live dashboard without a browser: its readings, the end of its thread, and its static twin in a notebook."""

from __future__ import annotations

import base64
import gc
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import current_thread
from types import SimpleNamespace
from typing import Any

import ipywidgets
import nbformat
import plotly.graph_objects as go
import pytest
from IPython.core.events import EventManager
from ipywidgets.widgets.widget import _instances
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.kernels import reached_by_files
from tests.logs import append_event
from tests.patience import PATIENCE_S, eventually
from workbench.base.errors import UnknownParameter
from workbench.figures.prepared_curve import MAX_POINTS
from workbench.record.rundir import RunDir, this_process, write_json, write_record
from workbench.runs.registry import data_wait
from workbench.runs.run import Run
from workbench.runs.status import STOPPING
from workbench.widgets import dashboard, live, live_widget
from workbench.widgets.run_reader import RunReader

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _frequent_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "REFRESH_S", 0.02)
    monkeypatch.setattr(live_widget, "UNSEEN_FACTOR", 1.0)


@pytest.fixture
def directory(tmp_path: Path) -> RunDir:
    """Return a run whose supervisor is this process."""
    return start_run(tmp_path / "run <1>")


def start_run(path: Path, steps: int = 100) -> RunDir:
    run = RunDir(path)
    run.path.mkdir(parents=True)
    write_record(run.environment, {})
    write_json(run.launcher, {"supervisor": this_process()})
    write_record(run.experiment, {"steps": steps})
    append_event(run.events, "status", state="running", message="")
    append_event(run.events, "start", devices=["cpu"], world=1, resumed_from=None)
    return run


def train(run: RunDir, first: int, last: int, data_wait: float | None = None) -> None:
    for step in range(first, last + 1):
        append_event(
            run.events,
            "step",
            step=step,
            loss=10 / step,
            learning_rate=1e-4,
            grad_norm=1.0,
            step_ms=500.0,
            tokens=step * 1000,
            samples=step,
            flops=step * 1e9,
            seconds=step * 0.5,
            tokens_per_s=2000.0,
            mfu=0.41,
            data_wait=data_wait,
        )


def end(run: RunDir, state: str, message: str = "") -> None:
    append_event(run.events, "status", state=state, message=message)


def row_of(dashboard: Any, row: int = 0) -> Any:
    return dashboard.children[0].children[row]


def points(dashboard: Any, part: str) -> list[int]:
    return [len(trace.x) for trace in dashboard.figure.data if trace.meta == part]


def test_facts_name_step_loss_speed_mfu_and_time_left(directory: RunDir) -> None:
    train(directory, 1, 40)
    snapshot = RunReader(directory.path).read()
    assert snapshot.facts == "30 s left · step 40 of 100 · loss 0.2506 · 2 k tokens/s · MFU 41.0%"
    assert snapshot.progress == 0.4
    sparse = start_run(directory.path.parent / "every tenth step")
    for step in (10, 20, 30, 40):
        append_event(sparse.events, "step", step=step, loss=1.0, seconds=0.5 * step)
    assert RunReader(sparse.path).read().eta_s == pytest.approx(0.5 * 60), "steps are left, not lines of the log"
    train(directory, 41, 80, data_wait=0.25)
    assert "MFU 41.0% · waiting for data 25%" in RunReader(directory.path).read().facts
    assert data_wait(Run(directory.path).history()) == pytest.approx(0.25)


def test_before_the_first_step_the_last_phase_is_named(directory: RunDir) -> None:
    reader = RunReader(directory.path)
    assert reader.read().facts == "no step yet"
    append_event(directory.events, "phase", name="compile", seconds=3.0)
    assert reader.read().facts == "compile done, first step to come"


def test_curves_grow_and_the_thread_ends_with_the_last_run(tmp_path: Path) -> None:
    first, second = start_run(tmp_path / "a"), start_run(tmp_path / "b")
    train(first, 1, 10)
    dashboard = live([Run(first.path), Run(second.path)])
    assert points(dashboard, "line") == [10, 0]
    train(second, 1, 5)
    end(first, "finished")
    eventually(lambda: points(dashboard, "line") == [10, 5])
    assert dashboard.following
    train(second, 6, 7)
    end(second, "stopped", "Stopped at step 7.")
    eventually(lambda: not dashboard.following)
    assert points(dashboard, "line") == [10, 7]


def test_a_long_run_sends_no_more_points_than_a_browser_redraws(directory: RunDir) -> None:
    train(directory, 1, 3000)
    dashboard = live(Run(directory.path))
    assert max(points(dashboard, "raw") + points(dashboard, "line")) <= MAX_POINTS
    dashboard.close()


def test_the_curves_of_long_runs_do_not_wait_for_the_panels(directory: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "REFRESH_S", 1e6)  # it is updated when it is woken, and not before
    train(directory, 1, 40)
    at_once = live(Run(directory.path))
    assert at_once._panels.figure is not None
    at_once.close()
    monkeypatch.setattr(dashboard, "AT_ONCE_POINTS", 39)
    shown = live(Run(directory.path))
    assert points(shown, "line") == [40]
    assert shown._panels.figure is None
    shown.wake()
    eventually(lambda: shown._panels.figure is not None)
    shown.close()


def test_closing_ends_the_thread_and_leaves_the_run_alone(directory: RunDir) -> None:
    dashboard = live(Run(directory.path))
    dashboard.close()
    eventually(lambda: not dashboard.following)
    assert not directory.stop_file.exists()


def alive(views: Callable[[], Any], times: int) -> tuple[int, int, int]:
    """Make a view some times; return how many are alive after, and the growth of widgets in registry and process."""

    def widgets_in_process() -> int:
        gc.collect()
        return sum(isinstance(each, ipywidgets.Widget) for each in gc.get_objects())

    live_widget.plotly_library()  # one for all of a process
    gc.collect()
    registered, before = len(_instances), widgets_in_process()
    made = [weakref.ref(views()) for _ in range(times)]
    eventually(lambda: (gc.collect(), not any(view() is not None for view in made))[1])
    return sum(view() is not None for view in made), len(_instances) - registered, widgets_in_process() - before


@pytest.mark.parametrize("way", ["closed", "forgotten", "shown and closed", "over", "shown and over"])
def test_nothing_of_a_view_is_alive_once_nobody_shows_it(
    directory: RunDir, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_widget, "display", lambda *_, **__: SimpleNamespace(update=lambda *_, **__: None))
    train(directory, 1, 10)
    if "over" in way:
        end(directory, "finished")

    def view() -> Any:
        shown = live(Run(directory.path))
        if "shown" in way:
            shown._ipython_display_()
        if "closed" in way:
            shown.close()
            with pytest.raises(AttributeError, match="was closed and has no 'figure' any more"):
                _ = shown.figure
        if "over" in way:
            eventually(lambda: not shown.following)
            assert points(shown, "line") == [10]
        return shown

    assert alive(view, times=1 if "over" in way else 3) == (0, 0, 0)
    eventually(lambda: not any(thread.name == "workbench-Live" for thread in threading.enumerate()))


def test_a_view_is_closed_when_its_cells_have_run_again_without_it_and_shown_anew_where_it_still_has_a_name(
    directory: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = SimpleNamespace(events=EventManager(None, {"pre_run_cell": ..., "post_run_cell": ...}))
    monkeypatch.setattr(live_widget, "get_ipython", lambda: shell)
    monkeypatch.setattr(live_widget, "display", lambda *_, **__: SimpleNamespace(update=lambda *_, **__: None))
    train(directory, 1, 10)

    def run_cell(code: Callable[[], Any], cell: str | None, source: str = "") -> Any:
        info = SimpleNamespace(cell_id=cell, raw_cell=source)
        shell.events.trigger("pre_run_cell", info)
        (result := code())._ipython_display_()
        shell.events.trigger("post_run_cell", SimpleNamespace(info=info))
        return result

    first = run_cell(lambda: live(Run(directory.path)), "one")
    run_cell(lambda: first, "two")
    second = run_cell(lambda: live(Run(directory.path)), "one")
    assert first.comm is not None, "the second cell still shows it"
    run_cell(lambda: second, "two")
    assert first.comm is None
    eventually(lambda: not first.following)
    assert {view for view in live_widget._shown if view.comm is not None} == {second}
    run_cell(lambda: first, "three")
    [anew] = {view for view in live_widget._shown if view is not second}
    assert points(anew, "line") == [10]
    second.close()
    anew.close()
    # Where a page gives its cells no names, they are told by their source.
    before, again = (run_cell(lambda: live(Run(directory.path)), None, "live(run)") for _ in range(2))
    assert before.comm is None
    assert again.comm is not None
    again.close()
    assert not live_widget._shown


def test_a_failed_run_shows_its_ranks_error_as_text(directory: RunDir) -> None:
    error = {"rank": 3, "stage": 1, "type": "ValueError", "message": "<i>bad</i>", "traceback": "File <x>", "time": 1.0}
    write_record(directory.error(3), error)
    end(directory, "failed", "rank 3")
    dashboard = live(Run(directory.path))
    eventually(lambda: not dashboard.following)
    note = dashboard.children[-1].value
    assert "rank 3 (stage 1)" in note
    assert "&lt;i&gt;bad&lt;/i&gt;" in note
    assert "<i>" not in note


def test_the_stop_button_asks_the_run_to_stop(directory: RunDir) -> None:
    dashboard = live(Run(directory.path))
    [button] = [child for child in row_of(dashboard).children if type(child).__name__ == "Button"]
    button.click()
    assert directory.stop_file.exists()
    assert button.disabled
    assert "Stopping: the ranks end their step" in row_of(dashboard).children[-1].value, "before the ranks answer"
    row = Run(directory.path).row()
    assert (row["state"], row["message"]) == ("running", STOPPING), "also in tables, the sidebar and the shell"
    append_event(directory.events, "status", state="stopped", message="Stopped at step 0 of 100.")
    eventually(lambda: "Stopping" not in row_of(dashboard).children[-1].value)
    dashboard.close()


def test_controls_redraw_without_new_steps(directory: RunDir) -> None:
    train(directory, 1, 30)
    dashboard = live(Run(directory.path))
    x, smoothing, _, log = dashboard.children[1].children
    x.value, smoothing.value, log.value = "step", 0.0, True
    eventually(lambda: dashboard.figure.layout.yaxis.type == "log" and points(dashboard, "raw") == [0])
    assert dashboard.figure.layout.xaxis.title.text == "Step"
    assert list(dashboard.figure.data[1].x) == list(range(1, 31))
    dashboard.close()


def test_every_update_reaches_the_figure(directory: RunDir) -> None:
    dashboard = live(Run(directory.path))
    for last in range(5, 80, 5):
        train(directory, last - 4, last)
        eventually(lambda last=last: points(dashboard, "line") == [last])
    dashboard.close()


def checkpoint(run: RunDir, step: int) -> None:
    path = run.checkpoint(step)
    write_json(path / "complete.json", {"step": step})
    append_event(run.events, "checkpoint", step=step, path=str(path), seconds=0.1)


def button_of(dashboard: Any, row: int = 0) -> Any:
    return row_of(dashboard, row).children[1]


def test_a_stopped_run_with_a_checkpoint_is_resumed_by_its_button_and_followed_again(
    directory: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(directory, 1, 40)
    checkpoint(directory, 30)
    end(directory, "stopped", "Stopped at step 40 of 100.")
    resumed = []

    def resume(run: Run) -> Run:
        resumed.append(run.path)
        append_event(directory.events, "status", state="running", message="")
        append_event(directory.events, "start", devices=["cpu"], world=1, resumed_from=str(directory.checkpoint(30)))
        return run

    monkeypatch.setattr(Run, "resume", resume)
    dashboard = live(Run(directory.path))
    eventually(lambda: not dashboard.following)
    assert button_of(dashboard).description == "Resume"
    button_of(dashboard).click()
    eventually(lambda: dashboard.following and points(dashboard, "line") == [30])
    assert resumed == [directory.path]
    train(directory, 31, 50)
    eventually(lambda: points(dashboard, "line") == [50])
    [mark] = [trace for trace in dashboard.figure.data if trace.meta == "mark"]
    assert list(mark.customdata) == ["checkpoint at step 30", "resumed at step 30"]
    assert button_of(dashboard).description == "Stop"
    dashboard.close()


def test_a_refused_resumption_shows_the_reason_in_the_row(directory: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    train(directory, 1, 40)
    checkpoint(directory, 30)
    end(directory, "stopped")

    def refuse(_: Run) -> Run:
        raise ValueError("it <trains> elsewhere")

    monkeypatch.setattr(Run, "resume", refuse)
    dashboard = live(Run(directory.path))
    eventually(lambda: not dashboard.following)
    button_of(dashboard).click()
    eventually(lambda: button_of(dashboard).description == "Not resumed")
    assert "it &lt;trains&gt; elsewhere" in "".join(
        child.value for child in row_of(dashboard).children if type(child).__name__ == "HTML"
    )


def test_a_run_without_a_checkpoint_offers_no_resumption(directory: RunDir) -> None:
    train(directory, 1, 10)
    end(directory, "failed", "rank 0")
    dashboard = live(Run(directory.path))
    eventually(lambda: not dashboard.following)
    assert button_of(dashboard).description == "Failed"


def test_memory_of_every_rank_stands_in_its_panel_against_the_limit(directory: RunDir) -> None:
    train(directory, 1, 10)
    for rank in range(2):
        event = {"peak_bytes": (rank + 1) * 2**30, "limit_bytes": 2**33, "stage": rank, "device": f"cuda:{rank}"}
        append_event(directory.events, "memory", rank=rank, **event)
    dashboard = live(Run(directory.path))
    *_, panels_box, _, _ = dashboard.children
    [panels] = panels_box.children
    traces = [json.loads(getattr(panels, name)) for name in panels.keys if name.startswith("trace_")]
    [bars] = [trace for trace in traces if trace["meta"] == "memory"]
    assert bars["y"] == [1.0, 2.0]
    dashboard.close()


def test_a_run_name_is_never_markup(directory: RunDir) -> None:
    dashboard = live(Run(directory.path))
    shown = "".join(child.value for child in row_of(dashboard).children if type(child).__name__ == "HTML")
    assert "run &lt;1&gt;" in shown
    assert "<1>" not in shown
    dashboard.close()


def test_an_unknown_axis_is_refused_before_anything_is_shown(directory: RunDir) -> None:
    with pytest.raises(UnknownParameter, match="Did you mean 'tokens'"):
        live(Run(directory.path), x="tokns")


def test_no_cell_waits_for_the_picture_of_a_dashboard(directory: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    train(directory, 1, 10)
    threads: list[str] = []
    drawn = live_widget.mimebundle

    def note(figure: go.Figure, with_picture: bool) -> dict[str, Any]:
        if with_picture:
            threads.append(current_thread().name)
        return drawn(figure, with_picture)

    monkeypatch.setattr(live_widget, "mimebundle", note)
    dashboard = live(Run(directory.path))
    dashboard._ipython_display_()
    eventually(lambda: bool(threads))
    assert set(threads) == {"workbench-Live"}
    dashboard.close()


IMPORTS = f"""
import sys, threading
sys.path.insert(0, {str(REPOSITORY)!r})
from pathlib import Path
from tests.patience import eventually
from workbench.record.rundir import RunDir, append_event
from workbench.runs.run import Run
from workbench.widgets import dashboard, live, live_widget
live_widget.UNSEEN_FACTOR = live_widget.TWIN_S = 0.1
live_widget.EXIT_S = 300
# Once a last cell has begun, no look begins until it has ended.
last_begins, last_ends, look = False, threading.Event(), dashboard.Live.update
dashboard.Live.update = lambda self: (last_begins and last_ends.wait(), look(self))[1]
get_ipython().events.register("post_run_cell", lambda _: last_begins and last_ends.set())
"""
DRAWN = """
def drawn(live): return ['image/png' in each for each in live.twins._bundles] == [False, True, True]
eventually(lambda: not over.following and drawn(begun) and drawn(over))
with begun.twins._lock, over.twins._lock: pass  # what is drawn has been sent
begun.stop()
"""
BETWEEN = """
def leave(twins, leaves=live_widget.StaticTwins.leave):
    leaves(twins)
    Path({left!r}).touch()
live_widget.StaticTwins.leave = leave
live(Run({run!r}))
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[list[nbformat.NotebookNode]]:
    """Return the outputs of four dashboards after the execution of their notebook without a page.

    The runs of the cells train on, had ended before, end between two cells, and end in the last cell.
    """
    folder = tmp_path_factory.mktemp("executed")
    running, ended, between, last = (start_run(folder / name) for name in ("running", "ended", "between", "last"))
    for run in (running, ended, between, last):
        train(run, 1, 10)
    end(ended, "stopped", "Stopped at step 10.")
    left = folder / "left"
    cells = [
        IMPORTS,
        f"begun = live(Run({str(running.path)!r}))\nbegun",
        f"over = live(Run({str(ended.path)!r}))\nover",
        DRAWN,
        BETWEEN.format(left=str(left), run=str(between.path)),
        "None",
        f"live(Run({str(last.path)!r}))",
        f"last_begins = True\nappend_event(RunDir({str(last.path)!r}).events, 'status', state='stopped', message='')",
    ]

    def end_between(cell: Any, cell_index: int) -> None:  # noqa: ARG001
        if cell_index == 5:
            end(between, "stopped", "Stopped at step 10.")
            eventually(left.exists)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    limits = {"timeout": PATIENCE_S, "startup_timeout": PATIENCE_S}
    manager = AsyncKernelManager(**reached_by_files(folder))
    NotebookClient(notebook, km=manager, on_cell_start=end_between, **limits).execute()
    return [[output.data for output in notebook.cells[number].outputs] for number in (1, 2, 4, 6)]


def test_a_notebook_executed_without_a_browser_keeps_something_to_read(executed: list[Any]) -> None:
    for outputs, state in zip(executed[:2], ("running", "stopped"), strict=True):
        widget, states, curves, panels = outputs
        assert ("application/vnd.jupyter.widget-view+json" in widget) == (state == "running")
        assert widget["text/html"] == widget["text/plain"] == ""
        assert state in states["text/html"]
        assert "step 10 of 100" in states["text/html"]
        assert base64.b64decode(curves["image/png"]).startswith(b"\x89PNG")
        assert len(json.dumps(curves)) < 200_000
        assert base64.b64decode(panels["image/png"]).startswith(b"\x89PNG")


def test_what_a_view_shows_between_two_cells_is_in_an_executed_notebook(executed: list[Any]) -> None:
    widget, states, curves, panels = executed[2]
    assert "application/vnd.jupyter.widget-view+json" not in widget
    assert "stopped" in states["text/html"]
    assert "image/png" in curves
    assert "image/png" in panels


def test_the_last_cell_of_an_executed_notebook_waits_for_the_last_look_at_a_run_that_has_ended(
    executed: list[Any],
) -> None:
    assert "stopped" in executed[3][1]["text/html"]
