"""The measurement of a grid: it outlives its kernel and its supervisor, and a cell that fails is a marked cell."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

import workbench as wb
from tests.distributed.real_worker import DEVICE, LINK
from tests.distributed.test_sweeps import HERE, eventually, experiment, node  # noqa: F401
from workbench.cost.cluster import Cluster
from workbench.errors import InvalidArgument, PlanInfeasible, RunExists, RunNotFound
from workbench.figures.figure import picture
from workbench.rundir import read_json

MACHINE = Cluster(DEVICE, 2, 2, LINK, LINK)


def grid() -> wb.sweeps.Grid:
    return wb.grid(experiment(), MACHINE, pipeline=1, tensor=[1, 2], micro_batch=[1, 2, 4], recompute="none", zero=0)


KERNEL = """
import sys, time
from tests.distributed.test_grids import grid
from workbench.runs.launching import processes
processes.WORKER = "grid_worker"
grid().measure("all", steps=8, directory=sys.argv[1])
print("started", flush=True)
time.sleep(3600)
"""


def test_a_measurement_survives_its_kernel_and_its_supervisor_and_trains_each_plan_once(node):  # noqa: F811
    path = node / "runs" / "grid"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    command = [sys.executable, "-c", KERNEL, str(path)]
    kernel = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert kernel.stdout is not None
    assert kernel.stdout.readline() == "started\n"
    kernel.kill()
    kernel.wait()
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


def test_cells_that_cannot_be_measured_are_refused_before_anything_is_written(node):  # noqa: F811
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
