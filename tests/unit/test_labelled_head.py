"""A vocabulary head and its loss give the same numbers when they run on labelled rows only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.distributed import zoo
from workbench.capture import Block, Graph, capture, spec_of
from workbench.capture.losses import MAX_ROW_FRACTION, ROW_STEPS, RowwiseHead, find_rowwise_head
from workbench.cost.graph_profiler import profile_graph
from workbench.cost.hardware import Device
from workbench.execution.blocks.loss_runners import (
    LabelCounter,
    LabelledRows,
    labelled_first,
    restrict_to_labelled_rows,
)
from workbench.execution.build import runners

HEADS = {
    "bert": ["linear", "gelu", "layer_norm", "linear", "view", "cross_entropy_loss"],
    "gpt2": ["layer_norm", "view", "alias", "linear", "to", "view", "cross_entropy_loss"],
    "t5": ["to", "pow", "mean", "add", "rsqrt", "mul", "mul", "mul", "linear", "view", "cross_entropy_loss"],
    "bart": ["linear", "add", "view", "cross_entropy_loss"],
}
CPU = torch.device("cpu")
A100 = Device("A100", "cuda", 80 << 30, {"bf16": 312e12, "fp32": 19e12}, 2e12)


def captured(model: nn.Module, batch: zoo.Batch) -> Graph:
    return capture(model.train(), {name: spec_of(name, value) for name, value in batch.items()})


def head_of(graph: Graph) -> tuple[Block, RowwiseHead]:
    [found] = [(block, part) for block in graph.blocks if (part := find_rowwise_head(block)) is not None]
    return found


def arguments(graph: Graph, block: Block, labels: torch.Tensor) -> list[torch.Tensor]:
    """Return random weights and values for a block's code, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    specs = [graph.parameters[name] for name in block.parameters] + [graph.buffers[name] for name in block.buffers]
    specs += [graph.values[name] for name in block.receives]
    found = [torch.randn(spec.shape, generator=generator).requires_grad_() for spec in specs]
    inputs = {"labels": labels, "next_sentence_label": torch.tensor([0, 1])}
    counts = [torch.tensor(7.0) for _ in block.counts]
    return [*found, *(inputs[name] for name in block.inputs), *counts]


def outcome(run: Callable[..., Any], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the loss, then every gradient."""
    given = [value.detach().requires_grad_(value.requires_grad) for value in given]
    [loss] = run(*given)
    loss.backward()
    gradients = [torch.zeros_like(v) if v.grad is None else v.grad for v in given if v.requires_grad]
    return [loss.detach(), *gradients]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * max(1.0, theirs.norm().item())


def labels_of(rows: int, labelled: int, offset: int = 0) -> torch.Tensor:
    """Return two samples with `labelled` labels at positions that depend on `offset`."""
    generator = torch.Generator().manual_seed(offset)
    labels = torch.randint(0, zoo.VOCAB, (rows,), generator=generator)
    labels[torch.randperm(rows, generator=generator)[labelled:]] = -100
    return labels.view(2, -1)


@pytest.fixture(scope="module")
def graphs() -> Callable[[str], Graph]:
    made: dict[str, Graph] = {}

    def graph(name: str) -> Graph:
        if name not in made:
            made[name] = captured(zoo.MODELS[name](), zoo.batch(name, 2))
        return made[name]

    return graph


@pytest.mark.parametrize("name", HEADS)
def test_the_part_reaches_back_to_the_last_operation_that_mixes_rows(name: str, graphs: Callable[[str], Graph]) -> None:
    block, part = head_of(graphs(name))
    operations = {node.name: getattr(node.target, "_opname", "") for node in block.code.graph.nodes}
    assert [operations[member] for member in part.reads] == HEADS[name]


@pytest.mark.parametrize("name", HEADS)
def test_loss_and_gradients_are_those_of_all_rows(name: str, graphs: Callable[[str], Graph]) -> None:
    graph = graphs(name)
    block, part = head_of(graph)
    shift = 1 if name == "gpt2" else 0  # its labels are those of the next position: a sample's first is never used
    for labelled in (0, 1, 5, part.rows * 3 // 4):
        labels = labels_of(part.rows, labelled)
        labels[:, :shift] = -100
        given = arguments(graph, block, labels)
        kept = part.rows_to_compute(int((labels >= 0).sum()))
        assert kept is not None
        selected = restrict_to_labelled_rows(block.code, part, kept)
        assert_equal(outcome(selected, given), outcome(block.code, given))


class Head(nn.Module):
    """A model with a dropout, two products and an operation of choice between dropout and head."""

    def __init__(self, mixes: Callable[[torch.Tensor], torch.Tensor], **loss: Any) -> None:
        super().__init__()
        self.body, self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 12)
        self.mixes, self.loss = mixes, loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.mixes(self.inner(functional.dropout(self.body(x), 0.1))))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **self.loss)}


def head(mixes: Callable[[torch.Tensor], torch.Tensor], **loss: Any) -> list[str]:
    """Return the operations of `Head` that may run on labelled rows only."""
    batch = {"x": torch.randn(2, 16, 8), "labels": torch.randint(0, 12, (2, 16))}
    graph = captured(Head(mixes, **loss), batch)
    parts = [part for block in graph.blocks if (part := find_rowwise_head(block)) is not None]
    return [name.rsplit("_", 1)[0] if name[-1].isdigit() else name for part in parts for name in part.reads]


def test_operations_that_draw_random_numbers_or_mix_rows_run_on_all_rows() -> None:
    tail = ["linear", "flatten", "cross_entropy_loss"]
    assert head(torch.tanh) == ["linear", "tanh", *tail], "the dropout before it draws"
    assert head(lambda x: x.softmax(1)) == tail
    assert head(lambda x: x.cumsum(0)) == tail
    assert head(lambda x: x.transpose(0, 1).reshape(2, 16, 8)) == ["reshape", *tail], "another order"
    assert head(lambda x: x.reshape(2, 8, 16).reshape(2, 16, 8)) == tail, "in between, a row is half of two"
    assert head(lambda x: x + x.mean(1, keepdim=True)) == tail, "every row needs all of them"
    assert head(lambda x: x - torch.arange(16.0)[None, :, None]) == tail, "positions differ"
    assert head(lambda x: x * torch.arange(8.0)[None, None]) == ["linear", "mul", *tail], "features differ"


def test_weighted_smoothed_and_summed_losses_run_on_all_rows() -> None:
    assert head(torch.tanh, label_smoothing=0.1) == []
    assert head(torch.tanh, weight=torch.rand(12)) == []
    assert head(torch.tanh, reduction="sum") == []
    assert head(torch.tanh, ignore_index=3) != []


def test_at_most_sixteen_numbers_of_rows_are_ever_computed() -> None:
    part = RowwiseHead(0, 1000, -100, "labels", "loss", {}, frozenset())
    kept = [part.rows_to_compute(labels) for labels in range(1001)]
    assert all(rows is None or labels <= rows <= MAX_ROW_FRACTION * 1000 for labels, rows in enumerate(kept))
    assert kept[1000] is None
    assert kept[0] == 63, "a loss of no labels is still zero, not nothing"
    assert len(set(kept)) <= ROW_STEPS


def test_labelled_rows_come_first_and_each_row_once() -> None:
    labels = torch.tensor([-100, 4, -100, -100, 2, 0])
    position = labelled_first(labels, -100)
    assert position.tolist() == [3, 0, 4, 5, 1, 2]


def test_labels_are_counted_for_each_micro_batch_and_again_when_they_change(graphs: Callable[[str], Graph]) -> None:
    graph = graphs("gpt2")
    counter = LabelCounter(dict(enumerate(graph.label_counts)), micro_batch=2)
    batch = zoo.batch("gpt2", 6)
    expected = [int((part[:, 1:] >= 0).sum()) for part in batch["labels"].split(2)]
    assert counter.count(batch) == {0: expected}
    batch["labels"][:2] = -100
    assert counter.count(batch) == {0: [0, *expected[1:]]}


def test_a_head_is_compiled_once_per_number_of_rows_and_computes_the_same(graphs: Callable[[str], Graph]) -> None:
    graph = graphs("bert")
    block, part = head_of(graph)
    eager = copy.deepcopy(block.code)
    compilations = 0

    def backend(module: Any, _examples: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile
    for recompute in ("none", "full"):
        compilations = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", lambda code, **how: compiled(code, backend=backend, **how))
            run = runners(graph, {block.block_type: block.code}, CPU, True, recompute)[block.block_type]
            assert isinstance(run, LabelledRows)
            for labelled in [*range(part.rows + 1)] * 2:
                given = arguments(graph, block, labels_of(part.rows, labelled, offset=labelled))
                assert_equal(outcome(run.for_labels(labelled), given), outcome(eager, given))
        assert compilations == ROW_STEPS * MAX_ROW_FRACTION + 1, (
            "one for each sixteenth up to three quarters, one for all rows"
        )


def test_the_head_is_priced_for_the_labels_that_are_expected(graphs: Callable[[str], Graph]) -> None:
    graph = graphs("bert")
    whole, part = (profile_graph(graph, A100, "bf16", compiled=True, labelled_share=share) for share in (1.0, 0.15))
    assert part.flops_per_sample == whole.flops_per_sample, "MFU counts the model's arithmetic"
    *layers, head = zip(whole.blocks, part.blocks, strict=True)
    assert all(whole.block_types[a.block_type] == part.block_types[b.block_type] for a, b in layers)
    full, fewer = whole.block_types[head[0].block_type], part.block_types[head[1].block_type]
    flops = [sum(kernel.flops for kernel in (*kind.forward, *kind.backward)) for kind in (fewer, full)]
    assert flops[0] < 0.25 * flops[1], "3 of 16 rows, and the next-sentence head"
    assert fewer.saved_bytes + fewer.workspace_bytes < 0.5 * (full.saved_bytes + full.workspace_bytes)
