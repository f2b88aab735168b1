"""Faults of models, data and trainings under real ranks: what ended a run is named, and nothing is lost."""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from tests.distributed.harness import CPU, LINK, AtGate
from tests.distributed.real_worker import (
    ENDLESS,
    Ranks,
    curve,
    directory,
    experiment,
    last_step,
    plan,
    reach,
    trained,
)
from tests.patience import PATIENCE_S, Gate, eventually
from workbench.base.errors import DataError, RunFailed
from workbench.cost.hardware import Cluster
from workbench.execution.checkpoint.files import complete_checkpoints, step_of
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.planner import plan as make_plan
from workbench.record.event_log import read_events
from workbench.record.rundir import RunDir, process_alive, read_record
from workbench.runs.launching import launcher, processes
from workbench.runs.launching.launcher import Attempt, write_attempt
from workbench.runs.run import Run

FAULTY = 9
"""An item that no plan reads before it starts."""


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _stop_iteration() -> None:
    next(iter(()))


def _leave() -> None:
    os._exit(3)


def _leave_in_order() -> None:
    os._exit(0)


def _unreadable() -> None:
    raise Unreadable


class Items:
    """Items of which one has a fault, in ranks alone."""

    def __init__(self, fault: Callable[[], Any] | None = None, size: int = 32, **fields: torch.Tensor) -> None:
        self.fault, self.size, self.fields = fault, size, fields

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= 32:
            raise IndexError("list index out of range")
        if index == FAULTY and "RANK" in os.environ:
            if self.fault is not None:
                self.fault()
            return {"x": torch.ones(4), "y": torch.tensor(index % 4), **self.fields}
        return {"x": torch.full((4,), float(index)), "y": torch.tensor(index % 4)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return functional.cross_entropy(x, y)


class WithConstant(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.tensor([2.0], device=x.device), y)


class Cached(Net):
    """A table that forward makes when it is first called, kept in a buffer that was None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(4, 4, device=x.device).tril().sum(0)
        return super().forward(x * self.table, y)


class WithEmpty(Net):
    """A parameter without elements, as of a model that was pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.pruned = nn.Parameter(torch.zeros(4, 0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x + (self.pruned @ self.pruned.T).sum(), y)


class Packed(nn.Module):
    """Packs sequences in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(1, 4, batch_first=True)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        lengths = 1 + y % 4
        packed = nn.utils.rnn.pack_padded_sequence(x[:, :, None], lengths.cpu(), batch_first=True, enforce_sorted=False)
        found, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        x = found.mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return functional.cross_entropy(x, y)


def _asked(data: Any, model: Any = Net, **changes: Any) -> Experiment:
    fields = {"steps": 16, "global_batch": 4, "seq_len": 1, "project": "", "name": "faulty"}
    return Experiment.of(model=model, data=data, **{**fields, **changes})


@pytest.mark.parametrize(
    ("model", "division"),
    [
        (WithConstant, {"pipeline": 2}),
        (Packed, {"pipeline": 2}),
        (Cached, {"data": 2, "zero": 0}),
        (WithEmpty, {"data": 2, "zero": 1}),
        (WithEmpty, {"data": 2, "zero": 3}),
    ],
)
def test_a_plan_that_is_offered_runs(model: Any, division: dict[str, int], tmp_path: Path) -> None:
    asked = _asked(Items(), model, steps=1)
    run = trained(tmp_path / "run", asked, plan(asked, **division))
    [(loss, _, _)] = curve(run).values()
    batch = asked.data.reads(asked).dataset().__getitems__(list(range(4)))
    assert loss == pytest.approx(asked.build()(**batch).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Items(_stop_iteration), "DataError: Item 9 of the dataset raised StopIteration"),
        (Items(_unreadable), "Unreadable: its message cannot be read, because Unreadable.__str__ raises RuntimeError"),
        (Items(x=torch.ones(4).double()), "DataError: Items differ in the type of 'x': float32 and float64"),
        (Items(y=torch.tensor(7)), "IndexError: The label 7 is none of the classes that the loss is given"),
    ],
    ids=["stop iteration", "unreadable", "float64", "label"],
)
def test_a_fault_of_an_item_is_told_in_a_sentence(data: Any, said: str, tmp_path: Path) -> None:
    asked = _asked(data)
    run = directory(tmp_path / "run", asked, plan(asked, pipeline=1, micro_batch=4))
    with pytest.raises(AssertionError):
        Ranks(run, 1).wait()
    error = read_record(run.error(0))
    assert f"{error['type']}: {error['message']}".startswith(said)


@pytest.mark.parametrize(("fault", "code"), [(_leave, 3), (_leave_in_order, 0)])
def test_a_rank_that_leaves_without_a_word_is_the_cause_and_not_the_rank_that_misses_it(
    fault: Callable[[], None], code: int, tmp_path: Path
) -> None:
    asked = _asked(Items(fault))
    chosen = make_plan(asked, Cluster(CPU, 2, 2, LINK, LINK), data=2, zero=0)
    run = wb.launch(asked, chosen, directory=tmp_path / "run", progress=False)
    with pytest.raises(RunFailed, match=f"the process ended with exit code {code} before it could say why") as failed:
        run.wait(PATIENCE_S)
    assert "os._exit" in str(failed.value)
    assert "Its last activity was 'batch', in step" in str(failed.value)


def test_a_run_whose_folder_is_deleted_ends_and_is_not_made_again(tmp_path: Path) -> None:
    asked = _asked([{"x": torch.ones(4), "y": torch.tensor(index % 4)} for index in range(8)], steps=ENDLESS)
    run = wb.launch(asked, make_plan(asked, Cluster(CPU, 2, 2, LINK, LINK), data=2), directory=tmp_path / "run")
    eventually(lambda: last_step(run.directory) >= 2)
    records = processes.named(run.directory)
    assert len(records) >= 3
    eventually(lambda: shutil.rmtree(run.path, ignore_errors=True) or not run.path.exists())  # ranks write meanwhile
    eventually(lambda: not any(map(process_alive, (*records, *processes.named(run.directory)))))
    assert not run.path.exists()


def test_a_dataset_that_claims_too_many_items_is_refused_before_anything_starts() -> None:
    with pytest.raises(DataError, match=r"says that it has 1,000,000,000,000 items, and item [\d,]+ raised Index"):
        make_plan(_asked(Items(size=10**12)), Cluster(CPU, 1, 1, LINK, LINK))
    with pytest.raises(DataError, match=r"len\(\) of Items raised OverflowError"):
        make_plan(_asked(Items(size=10**30)), Cluster(CPU, 1, 1, LINK, LINK))


DIVERGING = {"learning_rate": 1e30, "warmup_steps": 2, "steps": ENDLESS}
"""The first step of the warm-up changes nothing, and the second one destroys the weights."""


@pytest.fixture(scope="module")
def chosen() -> Plan:
    """Return the plan of every run here: it depends on none of the fields that they change."""
    return plan(experiment())


def assert_saved_and_stopped(run: RunDir, ranks: Ranks, number: int) -> None:
    """Send a signal to the only rank, and assert that it has stopped with a checkpoint of its last step."""
    os.kill(ranks.processes[0].pid or 0, number)
    ranks.wait()
    [end] = [event for event in read_events(run.events) if event["type"] == "end"]
    assert step_of(complete_checkpoints(run.checkpoints)[-1]) == end["steps"]
    assert Run(run.path).status.state == "stopped"


def test_a_run_that_asks_for_it_trains_on_without_a_finite_loss_and_an_interrupt_saves_it(
    tmp_path: Path, chosen: Plan
) -> None:
    run = directory(tmp_path, experiment(**DIVERGING, stop_on_non_finite=False), chosen)
    ranks = Ranks(run, 1)
    reach(run, 8)
    assert not math.isfinite(curve(run)[8][0])
    assert_saved_and_stopped(run, ranks, signal.SIGINT)


def test_a_closed_terminal_saves_as_a_request_to_stop_does(tmp_path: Path, chosen: Plan) -> None:
    run = directory(tmp_path, experiment(steps=ENDLESS), chosen)
    ranks = Ranks(run, 1)
    reach(run, 2)
    assert_saved_and_stopped(run, ranks, signal.SIGHUP)


def test_a_run_that_was_rewound_never_returns_to_the_curve_that_it_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: Plan
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    gate = Gate(tmp_path / "gate", open_to=math.inf)
    asked = experiment(steps=12, checkpoint_every=3, keep_checkpoints=9, callbacks=[AtGate(gate.file)])
    run = write_attempt(Attempt(asked, chosen, directory=tmp_path / "run"))
    Ranks(run, 1).wait()
    whole = curve(run)
    with monkeypatch.context() as killed:  # between setting the later checkpoints aside and the rest
        killed.setattr(launcher, "what_was_started", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_attempt(Attempt(asked, chosen, resume=run.checkpoint(3)))
    assert launcher.checkpoint_of(run.path) == run.checkpoint(3)
    write_attempt(Attempt(asked, chosen, resume=run.checkpoint(3)))
    gate.open(8)
    ranks = Ranks(run, 1)
    eventually(lambda: 3 < max(curve(run)) < 12)
    ranks.kill(0)
    gate.open()
    assert run.checkpoint(12) not in complete_checkpoints(run.checkpoints)
    assert (run.path / "attempts" / "1" / "checkpoints" / "step-00000012" / "complete.json").exists()
    write_attempt(Attempt(asked, chosen, resume=run.path))
    Ranks(run, 1).wait()
    assert curve(run) == whole
