"""Why an export failed, in one sentence that names the line of the model's code and a way out."""

from __future__ import annotations

import traceback
from collections.abc import Mapping

import torch
from torch import fx, nn
from torch.nn.utils.rnn import PackedSequence

from workbench.capture.opaque import FLEX_ATTENTION
from workbench.capture.source_lines import SourceLine, line_of_frames, line_of_node
from workbench.errors import CaptureError, first_line, in_words
from workbench.tensors import TensorSpec

PACKED_SHAPE = "the shape of a packed sequence depends on values"
"""Reason of opaque calls that are given packed sequences."""

WITHOUT_META = frozenset({"istft"})
"""Operations that torch 2.13 exports although they read values, which a tensor of the meta device has not."""


def mixes_devices(error: BaseException) -> bool:
    """Return True if export failed because tensors of two devices meet."""
    message = str(error)
    return "on the same device" in message or "found two different devices" in message


def depends_on_values(error: BaseException) -> bool:
    """Return True if export failed because something depends on the values of a tensor."""
    reason, error_type = str(error).lower(), type(error).__name__.lower()
    is_named = "datadependent" in error_type or "dynamicoutputshape" in error_type
    return is_named or "data-dependent" in reason or "unbacked" in reason


def explained(error: Exception, model: nn.Module, name: str, batch: Mapping[str, TensorSpec]) -> CaptureError:
    """Return the `CaptureError` that says why an export failed, and what to do."""
    line = line_of_frames(traceback.extract_tb(error.__traceback__))
    reason = first_line(error)
    fields = ", ".join(f"{key} {list(spec.shape)}" for key, spec in batch.items())
    known = _known_cause(error, model, line)
    message, facts = known or (_by_message(error, reason, fields, line), {})
    return line.error(name, f"cannot be captured: {message}", **facts)


def _known_cause(error: Exception, model: nn.Module, line: SourceLine) -> tuple[str, dict[str, str]] | None:
    """Return the message for a feature of torch that export does not know, found in the frames of the failure.

    Beside it stands why a call of it would be opaque, if it can be.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    files = [frame.f_code.co_filename.replace("\\", "/") for frame, _ in frames]
    scripted = next(
        (path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)), None
    )
    if any("flex_attention" in file for file in files):
        return (
            f"it calls FlexAttention{line.where}, which capture cannot follow. Call scaled_dot_product_attention with "
            f"an attn_mask instead (attn_implementation='sdpa' of a transformers model)."
        ), {"reason": FLEX_ATTENTION}
    if "ctc_loss" in str(error):
        return (
            f"the memory that the CTC loss{line.where} needs depends on the values of the lengths. Register a function "
            f"that calls it by torch.library.custom_op, with register_fake and register_autograd."
        ), {"reason": "the memory of a CTC loss depends on values"}
    if any(isinstance(value, PackedSequence) for frame, _ in frames for value in frame.f_locals.values()) or any(
        file.endswith("nn/utils/rnn.py") for file in files
    ):
        return (
            f"the shape of a packed sequence{line.where} depends on the values of the lengths. Give the padded "
            f"sequence to the recurrent layer, and take the last states by x[torch.arange(len(x)), lengths - 1]."
        ), {"reason": PACKED_SHAPE}
    if scripted is not None:
        return (
            f"torch.jit.script compiled {f'its module {scripted}' if scripted else 'it'}, which torch.export cannot "
            f"follow. Give the module as it was before torch.jit.script; compile=True of the experiment compiles it."
        ), {}
    return None


def _by_message(error: Exception, reason: str, fields: str, line: SourceLine) -> str:
    if depends_on_values(error):
        way = (
            "Replace a branch by torch.where or torch.cond and a selection by a mask, or decide before training."
            if not line.caller
            else "The line is a library's: put the call that leads to it into a module of your own that returns "
            "tensors of fixed shapes, such as the loss, and it runs as written."
        )
        return f"what it does{line.where or ' in its forward'} depends on the values of a tensor. {way}"
    if "unexpected keyword" in reason or ("missing" in reason and "argument" in reason):
        return f"{reason}. The batch has the fields {fields}: let forward take exactly these as keyword arguments."
    if "fake tensor in the exported program" in reason:
        return (
            f"its forward computes with a tensor{line.where} that an earlier forward left outside of the model, such "
            "as in a global. Register it, self.register_buffer('state', torch.zeros(8)), and write to it in place, "
            "self.state.copy_(new)."
        )
    if mixes_devices(error):
        return (
            f"tensors of two devices meet{line.where}. Make tensors in forward where its inputs are, "
            f"torch.arange(…, device=x.device), and register those made in the constructor as buffers."
        )
    return f"{in_words(error, line.where)}. It was called with {fields}: see that model(**batch) runs on such a batch."


def refuse_unpriced(graph: fx.Graph, name: str) -> None:
    """Raise `CaptureError` for an operation that is exported but runs on no meta tensors, and for `torch.vmap`.

    Of `torch.vmap`, export leaves the bookkeeping in the graph, cut in pieces. The module around either runs as
    written.
    """
    for node in graph.nodes:
        operation = getattr(node.target, "_opname", "")
        if operation in WITHOUT_META:
            line = line_of_node(node)
            raise line.error(
                name,
                f"calls torch.{operation}{line.where}, which PyTorch cannot run without values, so that its shapes "
                f"and its cost are unknown. Put it into a module of your own, which then runs as written.",
                inside=[path for path, _ in (node.meta.get("nn_module_stack") or {}).values()],
                reason=f"torch.{operation} does not run without values",
            )
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "_vmap_increment_nesting":
            line = line_of_node(node)
            raise line.error(
                name,
                f"calls torch.vmap{line.where}, whose operations cannot be divided into blocks. Write the dims that it "
                f"maps over by broadcasting, for a mask i[:, None] >= i[None, :].",
                inside=[path for path, _ in (node.meta.get("nn_module_stack") or {}).values()],
                reason="the operations of torch.vmap cannot be divided into blocks",
            )
