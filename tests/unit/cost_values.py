"""Small captured models and a hand-made profile for the tests of cost and planning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from workbench import models
from workbench.base.tensors import TensorSpec
from workbench.capture import Graph, build_meta, capture
from workbench.cost.profile import GEMM, STREAM, BlockCost, BlockTypeCost, Kernel, Profile


def bert(**changes: Any) -> Any:
    return models.bert(
        **{"hidden_size": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 512, "max_positions": 64, **changes}
    )


def gpt2(**changes: Any) -> Any:
    return models.gpt2(
        **{"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 512, "max_positions": 64, **changes}
    )


def batch_of(model: Any, samples: int, seq_len: int) -> dict[str, TensorSpec]:
    names = ("input_ids", "labels") if model.objective == "clm" else ("input_ids", "token_type_ids", "labels")
    batch = {name: TensorSpec(name, (samples, seq_len), "int64") for name in names}
    if model.objective == "mlm_nsp":
        batch["next_sentence_label"] = TensorSpec("next_sentence_label", (samples,), "int64")
    return batch


def graph_of(model: Any, samples: int = 2, seq_len: int = 32) -> Graph:
    return capture(build_meta(model.build), batch_of(model, samples, seq_len), name=model.name)


def layered_profile(layers: int = 12, elements: int = 50_000_000, vocabulary: int = 60_000_000) -> Profile:
    """Return a profile of an embedding, equal layers and a head that shares the embedding's table, in bf16."""
    layer = BlockTypeCost(
        block_type="layer",
        forward=(Kernel(GEMM, 1024.0 * elements, 30e6, 2.0 * elements, 6), Kernel(STREAM, 0, 60e6, 6.0 * elements, 4)),
        backward=(
            Kernel(GEMM, 1024.0 * elements, 30e6, 2.0 * elements, 6),
            Kernel(GEMM, 1024.0 * elements, 30e6, 2.0 * elements, 6),
            Kernel(STREAM, 0, 90e6, 18.0 * elements, 6),
        ),
        model_flops=1024.0 * elements,
        model_backward_flops=2048.0 * elements,
        saved_bytes=35e6,
        workspace_bytes=9e6,
        weight_copy_bytes=2.0 * elements,
        products_bytes=18e6,
    )
    embedding = BlockTypeCost(
        "embedding", (Kernel(STREAM, 0, 10e6, 0),), (Kernel(STREAM, 0, 10e6, 4e8),), 0, 5e6, 4e6, 0
    )
    head = BlockTypeCost(
        block_type="head",
        forward=(Kernel(GEMM, 1024.0 * vocabulary, 70e6, 2.0 * vocabulary),),
        backward=(
            Kernel(GEMM, 1024.0 * vocabulary, 70e6, 2.0 * vocabulary),
            Kernel(GEMM, 1024.0 * vocabulary, 70e6, 2.0 * vocabulary),
        ),
        model_flops=1024.0 * vocabulary,
        model_backward_flops=2048.0 * vocabulary,
        saved_bytes=70e6,
        workspace_bytes=90e6,
        weight_copy_bytes=2.0 * vocabulary,
    )
    blocks = [BlockCost("embeddings", 0, ("table",), 0.0)]
    blocks += [BlockCost(f"layer.{i}", 1, (f"layer.{i}.weight",), 4e6) for i in range(layers)]
    blocks.append(BlockCost("head", 2, ("table", "head.bias"), 4e6))
    sizes = {"table": vocabulary, "head.bias": 30_000} | {f"layer.{i}.weight": elements for i in range(layers)}
    crossing = (0.0, *([4e6] * (layers + 1)), 0.0)
    return Profile(
        "layered", "0" * 16, "bf16", "cuda", True, (embedding, layer, head), tuple(blocks), sizes, frozenset(), crossing
    )


def uneven_profile(seed: int, layers: int = 6) -> Profile:
    """Return `layered_profile` with layers that differ in time, parameters, activations and bytes sent."""
    rng = np.random.default_rng(seed)
    even = layered_profile(layers, elements=40_000_000, vocabulary=int(rng.integers(1, 120)) * 10**6)
    embedding, layer, head = even.block_types
    sizes, kinds, blocks = dict(even.parameters), [embedding, head], [even.blocks[0]]
    for index in range(layers):
        work, weight, kept = rng.uniform((2.0, 0.2, 0.2), (40.0, 3.0, 3.0))
        sizes[f"layer.{index}.weight"] = int(40e6 * weight)
        kinds.append(
            replace(
                layer,
                forward=tuple(replace(kernel, flops=kernel.flops * work) for kernel in layer.forward),
                backward=tuple(replace(kernel, flops=kernel.flops * work) for kernel in layer.backward),
                saved_bytes=layer.saved_bytes * kept,
                products_bytes=layer.products_bytes * kept,
                weight_copy_bytes=layer.weight_copy_bytes * weight,
            )
        )
        blocks.append(
            replace(even.blocks[index + 1], block_type=len(kinds) - 1, input_bytes=4e6 * rng.uniform(0.2, 2.0))
        )
    blocks.append(replace(even.blocks[-1], block_type=1))
    crossing = (0.0, *(float(size) for size in rng.uniform(1e6, 9e6, layers + 1)), 0.0)
    return replace(
        even,
        block_types=tuple(kinds),
        blocks=tuple(blocks),
        parameters=sizes,
        crossing_bytes=crossing,
        signature=f"{seed:016}",
    )
