"""The data-parallel axis of a stage: FSDP2 block by block (ZeRO 1, 2, 3) or `DistributedDataParallel` (ZeRO 0).

ZeRO 1 keeps all-gathered weights and unsharded gradients until the last micro-batch and reduces once. ZeRO 2 reduces
after every micro-batch. ZeRO 3 also all-gathers each block's weights anew for every forward and backward.

ZeRO 0 does not use `replicate`, which on an H200 keeps a second copy of every weight and takes 2 ms of Python per block
and step.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from workbench.execution.parallel.stage import StageModule
from workbench.optimizers.parameters import local as local


def distribute(stage: StageModule, mesh: DeviceMesh, zero: int, precision: str) -> nn.Module:
    """Return the module that the pipeline runs: `stage` itself, sharded in place if asked, or a wrapper around it.

    FSDP2 shards each block that has parameters, then the stage for the parameters that its blocks share. Under bf16 it
    all-gathers bf16 weights (half the traffic) and reduces fp32 gradients. Inputs of blocks are not cast: autocast
    decides per operation, as it does without sharding (`workbench.execution.blocks.weight_copies`). Parameters that
    FSDP2 cannot shard stay replicated, and `workbench.execution.parallel.gradient_all_reduce` reduces their gradients.
    Weights may still be in the host's memory: FSDP2 moves those of a block when it shards them.
    """
    if mesh.size() == 1 or not any(parameter.requires_grad for parameter in stage.parameters()):
        return _move_to_device(stage, mesh)
    if zero == 0:
        with warnings.catch_warnings():  # torch 2.13 deprecates `broadcast_buffers` without a substitute
            warnings.simplefilter("ignore", FutureWarning)
            replica = DistributedDataParallel(
                stage, process_group=mesh.get_group(), broadcast_buffers=False, gradient_as_bucket_view=True
            )
        _fix_buckets(replica)
        return replica
    blocks = [block for block in stage.block_modules() if any(True for _ in block.parameters())]
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        reduce_dtype=torch.float32 if precision == "bf16" else None,
        cast_forward_inputs=False,
    )
    replicated = set(_unshardable(stage.parameters(recurse=False)))
    for block in blocks:
        replicated.update(_unshardable(block.parameters()))
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy, ignored_params=replicated)
        _reuse_activation_memory(block, block.parameters())
    fully_shard(stage, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=replicated)
    _reuse_activation_memory(stage, stage.parameters(recurse=False))
    return _move_to_device(stage, mesh)


def _move_to_device(stage: StageModule, mesh: DeviceMesh) -> StageModule:
    """Move the parameters that FSDP2 has not moved."""
    for parameter in stage.parameters():
        if parameter.device.type != mesh.device_type:
            parameter.data = parameter.data.to(mesh.device_type)
    return stage


def _reuse_activation_memory(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if sharded and sharded[0].device_mesh.device_type == "cuda":
        assert isinstance(module, FSDPModule)
        module.set_custom_reduce_scatter(_ReduceScatterToActivationMemory(sharded))


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


def _unshardable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return those of one FSDP2 group that it cannot shard: scalars, empty ones, and all but the most common dtype.

    The most common one is that of most bytes.
    """
    group = list(parameters)
    bytes_of: Counter[torch.dtype] = Counter()
    for parameter in group:
        bytes_of[parameter.dtype] += parameter.nbytes
    return [p for p in group if p.ndim == 0 or not p.numel() or p.dtype != bytes_of.most_common(1)[0][0]]


def _fix_buckets(replica: DistributedDataParallel) -> None:
    """Make DDP choose its buckets now, in a backward of zeros, instead of after the first step.

    DDP begins with one bucket and divides it once, in the order in which its first backward makes gradients ready. The
    order in which three or more replicas add a gradient depends on its position in a bucket. Without this function, the
    first step after a restart would differ in its last bits from the same step of an uninterrupted run. Autograd runs
    first what was computed last, so the order is that of a real backward: the last block first, shared parameters last.
    """
    parameters = [parameter for parameter in replica.parameters() if parameter.requires_grad]
    replica.reducer.prepare_for_backward([])
    (0.0 * torch.stack([parameter.sum().real for parameter in parameters]).sum()).backward()
    for parameter in parameters:
        parameter.grad = None
    replica.reducer._rebuild_buckets()


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
