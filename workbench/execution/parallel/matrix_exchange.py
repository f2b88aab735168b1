"""The ways of matrices to the ranks that orthogonalise them, and of the results back to every rank's shards.

The ranks of one pipeline stage, its data-parallel and tensor-parallel axes together, own its matrices. A matrix that an
axis divides is brought together from all ranks of that axis; along an axis that replicates it the owner takes what it
has itself. Results return by an all-to-all of shards, or, where every rank holds every matrix whole, by an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from workbench.execution.blocks.tensor_parallel import take_shard
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.parallel.sharding import is_sharded
from workbench.execution.parallel.stage import RankStages
from workbench.optimizers.muon import working_type
from workbench.optimizers.parameters import Arriving, Owned


class ReplicaExchange:
    """Exchanges matrices among the ranks that hold the same stages, numbered `data_rank * tensor + tensor_rank`.

    Constructing one is a collective of all ranks.
    """

    def __init__(self, stages: RankStages, coordinate: MeshCoordinate) -> None:
        self._here, self._shardings = coordinate, stages.shardings
        self.ranks = coordinate.data * coordinate.tensor
        self.rank = coordinate.data_rank * coordinate.tensor + coordinate.tensor_rank
        parameters = stages.model_parameters()
        self._rows = {name for name, parameter in parameters.items() if is_sharded(parameter)}
        """Matrices whose rows the data-parallel axis divides, or those of their tensor-parallel shard."""
        self._shapes = {name: self.whole_shape(name, parameter) for name, parameter in parameters.items()}
        self._group, device = _group(coordinate), coordinate.data_mesh.device_type
        self._nothing = torch.empty(0, device=device, dtype=working_type(torch.device(device)))

    def whole_shape(self, name: str, parameter: nn.Parameter) -> torch.Size:
        shape, sharding = list(parameter.shape), self._shardings.get(name)
        if sharding is not None:
            shape[sharding.dim] = sum(sharding.segments)
        return torch.Size(shape)

    def is_source(self, name: str, owner: int) -> bool:
        return self.rank in self._sources(name, owner)

    def to_owners(self, owned: Owned, shards: Mapping[str, torch.Tensor]) -> Arriving:
        mine = owned[self.rank]
        if not any(self._is_divided(name) for names in owned for name in names):
            return lambda: {name: shards[name] for name in mine}
        outgoing = [
            [shards[name] for name in names if self.rank in self._sources(name, owner)]
            for owner, names in enumerate(owned)
        ]
        counts = [
            [self._shard_shape(name, source).numel() for name in mine if source in self._sources(name, self.rank)]
            for source in range(self.ranks)
        ]
        arriving = self._all_to_all(outgoing, counts)

        def wait() -> dict[str, torch.Tensor]:
            pieces = arriving()
            return {
                name: self._whole(name, {source: pieces[source].pop(0) for source in self._sources(name, self.rank)})
                for name in mine
            }

        return wait

    def from_owners(self, owned: Owned, whole: Mapping[str, torch.Tensor]) -> Arriving:
        mine = owned[self.rank]
        if not any(self._is_divided(name) for names in owned for name in names):
            return self._all_gather(owned, whole)
        outgoing = [[self._shard(name, whole[name], rank) for name in mine] for rank in range(self.ranks)]
        counts = [[self._shard_shape(name, self.rank).numel() for name in names] for names in owned]
        arriving = self._all_to_all(outgoing, counts)

        def wait() -> dict[str, torch.Tensor]:
            return {
                name: piece.view(self._shard_shape(name, self.rank))
                for names, pieces in zip(owned, arriving(), strict=True)
                for name, piece in zip(names, pieces, strict=True)
            }

        return wait

    # Shards

    def _is_divided(self, name: str) -> bool:
        return name in self._rows or name in self._shardings

    def _sources(self, name: str, owner: int) -> list[int]:
        """Return the ranks whose shards make a matrix whole, in ascending order."""
        data, tensor = divmod(owner, self._here.tensor)
        of_data = range(self._here.data) if name in self._rows else (data,)
        of_tensor = range(self._here.tensor) if name in self._shardings else (tensor,)
        return [d * self._here.tensor + t for d in of_data for t in of_tensor]

    def _shard_shape(self, name: str, rank: int) -> torch.Size:
        shape, sharding = list(self._shapes[name]), self._shardings.get(name)
        data, tensor = divmod(rank, self._here.tensor)
        if sharding is not None:
            shape[sharding.dim] = sharding.size(tensor)
        if name in self._rows:
            chunk = -(-shape[0] // self._here.data)
            shape[0] = max(0, min((data + 1) * chunk, shape[0]) - data * chunk)
        return torch.Size(shape)

    def _shard(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        sharding = self._shardings.get(name)
        data, tensor = divmod(rank, self._here.tensor)
        mine = whole if sharding is None else take_shard(whole, sharding, tensor)
        if name not in self._rows:
            return mine
        chunk = -(-mine.shape[0] // self._here.data)
        return mine[data * chunk : (data + 1) * chunk]

    def _whole(self, name: str, pieces: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return a matrix of flat shards by rank, which are all that make it whole."""
        shaped = {rank: piece.view(self._shard_shape(name, rank)) for rank, piece in pieces.items()}
        ranks_of: dict[int, list[int]] = {}
        for rank in shaped:
            ranks_of.setdefault(rank % self._here.tensor, []).append(rank)
        columns = {tensor: torch.cat([shaped[rank] for rank in ranks]) for tensor, ranks in ranks_of.items()}
        sharding = self._shardings.get(name)
        if sharding is None:
            return next(iter(columns.values()))
        whole = next(iter(columns.values())).new_empty(self._shapes[name])
        for tensor, shard in columns.items():
            pieces_of_shard = sharding.pieces(tensor)
            parts = shard.split([length for _, length in pieces_of_shard], sharding.dim)
            for (start, length), part in zip(pieces_of_shard, parts, strict=True):
                whole.narrow(sharding.dim, start, length).copy_(part)
        return whole

    # Collectives

    def _all_to_all(
        self, outgoing: Sequence[Sequence[torch.Tensor]], counts: Sequence[Sequence[int]]
    ) -> Callable[[], list[list[torch.Tensor]]]:
        """Start to send each rank its tensors; `counts` are the elements of those that each rank sends here."""
        sending = torch.cat([self._nothing, *(tensor.flatten() for tensors in outgoing for tensor in tensors)])
        sent = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
        received = [sum(each) for each in counts]
        arrived = self._nothing.new_empty(sum(received))
        work = dist.all_to_all_single(arrived, sending, received, sent, group=self._group, async_op=True)

        def wait(_alive: torch.Tensor = sending) -> list[list[torch.Tensor]]:
            work.wait()
            return [list(a.split(list(each))) for a, each in zip(arrived.split(received), counts, strict=True)]

        return wait

    def _all_gather(self, owned: Owned, whole: Mapping[str, torch.Tensor]) -> Arriving:
        """Start to send every rank the matrices that this rank owns; all ranks send as much as the one with most."""
        counts = [[self._shapes[name].numel() for name in names] for names in owned]
        sending = self._nothing.new_empty(max(map(sum, counts)))
        torch.cat(
            [whole[name].flatten() for name in owned[self.rank]] or [self._nothing],
            out=sending[: sum(counts[self.rank])],
        )
        name = self._group.group_name
        arriving = torch.ops._c10d_functional.all_gather_into_tensor(sending, self.ranks, name)

        def wait() -> dict[str, torch.Tensor]:
            arrived = torch.ops._c10d_functional.wait_tensor(arriving).view(self.ranks, -1)
            return {
                name: piece.view(self._shapes[name])
                for names, each, a in zip(owned, counts, arrived, strict=True)
                for name, piece in zip(names, a[: sum(each)].split(each), strict=True)
            }

        return wait


def _group(coordinate: MeshCoordinate) -> dist.ProcessGroup:
    """Return the group of the ranks that hold the same stages as this one."""
    if coordinate.tensor == 1:
        return coordinate.data_group
    if coordinate.data == 1:
        return coordinate.tensor_group
    size = coordinate.data * coordinate.tensor
    groups: list[dist.ProcessGroup] = [
        dist.new_group(list(range(first, first + size))) for first in range(0, coordinate.pipeline * size, size)
    ]
    return groups[coordinate.pipeline_rank]
