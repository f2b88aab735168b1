"""Attention whose queries, keys and values differ in heads or samples, as fused kernels take it.

Scaled dot-product attention broadcasts, as in Falcon's multi-query attention, where all heads read one head of keys and
values. PyTorch has no fused kernel for such operands and computes all scores in their place: 4 bytes for each query,
key and head, in every layer (`sdp_utils.cpp`). The same numbers come from operands that its kernels take, which a rank
makes and a plan prices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

from workbench.capture.operations import ATTENTION, shape_of


def is_broadcast(node: fx.Node) -> bool:
    """Return True for a call of attention whose operands differ in samples or heads, or are not of four dims."""
    if node.target is not ATTENTION:
        return False
    leads = {tuple(shape_of(operand)[:-2]) for operand in node.args[:3]}
    return len(leads) > 1 or any(len(lead) != 2 for lead in leads)


def repeats_heads(
    device_type: str, dtype: torch.dtype, heads: tuple[int, int, int], is_masked: bool, gqa: bool
) -> bool:
    """Return True if heads of keys and values must be copied, so that each head of the queries has one.

    `heads` are those of queries, keys and values. On a GPU, the kernels that read a head of keys for several heads of
    queries compute in 16 bits, and not all of them take a mask. On a CPU they are used where the model asks for it
    (`gqa`, the argument `enable_gqa`).
    """
    queries, keys, values = heads
    if queries == keys == values:
        return False
    takes_groups = dtype == torch.bfloat16 and not is_masked if device_type == "cuda" else gqa
    return keys != values or not takes_groups


def fused_operands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    device_type: str,
    dtype: torch.dtype,
    is_masked: bool,
    gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return operands of four dims, [samples, heads, rows, features], that the device's fused kernels take.

    They broadcast as in `scaled_dot_product_attention`: a dim that one lacks, or has once, is that of the others.
    Samples of several dims become one. `dtype` is that of the computation, under autocast as well; `is_masked` says
    whether there is a mask, and `gqa` is the argument `enable_gqa`.
    """
    dims = max(4, *(each.dim() for each in (query, key, value)))
    query, key, value = (
        each if each.dim() == dims else each[(None,) * (dims - each.dim())] for each in (query, key, value)
    )
    samples = torch.broadcast_shapes(*(each.shape[:-3] for each in (query, key, value)))
    query, key, value = (
        each if each.shape[:-3] == samples else each.expand(*samples, *each.shape[-3:]).contiguous()
        for each in (query, key, value)
    )
    if dims > 4:
        query, key, value = (each.flatten(0, -4) for each in (query, key, value))
    heads = max(each.shape[1] for each in (query, key, value))
    query = query if query.shape[1] == heads else query.repeat_interleave(heads, 1)
    if repeats_heads(device_type, dtype, (heads, key.shape[1], value.shape[1]), is_masked, gqa):
        key, value = (
            each if each.shape[1] == heads else each.repeat_interleave(heads // each.shape[1], 1)
            for each in (key, value)
        )
    return query, key, value


def as_read(result: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """Return what attention of `fused_operands` gave, with the dims that attention of the given operands has."""
    dims = max(each.dim() for each in operands)
    if dims > 4:
        samples = torch.broadcast_shapes(*(each.shape[:-3] for each in operands))
        return result.reshape(*samples, *result.shape[1:])
    return result.squeeze(tuple(range(4 - dims)))


def broadcast_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return `scaled_dot_product_attention` of operands that broadcast: [..., heads, rows, features] each."""
    device_type = query.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else query.dtype
    operands = fused_operands(query, key, value, device_type, dtype, attn_mask is not None, enable_gqa)
    dims = max(4, query.dim(), key.dim(), value.dim())
    if attn_mask is not None and attn_mask.dim() > 2:  # kernels take two dims or four
        attn_mask = attn_mask[(None,) * (dims - attn_mask.dim())]
        if any(size > 1 for size in attn_mask.shape[:-3]):
            samples = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
            attn_mask = attn_mask.expand(*samples, *attn_mask.shape[-3:])
        attn_mask = attn_mask.flatten(0, -4)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": operands[0].shape[1] != operands[1].shape[1]}
    found = functional.scaled_dot_product_attention(*operands, attn_mask, dropout_p, is_causal, **options)
    return as_read(found, query, key, value)
