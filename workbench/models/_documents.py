"""Models that read several documents in one sample, each as if it stood alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.base.errors import InvalidExperiment

if TYPE_CHECKING:
    import torch
    from torch import nn

TAKES_MASKS = ("sdpa", "eager")
"""Implementations of attention in `transformers` that take a mask for each query and key."""


def attending_within_documents(build: Callable[[], nn.Module], name: str, is_causal: bool) -> nn.Module:
    """Build a model whose forward is given a mask that keeps attention in the documents of each sample.

    The batch has `position_ids`, shape `(B, S)`, which begin anew with each document. `attention_mask` is made of them,
    shape `(B, 1, S, S)`: True where a query may attend to a key, as `scaled_dot_product_attention` takes it, or what is
    added to the scores in a model of `transformers` that computes them itself. Forward is given those of the two that
    it takes. A batch without `position_ids`, such as a prompt, passes as it is.

    Raises `InvalidExperiment` for a model whose forward takes neither, and for attention that takes no such mask.
    """
    model = build()
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    takes = {field: field in parameters or takes_all for field in ("attention_mask", "position_ids")}
    if not any(takes.values()):
        raise InvalidExperiment(
            f"The forward of {name} takes {', '.join(parameters)}, and samples with separate_documents=True need "
            "attention_mask, of shape (B, 1, S, S) and True where a token may attend to another, and position_ids, of "
            "shape (B, S), if positions are learned. Let forward take them, or remove separate_documents=True."
        )
    attention = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    if attention not in TAKES_MASKS:
        raise InvalidExperiment(
            f"The attention of {name} is {attention}, which takes no mask for each query and key, and "
            'separate_documents=True needs one. Build the model with attn_implementation="sdpa", or remove it.'
        )
    # A subclass of the same name, and no hook: export binds the fields of the batch to the signature of forward.
    of_model: Any = type(model)
    model.__class__ = _with_mask(of_model, *takes.values(), is_causal, attention == "eager")
    return model


@functools.cache
def _with_mask(
    base: type[nn.Module], takes_mask: bool, takes_positions: bool, is_causal: bool, is_added: bool
) -> type[nn.Module]:
    """Return a class whose forward calls that of `base` with a mask in place of positions, or beside them."""

    def forward(self: nn.Module, **batch: Any) -> Any:
        positions_BS = batch.get("position_ids")
        if positions_BS is not None and takes_mask:
            batch["attention_mask"] = _mask(positions_BS, is_causal, is_added)
        if not takes_positions:
            batch.pop("position_ids", None)
        return base.forward(self, **batch)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**names, "forward": forward})


def _mask(positions_BS: torch.Tensor, is_causal: bool, is_added: bool) -> torch.Tensor:
    """Return where a query (next to last dim) attends to a key (last dim), or what that adds to scores."""
    import torch

    # A position that does not follow the one before it begins a document.
    document_BS = (torch.diff(positions_BS, prepend=positions_BS[:, :1]) != 1).cumsum(1)
    allowed_B1SS = document_BS[:, None, :, None] == document_BS[:, None, None, :]
    if is_causal:
        place_S = torch.arange(positions_BS.shape[1], device=positions_BS.device)
        allowed_B1SS = allowed_B1SS & (place_S[:, None] >= place_S[None, :])
    if not is_added:
        return allowed_B1SS
    scores_B1SS = torch.zeros(allowed_B1SS.shape, device=positions_BS.device)
    return scores_B1SS.masked_fill(~allowed_B1SS, torch.finfo(scores_B1SS.dtype).min)
