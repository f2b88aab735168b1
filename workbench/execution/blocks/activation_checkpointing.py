"""Activation checkpointing of one block: nothing, everything, or everything but the expensive operations.

Selective checkpointing keeps the results of matrix products, convolutions and attention and computes the rest
(norms, activations, dropout) again (Korthikanti et al., arXiv:2205.05198; here per operation, as torch does it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import workbench.capture.experts  # noqa: F401  (its operations)
from workbench.capture.dataflow import mutates, writes_arguments

aten = torch.ops.aten
_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        torch.ops.workbench.grouped_mm.default,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.wait_tensor.default,
    }
)
"""Matrix products, and the sums of their parts over tensor-parallel devices."""
_ATTENTION: dict[Any, int] = {
    aten._scaled_dot_product_flash_attention.default: 3,
    aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    aten._scaled_dot_product_efficient_attention.default: 5,
    aten._scaled_dot_product_cudnn_attention.default: 5,
}
"""Attention kernels, with the position of their dropout rate."""


_RECURRENT = ("lstm", "gru", "rnn_")
"""Operations that, on a CPU, add to the products that they make in place."""


def mode_for(code: fx.GraphModule, asked: str) -> str:
    """How a block may be recomputed.

    One that advances buffers (BatchNorm's statistics) never is: they would advance twice. One that works in place is
    recomputed as a whole: it might write to a result that selective checkpointing keeps. So is one with `torch.cond`,
    which selective checkpointing cannot look into.
    """
    if writes_arguments(code):
        return "none"
    as_a_whole = any(mutates(node) or _is_recurrent(node) or _is_branch(node) for node in code.graph.nodes)
    return "full" if asked == "selective" and as_a_whole else asked


def _is_recurrent(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._opname.startswith(_RECURRENT)


def _is_branch(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def checkpointed(mode: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, whose intermediate results are computed again in the backward.

    `mode` is "full" or "selective". `function` seeds its own random numbers, so no generator state is kept.
    """
    if mode == "full":
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=_selective_contexts
    )


def checkpointed_when_compiled(mode: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """As `checkpointed`, inside what is compiled: the compiler keeps and replays the random numbers."""
    if mode == "full":
        return checkpoint(function, *arguments, use_reentrant=False)
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=_selective_contexts_when_compiled)


def _keeps(replays_random: bool, _context: Any, operation: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
    """Attention that draws dropout is computed again in eager mode: leaving it out would shift what is drawn after."""
    if operation in _PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    if operation in _ATTENTION:
        at = _ATTENTION[operation]
        rate = arguments[at] if len(arguments) > at else 0.0
        if replays_random or not rate:
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_selective_contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_keeps, False))
_selective_contexts_when_compiled = functools.partial(
    create_selective_checkpoint_contexts, functools.partial(_keeps, True)
)
