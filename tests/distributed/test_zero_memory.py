"""Bytes of tensors that each ZeRO stage holds on one of two replicas, counted while a step runs.

W is the size of the fp32 weights. Between two micro-batches no activation is alive, and after a first step the
optimiser has its two moments.
"""

from __future__ import annotations

import copy
import functools
import gc
from pathlib import Path

import pytest
import torch

import workbench as wb
from tests.distributed import real_worker, zoo
from tests.distributed.harness import launch
from tests.distributed.test_every_plan import MICRO_BATCH, Case, captured, captured_once, part_of, plan_of, trainer_of
from workbench.record.event_log import read_events
from workbench.runs.registry import measurements

Held = dict[str, float]


@pytest.fixture(scope="module")
def held() -> dict[int, Held]:
    """Return, for each ZeRO stage, the bytes at two moments as multiples of W."""
    found: dict[int, Held] = launch(_held, 2)
    return found


def test_between_micro_batches_each_zero_stage_holds_what_it_promises(held: dict[int, Held]) -> None:
    expected = {
        0: 1.0 + 2.0 + 2.0,  # weights, moments, gradients, and the buckets in which they will be reduced
        1: 0.5 + 1.0 + 1.0 + 1.0,  # shard of the weights, shards of the moments, whole weights, whole gradients
        2: 0.5 + 1.0 + 1.0 + 0.5,  # the gradients are a shard
        3: 0.5 + 1.0 + 0.0 + 0.5,  # no whole weights
    }
    assert {zero: held[zero]["between"] for zero in expected} == pytest.approx(expected, abs=0.12)


def test_zero_3_frees_each_block_after_its_forward(held: dict[int, Held]) -> None:
    """In the first forward of the last block, ZeRO 2 holds all whole weights, ZeRO 3 little more than that block's."""
    assert held[2]["forward"] - held[3]["forward"] > 0.5
    assert held[1]["forward"] == pytest.approx(held[2]["forward"], abs=0.05)


def _held(_rank: int) -> dict[int, Held]:
    gc.collect()
    gc.freeze()  # what was there before is not looked at
    model, graph = captured("bert")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    found = {}
    for zero in range(4):
        own, plan = copy.deepcopy(model), plan_of(graph, Case(data=2, zero=zero, num_microbatches=2))
        batch = zoo.batch("bert", plan.global_batch)
        before = _live_bytes() - weights  # without the copy of the model, whose weights the stages take
        trainer = trainer_of(own, graph, plan)
        part = part_of(trainer, batch)
        trainer.step(0, part)
        trainer.prepare_forward()
        seen: Held = {}

        def note(moment: str, seen: Held = seen, before: int = before) -> None:
            seen.setdefault(moment, (_live_bytes() - before) / weights)

        blocks = [module for stage in trainer.stages.stages for module in stage.block_modules()]
        forwards: list[int] = []

        def starts(*_: object, forwards: list[int] = forwards, note: object = note) -> None:
            forwards.append(1)
            if len(forwards) == 2:
                note("between")  # type: ignore[operator]

        handles = [
            trainer.stages.stages[0].register_forward_pre_hook(starts, prepend=True),
            blocks[-1].register_forward_hook(lambda *_, note=note: note("forward"), prepend=True),
        ]
        trainer.gradients(1, part)
        for handle in handles:
            handle.remove()
        found[zero] = seen
        del trainer, own, blocks, handles
        gc.collect()
    assert MICRO_BATCH == 2
    return found


def _live_bytes() -> int:
    """Return the bytes of all tensors of this process; tensors that share memory count once."""
    gc.collect()
    sizes = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":  # isinstance would ask proxies
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    local = getattr(tensor, "_local_tensor", tensor)
                    storage = local.untyped_storage()
                    sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


class Layers(torch.nn.Module):
    """Layers whose weights are many times as large as their activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((256,), index / 64)}


@pytest.mark.parametrize("degrees", [{}, {"data": 2, "zero": 0}])
def test_a_run_on_cpus_measures_the_tensors_that_its_plan_predicts(degrees: dict[str, int], tmp_path: Path) -> None:
    """Weights, gradients and two moments, with less than two layers' gradients beside the buckets that hold all."""
    experiment = wb.Experiment(model=Layers, data=Rows(), steps=5, global_batch=4, tracking=wb.Tracking(project=""))
    plan = real_worker.plan(experiment, **degrees)
    run = wb.runs.debug(experiment, plan, directory=tmp_path / "run", progress=False)
    events = [event for event in read_events(run.directory.events) if event["type"] == "memory"]
    weights, peaks = 6 * 256 * 256 * 4, {event["peak_bytes"] for event in events}
    assert all(event["counted"] for event in events)
    assert 4 * weights <= min(peaks) <= max(peaks) < (4 + 2 / 6) * weights
    assert plan.peak_bytes == pytest.approx(max(peaks), rel=0.15)
    assert measurements(run)["peak_bytes"] == {0: max(event["peak_bytes"] for event in events[-plan.world :])}


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_shard_of_a_weight_keeps_no_memory_of_the_rest(name: str) -> None:
    for key, held, needed in launch(_memory, 2, name, ahead=functools.partial(captured_once, name)):
        assert held == needed, f"{key}: {held} bytes are allocated for {needed}"


def _memory(_rank: int, name: str) -> list[tuple[str, int, int]]:
    model, graph = captured_once(name)
    stage = trainer_of(copy.deepcopy(model), graph, plan_of(graph, Case(tensor=2))).stages
    divided = [(key, p) for key, p in stage.model_parameters().items() if key in stage.shardings]
    assert divided
    return [(key, parameter.untyped_storage().nbytes(), parameter.nbytes) for key, parameter in divided]
