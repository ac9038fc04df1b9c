"""Overflow on a device that saturates: inf becomes the largest finite value and NaN becomes 0, and only a status register tells.

Source: the overflow records of the matrices (Ascend 910A, 310P and 310B: "Inf becomes the largest value and NaN 0; only the register shows an overflow").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpbackend_emulator.products import Products

PLACING = frozenset(
    (
        *("arange", "empty", "empty_like", "empty_strided", "fill", "fill_", "full", "full_like", "index_put", "index_put_", "masked_fill", "masked_fill_"),
        *("new_empty", "new_empty_strided", "new_full", "ones", "ones_like", "resize_", "scalar_tensor", "set_", "where", "zeros", "zeros_like"),
    )
)
"""Operators that place numbers and compute none: an inf that a mask puts there is no overflow."""

COPYING = frozenset(("clone", "copy_"))
"""Operators that compute something only where they convert."""


class StatusRegister:
    """The register of an emulated device, as ``mpbackend.backend.OverflowFlag``.

    Args:
        products: what sees the overflows.
    """

    def __init__(self, products: Products) -> None:
        self._products = products

    def clear(self) -> None:
        """Reset the register."""
        self._products.overflowed = False

    def found(self) -> Tensor:
        """Return a scalar bool tensor: whether an overflow happened since ``clear``."""
        return torch.tensor(self._products.overflowed)


def saturate(products: Products, func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """Limit the floating-point results of an operator in place, and set the register where one did not fit."""
    name = func._schema.name.partition("::")[2]
    if name in PLACING or func.is_view or (name in COPYING and not converts(args)):
        return out
    for value in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(value, Tensor) and value.is_floating_point() and value.is_cpu and not torch.isfinite(value).all():
            products.overflowed = True
            torch.nan_to_num_(value, nan=0.0)
    return out


def converts(args: tuple[Any, ...]) -> bool:
    """Tell whether the first two arguments are tensors of different formats."""
    return len(args) > 1 and isinstance(args[1], Tensor) and args[0].dtype != args[1].dtype
