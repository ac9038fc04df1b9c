"""Quantization of matrices with shared scales to formats of at most 8 bits, and back: the emulated twin of what units and libraries do.

Elements are stored in the torch dtype that is their format, or as codes in uint8, one each. Work goes by bands of rows whose temporaries stay in the caches of
a CPU; the result does not depend on their size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.formats import FORMATS, Format
from mpbackend.numerics.block_scales import ScaleRule, Scales, group_amax, group_shape, rule_for, scales_of, tiled
from mpbackend.numerics.rounding import chance, round_to
from mpbackend.numerics.rounding_rules import RoundingMode, rounding_target
from mpbackend.roles import Granularity

BAND = 1 << 19
"""Elements of a band on a CPU: 2 MiB of fp32. Larger bands leave the caches, in smaller ones threads wait for each other more than they work."""

SOURCES = (torch.float32, torch.bfloat16, torch.float16)
"""What is quantized. float64 is not: a product with an fp32 scale would round it twice."""

AS_FP16 = {"fp8_e4m3": (7, 256.0), "fp8_e5m2": (8, 1.0)}
"""How far a code is shifted to be a pattern of fp16, and the power of two by which the biases differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A matrix in a low-bit format.

    Attributes:
        stored: (rows, K): elements in the dtype that is the format, or codes in uint8, one each.
        scale: (groups of rows, groups of K): what an element is multiplied by; float32, float8_e8m0fnu or float8_e4m3fn by rule. NaN for a group that held
            an infinity or NaN.
        tensor_scale: () fp32: multiplies every scale too; None where the rule has one level.
        amax: (groups of rows, groups of K) fp32: largest magnitude of each group, whatever its scale was made from.
        format: element format.
        granularity: extent of a group: its second number runs along K.
        rule: how scales were made.
    """

    stored: Tensor
    scale: Tensor
    tensor_scale: Tensor | None
    amax: Tensor
    format: str
    granularity: Granularity
    rule: ScaleRule

    @property
    def multiplier(self) -> Tensor:
        """What the elements of each group are multiplied by to give their values back: shape of ``scale``, fp32."""
        scale = self.scale.float()
        return scale if self.tensor_scale is None else scale * self.tensor_scale


def quantize(
    x: Tensor,
    name: str,
    granularity: Granularity,
    *,
    rule: ScaleRule | None = None,
    amax: Tensor | None = None,
    amax_to: float | None = None,
    rounding: RoundingMode = "rne",
    generator: torch.Generator | None = None,
    uniform: Tensor | None = None,
) -> Quantized:
    """Quantize a matrix: ``round(x * multiplier)`` with the multiplier of each element's group, see ``block_scales``.

    A finite value beyond the format's largest one becomes that one, whatever a cast does. Where K or the rows are no multiple of a group, the last groups are
    smaller: they are made as if zeros followed, and nothing is stored for those. No gradient is carried.

    Args:
        x: (rows, K) float32, bfloat16 or float16.
        name: a floating-point format of at most 8 bits.
        granularity: extent of a group.
        rule: how scales are made; None takes ``e8m0_round_up`` for 1x32, ``ue4m3`` for 1x16 and ``fp32`` for the others.
        amax: what scales are made from instead of the groups' own (delayed scaling), fp32, broadcast to them; for ``ue4m3`` the amax of the tensor.
        amax_to: value that an amax is scaled to; None for the largest of the format.
        rounding: the rule of rounding; hif8 rounds halves away from zero in both nearest modes.
        generator: for stochastic rounding; see ``round_to``.
        uniform: likewise.

    Raises:
        UnknownNameError: no such format, granularity, rule or rounding.
        BackendError: not a matrix of one of these dtypes, a wider format, a rule that the granularity does not have, or no source of chance.
    """
    form, _ = rounding_target(name, rounding, "saturate")
    chosen = rule_for(granularity, rule)
    if not form.is_low_bit:
        raise UnknownNameError("low-bit format", name, [other.name for other in FORMATS.values() if other.kind == "float" and other.is_low_bit])
    if x.dim() != 2 or x.dtype not in SOURCES:
        found = f"{x.dtype} of shape {tuple(x.shape)}"
        raise BackendError(f"quantization to {name}", found=found, allowed=[str(dtype) for dtype in SOURCES], remedy="give a matrix of one of these dtypes")
    x = x.detach()
    drawn = chance(x, generator, uniform) if rounding == "stochastic" else None
    own = group_amax(x, granularity)
    scales = scales_from(own, form, chosen, amax, amax_to)
    stored = torch.empty(x.shape, dtype=native_dtype(form) or torch.uint8, device=x.device)
    buffer = None
    for rows, groups in bands(x, granularity):
        part = tiled(x[rows], granularity)
        buffer = torch.empty(part.shape, device=x.device) if buffer is None or buffer.shape != part.shape else buffer
        torch.mul(part, scales.multiplier[groups, None, :, None], out=buffer)
        values = buffer.flatten(2).flatten(0, 1)[: rows.stop - rows.start, : x.shape[1]]
        encode_(values, form, rounding, None if drawn is None else drawn[rows], stored[rows])
    return Quantized(stored=stored, scale=scales.scale, tensor_scale=scales.tensor_scale, amax=own, format=form.name, granularity=granularity, rule=chosen)


def scales_from(own: Tensor, form: Format, rule: ScaleRule, amax: Tensor | None, amax_to: float | None) -> Scales:
    """Return the scales of groups, made from their own amaxes or from others; a group that is not finite has the scale NaN in either case."""
    if rule == "ue4m3" or amax is None:
        return scales_of(own, form.name, rule, top=amax_to, tensor_amax=amax)
    scales = scales_of(amax.float().broadcast_to(own.shape), form.name, rule, top=amax_to)
    # torch cannot choose between tensors of float8_e8m0fnu; float32 holds its values.
    scale = scales.scale.float().where(own.isfinite(), torch.nan).to(scales.scale.dtype)
    return Scales(scales.multiplier, scale)


def bands(x: Tensor, granularity: Granularity) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of each band of a matrix and the groups that they lie in; one band for all on devices other than a CPU."""
    rows, columns = x.shape
    high = 1 if granularity == "tensor" else group_shape(granularity, x.shape)[0]
    size = max(1, BAND // (max(columns, 1) * high)) * high if x.is_cpu else max(rows, 1)
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        yield slice(start, stop), slice(0, 1) if granularity == "tensor" else slice(start // high, -(-stop // high))


def dequantize(quantized: Quantized, *, out: Tensor | None = None) -> Tensor:
    """Return the values of a quantized matrix: each stored element times the multiplier of its group, rounded once where that is inexact.

    Args:
        quantized: the matrix.
        out: contiguous fp32 tensor of the matrix's shape to write to; None makes one.

    Returns:
        (rows, K) fp32.

    Raises:
        BackendError: ``out`` has another shape or dtype, or is not contiguous.
    """
    stored, form, granularity = quantized.stored, FORMATS[quantized.format], quantized.granularity
    multiplier = quantized.multiplier
    result = torch.empty(stored.shape, device=stored.device) if out is None else out
    if result.shape != stored.shape or result.dtype != torch.float32 or not result.is_contiguous():
        found = f"{result.dtype} of shape {tuple(result.shape)}"
        raise BackendError("dequantization into a tensor", found=found, remedy=f"give a contiguous float32 one of shape {tuple(stored.shape)}")
    for rows, groups in bands(stored, granularity):
        part = result[rows]
        decode_into(stored[rows], form, part)
        whole = tiled(part, granularity)
        if whole.data_ptr() == part.data_ptr():
            whole.mul_(multiplier[groups, None, :, None])
        else:
            part.copy_((whole * multiplier[groups, None, :, None]).flatten(2).flatten(0, 1)[: part.shape[0], : part.shape[1]])
    return result


def native_dtype(form: Format) -> torch.dtype | None:
    """Return the torch dtype that is a format, one element each, or None where torch has none."""
    dtype = getattr(torch, form.torch_dtype or "", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def encode_(values: Tensor, form: Format, rounding: RoundingMode, uniform: Tensor | None, out: Tensor) -> None:
    """Round scaled values into a tensor of elements or codes; the values are overwritten.

    NaN becomes NaN where the format has it, else 0; the scale of its group is NaN.
    """
    dtype = native_dtype(form)
    if dtype is not None and rounding == "rne":
        # Casts disagree about values beyond the largest one.
        out.copy_(values.clamp_(-form.max, form.max))
        return
    rounded = round_to(values, form.name, rounding, overflow="saturate", uniform=uniform)
    out.copy_(rounded if dtype is not None else codes_of(rounded, form))


def codes_of(values: Tensor, form: Format) -> Tensor:
    """Return the codes, in uint8, of finite values of a format that is not a torch dtype, and of NaN where the format has it."""
    if form.encoding == "finite":
        # Times the ratio of the smallest normal numbers, a value's pattern in fp16 is its code and zeros behind it.
        patterns = (values * (FORMATS["fp16"].smallest_normal / form.smallest_normal)).half().view(torch.int16)
        magnitudes = (patterns & 0x7FFF) >> FORMATS["fp16"].mantissa_bits - form.mantissa_bits
        return magnitudes.bitwise_or_(patterns.signbit().to(torch.int16) << form.bits - 1).to(torch.uint8)
    ordered, codes, nan_code = code_table(form.name)
    place = torch.bucketize(values, torch.tensor(ordered, device=values.device)).clamp_(max=len(ordered) - 1)
    return torch.tensor(codes, dtype=torch.uint8, device=values.device)[place].masked_fill_(values.isnan(), nan_code)


@functools.cache
def code_table(name: str) -> tuple[tuple[float, ...], tuple[int, ...], int]:
    """Return the finite values of a format in order, their codes (zero's is the positive one), and the code that NaN becomes."""
    form = FORMATS[name]
    value_of = {code: float(form.value(code)) for code in range(1 << form.bits)}
    code_of = {value: code for code, value in reversed(value_of.items()) if math.isfinite(value)}
    ordered = tuple(sorted(code_of))
    return ordered, tuple(code_of[value] for value in ordered), next((code for code, value in value_of.items() if math.isnan(value)), 0)


@functools.cache
def value_table(name: str, device: torch.device) -> Tensor:
    """Return the value of every code of a format, fp32."""
    form = FORMATS[name]
    return torch.tensor([float(form.value(code)) for code in range(1 << form.bits)], device=device)


def decode_into(stored: Tensor, form: Format, out: Tensor) -> None:
    """Write the values of stored elements, in fp32."""
    if form.name in AS_FP16 and stored.is_cpu:
        decode_by_fp16(stored, form, out)
    elif native_dtype(form) is not None:
        out.copy_(stored)
    else:
        out.copy_(value_table(form.name, stored.device)[stored.int()])


def decode_by_fp16(stored: Tensor, form: Format, out: Tensor) -> None:
    """Write the values of fp8 elements by way of fp16, whose cast is an instruction of processors: a quarter of the time of torch's cast on a CPU.

    Shifted to the place of fp16's exponent, the code of a number is the pattern of the number over a power of two, subnormal ones included.
    """
    shift, factor = AS_FP16[form.name]
    codes = stored.view(torch.int8)
    # The sign is extended to bit 15 and one copy of it is left in bit 14.
    patterns = codes.to(torch.int16).bitwise_left_shift_(shift)
    if factor != 1.0:
        out.copy_(patterns.bitwise_and_(~(1 << 14)).view(torch.float16)).mul_(factor)
    else:
        out.copy_(patterns.view(torch.float16))
    if form.encoding == "fn" and codes.numel() and (codes & 0x7F).max() == 0x7F:
        out.masked_fill_(codes & 0x7F == 0x7F, torch.nan)
