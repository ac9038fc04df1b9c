"""Quantization as a ``LowBit`` says it: scales from magnitudes, rounding to a number format, and the product of two quantized operands.

Formats are taken by value from ``mpbackend.formats``. Those that are a torch dtype are stored in it, the others as codes in uint8, one element each.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mpbackend.formats import FORMATS, Format
from mpbackend.lowbit import LowBit, Operand
from mpbackend.roles import Granularity

FP32_MAX = FORMATS["fp32"].max
EXPONENT_BITS_OF_FP32 = 0x7F80_0000
UNIFORM: frozenset[Granularity] = frozenset({"none", "tensor", "128x128"})
"""Granularities whose scales are the same seen from both sides, so that the transpose of a quantized tensor is the quantized transpose."""


class Table(NamedTuple):
    """A format of at most 8 bits in the order of its finite values.

    Attributes:
        codes: their codes.
        boundaries: the least fp32 number that is rounded to the second, third, ... of them.
        by_code: the value of every code.
        nan_code: the code that NaN becomes; 0 where the format has no NaN.
    """

    codes: tuple[int, ...]
    boundaries: tuple[float, ...]
    by_code: tuple[float, ...]
    nan_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A matrix in a low-bit format and what gives its values back: all that a product needs.

    Attributes:
        stored: (rows, K): elements in the dtype that is the format, or codes in uint8.
        inverse: (groups of rows, groups of K) fp32: what an element is multiplied by; NaN for a group that held a non-finite value, which no cast then hides.
        format: element format.
        granularity: extent of a group.
    """

    stored: Tensor
    inverse: Tensor
    format: str
    granularity: Granularity

    def dequantized(self) -> Tensor:
        """Return the values in fp32, shape of ``stored``."""
        return decode(self.stored, self.format) * spread(self.inverse, self.stored.shape, self.granularity)

    def transposed(self) -> Stored:
        """Return the transpose, without copying; it is the quantized transpose where ``granularity`` is one of ``UNIFORM``."""
        return Stored(stored=self.stored.t(), inverse=self.inverse.t(), format=self.format, granularity=self.granularity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized(Stored):
    """A matrix in a low-bit format with all that is known about its scales.

    Attributes:
        scale: shape of ``inverse``: what the tensor was multiplied by.
        amax: likewise: largest magnitude of each group, whatever its scale was made from.
    """

    scale: Tensor
    amax: Tensor


def quantize(tensor: Tensor, operand: Operand, low_bit: LowBit, amax: Tensor | None = None) -> Quantized:
    """Quantize a matrix as one operand of a product.

    Args:
        tensor: (rows, K), any floating dtype; K is the dimension that the product sums over.
        operand: format and granularity.
        low_bit: the rules of scales.
        amax: scalar that a delayed scale is made from, 0 for none; None takes the tensor's own.
    """
    if operand.granularity == "none":
        one = tensor.new_ones((1, 1), dtype=torch.float32)
        amax = group_amax(tensor, "tensor")
        return Quantized(stored=encode(tensor.float(), operand), inverse=one, format=operand.format, granularity="none", scale=one, amax=amax)
    groups = group_amax(tensor, operand.granularity)
    if low_bit.scale_format == "ue4m3":
        scale, inverse = two_level_scale(groups, operand.top * 2.0**-low_bit.margin)
    else:
        scale = scale_of(groups if amax is None else amax.reshape(1, 1), operand.top, low_bit)
        inverse = scale.reciprocal()
    inverse = torch.where(groups.isfinite(), inverse, math.nan)
    stored = cast(saturate_(tensor * spread(scale, tensor.shape, operand.granularity), operand.format), operand)
    return Quantized(stored=stored, inverse=inverse, format=operand.format, granularity=operand.granularity, scale=scale, amax=groups)


def scale_of(amax: Tensor, top: float, low_bit: LowBit) -> Tensor:
    """Return the scale of each amax: ``top / amax / 2^margin``, 1 where the amax is 0 or not finite; see ``LowBit``."""
    # A number divided by a tensor would be the number times a rounded reciprocal.
    scale = (torch.full_like(amax, top * 2.0**-low_bit.margin) / amax).clamp(max=FP32_MAX)
    if low_bit.power_of_two:
        scale = (scale.view(torch.int32) & EXPONENT_BITS_OF_FP32).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def two_level_scale(groups: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Return scale and inverse of blocks whose own scale is stored in ue4m3 under one scale of the tensor; see ``LowBit``.

    Args:
        groups: amax of each block.
        top: value that the amax of a block is scaled to.
    """
    limit = FORMATS["ue4m3"].max
    finite = torch.where(groups.isfinite(), groups, 0.0)
    largest = finite.amax() if finite.numel() else finite.new_zeros(())
    encode_tensor = torch.where(largest > 0, (torch.full_like(largest, limit * top) / largest).clamp(max=FP32_MAX), 1.0)
    stored = (finite / torch.full_like(largest, top) * encode_tensor).clamp(max=limit).to(torch.float8_e4m3fn).float()
    return (encode_tensor / stored).clamp(max=FP32_MAX), stored / encode_tensor


def block_shape(granularity: Granularity, shape: torch.Size) -> tuple[int, int]:
    """Return rows and columns of one group, at least 1 each."""
    rows, columns = (max(1, size) for size in shape)
    if granularity in ("none", "tensor"):
        return rows, columns
    if granularity == "row":
        return 1, columns
    high, _, wide = granularity.partition("x")
    return int(high), int(wide)


def group_amax(tensor: Tensor, granularity: Granularity) -> Tensor:
    """Return the largest magnitude of each group in fp32, NaN where a group holds one; a ragged last group counts what it has, an empty tensor has 0."""
    high, wide = block_shape(granularity, tensor.shape)
    rows, columns = (math.ceil(size / side) for size, side in zip(tensor.shape, (high, wide), strict=True))
    if tensor.numel() == 0:
        return tensor.new_zeros((max(rows, 1), max(columns, 1)) if granularity == "tensor" else (rows, columns), dtype=torch.float32)
    if (rows, columns) == (1, 1):
        low, top = torch.aminmax(tensor)
        return torch.maximum(-low, top).float().reshape(1, 1)
    padded = functional.pad(tensor, (0, columns * wide - tensor.shape[1], 0, rows * high - tensor.shape[0]))
    return padded.reshape(rows, high, columns, wide).abs().amax((1, 3)).float()


def spread(groups: Tensor, shape: torch.Size, granularity: Granularity) -> Tensor:
    """Return a value per group so that it multiplies the elements of a matrix: as it is where it broadcasts, else repeated to ``shape``."""
    if granularity in ("none", "tensor", "row"):
        return groups
    high, wide = block_shape(granularity, shape)
    return groups.repeat_interleave(high, 0).repeat_interleave(wide, 1)[: shape[0], : shape[1]]


def encode(values: Tensor, operand: Operand) -> Tensor:
    """Round to a format; in a low-bit one values beyond the largest, inf included, become that one, and NaN stays NaN where the format has it, else becomes 0.

    Args:
        values: fp32, already scaled.
        operand: gives format and rounding; its granularity plays no part.

    Returns:
        The elements in the dtype that is the format, or its codes in uint8.
    """
    return cast(saturate_(values.clone(), operand.format), operand)


def saturate_(values: Tensor, name: str) -> Tensor:
    """Limit values in place to those that a low-bit format has.

    Casts disagree about the others: torch 2.12 and later gives the largest value in e4m3 and inf in e5m2, earlier ones NaN and inf.
    """
    spec = FORMATS[name]
    return values.clamp_(spec.min, spec.max) if spec.is_low_bit else values


def cast(values: Tensor, operand: Operand) -> Tensor:
    """Round values within a format's range to it, by torch's own cast (to nearest even) where a dtype is the format, else by its table."""
    dtype = native_dtype(FORMATS[operand.format])
    if dtype is not None:
        return values.to(dtype)
    table = value_table(operand.format, operand.rounding)
    codes = values.new_tensor(table.codes, dtype=torch.uint8)[torch.bucketize(values.contiguous(), values.new_tensor(table.boundaries), right=True)]
    return torch.where(values.isnan(), table.nan_code, codes).to(torch.uint8)


def decode(stored: Tensor, name: str) -> Tensor:
    """Return the values of stored elements in fp32."""
    if native_dtype(FORMATS[name]) is not None:
        return stored.float()
    return torch.tensor(value_table(name, "rne").by_code, device=stored.device)[stored.int()]


def native_dtype(spec: Format) -> torch.dtype | None:
    """Return the dtype that is a floating-point format, or None where torch has none."""
    dtype = getattr(torch, spec.torch_dtype) if spec.kind == "float" and spec.torch_dtype is not None else None
    return dtype if isinstance(dtype, torch.dtype) else None


@functools.cache
def value_table(name: str, rounding: str) -> Table:
    """Return the table of a format of at most 8 bits.

    Two neighbors meet in the middle. There ``rne`` takes the even code of the two (codes of neighbors differ in their last bit), ``rna`` the one farther from
    zero.
    """
    spec = FORMATS[name]
    by_code = tuple(float(spec.value(code)) for code in range(1 << spec.bits))
    code_of = {value: code for code, value in reversed(list(enumerate(by_code))) if math.isfinite(value)}
    ordered = sorted(code_of)
    boundaries = []
    for low, high in itertools.pairwise(ordered):
        middle = (low + high) / 2
        up = code_of[high] % 2 == 0 if rounding == "rne" else low >= 0
        boundaries.append(middle if up else next_fp32(middle))
    nan = next((code for code, value in enumerate(by_code) if math.isnan(value)), 0)
    return Table(codes=tuple(code_of[value] for value in ordered), boundaries=tuple(boundaries), by_code=by_code, nan_code=nan)


def next_fp32(value: float) -> float:
    """Return the least fp32 number above ``value``, an fp32 number other than 0."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    (above,) = struct.unpack("<f", struct.pack("<i", bits + (1 if value > 0 else -1)))
    return float(above)


def multiply(a: Stored, b: Stored) -> Tensor:
    """Return ``a @ b^T`` in fp32, summed in fp32.

    torch's scaled product runs it where both operands are fp8 with scales of one kind that it takes on a CPU; everything else is dequantized and multiplied.

    Args:
        a: (M, K).
        b: (N, K).
    """
    if takes_scaled_product(a, b):
        scales = a.inverse.reshape(scale_shape(a, -1, 1)), b.inverse.reshape(scale_shape(b, 1, -1))
        return torch._scaled_mm(a.stored, b.stored.t(), *scales, out_dtype=torch.float32)
    return a.dequantized() @ b.dequantized().t()


def takes_scaled_product(a: Stored, b: Stored) -> bool:
    """Tell whether ``torch._scaled_mm`` multiplies two operands on a CPU: fp8 dtypes, tensor or row scales on both, and something to multiply."""
    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    return (
        a.stored.is_cpu
        and a.stored.dtype in fp8
        and b.stored.dtype in fp8
        and a.granularity == b.granularity
        and a.granularity in ("tensor", "row")
        and min(*a.stored.shape, *b.stored.shape) > 0
    )


def scale_shape(operand: Stored, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape in which the scaled product takes scales: none for a tensor's, else (rows, columns)."""
    return () if operand.granularity == "tensor" else (rows, columns)
