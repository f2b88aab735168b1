"""Sweeps and grids with real processes: detached supervisors, runs side by side, kills, and cells that fail."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optuna
import psutil
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import workbench as wb
from tests.distributed.own_machine import own_machine
from tests.distributed.real_worker import DEVICE, LINK, SEQ, VOCAB, Words
from tests.patience import eventually
from workbench.cost.hardware import Cluster
from workbench.errors import (
    InvalidArgument,
    InvalidExperiment,
    PlanInfeasible,
    RunExists,
    RunNotFound,
    UnknownParameter,
)
from workbench.figures.figure import picture
from workbench.rundir import read_json
from workbench.runs.launching import processes
from workbench.runs.run import Run
from workbench.sweeps import sweep as sweep_module
from workbench.sweeps.rules import RUN, diverged
from workbench.sweeps.sweep import Sweep

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def node(tmp_path, monkeypatch):
    prepare(monkeypatch.setattr)
    yield from own_machine(tmp_path, monkeypatch)


def prepare(replace=setattr) -> None:
    """Let this process start the stand-in worker, on a machine of two processes whose speed need not be measured."""
    replace(processes, "WORKER", "sweep_worker")
    replace(sweep_module, "local_cluster", lambda: Cluster(DEVICE, 2, 2, LINK, LINK))


def experiment(**changes) -> wb.Experiment:
    sizes = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "vocab_size": VOCAB, "max_positions": SEQ}
    model = wb.models.bert(**sizes, next_sentence=False)
    fields = {"steps": 20, "global_batch": 4, "seq_len": SEQ, "name": "tiny", **changes}
    return wb.Experiment.of(model=model, data=Words(), **fields)


KERNEL = """
import sys, time
from tests.distributed.test_sweeps import experiment, prepare
import workbench as wb
prepare()
axes = {"learning_rate": [1e-3, 2e-3], "global_batch": [4, 8]}
wb.sweep(experiment(), **axes, seeds=3, sampler="random", trials=4, directory=sys.argv[1])
print("started", flush=True)
time.sleep(3600)
"""


def start_and_kill_kernel(code: str, path: Path) -> None:
    """Run code that starts what is measured in a folder, and kill its process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    command = [sys.executable, "-c", code, str(path)]
    kernel = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert kernel.stdout is not None
    assert kernel.stdout.readline() == "started\n"
    kernel.kill()
    kernel.wait()


def test_a_sweep_survives_its_kernel_and_its_supervisor_and_trains_each_configuration_once(node, monkeypatch):
    monkeypatch.setenv("SWEEP_STEP_S", "0.02")
    path = node / "runs" / "sweep"
    start_and_kill_kernel(KERNEL, path)

    began = time.time()
    sweep = wb.sweeps.load_sweep(path)
    assert sweep.alive
    assert ", 2 side by side on 1 device each, take" in sweep.why
    eventually(lambda: sweep.results())
    interrupted = eventually(lambda: next((run for run in reversed(sweep.runs) if not run.status.final), None))
    supervisor = psutil.Process(read_json(sweep.directory.supervisor)["pid"])
    supervisor.send_signal(signal.SIGKILL)
    eventually(lambda: not sweep.alive)
    assert not sweep.complete
    started = {run.path for run in sweep.runs}
    interrupted.kill()

    again = wb.sweeps.load_sweep(path).resume().wait(timeout=200)
    took = time.time() - began
    assert again.complete
    assert {result.state for _, result in again.results()} == {"finished"}, again.results()
    runs = [run.experiment for run in again.runs]
    trained = [(run.learning_rate, run.global_batch, run.seed) for run in runs]
    assert len(trained) == len(set(trained)) == 12
    assert started <= {run.path for run in again.runs}
    assert {run.name for run in runs} == {"sweep"}, "one group on W&B"
    assert [len(run.history()) for run in again.runs] == [20] * 12
    storage = JournalStorage(JournalFileBackend(str(again.directory.journal)))
    [study] = optuna.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=study.study_name, storage=storage).get_trials()
    kept = [trial for trial in trials if RUN in trial.user_attrs]
    others = {trial.state.name for trial in trials if RUN not in trial.user_attrs}
    assert others <= {"FAIL"}, "draws of what was tried before, and a trial that the kill left half open"
    assert {trial.state.name for trial in kept} == {"COMPLETE"}, "adopted runs keep their trials"
    told = [(trial.params["learning_rate"], trial.params["global_batch"], trial.params["seed"]) for trial in kept]
    assert sorted(told) == sorted(trained)

    assert again.rows()[0].values == {"learning_rate": 1e-3, "global_batch": 4}
    assert [run.experiment.global_batch for run in again.best(1)] == [4, 4, 4]
    assert again.rows()[0].mean == pytest.approx(1.04 + 0.001 + (1 / 19 + 1 / 20) / 2)
    assert again.rows()[0].spread == pytest.approx(0.001)
    assert "mean training loss" in repr(again)
    own = sum(run_seconds(run) for run in again.runs) / 2
    print(
        f"overhead of the sweep over the runs' own time: {took - own:.1f} s of {took:.1f} s for 12 runs, two at a time"
    )
    assert side_by_side(again)


def run_seconds(run: Run) -> float:
    """Return the time from the moment a run had its devices to its end, over all attempts."""
    times = [(event["state"], event["time"]) for event in run.events() if event["type"] == "status"]
    begun = next(when for state, when in times if state == "starting")
    return times[-1][1] - begun


def side_by_side(sweep: Sweep) -> bool:
    """Return True if two runs trained at the same time, and never three."""
    spans = []
    for run in sweep.runs:
        events = run.events()
        if sum(event["type"] == "start" for event in events) == 1:
            begun = next(e["time"] for e in events if e["type"] == "status" and e["state"] == "starting")
            spans.append((begun, next(e["time"] for e in events if e["type"] == "end")))
    counts = [sum(begun <= at < end for begun, end in spans) for at, _ in spans]
    return max(counts) == 2


def test_a_run_that_diverges_is_stopped_and_what_that_saved_is_told(monkeypatch):
    monkeypatch.setenv("SWEEP_STEP_S", "0.05")
    sweep = wb.sweep(experiment(steps=200), learning_rate=[1e-3, 0.9], stop=diverged(above=50, after=3))
    stopped = next(run for run in eventually(lambda: len(sweep.runs) == 2 and sweep.runs) if "0.9" in run.name)
    eventually(lambda: any(result.state == "stopped early" for _, result in sweep.results()))
    [result] = [result for _, result in sweep.results() if result.state == "stopped early"]
    assert "above 50 after step 3" in result.reason
    assert 4 <= result.steps < 200
    assert result.saved_steps == 200 - result.steps
    assert stopped.status.state == "stopped"
    assert stopped.status.message == f"Stopped at step {result.steps} of 200.", "it was stopped in order"
    assert f"saved {result.saved_steps} steps" in sweep.saved
    sweep.stop(wait=True)
    assert not sweep.complete
    assert [run.status.state for run in sweep.runs] == ["stopped", "stopped"]


@pytest.mark.parametrize(
    ("axes", "error", "words"),
    [
        ({"learning_rat": [1e-3]}, UnknownParameter, "Did you mean 'learning_rate'?"),
        ({"learning_rate": []}, InvalidExperiment, "has no value"),
        ({"learning_rate": ["fast"]}, InvalidExperiment, "is not a number"),
        ({"learning_rate": 1e-3}, InvalidExperiment, "not a list of values. Write learning_rate=[0.001]."),
        ({"learning_rate": "1e-3, 1e-4"}, InvalidExperiment, "Write learning_rate=[0.001, 0.0001]."),
        ({"learning_rate": np.array([0.5, 1e-4])}, InvalidExperiment, "Write learning_rate=[0.5, 0.0001]."),
        ({"optimizer": "muon"}, InvalidExperiment, "Write optimizer=['muon']."),
        ({"pipeline": [1, 2]}, UnknownParameter, "choice of the plan: wb.grid(experiment, pipeline=[1, 2])."),
        ({"learning_rate": [1e-3, 0.001]}, InvalidExperiment, "more than once"),
        ({}, InvalidExperiment, "needs an axis"),
        ({"seed": [1, 2]}, InvalidExperiment, "seeds=3"),
        ({"global_batch": [4], "seeds": 0}, InvalidExperiment, "is not a number of seeds"),
        ({"global_batch": [4], "sampler": "bayes"}, InvalidExperiment, "random"),
        ({"global_batch": [4], "sampler": "tpe"}, InvalidExperiment, "Give trials from 1 to 1"),
        ({"global_batch": [4], "trials": 3}, InvalidExperiment, "Leave trials out"),
        ({"global_batch": [4], "stop": "soon"}, InvalidExperiment, "no rule"),
    ],
)
def test_bad_axes_are_refused_before_anything_is_written(node, axes, error, words):
    with pytest.raises(error) as refused:
        wb.sweep(experiment(), **axes)
    assert words in str(refused.value)
    assert not (node / "runs").exists()


def test_a_sweep_that_does_not_exist_is_not_found():
    with pytest.raises(RunNotFound, match="no sweep 'none'"):
        wb.sweeps.load_sweep("none")


MACHINE = Cluster(DEVICE, 2, 2, LINK, LINK)


def grid() -> wb.sweeps.Grid:
    return wb.grid(experiment(), MACHINE, pipeline=1, tensor=[1, 2], micro_batch=[1, 2, 4], recompute="none", zero=0)


GRID_KERNEL = """
import sys, time
from tests.distributed.test_sweeps import grid
from workbench.runs.launching import processes
processes.WORKER = "grid_worker"
grid().measure("all", steps=8, directory=sys.argv[1])
print("started", flush=True)
time.sleep(3600)
"""


def test_a_measurement_survives_its_kernel_and_its_supervisor_and_trains_each_plan_once(node):
    path = node / "runs" / "grid"
    start_and_kill_kernel(GRID_KERNEL, path)
    measured = wb.sweeps.load_grid(path)
    asked = read_json(path / "grid.json")["experiment"]
    assert "axes" not in read_json(path / "grid.json")
    plans = {(1, 1), (1, 2), (2, 1), (2, 2), (2, 4)}
    queue = read_json(path / "queue.json")
    assert {(entry["choices"]["tensor"], entry["choices"]["micro_batch"]) for entry in queue} == plans
    kept, project = asked["checkpoints"]["keep"], asked["tracking"]["project"]
    assert (kept, project) == (0, ""), "a cell writes no checkpoint and is not tracked"
    eventually(lambda: measured.measured())
    psutil.Process(read_json(path / "supervisor.json")["pid"]).send_signal(signal.SIGKILL)
    eventually(lambda: not measured.alive)
    assert not measured.complete
    assert "not at work; resume() goes on" in repr(measured)

    again = wb.sweeps.load_grid("grid").resume().wait(timeout=200)
    assert again.complete
    assert not again.directory.journal.exists(), "Optuna chooses nothing here"
    steps = {
        (run.plan.tensor, run.plan.micro_batch): [event["step"] for event in run.events() if event["type"] == "step"]
        for run in again.runs
    }
    assert len(again.runs) == 5
    assert steps == {plan: [] if plan == (2, 4) else list(range(1, 9)) for plan in plans}, "each plan was trained once"
    cells = {(cell.choices["tensor"], cell.choices["micro_batch"]): cell for cell in again.cells()}
    seen = {key: cell.step_ms for key, cell in cells.items()}
    assert seen == {(1, 1): 36.0, (1, 2): 32.0, (2, 1): 86.0, (2, 2): 82.0, (2, 4): None}, "4 samples, 2 replicas"
    failed = cells[2, 4]
    assert failed.state == "failed"
    assert "Out of memory: tried 3 GiB." in failed.reason
    assert f"Failed: {failed.name}: " in repr(again)

    predicted = {key: cell.predicted_ms for key, cell in cells.items() if cell.step_ms is not None}
    chosen = min(predicted, key=predicted.__getitem__)
    assert again.regret == pytest.approx(seen[chosen] / 32.0 - 1)
    assert again.ratio == pytest.approx(86.0 / 32.0)
    orders = [sorted(predicted, key=values.__getitem__) for values in (predicted, seen)]
    squares = sum((orders[0].index(key) - orders[1].index(key)) ** 2 for key in predicted)
    assert again.rank_correlation == pytest.approx(1 - 6 * squares / (4 * (16 - 1)))
    figure = wb.figures.predictions(again)
    marks = {trace.name: trace for trace in figure.data}
    assert sorted(marks["measured"].y) == [32.0, 36.0, 82.0, 86.0]
    names = {f"tensor={tensor}, micro_batch={size}" for tensor, size in seen}
    assert {cell.name for cell in again.cells()} == names, "the choices that vary, and no others"
    assert all(name in again._repr_html_() for name in names)
    assert {text.partition(":")[0] for text in (*marks["measured"].text, *marks["failed"].text)} == names
    assert (list(marks["failed"].x), list(marks["fastest measured"].y)) == ([failed.predicted_ms], [32.0])
    assert picture(figure)[:4] == b"\x89PNG"


def test_cells_that_cannot_be_measured_are_refused_before_anything_is_written(node):
    here = grid()
    assert [cell.plan is None for cell in here.cells] == [False, False, True, False, False, False]
    near, _ = here._chosen("choice")
    assert [cell.step_ms for cell in near] == [
        c.step_ms for c in here.feasible if c.step_ms <= 1.27 * here.best.step_ms
    ]
    sample, why = here._chosen(3)
    assert sample == [here.feasible[0], here.feasible[2], here.feasible[4]]
    assert why == "Measured are 3 of 5 cells, evenly by rank."
    for cells in (0, 6, "some", []):
        with pytest.raises(
            InvalidArgument, match=r"chooses no cell\. Give 'all', 'choice', 1 to 5, or a list of cells"
        ):
            here.measure(cells)
    with pytest.raises(InvalidArgument, match=r"The cell .*micro_batch=4.* has no plan \(No division of 2 devices"):
        here.measure([here.cells[2]])
    with pytest.raises(InvalidArgument, match=r"steps=3 times no step\. Give more than 3"):
        here.measure("all", steps=3)
    away = wb.grid(experiment(), Cluster.of("h200", gpus=2), micro_batch=[1, 2])
    with pytest.raises(PlanInfeasible, match="this machine offers no GPUs"):
        away.measure("all")
    (node / "full").mkdir()
    (node / "full" / "file").touch()
    with pytest.raises(RunExists, match=r"is not empty\. Choose another directory, or go on: wb\.load_grid"):
        here.measure("all", directory=node / "full")
    with pytest.raises(RunNotFound, match=r"There is no measured grid 'none'\. There are none in"):
        wb.sweeps.load_grid("none")
    assert not (node / "runs").exists()
