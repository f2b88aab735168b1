"""Whole tensors behind what a rank stores: sums over shards, all-gathers, and zeros in place of absent blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from workbench.execution.blocks.tensor_parallel import all_gather_shards, take_shard
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.parallel.sharding import full, is_sharded, local
from workbench.execution.parallel.stage import RankStages
from workbench.sparsity.kernels.index import to_compact, to_dense


class ShardedTensors:
    """Whole tensors of parameters that the data-parallel axis (ZeRO) and the tensor-parallel axis divide, or that are
    stored without their absent blocks.

    All ranks of both axes must call a method in the same order.
    """

    def __init__(self, stages: RankStages, coordinate: MeshCoordinate) -> None:
        self._stages, self._coordinate = stages, coordinate
        self.indices = stages.compact.indices
        """Index of each parameter that is stored without absent blocks, by name."""

    def summed(self, names: Sequence[str], parameters: Sequence[nn.Parameter], shares: torch.Tensor) -> torch.Tensor:
        """Return `shares` (…, one column for each parameter), each summed over the shards of its parameter.

        Of a parameter that an axis does not divide, the first rank of that axis counts alone.
        """
        here = self._coordinate
        axes = (
            ([is_sharded(p) for p in parameters], here.data_rank, here.data_mesh),
            ([name in self._stages.shardings for name in names], here.tensor_rank, here.tensor_mesh),
        )
        for divided, rank, mesh in axes:
            if any(divided):
                counts = torch.tensor([rank == 0 or each for each in divided], device=shares.device)
                shares = torch.where(counts, shares, 0.0)
                dist.all_reduce(shares, group=mesh.get_group())
        return shares

    def all_gathered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of a tensor that is stored like the parameter `name`."""
        if name in self.indices and tensor.ndim > 0:
            return to_dense(tensor, self.indices[name])
        whole, sharding = full(tensor), self._stages.shardings.get(name)
        if sharding is None or tensor.ndim == 0:
            return whole
        return all_gather_shards(whole, sharding, self._coordinate.tensor_group)

    def own_shard(self, name: str, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return what this rank stores of a whole tensor, as a plain tensor; `like` is sharded as the result is."""
        if name in self.indices:
            index = self.indices[name]
            return to_compact(whole.to(index.data.device), index)
        sharding = self._stages.shardings.get(name)
        mine = whole if sharding is None else take_shard(whole, sharding, self._coordinate.tensor_rank)
        if isinstance(like, DTensor):
            return local(distribute_tensor(mine, like.device_mesh, like.placements, src_data_rank=None))
        return mine
