"""The weights that can be sharded over tensor-parallel devices follow from the captured blocks alone."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from workbench.base.tensors import TensorSpec
from workbench.capture import Graph, capture
from workbench.capture.blocks.tensor_parallel import ModelSharding, Sharding, plan_tensor_parallel

BATCH, SEQ, WIDTH, HEADS, VOCAB = 2, 8, 24, 6, 50
TOKENS = {name: TensorSpec(name, (BATCH, SEQ), "int64") for name in ("input_ids", "labels")}


def captured(model: nn.Module, batch: dict[str, TensorSpec] = TOKENS) -> Graph:
    return capture(model.train(), batch)


@functools.cache
def gpt2(heads: int = HEADS, tied: bool = True) -> Graph:
    config = tf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=2,
        n_head=heads,
        n_positions=SEQ,
        use_cache=False,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    return captured(tf.GPT2LMHeadModel(config))


def sharded_names(division: ModelSharding, part: str) -> set[str]:
    return {name for name in division.parameters if part in name}


@given(segments=st.lists(st.integers(1, 40), min_size=1, max_size=4), degree=st.integers(1, 8))
def test_every_index_of_a_sharded_dim_is_on_exactly_one_device(segments: list[int], degree: int) -> None:
    sharding = Sharding(0, tuple(segments), degree)
    held = [
        index
        for rank in range(degree)
        for start, length in sharding.pieces(rank)
        for index in range(start, start + length)
    ]
    assert sorted(held) == list(range(sum(segments)))
    assert [sharding.size(rank) for rank in range(degree)] == sorted(map(sharding.size, range(degree)), reverse=True)


def test_a_layer_is_sharded_into_columns_and_rows_with_two_reductions_each_way() -> None:
    graph = gpt2()
    division = plan_tensor_parallel(graph, 2)
    layer = next(i for i, block in enumerate(graph.blocks) if block.name == "transformer.h.0")
    found = {graph.blocks[layer].parameters[i]: s for i, s in division.blocks[layer].parameters.items()}
    prefix = "transformer.h.0"
    assert {name: (s.dim, s.segments) for name, s in found.items()} == {
        f"{prefix}.attn.c_attn.weight": (1, (WIDTH,) * 3),
        f"{prefix}.attn.c_attn.bias": (0, (WIDTH,) * 3),
        f"{prefix}.attn.c_proj.weight": (0, (WIDTH,)),
        f"{prefix}.mlp.c_fc.weight": (1, (4 * WIDTH,)),
        f"{prefix}.mlp.c_fc.bias": (0, (4 * WIDTH,)),
        f"{prefix}.mlp.c_proj.weight": (0, (4 * WIDTH,)),
    }
    activations = BATCH * SEQ * WIDTH
    assert division.blocks[layer].forward_elements == (activations,) * 2
    assert division.blocks[layer].backward_elements == (activations,) * 2


def test_attention_heads_stay_whole_and_the_mlp_is_sharded_all_the_same() -> None:
    division = plan_tensor_parallel(gpt2(heads=HEADS), 4)
    assert not sharded_names(division, ".attn."), "four devices cannot share six heads"
    assert len(sharded_names(division, ".mlp.")) == 2 * 3


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_a_tied_embedding_and_head_are_sharded_over_the_vocabulary_even_if_the_degree_does_not_divide_it(
    degree: int,
) -> None:
    graph = gpt2()
    division = plan_tensor_parallel(graph, degree)
    assert division.parameters["transformer.wte.weight"] == Sharding(0, (VOCAB,), degree)
    assert "transformer.wpe.weight" not in division.parameters
    assert sum(division.blocks[0].forward_elements) == BATCH * SEQ * WIDTH
    assert division.blocks[-1].forward_elements == (3 * BATCH * SEQ,), (
        "the cross-entropy reduces three numbers per label; logits are not moved"
    )


class Rotated(nn.Module):
    """A model whose loss needs every logit on one device; its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(self.table(input_ids), self.table.weight)
        return functional.cross_entropy(logits.cumsum(-1).flatten(0, 1), labels.flatten())


class Mixed(nn.Module):
    """Two pairs of products; one pair has an operation without a rule between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.over, self.back = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.down(functional.gelu(self.up(x)))
        x = self.back(self.over(x).roll(1, -1))
        return functional.cross_entropy(self.head(x), labels)


def test_a_parameter_that_cannot_be_sharded_everywhere_is_sharded_nowhere() -> None:
    assert plan_tensor_parallel(captured(Rotated()), 2).parameters == {}


def test_an_unknown_operation_leaves_its_columns_whole_and_no_others() -> None:
    batch = {"x": TensorSpec("x", (BATCH, WIDTH), "float32"), "labels": TensorSpec("labels", (BATCH,), "int64")}
    found = set(plan_tensor_parallel(captured(Mixed(), batch), 2).parameters)
    assert found >= {"up.weight", "up.bias", "down.weight"}
    assert not found & {"over.weight", "over.bias"}


def test_a_degree_of_one_shards_nothing() -> None:
    division = plan_tensor_parallel(gpt2(), 1)
    assert division.parameters == {}
    assert all(not block.divided for block in division.blocks)


def test_most_of_a_transformers_weight_is_sharded() -> None:
    for graph, degree in itertools.product((gpt2(), gpt2(tied=False)), (2, 3)):
        division = plan_tensor_parallel(graph, degree)
        held = sum(graph.parameters[name].numel for name in division.parameters)
        assert held > 0.95 * graph.parameter_count


class Experts(nn.Module):
    """Two products of experts; weights are stored with inputs last ("transposed") or outputs last ("as read")."""

    def __init__(self, stored: str, *, read_again: bool = False) -> None:
        super().__init__()
        self.stored, self.read_again = stored, read_again
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        up, down = (2, WIDTH, 4 * WIDTH), (2, 4 * WIDTH, WIDTH)
        up, down = (down, up) if stored == "transposed" else (up, down)
        self.up, self.down = nn.Parameter(torch.randn(up)), nn.Parameter(torch.randn(down))

    def matrices(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.transpose(1, 2) if self.stored == "transposed" else weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = self.table(input_ids).flatten(0, 1)
        ends = torch.tensor([6, BATCH * SEQ], dtype=torch.int32, device=rows.device)
        up = self.matrices(self.up)
        made = functional.gelu(torch.ops.workbench.grouped_mm(rows, up, ends))
        rows = rows + torch.ops.workbench.grouped_mm(made, self.matrices(self.down), ends)
        if self.read_again:
            rows = rows * up.mean()
        return functional.cross_entropy(self.head(rows), labels.flatten())


@pytest.mark.parametrize(("stored", "up", "down"), [("transposed", 1, 2), ("as read", 2, 1)])
def test_every_experts_matrices_are_sharded_as_a_layers_are(stored: str, up: int, down: int) -> None:
    division = plan_tensor_parallel(captured(Experts(stored)), 2)
    assert {name: division.parameters[name].dim for name in ("up", "down")} == {"up": up, "down": down}
    layers = [block for block in division.blocks if block.reduced]
    assert sum(block.forward_elements.count(BATCH * SEQ * WIDTH) for block in layers) == 2, "table, experts"


def test_experts_that_another_operation_reads_stay_whole() -> None:
    assert "up" not in plan_tensor_parallel(captured(Experts("transposed", read_again=True)), 2).parameters
