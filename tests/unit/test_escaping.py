"""Names of a user or of a model's author, and words of a failed rank, are text in every page: never markup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from figure_values import plan
from test_runs import make_run
from torch import nn
from torch.nn import functional

from workbench.capture import capture, spec_of
from workbench.figures.plan_view import draw_partition, show_plan
from workbench.record.rundir import append_event, write_record
from workbench.runs.registry import list_runs
from workbench.runs.run import Run
from workbench.widgets.dashboard import DashboardRow, rows_html
from workbench.widgets.run_reader import RunReader

MARKUP, TEXT = "<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)&gt;"


def assert_is_text(page: str, times: int = 1) -> None:
    """Assert that the page holds the markup so many times at least, and always as text."""
    assert "<img" not in page
    assert page.count(TEXT) >= times


@pytest.fixture
def failed(tmp_path: Path) -> Run:
    """Return a failed run whose name, message, error and checkpoint problem hold markup."""
    run = make_run(tmp_path, name=MARKUP)
    append_event(run.events, "checkpoint_problem", step=1, path="p", message=f"problem {MARKUP}")
    error = {"rank": 1, "stage": 1, "type": f"Bad{MARKUP}", "message": MARKUP, "traceback": f"File {MARKUP}"}
    write_record(run.error(1), {**error, "time": 1.0})
    append_event(run.events, "status", state="failed", message=f"rank 1 (stage 1): {MARKUP}")
    return Run(run.path)


def test_a_run_shows_its_name_its_failure_and_its_problems_as_text(failed: Run) -> None:
    page = failed._repr_html_()
    assert_is_text(page, times=4)  # name, directory, failure, problem
    assert f"failed. rank 1 (stage 1): {TEXT}" in page
    assert_is_text(list_runs(failed.path.parent)._repr_html_())


def test_a_dashboard_shows_them_as_text(failed: Run) -> None:
    reader = RunReader(failed.path)
    snapshot = reader.read()
    assert_is_text(snapshot.failure_html, times=4)  # name, type, message, traceback
    assert_is_text(rows_html([snapshot], [failed.name]), times=2)
    row = DashboardRow(reader, 0)
    row.show(snapshot)
    assert_is_text("".join(child.value for child in row.box.children if isinstance(getattr(child, "value", 0), str)))
    queued = replace(snapshot, status=replace(snapshot.status, state="queued", message=f"Waits for {MARKUP}."))
    row.show(queued)
    assert f"Waits for {TEXT}." in rows_html([queued], [failed.name])
    assert_is_text("".join(child.value for child in row.box.children if isinstance(getattr(child, "value", 0), str)))


def test_the_pages_of_a_plan_show_names_of_blocks_as_text() -> None:
    named = plan(2, 8, model=MARKUP)
    names = tuple(f"{MARKUP}{index}" for index in range(8))
    for figure in (draw_partition(replace(named, block_names=names)), show_plan(replace(named, block_names=names))):
        shown = figure.to_json()
        assert r"\u003cimg" not in shown
        assert_is_text(shown, times=8)


def test_a_graph_shows_names_of_modules_as_text() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({MARKUP.replace(".", ""): nn.Linear(4, 4)})

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return functional.cross_entropy(x, labels)

    batch = {"x": torch.zeros(2, 4), "labels": torch.zeros(2, dtype=torch.long)}
    graph = capture(Model(), {name: spec_of(name, value) for name, value in batch.items()}, name="model")
    named = replace(graph, model=MARKUP, blocks=tuple(replace(block, name=MARKUP) for block in graph.blocks))
    assert_is_text(named._repr_html_(), times=1 + len(graph.blocks))
