"""Blocks given bf16 weights compute the same values, in the same types, as autocast does with fp32 weights."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import zoo
from workbench.capture import Graph, build_meta, capture
from workbench.capture.operations import retarget
from workbench.execution.blocks.weight_copies import match_autocast_types
from workbench.tensors import TensorSpec

CPU = torch.device("cpu")
NAMES = ("bert", "gpt2", "llama", "t5", "vit", "swin", "deberta", "tied-everywhere")


def captured(name: str, batch: zoo.Batch) -> Graph:
    specs = {key: TensorSpec(key, tuple(v.shape), str(v.dtype).removeprefix("torch.")) for key, v in batch.items()}
    graph = capture(build_meta(zoo.MODELS[name]), specs)
    for block in graph.blocks:
        retarget(block.code, CPU)
    return graph


def sent(name: str, *, bf16: bool) -> list[torch.Tensor]:
    """Return what every block sends, given bf16 weights or the same numbers in fp32."""
    torch.manual_seed(0)
    batch = zoo.batch(name, 2)
    graph = captured(name, batch)
    model = zoo.MODELS[name]().train()
    weights = {key: value.detach().bfloat16() for key, value in model.named_parameters()}
    weights = weights if bf16 else {key: value.float() for key, value in weights.items()}
    tensors = dict(model.named_buffers()) | dict(graph.constants)
    values: dict[str, torch.Tensor] = {}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for block in graph.blocks:
            code = match_autocast_types(block.code, len(block.parameters)) if bf16 else block.code
            arguments = [weights[key] for key in block.parameters] + [tensors[key] for key in block.buffers]
            arguments += [values[key] for key in block.receives] + [batch[key] for key in block.inputs]
            arguments += [torch.tensor(8.0) for _ in block.counts]
            values |= dict(zip(block.sends, code(*arguments), strict=True))
    return list(values.values())


@pytest.mark.parametrize("name", NAMES)
def test_blocks_with_bf16_weights_send_what_autocast_computes_from_the_same_numbers(name: str) -> None:
    found, expected = sent(name, bf16=True), sent(name, bf16=False)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_embedding_tables_stay_bf16_and_only_their_rows_are_cast() -> None:
    batch = zoo.batch("gpt2", 2)
    block = captured("gpt2", batch).blocks[0]
    code = match_autocast_types(block.code, len(block.parameters))
    tables = [node for node in code.graph.nodes if node.op == "placeholder"][: len(block.parameters)]
    assert {user.target for table in tables for user in table.users} == {torch.ops.aten.embedding.default}
