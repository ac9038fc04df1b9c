"""One matrix product of a GPU for probes, which take it for a black box."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mpbackend.errors import UnknownNameError
from mpbackend.train.fence import Fence
from mpbackend_cuda.switches import switches

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}
SETTINGS = {"fp32": "ieee", "tf32": "tf32"}
"""Settings of ``matmul.fp32_precision`` that compute a format in tensors of fp32."""

REDUCTIONS = {"fp16": "matmul.reduced_precision_reduction_fp16", "bf16": "matmul.reduced_precision_reduction_bf16"}


def product(device: torch.device, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what multiplies fp64 matrices that hold values of a format on a GPU; see ``mpbackend.backend.Backend``.

    fp8 is multiplied by ``torch._scaled_mm`` with scales of 1, and its fp32 result is not rounded; its sizes must be multiples of 16.

    Args:
        device: the GPU.
        name: the format.

    Raises:
        UnknownNameError: torch has no such product.
    """
    if name not in DTYPES:
        raise UnknownNameError("format of products on a GPU", name, DTYPES)
    dtype = DTYPES[name]

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        left, right = a.to(device, dtype), b.to(device, dtype)
        if name.startswith("fp8"):
            one = torch.ones((), device=device)
            columns = right.t().contiguous().t()  # cuBLASLt takes the second operand by columns
            return torch._scaled_mm(left, columns, one, one, out_dtype=torch.float32, use_fast_accum=True).double().cpu()
        with settings(name):
            return torch.mm(left, right).double().cpu()

    return multiply


def settings(name: str) -> AbstractContextManager[object]:
    """Return a context in which torch computes a format as it is called: fp32 and tf32 by their setting, 16-bit formats without reduced sums of parts."""
    if name in SETTINGS:
        return Fence(switches(), {"matmul.fp32_precision": SETTINGS[name]}, backend="cuda", owner=f"a product of {name}")
    if name in REDUCTIONS:
        return Fence(switches(), {REDUCTIONS[name]: "false"}, backend="cuda", owner=f"a product of {name}")
    return nullcontext()
