"""Replicas that all-reduce gradients without DDP obtain the means, in whatever buckets the gradients are reduced."""

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
from tests.distributed.test_every_plan import (
    BACKEND,
    MICRO_BATCH,
    ONE_BERT,
    Case,
    compiler,
    part_of,
    plan_of,
    trainer_of,
)
from workbench.execution import gradients as reducing
from workbench.execution.gradients import GradientAllReduce

EVERY_BUFFER_ALONE, BOTH_BUFFERS, ALL_TOGETHER = 0, 70, 1 << 30
STEPS = 2
FP32_BYTES = 4


@pytest.mark.parametrize("bucket_bytes", [EVERY_BUFFER_ALONE, BOTH_BUFFERS, ALL_TOGETHER])
def test_gradients_are_replaced_by_their_means_over_the_replicas(bucket_bytes: int) -> None:
    means = launch(_reduced, 2, bucket_bytes)
    assert len(means) == STEPS * 5
    for found, expected in means:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _reduced(rank: int, bucket_bytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    reducing.OVERLAPPED_BUCKET_BYTES = bucket_bytes
    group = dist.group.WORLD
    assert group is not None
    all_reduce, found = GradientAllReduce(group), []
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
        all_reduce.start(parameters[:2], [first])
        all_reduce.start(parameters[2:3], [second])
        assert len(all_reduce._running) == {EVERY_BUFFER_ALONE: 2, BOTH_BUFFERS: 1, ALL_TOGETHER: 0}[bucket_bytes]
        all_reduce.finish(parameters)
        assert parameters[4].grad is None
        for parameter, gradient, other in zip(parameters, gradients, others, strict=True):
            if parameter.grad is not None:
                found.append((parameter.grad.clone(), (gradient + other) / 2))
    return found


def test_the_number_of_buckets_with_copied_gradients_is_limited() -> None:
    most, wrong = launch(_many_small_buffers, 2)
    assert 0 < most <= reducing.MAX_COPIED_BUCKETS
    assert wrong == 0


def _many_small_buffers(rank: int) -> tuple[int, int]:
    """Return the largest number of copied buckets at once, and the number of wrong means."""
    reducing.OVERLAPPED_BUCKET_BYTES = 2 * FP32_BYTES
    group = dist.group.WORLD
    assert group is not None
    all_reduce, most = GradientAllReduce(group), 0
    parameters = [nn.Parameter(torch.zeros(())) for _ in range(6 * reducing.MAX_COPIED_BUCKETS + 1)]
    for index, parameter in enumerate(parameters):
        buffer = _in_a_buffer([parameter])
        buffer.fill_(index + rank)
        all_reduce.start([parameter], [buffer])
        most = max(most, sum(bucket.is_copy for bucket in all_reduce._running))
    all_reduce.finish(parameters)
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


def test_the_gradients_of_a_capturable_block_are_reduced_after_its_last_backward() -> None:
    handed, names, difference, freed = launch(_reduced_in_a_trainer, 2, ahead=ONE_BERT)
    assert names
    for of_step in handed:
        assert sorted(itertools.chain(*(found for found, _ in of_step))) == sorted(names)
        assert [left for _, left in of_step] == list(reversed(range(len(of_step)))), (
            "once per block, while other blocks have backwards to come"
        )
    assert difference == 0.0
    assert freed, "the next step must not begin with the gradients of the previous one"


@compiler(BACKEND)
def _reduced_in_a_trainer(_rank: int) -> tuple[list[list[tuple[list[str], int]]], list[str], float, bool]:
    """Train with and without overlapped reduction, and return four results.

    By step and block: the parameters whose reduction started, and the number of blocks with a backward to come. Then
    the parameters of capturable blocks; the largest difference between the two trainings' gradients; and True if the
    next step begins without the gradients.
    """
    (model, graph), batch = ONE_BERT(), zoo.batch("bert", 4 * MICRO_BATCH)
    plan = plan_of(graph, Case(data=2, num_microbatches=2, compile=True, cuda_graphs=True))
    reducing.OVERLAPPED_BUCKET_BYTES = EVERY_BUFFER_ALONE
    overlapped, late = (trainer_of(copy.deepcopy(model), graph, plan, compiles=True) for _ in range(2))
    graphs = overlapped.context.cuda_graphs
    assert graphs is not None
    assert graphs.on_last_backward is not None
    assert late.context.cuda_graphs is not None
    late.context.cuda_graphs.on_last_backward = None
    [stage] = overlapped.stages.stages
    name_of = {parameter: name for name, parameter in overlapped.stages.model_parameters().items()}
    backwards: list[list[tuple[list[str], int]]] = []
    held: list[weakref.ref[torch.Tensor]] = []

    def on_last_backward(parameters: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor]) -> None:
        spans = [(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) for buffer in buffers]
        for parameter in parameters:
            assert parameter.grad is not None
            assert any(begin <= parameter.grad.data_ptr() < end for begin, end in spans)
        held.extend(weakref.ref(buffer) for buffer in buffers)
        left = sum(of_block.num_backwards < plan.num_microbatches for of_block in graphs._gradients.values())
        backwards[-1].append(([name_of[parameter] for parameter in parameters], left))
        start(parameters, buffers)

    start, graphs.on_last_backward = graphs.on_last_backward, on_last_backward
    worst = 0.0
    for step in range(STEPS):
        backwards.append([])
        for trainer in (overlapped, late):
            trainer.gradients(step, part_of(trainer, batch))
        for name, parameter in overlapped.stages.model_parameters().items():
            assert parameter.grad is not None
            other = late.stages.model_parameters()[name].grad
            assert other is not None
            worst = max(worst, float((parameter.grad - other).abs().max()))
    assert any(buffer() is not None for buffer in held)
    overlapped.optimizer.zero_grad(set_to_none=True)
    graphs.begin_step()
    own = [name for block in stage.block_modules() if block.is_capturable for name in block.exclusive_parameters]
    return backwards, own, worst, all(buffer() is None for buffer in held)
