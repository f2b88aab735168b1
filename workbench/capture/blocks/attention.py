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
    """Return True for a call of attention whose operands differ in samples or heads, or have more than four dims."""
    if node.target is not ATTENTION:
        return False
    shapes = [shape_of(operand) for operand in node.args[:3]]
    return len({shape[:-2] for shape in shapes}) > 1 or len(shapes[0]) > 4


def repeats_heads(
    device_type: str, dtype: torch.dtype, is_masked: bool, heads: tuple[int, int, int], gqa: bool
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
    samples = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    query, key, value = (
        each if each.shape[:-3] == samples else each.expand(*samples, *each.shape[-3:]).contiguous()
        for each in (query, key, value)
    )
    is_flat = query.dim() > 4 and (attn_mask is None or attn_mask.dim() < 4)
    if is_flat:
        query, key, value = (each.flatten(0, -4) for each in (query, key, value))
        attn_mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask.unsqueeze(0)
    heads = max(each.shape[-3] for each in (query, key, value))
    query = query if query.shape[-3] == heads else query.repeat_interleave(heads, -3)
    device_type = query.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else query.dtype
    of_each = (heads, key.shape[-3], value.shape[-3])
    if repeats_heads(device_type, dtype, attn_mask is not None, of_each, enable_gqa):
        key, value = (
            each if each.shape[-3] == heads else each.repeat_interleave(heads // each.shape[-3], -3)
            for each in (key, value)
        )
    options: dict[str, Any] = {"scale": scale, "enable_gqa": key.shape[-3] != heads}
    found = functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return found.unflatten(0, samples) if is_flat else found
