"""The data-parallel axis of a stage: FSDP2 block by block (ZeRO 1, 2 and 3), or `DistributedDataParallel` (ZeRO 0).

ZeRO 1 keeps gathered weights and whole gradients until the last micro-batch, and reduces once; ZeRO 2 reduces after
every micro-batch; ZeRO 3 also gathers each block's weights anew for every forward and backward.

Not `replicate` for ZeRO 0: on 4 × H200 it kept a second copy of every weight and spent 2 ms of Python a block and
step (BERT-Large, 128 × 128 tokens: 105 ms a step).
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


def distribute(stage: StageModule, mesh: DeviceMesh, zero: int, precision: str) -> nn.Module:
    """The module that the pipeline runs: `stage` itself, sharded in place, or wrapped.

    FSDP2 wraps each block that has parameters, then the stage for those that its blocks share. Under bf16 it gathers
    bf16 weights (half the traffic) and reduces fp32 gradients. Block inputs are not cast: autocast decides per
    operation, as it does without sharding (`workbench.execution.blocks.autocast_types`). What FSDP2 cannot shard stays whole, its
    gradients left to `workbench.execution.parallel.gradient_all_reduce`. Weights may still be on the host: FSDP2 moves a block's when it
    shards them.
    """
    if mesh.size() == 1 or not any(parameter.requires_grad for parameter in stage.parameters()):
        return _on_device(stage, mesh)
    if zero == 0:
        with warnings.catch_warnings():  # torch 2.13 deprecates `broadcast_buffers`, and has no substitute yet
            warnings.simplefilter("ignore", FutureWarning)
            replica = DistributedDataParallel(
                stage, process_group=mesh.get_group(), broadcast_buffers=False, gradient_as_bucket_view=True
            )
        _settle_buckets(replica)
        return replica
    blocks = [block for block in stage.block_modules() if any(True for _ in block.parameters())]
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        reduce_dtype=torch.float32 if precision == "bf16" else None,
        cast_forward_inputs=False,
    )
    whole = set(_kept_whole(stage.parameters(recurse=False)))
    for block in blocks:
        whole.update(_kept_whole(block.parameters()))
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy, ignored_params=whole)
        _share_memory(block, block.parameters())
    fully_shard(stage, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=whole)
    _share_memory(stage, stage.parameters(recurse=False))
    return _on_device(stage, mesh)


def _on_device(stage: StageModule, mesh: DeviceMesh) -> StageModule:
    """With what FSDP2 has not moved there."""
    for parameter in stage.parameters():
        if parameter.device.type != mesh.device_type:
            parameter.data = parameter.data.to(mesh.device_type)
    return stage


def _share_memory(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if sharded and sharded[0].device_mesh.device_type == "cuda":
        assert isinstance(module, FSDPModule)
        module.set_custom_reduce_scatter(_InActivationsMemory(sharded))


class _InActivationsMemory(DefaultReduceScatter):
    """A reduce-scatter whose result, gradients that stay until the optimiser's step, lies where activations lay.

    CUDA's caching allocator keeps memory for the stream that asked for it. FSDP2 asks on the stream that reduces, so
    that the sharded gradients come on top of the memory that the backward lets go: 6.8 % of scaled BERT's 85 GiB on
    2 × H200 (`results/prediction_2xH200_acdd8c9.json` in `benchmarks/`). Memory of the computing stream is as safe:
    the reducing stream has just waited for that one, and nothing lets gradients go before the optimiser, which waits
    for the reduction. What is added to earlier gradients, or cast, is let go at once and stays with its stream.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        stays = all(parameter.grad is None and parameter.dtype == dtype for parameter in self._parameters)
        stream = torch.cuda.default_stream(device) if stays else torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            return torch.empty(*size, dtype=dtype, device=device)


def _kept_whole(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Of those that are gathered together: scalars, which have no dim to shard, and all but the commonest dtype."""
    together = list(parameters)
    bytes_of: Counter[torch.dtype] = Counter()
    for parameter in together:
        bytes_of[parameter.dtype] += parameter.nbytes
    return [p for p in together if p.ndim == 0 or p.dtype != bytes_of.most_common(1)[0][0]]


def _settle_buckets(replica: DistributedDataParallel) -> None:
    """Have DDP choose its buckets now, from a backward of zeros, instead of after the first step.

    It begins with one bucket and divides it once, in the order in which its first backward makes gradients ready. In
    which order three or more replicas add a gradient depends on its place in a bucket: left alone, the first step
    after a restart would differ in its last bits from the same step of an unbroken run. Autograd runs first what was
    computed last, so the order is that of a real backward: the last block first, what blocks share at the end.
    """
    parameters = [parameter for parameter in replica.parameters() if parameter.requires_grad]
    replica.reducer.prepare_for_backward([])
    (0.0 * torch.stack([parameter.sum().real for parameter in parameters]).sum()).backward()
    for parameter in parameters:
        parameter.grad = None
    replica.reducer._rebuild_buckets()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(parameter: nn.Parameter | torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered from its shards (a collective over its mesh)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
