"""What a saturating device does with an overflow: the result stays at the largest finite value, NaN becomes 0, and the status register remembers.

Assumptions, since no such device was at hand: only 16-bit results saturate, an fp32 result never does; moving values (copies without a conversion, fills,
selections) leaves them as they are; an infinity that the program itself put in, as into an attention mask, saturates without setting the register.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import torch

LIBRARY = "libascendcl.so"
SATURATING = frozenset({torch.float16, torch.bfloat16})


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


MOVING = words("""
alias cat clone constant_pad_nd copy_ diagonal expand fill_ flip full full_like gather index index_put_ index_select masked_fill masked_fill_ masked_scatter
masked_select new_full ones ones_like repeat roll scalar_tensor scatter scatter_ select slice split stack tril tril_ triu triu_ where zero_ zeros zeros_like
""")
"""Operators that move values, by name without the overload."""


@functools.cache
def runtime() -> Any:
    """Return the stand-in runtime that torch_npu has loaded."""
    return ctypes.CDLL(LIBRARY)


def saturates() -> bool:
    """Tell whether torch_npu has put the device into saturation mode."""
    return bool(runtime().npu_simulator_saturates())


def finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether every floating-point element is finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor.is_floating_point() and tensor.element_size() > 1)


def saturate(results: Iterable[torch.Tensor], operands: Iterable[torch.Tensor]) -> None:
    """Saturate the 16-bit results of one operator in place, and set the register when its operands were finite.

    Args:
        results: CPU tensors that the operator wrote or returned.
        operands: CPU tensors that it read, as they were before.
    """
    overflowed = [result for result in results if result.dtype in SATURATING and not finite([result])]
    if not overflowed:
        return
    if finite(operands):
        runtime().npu_simulator_set_overflow(1)
    for result in overflowed:
        result.copy_(torch.nan_to_num(result, nan=0.0))
