"""Quantized operators of the simulated 950, after their documentation: casts to 8-bit formats, and the quantized product.

Source: Ascend/op-plugin, docs/context, pages of npu_quant_matmul and npu_dtype_cast. Products are summed in fp32 over dequantized
operands, so what is shown is which operands and scales arrive where, not the arithmetic of a Cube. Other devices refuse, as CANN does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from npu_simulator.kernels import calls
from npu_simulator.memory import alias, upload

ENUMERATION = {256: torch.float32, 257: torch.float16, 283: torch.bfloat16, 291: torch.float8_e5m2, 292: torch.float8_e4m3fn}
"""Numbers of torch_npu's dtypes that torch has too: 256 + the number of CANN's type."""
HIFLOAT8 = 290
E8M0 = 293

SCALAR_TYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16, 23: torch.float8_e5m2, 24: torch.float8_e4m3fn}
"""Numbers of c10::ScalarType, which torch.dtype arguments become."""

BLOCK = 128
BLOCKS = ([1, BLOCK, BLOCK], [BLOCK, BLOCK, BLOCK])
MX_BLOCK = 32


def dtype_of(number: int) -> torch.dtype:
    """Return the torch dtype that a number means."""
    return ENUMERATION.get(number) or SCALAR_TYPES[number]


def require_950(name: str) -> None:
    """Raise where the operator does not exist, as CANN's own check would."""
    npu: Any = vars(torch)["npu"]
    soc = npu.get_device_name(0)
    if not soc.startswith("Ascend950"):
        raise RuntimeError(f"{name} is not supported on {soc}")


@functools.cache
def hif8_table() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the non-negative finite values of hif8, ascending, and their codes."""
    from mpbackend.formats import FORMATS

    format_ = FORMATS["hif8"]
    pairs = sorted({value: code for code in range(128) if (value := format_.value(code)) == value and value <= format_.max}.items())
    return torch.tensor([value for value, _ in pairs]), torch.tensor([code for _, code in pairs], dtype=torch.uint8)


def encode_hif8(values: torch.Tensor) -> torch.Tensor:
    """Round to hif8, half away from zero, and return the codes; beyond the range the largest finite value."""
    table, codes = hif8_table()
    magnitude = values.float().abs().clamp(max=float(table[-1]))
    upper = torch.searchsorted(table, magnitude.contiguous()).clamp(max=len(table) - 1)
    lower = (upper - 1).clamp(min=0)
    nearest = torch.where(magnitude - table[lower] < table[upper] - magnitude, lower, upper)
    found = codes[nearest]
    return torch.where((values < 0) & (found != 0), found | 0x80, found)


@functools.cache
def hif8_values() -> torch.Tensor:
    """Return the value of every code."""
    from mpbackend.formats import FORMATS

    return torch.tensor([FORMATS["hif8"].value(code) for code in range(256)])


def decode(tensor: torch.Tensor, number: int | None) -> torch.Tensor:
    """Return the values of an operand in fp32."""
    return hif8_values()[tensor.long()] if number == HIFLOAT8 else tensor.float()


def dtype_cast(self: torch.Tensor, dtype: int, input_dtype: int | None = None) -> torch.Tensor:
    """Convert to one of torch_npu's formats."""
    calls["npu_dtype_cast"] += 1
    source = decode(alias(self), input_dtype)
    if dtype == HIFLOAT8:
        require_950("npu_dtype_cast to hifloat8")
        return upload(encode_hif8(source), self.device)
    target = dtype_of(dtype)
    if target.itemsize == 1:
        require_950(f"npu_dtype_cast to {target}")
    return upload(source.to(target), self.device)


def mx_factors(scales: torch.Tensor, size: int) -> torch.Tensor:
    """Return one factor an element from exponents (rows, pairs, 2), first ``size`` columns."""
    exponents = scales.reshape(scales.shape[0], -1).int() - 127
    return torch.ldexp(torch.ones(exponents.shape), exponents).repeat_interleave(MX_BLOCK, 1)[:, :size]


def quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply (m, k) by (k, n) with a scale a tensor, a row and column, or a block of 128 or 32."""
    require_950("npu_quant_matmul in an 8-bit float format")
    calls["npu_quant_matmul"] += 1
    if pertoken_scale is None or output_dtype is None or offset is not None or y_scale is not None:
        raise RuntimeError("simulated: scales on both operands and an output format only")
    a, b = decode(alias(x1), x1_dtype), decode(alias(x2), x2_dtype)
    left, right = alias(pertoken_scale), alias(scale)
    if scale_dtype == E8M0:
        if pertoken_scale_dtype != E8M0 or group_sizes != [1, 1, MX_BLOCK] or right.dim() != 3 or left.dim() != 3:
            raise RuntimeError("simulated: microscaling needs e8m0 scales of three dimensions on both operands and group_sizes [1, 1, 32]")
        product = (a * mx_factors(left, a.shape[1])) @ (b * mx_factors(right.transpose(0, 1), b.shape[0]).T)
    elif group_sizes in BLOCKS:
        high = group_sizes[0]
        left = left.repeat_interleave(high, 0).repeat_interleave(BLOCK, 1)[: a.shape[0], : a.shape[1]]
        right = right.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: b.shape[0], : b.shape[1]]
        product = (a * left) @ (b * right)
    else:
        if left.shape not in ((1,), (a.shape[0],)) or right.shape not in ((1,), (b.shape[1],)) or left.dtype != torch.float32 or right.dtype != torch.float32:
            raise RuntimeError(f"scales of shapes {tuple(left.shape)} and {tuple(right.shape)} do not fit {tuple(a.shape)} by {tuple(b.shape)}")
        product = (a @ b) * right * left[:, None]
    if bias is not None:
        product = product + alias(bias)
    return upload(product.to(dtype_of(output_dtype)), x1.device)


KERNELS: dict[str, Callable[..., Any]] = {"npu_dtype_cast": dtype_cast, "npu_quant_matmul": quant_matmul}


def install(library: Any) -> None:
    """Register the kernels.

    Args:
        library: a ``torch.library.Library`` of the namespace npu.
    """
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "PrivateUse1", allow_override=True)
