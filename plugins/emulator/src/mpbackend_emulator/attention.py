"""Fused attention, which is not emulated: the host computes it in fp32 from the device's operands and rounds its results once.

On a device the kernel multiplies in its matrix units and keeps the probabilities in 16 bits between its two products. How it blocks its sums is the
kernel's own; what is taken here is stated in the plan's notes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpbackend_emulator.products import Products

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)


def widen(value: Any) -> Any:
    """Return a 16-bit tensor in fp32, which is exact; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


def attention(products: Products, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the output of attention, rounded to the format of the query, and the logarithm of the sums in fp32."""
    wide = [widen(arg) for arg in (query, *args)]
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu.default(*wide, **{name: widen(value) for name, value in kwargs.items()})
    return out.to(query.dtype), sums


def attention_backward(products: Products, gradient: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, rounded to the format of the output's gradient."""
    wide = [widen(arg) for arg in (gradient, *args)]
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(*wide, **{name: widen(value) for name, value in kwargs.items()})
    return tuple(part.to(gradient.dtype) for part in found)
