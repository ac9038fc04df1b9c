"""One product of an emulated device for probes, which take the device for a black box."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mpbackend.errors import UnknownNameError
from mpbackend.numerics.matmul import mm
from mpbackend_emulator.implementations import implementations
from mpbackend_emulator.products import FORMAT_OF
from mpbackend_emulator.unit import Unit


def product(unit: Unit, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what multiplies fp64 matrices that hold values of a format, as ``mpbackend.backend.Backend`` says.

    Args:
        unit: the device's matrix unit.
        name: the format. A product of tensors of that dtype is rounded to it; one of any other format stays in the format of its sums.

    Raises:
        UnknownNameError: the device has no such product.
    """
    runs = [row.a for row in implementations(unit) if row.op == "matmul" and row.a == row.b and row.scaling == "none" and row.level is not None]
    if name not in runs:
        raise UnknownNameError(f"format of products on {unit.key}", name, dict.fromkeys(runs), remedy="`mpbackend matrix --op matmul` shows what it computes")
    arithmetic = unit.find(name, name)
    dtype = next((dtype for dtype, form in FORMAT_OF.items() if form == name), None)

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        with torch._C._DisableTorchDispatch():
            sums = mm(a, b, arithmetic)
            return (sums if dtype is None else sums.to(dtype)).double()

    return multiply
