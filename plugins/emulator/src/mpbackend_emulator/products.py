"""The products of plain tensors below autograd, in the arithmetic of a device's matrix unit.

Each takes what torch's operator takes. The sums come from the unit; what an operator adds to them (``beta * self``, a bias) is added in the format of the
sums, as a library's epilogue does, and the result is rounded once to the format of the operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpbackend.numerics.matmul import mm
from mpbackend_emulator.unit import Unit

FORMAT_OF = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
"""Dtypes whose products are emulated, by format."""

FP16_MAX = 65504.0


class Products:
    """The products of one device, and whether an overflow was seen.

    Args:
        unit: its matrix unit.

    Attributes:
        unit: its matrix unit.
        overflowed: set when a result or a converted operand did not fit, on a device that saturates.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.overflowed = False

    def sums(self, op: str, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a @ b`` in the format of the register.

        Args:
            op: ``matmul`` or ``conv``.
            a: (M, K).
            b: (K, N), same dtype.

        Raises:
            BackendError: the device has no such product, or refuses its sizes.
        """
        name = FORMAT_OF[a.dtype]
        arithmetic = self.unit.plain(op, name)
        self.unit.check_sizes(self.unit.alignment(name, name, ("none",)), a.shape[0], b.shape[1], a.shape[1])
        if self.unit.saturates and arithmetic.a == "fp16" and name == "fp32":
            a, b = self.converted(a), self.converted(b)
        return mm(a, b, arithmetic)

    def converted(self, x: Tensor) -> Tensor:
        """Return fp32 numbers limited to the range of fp16, as a saturating conversion leaves them."""
        limited = torch.nan_to_num(x, nan=0.0, posinf=FP16_MAX, neginf=-FP16_MAX).clamp(-FP16_MAX, FP16_MAX)
        self.overflowed |= not torch.equal(limited, x)
        return limited

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``aten::mm``."""
        return self.sums("matmul", a, b).to(a.dtype)

    def addmm(self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """Return ``aten::addmm``."""
        return epilogue(bias, self.sums("matmul", a, b), beta, alpha).to(a.dtype)

    def bmm(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``aten::bmm``."""
        return self.batch("matmul", a, b).to(a.dtype)

    def baddbmm(self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """Return ``aten::baddbmm``."""
        return epilogue(bias, self.batch("matmul", a, b), beta, alpha).to(a.dtype)

    def batch(self, op: str, a: Tensor, b: Tensor) -> Tensor:
        """Return the products of (B, M, K) and (B, K, N), in the format of the register."""
        if not len(a):
            return a.new_zeros(0, a.shape[1], b.shape[2], dtype=torch.promote_types(a.dtype, torch.float32))
        return torch.stack([self.sums(op, left, right) for left, right in zip(a, b, strict=True)])


def epilogue(bias: Tensor, sums: Tensor, beta: float, alpha: float) -> Tensor:
    """Return ``beta * bias + alpha * sums`` in the format of the sums; with ``beta`` 0 the bias is not read, so that its NaN does not spread."""
    scaled = sums if alpha == 1 else sums * alpha
    return scaled if beta == 0 else torch.add(scaled, bias.to(sums.dtype), alpha=beta)


def fits(operands: Sequence[Any]) -> bool:
    """Tell whether operands are plain tensors of one emulated dtype in main memory; torch refuses or computes everything else by itself."""
    tensors = [operand for operand in operands if operand is not None]
    kinds = {operand.dtype for operand in tensors if isinstance(operand, Tensor) and operand.is_cpu and operand.layout is torch.strided}
    return len(kinds) == 1 and kinds <= FORMAT_OF.keys() and all(isinstance(operand, Tensor) and operand.dtype in kinds for operand in tensors)
