"""Replicas that average their gradients themselves have the means, however the gradients come together."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed import zoo
from tests.distributed.harness import launch
from tests.distributed.test_every_plan import MICRO_BATCH, Case, captured, part_of, plan_of, trainer_of
from workbench.execution.parallel import gradient_all_reduce as averaging
from workbench.execution.parallel.gradient_all_reduce import Averaging

EVERY_BUFFER_ALONE, BOTH_BUFFERS, ALL_TOGETHER = 0, 70, 1 << 30
STEPS = 2
NUMBER = 4
"""Bytes."""


@pytest.mark.parametrize("beside_bytes", [EVERY_BUFFER_ALONE, BOTH_BUFFERS, ALL_TOGETHER])
def test_gradients_are_replaced_by_their_means_over_the_replicas(beside_bytes: int) -> None:
    means = launch(_averaged, 2, beside_bytes)
    assert len(means) == STEPS * 5
    for found, expected in means:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _averaged(rank: int, beside_bytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    averaging.BESIDE_BYTES = beside_bytes
    group = dist.group.WORLD
    assert group is not None
    means, found = Averaging(group), []
    sizes = [(3, 4), (5,), (), (7, 2), (6,)]
    for step in range(STEPS):
        parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        parameters.append(nn.Parameter(torch.zeros(3, dtype=torch.float64)))
        first, second = _in_a_buffer(parameters[:2]), _in_a_buffer(parameters[2:3])
        for parameter in (parameters[3], parameters[5]):
            parameter.grad = torch.empty_like(parameter)
        gradients = [_drawn(parameter, index, rank, step) for index, parameter in enumerate(parameters)]
        others = [_drawn(parameter, index, 1 - rank, step) for index, parameter in enumerate(parameters)]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(gradient)
        means.begin(parameters[:2], [first])
        means.begin(parameters[2:3], [second])
        assert len(means._running) == {EVERY_BUFFER_ALONE: 2, BOTH_BUFFERS: 1, ALL_TOGETHER: 0}[beside_bytes]
        means.finish(parameters)
        assert parameters[4].grad is None
        for parameter, gradient, other in zip(parameters, gradients, others, strict=True):
            if parameter.grad is not None:
                found.append((parameter.grad.clone(), (gradient + other) / 2))
    return found


def test_no_more_copies_of_gradients_are_held_than_are_on_their_way() -> None:
    most, wrong = launch(_many_small_buffers, 2)
    assert 0 < most <= averaging.MOST_COPIES
    assert wrong == 0


def _many_small_buffers(rank: int) -> tuple[int, int]:
    """The most copies held at once, and how many of the means are wrong."""
    averaging.BESIDE_BYTES = 2 * NUMBER
    group = dist.group.WORLD
    assert group is not None
    means, most = Averaging(group), 0
    parameters = [nn.Parameter(torch.zeros(())) for _ in range(6 * averaging.MOST_COPIES + 1)]
    for index, parameter in enumerate(parameters):
        buffer = _in_a_buffer([parameter])
        buffer.fill_(index + rank)
        means.begin([parameter], [buffer])
        most = max(most, sum(bucket.is_copy for bucket in means._running))
    means.finish(parameters)
    found = [parameter.grad.item() for parameter in parameters if parameter.grad is not None]
    return most, sum(mean != index + 0.5 for index, mean in enumerate(found)) + len(parameters) - len(found)


def _in_a_buffer(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
    parts = buffer.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return buffer


def _drawn(parameter: nn.Parameter, index: int, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    return torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def test_the_gradients_of_a_recordable_block_are_averaged_from_its_last_backward_on() -> None:
    handed, names, difference, freed = launch(_handed_over, 2)
    assert names
    for of_step in handed:
        assert sorted(itertools.chain(*(found for found, _ in of_step))) == sorted(names)
        assert [left for _, left in of_step] == list(reversed(range(len(of_step)))), "not after each of them"
    assert difference == 0.0
    assert freed, "the next step begins with the gradients of the one before"


def _handed_over(_rank: int) -> tuple[list[list[tuple[list[str], int]]], list[str], float, bool]:
    """By step and block, the parameters handed over and how many blocks have a backward still to come; the parameters
    of blocks that can be recorded; how far the gradients are from those of the same steps where nothing is handed over;
    whether the next step begins without them."""
    (model, graph), batch = captured("bert"), zoo.batch("bert", 4 * MICRO_BATCH)
    plan = plan_of(graph, Case(data=2, num_microbatches=2, compile=True, cuda_graphs=True))
    averaging.BESIDE_BYTES = EVERY_BUFFER_ALONE
    beside, alone = (trainer_of(copy.deepcopy(model), graph, plan, compiles=True) for _ in range(2))
    graphs = beside.context.cuda_graphs
    assert graphs is not None
    assert graphs.finished is not None
    assert alone.context.cuda_graphs is not None
    alone.context.cuda_graphs.finished = None
    [stage] = beside.stage.stages
    name_of = {parameter: name for name, parameter in beside.stage.named().items()}
    backwards: list[list[tuple[list[str], int]]] = []
    held: list[weakref.ref[torch.Tensor]] = []

    def finished(parameters: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor]) -> None:
        spans = [(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) for buffer in buffers]
        for parameter in parameters:
            assert parameter.grad is not None
            assert any(begin <= parameter.grad.data_ptr() < end for begin, end in spans)
        held.extend(weakref.ref(buffer) for buffer in buffers)
        left = sum(of_block.backwards < plan.num_microbatches for of_block in graphs._gradients.values())
        backwards[-1].append(([name_of[parameter] for parameter in parameters], left))
        begin(parameters, buffers)

    begin, graphs.finished = graphs.finished, finished
    worst = 0.0
    for step in range(STEPS):
        backwards.append([])
        for trainer in (beside, alone):
            trainer.gradients(step, part_of(trainer, batch))
        for name, parameter in beside.stage.named().items():
            assert parameter.grad is not None
            worst = max(worst, float((parameter.grad - _gradient(alone.stage.named()[name])).abs().max()))
    assert any(buffer() is not None for buffer in held)
    beside.optimizer.zero_grad(set_to_none=True)
    graphs.begin_step()
    own = [name for block in stage.block_modules() if block.recordable for name in block.own]
    return backwards, own, worst, all(buffer() is None for buffer in held)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad
