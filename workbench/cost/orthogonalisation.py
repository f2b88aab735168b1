"""The time in which the ranks of a stage orthogonalise its matrices, as `workbench.optimizers.muon` does it.

The ranks that hold a stage share its matrices out; or each does all of them, which is faster where products take less
time than a collective. Both the planner and the runtime ask here. Numbers may be arrays, one entry for each stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.cost.hardware import Cluster
from workbench.cost.memory import BF16, FP32, IN_TRANSIT_BYTES
from workbench.cost.profile import ADAMW
from workbench.strategy import Strategy

ROUND_ELEMENTS = IN_TRANSIT_BYTES // ADAMW
"""Number of elements of a round (`workbench.optimizers.adamw.BATCH_ELEMENTS`)."""
PRODUCTS = 15
"""Number of products that orthogonalise a batch of matrices of one shape: three in each of five iterations."""


@dataclass(frozen=True)
class Matrices:
    """The matrices of a stage, or of each of many stages."""

    flops: Any
    """FLOPs of the products that orthogonalise all of them."""
    elements: Any
    divided_elements: Any
    """Elements of those that the tensor-parallel axis divides."""
    largest_flops: Any
    """FLOPs of the one that takes longest."""
    shapes: int
    """Number of different shapes, each of which makes a batch of its own."""


def orthogonalisation_s(matrices: Matrices, strategy: Strategy, cluster: Cluster) -> Any:
    """Return the seconds in which the matrices of a stage are orthogonalised, exchange included, once a step."""
    alone = _products_s(matrices, cluster, 1)
    ranks = strategy.data * strategy.tensor
    if ranks == 1:
        return alone
    shared = _products_s(matrices, cluster, ranks) + _exchange_s(matrices, strategy, cluster)
    return shared if strategy.shards or strategy.tensor > 1 else np.minimum(alone, shared)


def shares_out(matrices: Matrices, strategy: Strategy, cluster: Cluster) -> bool:
    """Return True if the ranks of a stage share its matrices out, False if each orthogonalises all of them."""
    if strategy.data * strategy.tensor == 1:
        return False
    is_divided = strategy.shards or strategy.tensor > 1
    return is_divided or bool(orthogonalisation_s(matrices, strategy, cluster) < _products_s(matrices, cluster, 1))


def _products_s(matrices: Matrices, cluster: Cluster, ranks: int) -> Any:
    """Return the seconds of the products of the rank that has most to do, where so many ranks share them."""
    device, tuned = cluster.device, cluster.device.efficiency
    flops = np.maximum(matrices.flops / ranks, matrices.largest_flops)
    batches = matrices.shapes + matrices.elements / ranks / ROUND_ELEMENTS
    half = PRODUCTS * batches * tuned.gemm_half_flops * (flops > 0)
    return (flops + half) / (device.peak("bf16" if device.type == "cuda" else "fp32") * tuned.gemm)


def _exchange_s(matrices: Matrices, strategy: Strategy, cluster: Cluster) -> Any:
    """Return the seconds in which shards reach their owners, and results all ranks that hold a shard.

    Of a matrix that `sources` ranks hold in parts, an owner receives all other parts of its own 1 / ranks of the
    matrices, and every rank its part of all that others own.
    """
    ranks, rows = strategy.data * strategy.tensor, strategy.data if strategy.shards else 1
    link = cluster.group_link(ranks, 1)
    whole = (matrices.elements - matrices.divided_elements, rows), (matrices.divided_elements, rows * strategy.tensor)
    moved = sum(
        elements * ((sources - 1) / sources / ranks + (ranks - 1) / ranks / sources) for elements, sources in whole
    )
    each = BF16 if cluster.device.type == "cuda" else FP32
    rounds = np.ceil(matrices.elements / ranks / ROUND_ELEMENTS)
    collectives = 2 if strategy.shards or strategy.tensor > 1 else 1
    return collectives * rounds * (ranks - 1).bit_length() * link.latency_s + each * moved / link.bandwidth
