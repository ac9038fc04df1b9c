"""Attention on a device that is not there: the fused operation that a device has, instead of the plain one that torch takes where it knows no better."""

from __future__ import annotations

from typing import Any

import torch

AUTOCAST = "Autocast"
AUTOGRAD = "Autograd"

FUSED_IN_16_BITS = (torch.float16, torch.bfloat16)
"""Formats that flash attention takes (aten/src/ATen/native/transformers, ``check_tensor_dtype``)."""


def route_attention(autocast_key: str) -> Any:
    """Route ``scaled_dot_product_attention`` to the fused operation of torch; returns the library that holds the kernel.

    Flash attention for 16-bit operands without a mask, memory-efficient attention for the rest.

    Args:
        autocast_key: name of the device's autocast key, from which that of autograd follows.
    """
    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, autocast_key.replace(AUTOCAST, AUTOGRAD))
    return library


def attention(
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
    """Compute attention by a fused operation; arguments as ``torch.nn.functional.scaled_dot_product_attention`` has them.

    Args:
        query: (batch, heads, length, width).
        key: (batch, heads, other length, width); fewer heads with ``enable_gqa``.
        value: like ``key``.
        attn_mask: boolean or additive mask, or None.
        dropout_p: share of scores that are dropped.
        is_causal: whether later positions are masked.
        scale: factor of the scores.
        enable_gqa: whether heads of ``key`` and ``value`` are shared.
    """
    if enable_gqa:
        shared = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
    if attn_mask is None and query.dtype in FUSED_IN_16_BITS and query.dim() == 4:
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out
    if query.dim() != 4:
        return plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    bias = None if attn_mask is None else attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    fused: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return fused


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Compute attention by the plain operations, which fused ones fall back to for operands of other than four dimensions."""
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, mask, dropout_p, is_causal, None, scale=scale)[0]
    return out
