"""The activation checkpointing that a block's code supports: a plan prices it, and a rank does it."""

from __future__ import annotations

import torch
from torch import fx

from workbench.capture import operations
from workbench.capture.export.opaque import call_of
from workbench.capture.torch_internals import DERIVATIVE

_RECURRENT = ("lstm", "gru", "rnn_")
"""First letters of recurrent operations, which on a CPU add in place to the products they compute."""


def supported_mode(code: fx.GraphModule, requested: str) -> str:
    """Return the checkpointing mode ("none", "selective" or "full") that a block supports, given the requested one.

    A block that updates buffers (BatchNorm's statistics) is never recomputed: the update would happen twice. A block
    with in-place operations is only recomputed in full, because one of them might overwrite a stored result. The same
    holds for a block with `torch.cond`, which selective checkpointing cannot look into, and for code that runs as
    written and takes derivatives: its own backward would use up what selective checkpointing keeps for one.

    A block with random slopes (`rrelu`) is never recomputed either: torch ends a recomputation when the last operation
    has saved what its backward needs, and this one saves its slopes before it draws them.
    """
    if operations.mutates_buffers(code) or any(
        operations.op_name(node).startswith("rrelu") and operations.is_random(node) for node in code.graph.nodes
    ):
        return "none"
    if requested == "selective" and any(
        operations.mutated_arguments(node)
        or operations.op_name(node).startswith(_RECURRENT)
        or isinstance(node.target, torch._ops.HigherOrderOperator)
        or ((call := call_of(node)) is not None and call.reason == DERIVATIVE)
        for node in code.graph.nodes
    ):
        return "full"
    return requested
