"""One matrix product of the processor for probes, which take it for a black box."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mpbackend.errors import UnknownNameError
from mpbackend_cpu.execution import aten, round_around

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def product(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what multiplies fp64 matrices that hold values of a format, as a session multiplies them; see ``mpbackend.backend.Backend``.

    Args:
        name: the format; fp16 is multiplied in fp32 and rounded once, as under a plan.

    Raises:
        UnknownNameError: there is no such product.
    """
    if name not in DTYPES:
        raise UnknownNameError("format of products on a CPU", name, DTYPES)
    dtype = DTYPES[name]

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = round_around(aten.mm.default, (a.to(dtype), b.to(dtype)), {})
        return result.double()

    return multiply
