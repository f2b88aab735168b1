"""A stage frees values as soon as it can, and its blocks see only what they use."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from tests.distributed import zoo
from workbench.capture import Graph, capture, spec_of
from workbench.execution.blocks.block_module import BlockProgram
from workbench.execution.blocks.context import StepContext
from workbench.execution.parallel.stage import StageModule

CPU = torch.device("cpu")


def stage_of(name: str, first: int = 0) -> tuple[Graph, StageModule, zoo.Batch]:
    """Return a model from block `first` on as one uncompiled stage."""
    model = {**zoo.MODELS, "bert-half-frozen": zoo.bert_half_frozen}[name]().eval()
    batch = zoo.batch(name, 2)
    graph = capture(model, {key: spec_of(key, value) for key, value in batch.items()}, name=name)
    context = StepContext(0, CPU)
    context.loss_denominators = [torch.ones(()) for _ in graph.label_counts]
    stage = StageModule(
        graph,
        first,
        context,
        num_microbatches=1,
        parameters=dict(model.named_parameters()),
        buffers={**dict(model.named_buffers()), **graph.constants},
        programs=[BlockProgram(block, block.code) for block in graph.blocks[first:]],
    )
    return graph, stage, batch


@pytest.mark.parametrize("name", ["bert", "skips"])
def test_a_value_is_freed_when_no_later_block_reads_it(name: str) -> None:
    """The stage runs without autograd, which would keep the values that its backward needs."""
    graph, stage, batch = stage_of(name)
    made: dict[str, weakref.ref[torch.Tensor]] = {}
    alive: list[set[str]] = []

    def note(module: Any, _arguments: Any, sent: tuple[torch.Tensor, ...]) -> None:
        alive.append({name for name, value in made.items() if value() is not None})
        made.update({name: weakref.ref(value) for name, value in zip(module.block.sends, sent, strict=True)})

    for module in stage.block_modules():
        module.register_forward_hook(note)
    with torch.no_grad():
        stage(**batch)
    for block, values in zip(graph.blocks, alive, strict=True):
        before = {name for earlier in graph.blocks[: block.index] for name in earlier.sends}
        assert values == before & {name for later in graph.blocks[block.index :] for name in later.receives}
    assert max(map(len, alive)) < len(graph.values) - 1, "some value was freed"


@pytest.mark.parametrize(("name", "borrowing"), [("bert", 2), ("albert", 6)])
def test_a_block_is_given_the_shared_parameters_that_it_uses_and_no_others(name: str, borrowing: int) -> None:
    """FSDP2 makes a gradient, of zeros if need be, for every parameter that a block is given."""
    graph, stage, batch = stage_of(name)
    given: list[set[str]] = []
    for module in stage.block_modules():
        module.register_forward_pre_hook(lambda _, arguments: given.append(set(arguments[0])))
    stage(**batch)
    uses = Counter(name for block in graph.blocks for name in block.parameters)
    shared = {name for name, times in uses.items() if times > 1}
    assert given == [shared & set(block.parameters) for block in graph.blocks]
    assert sum(map(bool, given)) == borrowing


@pytest.mark.parametrize(("name", "asked"), [("bert", True), ("bert-half-frozen", False)])
def test_a_stage_computes_a_gradient_of_what_it_receives_only_where_something_before_it_is_trained(
    name: str, asked: bool
) -> None:
    """PyTorch's pipeline asks for a gradient of every received value."""
    _, stage, batch = stage_of(name, first=2)
    [received] = (torch.randn(spec.shape, requires_grad=True) for spec in stage.received)
    stage(received, **batch).backward()
    assert (received.grad is not None) == asked
    trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    assert trained
    assert all(parameter.grad is not None for parameter in trained)
