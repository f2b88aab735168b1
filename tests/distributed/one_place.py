"""The check of `test_one_place.py`, where `additions` holds one schedule and one column; ranks import it as well."""

from __future__ import annotations

import sys
from pathlib import Path

import additions  # noqa: F401 - before anything derives a table from the two
import pytest
from wandb_log import offline_history

from tests.distributed import real_worker
from tests.distributed.real_worker import experiment, plan, trained
from tests.patience import eventually
from workbench.analysis.curve import X_AXES, Curve
from workbench.base.errors import PlanInfeasible
from workbench.execution.blocks.step_context import FIRST_RECORDED
from workbench.figures.curves_view import loss_curves
from workbench.figures.panels_view import panels
from workbench.figures.timeline_view import draw_timeline, measured_timeline
from workbench.planning.prediction import peak_holdings
from workbench.planning.prediction import timeline as predicted
from workbench.record.columns import reserved_names
from workbench.record.event_log import read_events
from workbench.record.history import HistoryTail
from workbench.record.rundir import RunDir, write_json, write_record
from workbench.runs.tracking.recorder import write_offline
from workbench.strategy import build_schedule


def check_schedule(run: RunDir, chosen: object) -> None:
    """The schedule was planned, run in the order of its record, and is drawn under its name."""
    assert (chosen.schedule, chosen.pipeline, chosen.chunks) == ("breadth_first", 2, 2)
    assert "breadth-first pipelining × 2" in chosen.describe()
    assert peak_holdings("breadth_first", 2, 50, 2)[0] == ((50, 0, 0), (50, 50, 1))
    with pytest.raises(PlanInfeasible, match="Breadth-first pipelining needs two micro-batches or more"):
        build_schedule("breadth_first", 2, 1, 2)
    measured = measured_timeline(read_events(run.events))
    assert measured is not None
    for planned_lane, measured_lane in zip(predicted(chosen).lanes, measured.lanes, strict=True):
        order = [(a.type, a.stage, a.micro_batch) for a in planned_lane]
        assert [(a.type, a.stage, a.micro_batch) for a in measured_lane] == order
    assert "breadth-first pipelining, 4 micro-batches of 2" in draw_timeline(chosen).layout.title.subtitle.text


def check_column(run: RunDir, project: str) -> None:
    """The column was logged, is read, drawn and named on W&B, and no metric may have its name."""
    history = HistoryTail(run.events).read()
    assert history.sample_pairs.tolist() == [4.0] * (FIRST_RECORDED + 2)
    assert "sample_pairs" in reserved_names()
    assert X_AXES["sample_pairs"].label == "pairs"
    curve = Curve("run", history)
    figure = panels([curve], x="step", smoothing=0.0)
    assert "Ten a pair" in [note.text for note in figure.layout.annotations]
    assert any(trace.y is not None and set(trace.y) == {40.0} for trace in figure.data)
    drawn = loss_curves([curve], x="sample_pairs", y="sample_pairs")
    assert (drawn.layout.yaxis.title.text, drawn.layout.xaxis.title.text) == ("Pairs of samples", "Pairs")
    write_record(run.environment, {})
    write_json(run.tracker, {"project": project, "id": "abc", "name": "run", "group": "g", "tags": []})
    write_offline(run, "")
    (file,) = run.tracking.glob("wandb/offline-run-*/run-*.wandb")
    logged = history.sample_pairs.tolist()  # W&B's service may write after the end of a run is confirmed
    eventually(lambda: [row["system/pairs"] for row in offline_history(file)] == logged)


if __name__ == "__main__":
    real_worker.start_method = lambda _: "fork"  # ranks have what was imported here, the additions first
    asked = experiment(steps=FIRST_RECORDED + 2)
    plans = plan(asked, pipeline=2, schedule="breadth_first", chunks=2)
    run = trained(Path(sys.argv[1]) / "run", asked, plans)
    check_schedule(run, plans)
    check_column(run, "one-place")
