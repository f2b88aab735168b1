"""The check of `test_one_place.py`, whose `additions` hold a schedule, a column and an optimiser; ranks import them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import additions  # noqa: F401 - before anything derives a table from them
import pytest
import torch
from wandb_log import offline_history

from tests.distributed import real_worker
from tests.distributed import test_optimizers as optimizers
from tests.distributed.harness import launch
from tests.distributed.real_worker import experiment, plan, trained
from tests.patience import eventually
from workbench.analysis.curve import X_AXES, Curve
from workbench.base.errors import InvalidExperiment, PlanInfeasible
from workbench.execution.blocks.step_context import FIRST_RECORDED
from workbench.experiment import Optimizer
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


class PlainSGDW(torch.optim.Optimizer):
    """Algorithm 1 of arXiv:1711.05101 on whole tensors, written once more."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self.momenta = {x: 0.0 for group in groups for x in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for x in group["params"]:
                self.momenta[x] = 0.9 * self.momenta[x] + x.grad
                x -= group["lr"] * (self.momenta[x] + group["weight_decay"] * x)


# At the level of the module, because the process from which ranks are forked imports this file as well.
optimizers.REFERENCES["sgdw"], optimizers.RATES["sgdw"] = PlainSGDW, 0.05


def check_optimizer(folder: Path) -> None:
    """The optimiser was planned, runs and goes on under other plans as in plain PyTorch, and is refused by its name."""
    assert plan(experiment(optimizer="sgdw"), data=2, zero=3).zero == 3, "an update reads elements alone"
    with pytest.raises(PlanInfeasible, match="the experiment trains with sgdw, whose state stays on the device"):
        plan(experiment(optimizer="sgdw"), offload_optimizer=True)
    with pytest.raises(InvalidExperiment, match="Did you mean 'sgdw'"):
        Optimizer("sdgw")
    with pytest.raises(InvalidExperiment, match="The optimizer is sgdw, and muon_scale can be given for muon alone"):
        Optimizer("sgdw", muon_scale="spectral")
    zero3, pipeline, tensor = optimizers.ZERO3, optimizers.PIPELINE, optimizers.TENSOR
    few, then = range(optimizers.FEW), range(optimizers.FEW, 2 * optimizers.FEW)
    cases = [
        optimizers.Case("sgdw", zero3, few),
        optimizers.Case("sgdw", pipeline, few, save_to=folder),
        optimizers.Case("sgdw", tensor, then, load_from=folder),
    ]
    found = launch(optimizers.train, 2, cases, ahead=optimizers.captured)
    errors = [found[case].error for case in cases]
    assert max(errors) < 1e-5, errors
    assert found[cases[0]].held[2] == optimizers.predicted(zero3, "sgdw")[2], "bytes of the momenta of a rank"


if __name__ == "__main__":
    real_worker.start_method = lambda _: "fork"  # ranks have what was imported here, the additions first
    asked = experiment(steps=FIRST_RECORDED + 2, optimizer="sgdw")
    plans = plan(asked, pipeline=2, schedule="breadth_first", chunks=2)
    run = trained(Path(sys.argv[1]) / "run", asked, plans)
    check_schedule(run, plans)
    check_column(run, "one-place")
    check_optimizer(Path(sys.argv[1]) / "checkpoints")
