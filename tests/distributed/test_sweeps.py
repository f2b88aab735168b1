"""Sweeps and grids with real processes: detached supervisors, runs side by side, kills, and cells that fail."""

import signal
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
from tests.distributed.test_launch import forked_kernel
from tests.patience import GATE, PATIENCE_S, Gate, eventually
from workbench.base.errors import (
    InvalidArgument,
    InvalidExperiment,
    PlanInfeasible,
    RunExists,
    RunNotFound,
    UnknownParameter,
)
from workbench.cost.hardware import Cluster
from workbench.figures.figure import picture
from workbench.record.rundir import process_alive, read_json
from workbench.runs.launching import processes
from workbench.runs.run import Run
from workbench.sweeps import sweep as sweep_module
from workbench.sweeps.rules import RUN, diverged

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
import signal, sys
from tests.distributed.test_sweeps import experiment, prepare
import workbench as wb
prepare()
axes = {"learning_rate": [1e-3, 2e-3], "global_batch": [4, 8]}
wb.sweep(experiment(), **axes, seeds=2, sampler="random", trials=4, directory=sys.argv[1])
print("told started", flush=True)
signal.pause()
"""


@pytest.fixture
def gate(tmp_path, monkeypatch) -> Gate:
    """Return the gate of all runs, which is closed; `gate-0000` beside it is that of the first run alone."""
    closed = Gate(tmp_path / "gate")
    monkeypatch.setenv(GATE, str(closed.file))
    return closed


def test_a_sweep_survives_its_kernel_and_its_supervisor_and_trains_each_configuration_once(node, gate):
    first, path = Gate(node / "gate-0000"), node / "runs" / "sweep"
    kernel, _ = forked_kernel(node, KERNEL, str(path))
    processes.send_signal([kernel], signal.SIGKILL)
    eventually(lambda: not process_alive(kernel))

    sweep = wb.sweeps.load_sweep(path)
    assert sweep.alive
    assert ", 2 side by side on 1 device each, take" in sweep.why
    eventually(lambda: [run.status.state for run in sweep.runs].count("running") == 2)
    first.open()
    eventually(sweep.results)
    interrupted = sweep.runs[1]
    psutil.Process(read_json(sweep.directory.supervisor)["pid"]).send_signal(signal.SIGKILL)
    eventually(lambda: not sweep.alive)
    assert not sweep.complete
    started = {run.path for run in sweep.runs}
    assert interrupted.kill().status.state == "stopped"

    gate.open()
    again = wb.sweeps.load_sweep(path).resume().wait(PATIENCE_S)
    assert again.complete
    assert {result.state for _, result in again.results()} == {"finished"}, again.results()
    runs = [run.experiment for run in again.runs]
    trained = [(run.learning_rate, run.global_batch, run.seed) for run in runs]
    assert len(trained) == len(set(trained)) == 8
    assert started <= {run.path for run in again.runs}
    assert {run.name for run in runs} == {"sweep"}, "one group on W&B"
    assert [len(run.history()) for run in again.runs] == [20] * 8
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
    assert [run.experiment.global_batch for run in again.best(1)] == [4, 4]
    assert again.rows()[0].mean == pytest.approx(1.04 + 0.0005 + (1 / 19 + 1 / 20) / 2)
    assert again.rows()[0].spread == pytest.approx(0.001 / 2**0.5)
    assert "mean training loss" in repr(again)
    spans = [span for run in again.runs for span in at_work(run)]
    assert max(sum(begun <= at < end for begun, end in spans) for at, _ in spans) <= 2, "never three side by side"


def at_work(run: Run) -> list[tuple[float, float]]:
    """Return when each attempt of a run had its devices, and when it had ended."""
    states = [(event["state"], event["time"]) for event in run.events() if event["type"] == "status"]
    begun = [when for state, when in states if state == "starting"]
    return list(zip(begun, [when for state, when in states if state in ("finished", "stopped")], strict=True))


def test_a_run_that_diverges_is_stopped_and_what_that_saved_is_told(gate):
    gate.open(10)
    sweep = wb.sweep(experiment(steps=200), learning_rate=[1e-3, 0.9], stop=diverged(above=50, after=3))
    eventually(lambda: any(result.state == "stopped early" for _, result in sweep.results()))
    [result] = [result for _, result in sweep.results() if result.state == "stopped early"]
    assert "above 50 after step 3" in result.reason
    assert 4 <= result.steps <= 10
    assert result.saved_steps == 200 - result.steps
    [stopped] = [run for run in sweep.runs if "0.9" in run.name]
    assert stopped.status.state == "stopped"
    assert stopped.status.message == f"Stopped at step {result.steps} of 200.", "it was stopped in order"
    assert f"saved {result.saved_steps} steps" in sweep.saved
    sweep.stop().wait(PATIENCE_S)
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


def test_a_measurement_survives_its_supervisor_and_trains_each_plan_once(node, monkeypatch, gate):
    """A sweep, whose supervisor starts in the same way, survives its kernel, too."""
    for first in ("gate-0000", "gate-0001"):  # one of the two has memory enough
        Gate(node / first).open()
    monkeypatch.setattr(processes, "WORKER", "grid_worker")
    path = node / "runs" / "grid"
    grid().measure("all", steps=8, directory=path)
    measured = wb.sweeps.load_grid(path)
    asked = read_json(path / "grid.json")["experiment"]
    assert "axes" not in read_json(path / "grid.json")
    plans = {(1, 1), (1, 2), (2, 1), (2, 2), (2, 4)}
    queue = read_json(path / "queue.json")
    assert {(entry["choices"]["tensor"], entry["choices"]["micro_batch"]) for entry in queue} == plans
    kept, project = asked["checkpoints"]["keep"], asked["tracking"]["project"]
    assert (kept, project) == (0, ""), "a cell writes no checkpoint and is not tracked"
    assert asked["optimizer"]["warmup_steps"] == 8, "losses of few steps at the full rate would look like a fault"
    eventually(measured.measured)
    psutil.Process(read_json(path / "supervisor.json")["pid"]).send_signal(signal.SIGKILL)
    eventually(lambda: not measured.alive)
    assert not measured.complete
    assert "not at work; resume() goes on" in repr(measured)

    gate.open()
    again = wb.sweeps.load_grid("grid").resume().wait(PATIENCE_S)
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
