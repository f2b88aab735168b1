"""Sweeps with real processes: detached supervisors, two runs side by side, kills, and early stopping."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import psutil
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import workbench as wb
from tests.distributed.real_worker import DEVICE, LINK, SEQ, VOCAB, Words, eventually
from workbench.cost.cluster import Cluster
from workbench.errors import InvalidExperiment, RunNotFound, UnknownParameter
from workbench.rundir import read_json
from workbench.runs.launching import processes
from workbench.runs.run import Run
from workbench.sweeps import start
from workbench.sweeps.rules import diverged
from workbench.sweeps.study import RUN
from workbench.sweeps.sweep import Sweep

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def node(tmp_path, monkeypatch):
    """Give the test a device queue and a runs folder of its own, and end the processes that it leaves."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prepare(monkeypatch.setattr)
    monkeypatch.syspath_prepend(str(HERE))
    yield tmp_path
    for file in (tmp_path / "runs").glob("*/supervisor.json"):
        processes.kill_trees([read_json(file)])
    for path in (tmp_path / "runs").glob("*/runs/*"):
        run = Run(path)
        supervisor = processes.launcher_record(run.directory).get("supervisor")
        processes.kill_trees([*([supervisor] if supervisor else []), *processes.live_workers(run.directory)])


def prepare(replace=setattr) -> None:
    """Let this process start the stand-in worker, on a machine of two processes whose speed need not be measured."""
    replace(processes, "WORKER", "sweep_worker")
    replace(start, "local_cluster", lambda: Cluster(DEVICE, 2, 2, LINK, LINK))


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


def test_a_sweep_survives_its_kernel_and_its_supervisor_and_trains_each_configuration_once(node, monkeypatch):
    monkeypatch.setenv("SWEEP_STEP_S", "0.02")
    path = node / "runs" / "sweep"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    command = [sys.executable, "-c", KERNEL, str(path)]
    kernel = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert kernel.stdout is not None
    assert kernel.stdout.readline() == "started\n"
    kernel.kill()
    kernel.wait()

    began = time.time()
    sweep = wb.sweeps.load_sweep(path)
    assert sweep.alive
    assert "2 runs side by side on 1 device each" in sweep.why
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
        ({"learning_rate": 1e-3}, InvalidExperiment, "not a list of values"),
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
