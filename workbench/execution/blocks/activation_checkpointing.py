"""Activation checkpointing of one block: store everything, nothing, or only the results of expensive operations.

Selective checkpointing stores the results of matrix products, convolutions and attention, and recomputes the rest
(norms, activations, dropout). The idea is from Korthikanti et al., arXiv:2205.05198; here, as in torch, the choice is
made per operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import workbench.capture.rewrites
import workbench.sparsity.kernels.operators  # noqa: F401  (both register their operations)
from workbench.capture.operations import mutated_arguments, mutates_buffers, op_name, overloads

aten = torch.ops.aten
_PRODUCTS = overloads("mm addmm bmm baddbmm convolution") | {
    torch.ops.workbench.grouped_mm.default,
    torch.ops.workbench.block_sparse_product.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.wait_tensor.default,
}
"""Matrix products, and the all-reduces that sum partial products over tensor-parallel devices."""
_ATTENTION: dict[Any, int] = {
    aten._scaled_dot_product_flash_attention.default: 3,
    aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    aten._scaled_dot_product_efficient_attention.default: 5,
    aten._scaled_dot_product_cudnn_attention.default: 5,
}
"""Attention kernels, with the position of the dropout rate among their arguments."""
_RECURRENT = ("lstm", "gru", "rnn_")
"""First letters of recurrent operations, which on a CPU add in place to the products they compute."""


def supported_mode(code: fx.GraphModule, requested: str) -> str:
    """Return the checkpointing mode ("none", "selective" or "full") that a block supports, given the requested one.

    A block that updates buffers (BatchNorm's statistics) is never recomputed: the update would happen twice. A block
    with in-place operations is only recomputed in full, because one of them might overwrite a stored result. The same
    holds for a block with `torch.cond`, which selective checkpointing cannot look into.
    """
    if mutates_buffers(code):
        return "none"
    if requested == "selective" and any(
        mutated_arguments(node)
        or op_name(node).startswith(_RECURRENT)
        or isinstance(node.target, torch._ops.HigherOrderOperator)
        for node in code.graph.nodes
    ):
        return "full"
    return requested


def checkpointed(mode: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)` and recompute its intermediate results in the backward.

    `mode` is "full" or "selective". `function` must seed its own random numbers: no generator state is saved.
    """
    options: dict[str, Any] = {"context_fn": _selective_contexts} if mode == "selective" else {}
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, **options)


def checkpointed_when_compiled(mode: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `checkpointed` returns, inside compiled code: the compiler saves and replays the random numbers."""
    if mode == "full":
        return checkpoint(function, *arguments, use_reentrant=False)
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=_selective_contexts_when_compiled)


def _policy(replays_random: bool, _context: Any, operation: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
    """Decide whether an operation's results are stored.

    In eager mode, attention with dropout is recomputed: if it were skipped, the later draws of the recomputation would
    differ from those of the forward.
    """
    if operation in _PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    if operation in _ATTENTION:
        position = _ATTENTION[operation]
        rate = arguments[position] if len(arguments) > position else 0.0
        if replays_random or not rate:
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_selective_contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, False))
_selective_contexts_when_compiled = functools.partial(
    create_selective_checkpoint_contexts, functools.partial(_policy, True)
)
