"""The weights of a stage divided over ranks: FSDP2 (ZeRO 1, 2, 3) or DDP (ZeRO 0), and what is whole behind shards.

ZeRO 1 keeps all-gathered weights and unsharded gradients until the last micro-batch and reduces once. ZeRO 2 reduces
after every micro-batch. ZeRO 3 also all-gathers each block's weights anew for every forward and backward.

ZeRO 0 does not use `replicate`, which on an H200 keeps a second copy of every weight and takes 2 ms of Python per block
and step.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from workbench.execution.blocks.tensor_parallel import all_gather_shards, take_shard
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.parallel.stage import RankStages, StageModule
from workbench.optimizers.muon import working_type
from workbench.optimizers.parameters import Arriving, Owned
from workbench.optimizers.parameters import local as local
from workbench.sparsity.kernels.index import to_compact, to_dense


def distribute(stage: StageModule, mesh: DeviceMesh, zero: int, precision: str) -> nn.Module:
    """Return the module that the pipeline runs: `stage` itself, sharded in place if asked, or a wrapper around it.

    FSDP2 shards each block that has parameters, then the stage for the parameters that its blocks share. Under bf16 it
    all-gathers bf16 weights (half the traffic) and reduces fp32 gradients. Inputs of blocks are not cast: autocast
    decides per operation, as it does without sharding (`workbench.execution.blocks.block_module`). Parameters that
    FSDP2 cannot shard stay replicated, and `workbench.execution.gradients` reduces their gradients.
    Weights may still be in the host's memory: FSDP2 moves those of a block when it shards them.
    """
    is_divided = mesh.size() > 1 and any(parameter.requires_grad for parameter in stage.parameters())
    if is_divided and zero == 0:
        with warnings.catch_warnings():  # torch 2.13 deprecates `broadcast_buffers` without a substitute
            warnings.simplefilter("ignore", FutureWarning)
            replica = DistributedDataParallel(
                stage, process_group=mesh.get_group(), broadcast_buffers=False, gradient_as_bucket_view=True
            )
        # DDP begins with one bucket and divides it once, in the order in which its first backward makes gradients
        # ready. The order in which three or more replicas add a gradient depends on its position in a bucket, so that
        # the first step after a restart would differ in its last bits from the same step of an uninterrupted run.
        # Therefore it chooses its buckets now, in a backward of zeros. Autograd runs first what was computed last, so
        # the order is that of a real backward: the last block first, shared parameters last.
        parameters = [parameter for parameter in replica.parameters() if parameter.requires_grad]
        replica.reducer.prepare_for_backward([])
        # `real`, because a backward begins at a real number only.
        (0.0 * torch.stack([parameter.sum().real for parameter in parameters]).sum()).backward()
        for parameter in parameters:
            parameter.grad = None
        replica.reducer._rebuild_buckets()
        return replica
    if is_divided:
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if precision == "bf16" else None,
            reduce_dtype=torch.float32 if precision == "bf16" else None,
            cast_forward_inputs=False,
        )
        # One group of parameters for each block that has any, and last one of those that blocks share. A group has one
        # dtype, that of most of its bytes, and FSDP2 shards neither scalars nor empty tensors.
        groups = [*(block for block in stage.block_modules() if any(True for _ in block.parameters())), stage]
        replicated = set[nn.Parameter]()
        for module in groups:
            bytes_of: Counter[torch.dtype] = Counter()
            for p in module.parameters(recurse=False):
                bytes_of[p.dtype] += p.nbytes
            for p in module.parameters(recurse=False):
                if p.ndim == 0 or not p.numel() or p.dtype != bytes_of.most_common(1)[0][0]:
                    replicated.add(p)
        for module in groups:
            reshards = zero == 3 and module is not stage
            fully_shard(module, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy, ignored_params=replicated)
            sharded = [p for p in module.parameters(recurse=False) if isinstance(p, DTensor)]
            if sharded and mesh.device_type == "cuda":
                assert isinstance(module, FSDPModule)
                module.set_custom_reduce_scatter(_ReduceScatterToActivationMemory(sharded))
        # FSDP2 issues a block's all-gather when the host comes to that block, which is after it has launched the block
        # before. Issued one block earlier, it runs beside that block's kernels also where the host is no further than
        # its GPU. What is gathered, in which order and on which streams stays the same.
        for module, following in itertools.pairwise((stage, *groups[:-1])):
            assert isinstance(module, FSDPModule)
            assert isinstance(following, FSDPModule)
            module.set_modules_to_forward_prefetch([following])
    for parameter in stage.parameters():  # those that FSDP2 has not moved
        if parameter.device.type != mesh.device_type:
            parameter.data = parameter.data.to(mesh.device_type)
    return stage


class _ReduceScatterToActivationMemory(DefaultReduceScatter):
    """A reduce-scatter that writes gradients which stay until the optimiser's step to memory freed by activations.

    CUDA's caching allocator keeps memory for the stream that allocated it. FSDP2 allocates on the stream that reduces,
    so its sharded gradients would add to the memory that the backward frees (6.8 % of the 85 GiB of a scaled BERT on
    2 × H200). Memory of the computing stream is equally safe: the reducing stream has just waited for that stream, and
    nothing frees the gradients before the optimiser, which waits for the reduction. Results that are added to earlier
    gradients, or cast, are freed at once and stay with the reducing stream.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        stays = all(parameter.grad is None and parameter.dtype == dtype for parameter in self._parameters)
        stream = torch.cuda.default_stream(device) if stays else torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            return torch.empty(*size, dtype=dtype, device=device)


def end_forward_only(stage: StageModule) -> None:
    """Free the all-gathered weights of a stage that has run forward without a backward.

    Forget the order of that forward too, from which FSDP2 would prefetch weights in the next backward. The private
    names are those of torch 2.11 and 2.13.
    """
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            state = module._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group or None
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is not None:
                    group._post_forward_indices.clear()


def is_sharded(parameter: nn.Parameter | torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, all-gathered from its shards (a collective over its mesh)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Whole tensors behind what a rank stores: sums over shards, all-gathers, and zeros in place of absent blocks.


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
            # Which parameters are divided is equal on all ranks of an axis, and so is the number of all-reduces.
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

    def as_stored(self, name: str, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return what this rank stores of a whole tensor, as a plain tensor; `like` is sharded as the result is."""
        if name in self.indices:
            index = self.indices[name]
            return to_compact(whole.to(index.data.device), index)
        sharding = self._stages.shardings.get(name)
        mine = whole if sharding is None else take_shard(whole, sharding, self._coordinate.tensor_rank)
        if isinstance(like, DTensor):
            return local(distribute_tensor(mine, like.device_mesh, like.placements, src_data_rank=None))
        return mine


# The ways of matrices to the ranks that orthogonalise them, and of the results back to every rank's shards.
#
# The ranks of one pipeline stage, its data-parallel and tensor-parallel axes together, own its matrices. A matrix
# that an axis divides is brought together from all ranks of that axis; along an axis that replicates it the owner
# takes what it has itself. Results return by an all-to-all of shards, or, where every rank holds every matrix whole,
# by an all-gather.


class ReplicaExchange:
    """Exchanges matrices among the ranks that hold the same stages, numbered by `MeshCoordinate.rank_in_stage`.

    Constructing one is a collective of all ranks.
    """

    def __init__(self, stages: RankStages, coordinate: MeshCoordinate) -> None:
        self._here, self._shardings = coordinate, stages.shardings
        self.ranks, self.rank = coordinate.devices_per_stage, coordinate.rank_in_stage
        parameters = stages.model_parameters()
        self._rows = {name for name, parameter in parameters.items() if is_sharded(parameter)}
        """Matrices whose rows the data-parallel axis divides, or those of their tensor-parallel shard."""
        self._shapes = {name: self.whole_shape(name, parameter) for name, parameter in parameters.items()}
        size, device = self.ranks, coordinate.data_mesh.device_type
        if coordinate.tensor == 1 or coordinate.data == 1:
            self._group = coordinate.data_group if coordinate.tensor == 1 else coordinate.tensor_group
        else:  # every rank creates every group, as `torch.distributed` demands
            groups: list[dist.ProcessGroup] = [
                dist.new_group(list(range(first, first + size))) for first in range(0, coordinate.pipeline * size, size)
            ]
            self._group = groups[coordinate.pipeline_rank]
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
            # An all-gather, in which all ranks send as much as the one that owns most
            sizes = [[self._shapes[name].numel() for name in names] for names in owned]
            sending = self._nothing.new_empty(max(map(sum, sizes)))
            # The rest of what is sent stays unwritten: nobody reads it.
            torch.cat([whole[name].flatten() for name in mine] or [self._nothing], out=sending[: sum(sizes[self.rank])])
            group = self._group.group_name
            gathering = torch.ops._c10d_functional.all_gather_into_tensor(sending, self.ranks, group)

            def gathered() -> dict[str, torch.Tensor]:
                arrived = torch.ops._c10d_functional.wait_tensor(gathering).view(self.ranks, -1)
                return {
                    name: piece.view(self._shapes[name])
                    for names, each, a in zip(owned, sizes, arrived, strict=True)
                    for name, piece in zip(names, a[: sum(each)].split(each), strict=True)
                }

            return gathered
        outgoing = []
        for rank in range(self.ranks):
            data, tensor = divmod(rank, self._here.tensor)
            shards = []
            for name in mine:
                sharding = self._shardings.get(name)
                shard = whole[name] if sharding is None else take_shard(whole[name], sharding, tensor)
                # FSDP2 divides rows as `torch.chunk` does: rounded up, so that the last ranks may have fewer, or none.
                chunk = -(-shard.shape[0] // self._here.data)
                shards.append(shard[data * chunk : (data + 1) * chunk] if name in self._rows else shard)
            outgoing.append(shards)
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

        # The default argument keeps the memory that is sent alive until the exchange is over.
        def wait(_alive: torch.Tensor = sending) -> list[list[torch.Tensor]]:
            work.wait()
            return [list(a.split(list(each))) for a, each in zip(arrived.split(received), counts, strict=True)]

        return wait
