"""Weights that come in bf16 are read as autocast reads fp32 ones: the same values, in the same types."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import zoo
from workbench.capture import Graph, build_meta, capture
from workbench.execution.blocks.autocast_types import read_as_autocast_reads
from workbench.execution.blocks.labelled_head import retarget
from workbench.tensors import TensorSpec

CPU = torch.device("cpu")
NAMES = ("bert", "gpt2", "llama", "t5", "vit", "swin", "deberta", "tied-everywhere")


def captured(name: str, batch: zoo.Batch) -> Graph:
    specs = {key: TensorSpec(key, tuple(v.shape), str(v.dtype).removeprefix("torch.")) for key, v in batch.items()}
    graph = capture(build_meta(zoo.MODELS[name]), specs)
    for block in graph.blocks:
        retarget(block.code, CPU)
    return graph


def sent(name: str, *, gathered: bool) -> list[torch.Tensor]:
    """What every block sends, of weights that are bf16, or the same numbers in fp32."""
    torch.manual_seed(0)
    batch = zoo.batch(name, 2)
    graph = captured(name, batch)
    model = zoo.MODELS[name]().train()
    weights = {key: value.detach().bfloat16() for key, value in model.named_parameters()}
    weights = weights if gathered else {key: value.float() for key, value in weights.items()}
    tensors = dict(model.named_buffers()) | dict(graph.constants)
    values: dict[str, torch.Tensor] = {}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for block in graph.blocks:
            code = read_as_autocast_reads(block.code, len(block.parameters)) if gathered else block.code
            arguments = [weights[key] for key in block.parameters] + [tensors[key] for key in block.buffers]
            arguments += [values[key] for key in block.receives] + [batch[key] for key in block.inputs]
            arguments += [torch.tensor(8.0) for _ in block.counts]
            values |= dict(zip(block.sends, code(*arguments), strict=True))
    return list(values.values())


@pytest.mark.parametrize("name", NAMES)
def test_blocks_send_what_autocast_makes_of_the_same_numbers(name: str) -> None:
    found, expected = sent(name, gathered=True), sent(name, gathered=False)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_tables_are_cast_where_they_are_looked_up_not_as_a_whole() -> None:
    batch = zoo.batch("gpt2", 2)
    block = captured("gpt2", batch).blocks[0]
    code = read_as_autocast_reads(block.code, len(block.parameters))
    tables = [node for node in code.graph.nodes if node.op == "placeholder"][: len(block.parameters)]
    assert {user.target for table in tables for user in table.users} == {torch.ops.aten.embedding.default}
