"""What a single call tells about other devices: operands of unlike formats, squares that overflow, a memory layout that is lost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mpbackend.observe.flops import PRODUCTS, Operation
from mpbackend.observe.memory import dtype_name, nested_tensors

EQUAL: Mapping[str, tuple[int, ...]] = {
    **{name: positions for name, positions in PRODUCTS.items() if not name.startswith(("_scaled", "_int", "_grouped"))},
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation", "convolution", "convolution_overrideable"), (0, 1, 2)),
    **dict.fromkeys(("linear", "matmul", "linalg_vecdot"), (0, 1)),
    **dict.fromkeys(("scatter_add", "scatter_add_", "scatter", "scatter_", "index_add", "index_add_", "index_copy", "index_copy_"), (0, 3)),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "masked_scatter", "masked_scatter_"), (0, 2)),
}
"""Operations whose floating-point operands must have one format, and the positions of these. A device raises where they differ; a fake tensor does not look."""

ATTENTION = "_scaled_dot_product"
"""Fused attention: query, key and value stand first and must have one format."""

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""What ``torch.amp.GradScaler`` unscales with. Of 16-bit formats its kernels for accelerators take fp16 only (github.com/pytorch/pytorch/issues/127176)."""


class Mismatch(NamedTuple):
    """Operands of unlike formats, by position in the call."""

    formats: tuple[str, ...]
    positions: tuple[int, ...]


def mismatch(op: Operation, args: Sequence[Any]) -> Mismatch | None:
    """Return the operands that must have one format and do not; None when all is well."""
    positions = (0, 1, 2) if op.base.startswith(ATTENTION) else EQUAL.get(op.base)
    if positions is None:
        return None
    found = [(position, args[position].dtype) for position in positions if position < len(args) and isinstance(args[position], torch.Tensor)]
    reals = [(position, dtype) for position, dtype in found if dtype.is_floating_point]
    if len({dtype for _, dtype in reals}) < 2:
        return None
    return Mismatch(tuple(dtype_name(dtype) for _, dtype in reals), tuple(position for position, _ in reals))


def widened(args: Sequence[Any], found: Mismatch) -> tuple[Any, ...]:
    """Return the arguments with the operands of a mismatch in the format of the first, so that the audit can go on."""
    first = args[found.positions[0]].dtype
    return tuple(value.to(first) if position in found.positions else value for position, value in enumerate(args))


def squares_in_fp16(op: Operation, args: Sequence[Any], out: Any) -> bool:
    """Tell whether a call squares a tensor in fp16, whose largest square root is ``sqrt(65504)`` = 255.9."""
    if not isinstance(out, torch.Tensor) or out.dtype is not torch.float16:
        return False
    if op.base in ("mul", "mul_"):
        return args[0] is args[1]
    return op.base == "square" or (op.base in ("pow", "pow_") and len(args) > 1 and isinstance(args[1], (int, float)) and args[1] == 2)


LARGEST_ROOT = math.sqrt(torch.finfo(torch.float16).max)
"""Largest number whose square fp16 holds."""


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor (N, C, H, W) lies with channels last and not also in the plain order, as it does with one channel or one pixel."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def loses_layout(args: Sequence[Any], out: Any) -> bool:
    """Tell whether a call takes a tensor with channels last and returns one of as many dimensions in the plain order."""
    if not isinstance(out, torch.Tensor) or out.dim() != 4 or out.shape[1] == 1 or out.shape[2] * out.shape[3] == 1 or not out.is_contiguous():
        return False
    return any(isinstance(value, torch.Tensor) and is_channels_last(value) for value in args)


def unscales_bf16(op: Operation, args: Sequence[Any]) -> bool:
    """Tell whether a call unscales gradients in bf16 in the way that accelerators do not."""
    return op.base == UNSCALE and any(tensor.dtype is torch.bfloat16 for tensor in nested_tensors(args[0]))


def shape_of(op: Operation, args: Sequence[Any]) -> tuple[int, int, int] | None:
    """Return (m, n, k) of a matrix product, of each of its batch; None for what is none, such as a convolution or fused attention."""
    if op.base not in PRODUCTS or len(op.operands) != 2:
        return None
    a, b = (args[position] for position in op.operands)
    if a.dim() < 2 or b.dim() < 2:
        return None
    return a.shape[-2], b.shape[-1], a.shape[-1]
