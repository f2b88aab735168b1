"""Runs of the real worker on GPUs: killed and resumed, resumed under another plan, from a damaged checkpoint; and when
its actions ran.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import real_worker
from tests.distributed.harness import AtGate, launch
from tests.distributed.real_worker import Ranks, curve, directory, plan, trained
from tests.distributed.test_every_plan import part_of
from tests.distributed.test_training import batch_of
from tests.gpu.machine import DEVICE, DEVICES, here, needs, together
from tests.gpu.test_equivalence import case, trainer_on_device
from tests.patience import PATIENCE_S, Gate, eventually
from workbench.base.units import GIB
from workbench.cost.hardware import Device
from workbench.execution.blocks.step_context import FIRST_RECORDED, ActionLog
from workbench.execution.checkpoint.files import complete_checkpoints
from workbench.execution.checkpoint.save_load import CheckpointStore, TrainingProgress
from workbench.execution.trainer import Trainer
from workbench.execution.worker import cap_memory, error_message
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.prediction import timeline
from workbench.record.event_log import read_events
from workbench.record.rundir import RunDir

STEPS, EVERY, LAST_LEG = 40, 10, 30
MACHINE = Device("test", DEVICE, 32 << 30, {"fp32": 5e13, "bf16": 5e14}, 3e12)
DATA: dict[str, tuple[str, dict[str, Any], bool]] = {
    "replicas": ("fp32", {"zero": 0}, False),
    "shards": ("bf16", {"zero": 3}, False),
    "compiled": ("bf16", {"zero": 1}, True),
    "recomputed": ("bf16", {"zero": 1, "recompute": "full"}, True),
    "recorded": ("bf16", {"zero": 0, "cuda_graphs": True}, True),
}
"""What is reduced by `DistributedDataParallel`, by FSDP2 and by hand; not compiled, to be quick, and compiled, as
training is by default."""


def experiment(precision: str, compiled: bool = False) -> Experiment:
    """With dropout. Deterministic, since the attention that torch takes otherwise adds up in no fixed order."""
    sizes = {"steps": STEPS, "checkpoint_every": EVERY, "keep_checkpoints": 9, "global_batch": 16}
    return real_worker.experiment(precision=precision, compile=compiled, deterministic=True, **sizes)


def divided(kind: str) -> tuple[Experiment, Plan]:
    """Over all devices."""
    precision, degrees, compiled = DATA[kind]
    asked = experiment(precision, compiled)
    if DEVICE == "cpu":
        degrees = {name: value for name, value in degrees.items() if name != "cuda_graphs"}
    return asked, plan(asked, device=MACHINE, data=DEVICES, **degrees)


class Unbroken(dict[str, RunDir]):
    """One run to the end of each kind, trained when it is first asked for."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        super().__init__()
        self._make_folder = make_folder

    def __missing__(self, kind: str) -> RunDir:
        self[kind] = trained(self._make_folder(kind), *divided(kind), device=DEVICE)
        return self[kind]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    return Unbroken(tmp_path_factory.mktemp)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[needs(2 if degrees["zero"] else 1), together(kind)])
        for kind, (_, degrees, _) in DATA.items()
    ],
)
def test_a_killed_run_repeats_the_curve_of_an_unbroken_one_to_the_last_bit(
    kind: str, unbroken: Unbroken, tmp_path: Path
) -> None:
    asked, chosen = divided(kind)
    gate = Gate(tmp_path / "gate", open_to=EVERY + 7)
    asked = asked.replace(callbacks=[AtGate(gate.file)])
    run = directory(tmp_path, asked, chosen)
    with Ranks(run, chosen.world, DEVICE) as ranks:
        real_worker.reach(run, EVERY + 7)
        eventually(lambda: complete_checkpoints(run.checkpoints))
        ranks.kill(first=chosen.world - 1)
    newest = complete_checkpoints(run.checkpoints)[-1]
    gate.open()
    run = trained(tmp_path, asked, chosen, newest, device=DEVICE)
    assert [event["resumed_from"] for event in read_events(run.events) if event["type"] == "start"][-1] == str(newest)
    expected = curve(unbroken[kind])
    assert len(expected) == STEPS
    assert curve(run) == expected


@needs(2)
@together("replicas")
def test_every_rank_has_a_device_of_its_own(unbroken: Unbroken) -> None:
    devices = {event["device"] for event in read_events(unbroken["replicas"].events) if event["type"] == "memory"}
    assert len(devices) == DEVICES
    assert all(name.startswith("cuda:" if DEVICE == "cuda" else "CPU") for name in devices)


@pytest.mark.skipif(DEVICE == "cpu", reason="the host's memory is not capped")
def test_a_memory_limit_holds_on_the_device() -> None:
    below, above = launch(_allocated_under_a_limit, 1, device=DEVICE)
    assert below
    assert "memory_limit_gib=" in above


def _allocated_under_a_limit(_rank: int) -> tuple[bool, str]:
    """(whether seven eighths of a limit of 8 GiB could be had, what is said of a quarter more than it)"""
    limited = dataclasses.replace(plan(experiment("fp32"), device=MACHINE), memory_limit_bytes=8 * GIB)
    cap_memory(limited, here())
    fits = torch.empty(7 * GIB, dtype=torch.uint8, device=here()).is_cuda
    try:
        torch.empty(10 * GIB, dtype=torch.uint8, device=here())
    except torch.OutOfMemoryError as error:
        return fits, error_message(error, limited)
    return fits, ""


@needs(2)
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Steps reduce over the devices' group while the save talks over its own; what is saved is where it began."""
    steps, continued, repeated = launch(_steps_beside_a_save, 2, tmp_path, device=DEVICE)
    assert steps == 3
    assert continued == repeated


def _steps_beside_a_save(rank: int, path: Path) -> tuple[int, list[float], list[float]]:
    """(steps while a save was written, their losses, losses of the same steps from the checkpoint).

    The save of rank 0 stops halfway until the steps are done, and that of rank 1 waits for it in a collective.
    """
    first, second = trainer_on_device(case(data=2)), trainer_on_device(case(data=2))
    for step in range(3):
        _loss(first, step)
    checkpoints, goes_on = CheckpointStore(first, RunDir(path)), threading.Event()

    def halfway(store: CheckpointStore, written: Path, digests: Any = CheckpointStore._digests) -> Any:
        assert rank == 1 or goes_on.wait(PATIENCE_S)
        return digests(store, written)

    done, losses = 0, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "_digests", halfway)
        checkpoints.save(TrainingProgress(1, 0.0))
        for step in range(3):
            losses.append(_loss(first, step))
            done += not checkpoints.is_idle
        goes_on.set()
        checkpoints.finish()
    loaded = CheckpointStore(second, RunDir(path)).load(RunDir(path).checkpoint(1))
    assert loaded == TrainingProgress(1, 0.0)
    return done, losses, [_loss(second, step) for step in range(3)]


def _loss(trainer: Trainer, step: int) -> float:
    batch = {name: value.to(here()) for name, value in batch_of("bert", step).items()}
    return float(trainer.step(step, part_of(trainer, batch)).scalars[0])


def resumed_from_the_last_leg(unbroken: RunDir, path: Path, asked: Experiment, chosen: Plan) -> RunDir:
    """A run directory with the checkpoints of an unbroken run up to `LAST_LEG`, to be resumed from the newest."""
    for step in range(EVERY, LAST_LEG + 1, EVERY):
        shutil.copytree(unbroken.checkpoint(step), RunDir(path).checkpoint(step))
    return directory(path, asked, chosen, RunDir(path).checkpoint(LAST_LEG))


@needs(2)
@together("shards")
def test_a_damaged_checkpoint_is_passed_over_for_the_last_good_one(unbroken: Unbroken, tmp_path: Path) -> None:
    asked, chosen = divided("shards")
    run = resumed_from_the_last_leg(unbroken["shards"], tmp_path, asked, chosen)
    truncated, flipped = (sorted(run.checkpoint(step).glob("*.distcp"))[-1] for step in (LAST_LEG, LAST_LEG - EVERY))
    truncated.write_bytes(truncated.read_bytes()[:-10])
    content = bytearray(flipped.read_bytes())
    content[-10] ^= 1
    flipped.write_bytes(content)
    Ranks(run, chosen.world, DEVICE).wait()
    events = read_events(run.events)
    problems = [event["message"] for event in events if event["type"] == "checkpoint_problem"]
    assert len(problems) == 2
    assert "bytes instead of" in problems[0]
    assert "does not hold what was written" in problems[1]
    [start] = [event for event in events if event["type"] == "start"]
    assert start["resumed_from"] == str(run.checkpoint(EVERY))
    assert curve(run) == {step: row for step, row in curve(unbroken["shards"]).items() if step > EVERY}


@pytest.fixture(scope="module")
def repartitioned(unbroken: Unbroken, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, RunDir]:
    """The last steps of the replicas' run as two stages (of two replicas, with four devices)."""
    asked = experiment("fp32")
    chosen = plan(asked, device=MACHINE, pipeline=2, data=DEVICES // 2, zero=0)
    run = resumed_from_the_last_leg(unbroken["replicas"], tmp_path_factory.mktemp("stages"), asked, chosen)
    Ranks(run, chosen.world, DEVICE).wait()
    return chosen, run


@needs(2)
@together("replicas")
def test_a_run_of_replicas_goes_on_as_stages(unbroken: Unbroken, repartitioned: tuple[Plan, RunDir]) -> None:
    """Optimiser, learning rate, place in the data and dropout are those of the run that never stopped."""
    found, expected = curve(repartitioned[1]), curve(unbroken["replicas"])
    assert list(found) == list(range(LAST_LEG + 1, STEPS + 1))
    first = LAST_LEG + 1
    assert found[first] == pytest.approx(expected[first], rel=1e-5)
    for step, (loss, norm, rate) in found.items():
        assert expected[step] == (pytest.approx(loss, rel=1e-4), pytest.approx(norm, rel=1e-3), rate), step


@needs(2)
@together("replicas")
def test_recorded_actions_are_ordered_and_cover_the_step(repartitioned: tuple[Plan, RunDir]) -> None:
    chosen, run = repartitioned
    events = read_events(run.events)
    recorded = sorted((e for e in events if e["type"] == "actions"), key=lambda event: event["rank"])
    step = LAST_LEG + FIRST_RECORDED + 1
    assert [(event["rank"], event["step"]) for event in recorded] == [(0, step), (chosen.data, step)]
    [step_ms] = [event["step_ms"] for event in events if event["type"] == "step" and event["step"] == step]
    assert step_ms is not None
    forwards: list[dict[int, float]] = []
    for lane, event in zip(timeline(chosen).lanes, recorded, strict=True):
        rows = event["actions"]
        assert [tuple(row[:3]) for row in rows] == [(a.type, a.stage, a.micro_batch) for a in lane]
        assert all(0 <= start <= end for *_, start, end in rows)
        assert all(end <= start for (*_, end), (*_, start, _) in itertools.pairwise(rows))
        assert 0.01 * step_ms <= rows[-1][-1] - rows[0][-2] <= step_ms, "in ms, whatever else the step waited for"
        origin_ms = 1e3 * event["origin_s"]
        forwards.append({row[2]: origin_ms + row[-1] for row in rows if row[0] == "F"})
    for micro_batch, end_ms in forwards[0].items():
        # A rank that is interrupted between its two clocks is off by that pause, which is a part of the step.
        assert end_ms <= forwards[1][micro_batch] + step_ms, "the second stage was ready before the first"


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU computes before it returns")
def test_an_action_lasts_as_long_as_its_kernels_not_as_its_launches() -> None:
    kernels_ms, recorded_ms, around_ms = launch(_one_action, 1, device=DEVICE)
    assert kernels_ms <= recorded_ms + 0.01
    assert recorded_ms <= around_ms + 0.01


def _one_action(_rank: int) -> tuple[float, float, float]:
    """Return what the device takes for the kernels of an action, what is recorded, and what it takes with both ends."""
    log, moments = ActionLog(here()), [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    moments[0].record()
    with log.action("F", 0, 0):
        moments[1].record()
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second, and its launch some microseconds
        moments[2].record()
    moments[3].record()
    [(*_, start, end)] = log.rows()
    return moments[1].elapsed_time(moments[2]), end - start, moments[0].elapsed_time(moments[3])
