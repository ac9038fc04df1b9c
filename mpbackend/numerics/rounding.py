"""Rounding of tensors to a number format: the vectorized twin of ``rounding_rules.round_value``, with the same bits.

A number's magnitude is cut as an integer. The bits below the format's ulp are the rest; what is left, plus one ulp where the rule goes up, is again the
pattern of a number, because a carry out of the fraction is a step of the exponent. So nothing here depends on how the host multiplies, rounds or flushes
subnormal numbers (``torch.set_flush_denormal``). Where torch has the format as a dtype its cast to nearest even is taken instead.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mpbackend.errors import BackendError
from mpbackend.formats import FORMATS, Format
from mpbackend.numerics.rounding_rules import Overflow, RoundingMode, neighbors, rounding_target

BLOCK = 1 << 17
"""Elements that are rounded at once on a CPU: the temporaries of one block stay in its caches, and its threads have enough to do."""

DEEPEST = 900
"""Most bits that are cut off a number: a stochastic result differs only for uniform numbers between 0 and 2^-800."""


class Carrier(NamedTuple):
    """The bit layout of a dtype that values are carried in.

    Attributes:
        integers: dtype of the same width.
        fraction: fraction bits.
        magnitude: the bits beside the sign.
        infinity: the pattern of infinity; larger magnitudes are NaN.
    """

    form: Format
    integers: torch.dtype
    fraction: int
    magnitude: int
    infinity: int


def carrier(name: str, integers: torch.dtype) -> Carrier:
    """Return the layout of a format that is a dtype of torch."""
    form = FORMATS[name]
    return Carrier(form, integers, form.mantissa_bits, (1 << form.bits - 1) - 1, (1 << form.exponent_bits) - 1 << form.mantissa_bits)


CARRIERS = {torch.float32: carrier("fp32", torch.int32), torch.float64: carrier("fp64", torch.int64)}


def round_to(
    x: Tensor,
    name: str,
    mode: RoundingMode = "rne",
    *,
    overflow: Overflow | None = None,
    subnormals: Literal["kept", "flushed"] = "kept",
    generator: torch.Generator | None = None,
    uniform: Tensor | None = None,
) -> Tensor:
    """Return numbers rounded to a format; a format that holds them returns them unchanged. No gradient is carried.

    Args:
        x: any shape, float32 or float64.
        name: a floating-point format whose values the dtype of ``x`` holds. hif8 rounds halves away from zero in both nearest modes.
        mode: the rule; see ``round_value``.
        overflow: what becomes of a number that is rounded beyond the largest; None takes the format's own.
        subnormals: ``flushed`` makes a result below the smallest normal number a zero of the same sign.
        generator: for stochastic rounding, what the uniform numbers are drawn from: 24 bits for float32, 53 bits for float64, so that the probability of going
            up is that of the part cut off, to one in 2^24 or 2^53.
        uniform: instead of a generator, the numbers themselves: shape of ``x``, floating, in [0, 1).

    Returns:
        A new contiguous tensor of the shape and dtype of ``x``.

    Raises:
        UnknownNameError: as ``rounding_target``.
        BackendError: another dtype, a format too wide for it, or stochastic rounding without exactly one source of chance.
    """
    form, rule = rounding_target(name, mode, overflow)
    if x.dtype not in CARRIERS:
        raise BackendError(f"rounding to {name}", found=f"a tensor of {x.dtype}", allowed=[str(dtype) for dtype in CARRIERS], remedy="convert it to float32")
    layout = CARRIERS[x.dtype]
    if form.max > layout.form.max or form.mantissa_bits > layout.fraction:
        raise BackendError(f"rounding to {name}", found=f"a tensor of {x.dtype}, which does not hold its values", remedy="convert it to float64")
    if mode == "stochastic":
        uniform = chance(x, generator, uniform)
    flat, result = x.detach().reshape(-1), torch.empty_like(x, requires_grad=False, memory_format=torch.contiguous_format)
    written = result.view(-1)
    cast = torch_cast(form, rule) if mode == "rne" and subnormals == "kept" and x.dtype == torch.float32 else None
    drawn = None if mode != "stochastic" or uniform is None else uniform.reshape(-1)
    size = BLOCK if x.is_cpu else max(flat.numel(), 1)
    for start in range(0, flat.numel(), size):
        part = slice(start, start + size)
        if cast is not None:
            written[part] = rounded_by_cast(flat[part], form, rule, cast)
        else:
            written[part] = rounded_bits(flat[part], form, rule, mode, subnormals == "flushed", None if drawn is None else drawn[part])
    return result


def chance(x: Tensor, generator: torch.Generator | None, uniform: Tensor | None) -> Tensor:
    """Return the uniform numbers that stochastic rounding compares with, one for each element.

    Raises:
        BackendError: neither a generator nor numbers are given, or both, or numbers of another shape.
    """
    if (generator is None) == (uniform is None):
        found = "neither a generator nor uniform numbers" if uniform is None else "both a generator and uniform numbers"
        raise BackendError("stochastic rounding", found=found, remedy="give a torch.Generator, so that the result can be repeated, or the numbers")
    if uniform is None:
        return torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    if uniform.shape != x.shape or not uniform.is_floating_point():
        raise BackendError("stochastic rounding", found=f"{uniform.dtype} of shape {tuple(uniform.shape)} for {tuple(x.shape)}", remedy="give floats, one each")
    return uniform


def torch_cast(form: Format, rule: Overflow) -> torch.dtype | None:
    """Return the dtype whose cast from float32 rounds to a format, or None where torch has none.

    A number within the range is rounded alike by every torch; one beyond it is not, so ``rounded_by_cast`` decides about those itself. bf16 has the range of
    float32, and limiting a number to it would be a detour: it is cast only where it overflows to infinity.
    """
    dtype = getattr(torch, form.torch_dtype or "", None)
    if form.name in ("fp32", "fp64") or not isinstance(dtype, torch.dtype) or (form.name == "bf16" and rule != "inf"):
        return None
    return dtype


def rounded_by_cast(x: Tensor, form: Format, rule: Overflow, dtype: torch.dtype) -> Tensor:
    """Return float32 numbers rounded to nearest even by the cast to a dtype."""
    if rule == "inf":
        return x.to(dtype).to(x.dtype)
    result = x.clamp(-form.max, form.max).to(dtype).to(x.dtype)
    return result if rule == "saturate" else result.masked_fill_(x.abs() >= first_beyond(form), torch.nan)


@functools.cache
def first_beyond(form: Format) -> float:
    """Return the least float32 number that is rounded to nearest even beyond a format's largest."""
    lower, upper = neighbors(Fraction(form.max), form)
    middle = torch.tensor(float((lower + upper) / 2))
    odd = lower / (upper - lower) % 2 == 1
    return float(middle if odd else torch.nextafter(middle, torch.tensor(torch.inf)))


@functools.cache
def cut_bits(form: Format, source: Format) -> tuple[int, ...]:
    """Return how many of the low bits of a significand a format has no room for, by the biased exponent of the number.

    Args:
        form: what is rounded to.
        source: the IEEE format of the number; exponent 0 (subnormal numbers) counts as 1.
    """
    counts = []
    for field in range(1 << source.exponent_bits):
        e = max(field, 1) - source.bias
        lower, upper = neighbors(Fraction(2) ** e, form)
        ulp = upper - lower
        exponent = ulp.numerator.bit_length() - ulp.denominator.bit_length()
        counts.append(min(max(exponent - (e - source.mantissa_bits), 0), DEEPEST))
    return tuple(counts)


@functools.cache
def cut_table(form: Format, source: Format, integers: torch.dtype, device: torch.device) -> Tensor:
    """Return ``cut_bits`` as a tensor."""
    return torch.tensor(cut_bits(form, source), dtype=integers, device=device)


@functools.cache
def weight_table(form: Format, source: Format, device: torch.device) -> Tensor:
    """Return what the lowest bit of a significand is of the format's ulp, by the biased exponent: powers of two in float64."""
    return torch.tensor([2.0**-count for count in cut_bits(form, source)], dtype=torch.float64, device=device)


def pattern(value: float, layout: Carrier) -> int:
    """Return the bits of a number that is not negative."""
    dtype = torch.float32 if layout.integers == torch.int32 else torch.float64
    return int(torch.tensor(value, dtype=dtype).view(layout.integers))


def rounded_bits(x: Tensor, form: Format, rule: Overflow, mode: RoundingMode, flush: bool, uniform: Tensor | None) -> Tensor:
    """Return numbers rounded to a format by their bits.

    Args:
        x: one dimension, float32 or float64.
        form: what is rounded to.
        rule: what overflows become.
        mode: the rule of rounding.
        flush: whether results below the smallest normal number become zero.
        uniform: for stochastic rounding.
    """
    layout = CARRIERS[x.dtype]
    bits = x.view(layout.integers)
    magnitude = bits & layout.magnitude
    field = magnitude >> layout.fraction
    significand = magnitude - ((field - 1).clamp_(min=0) << layout.fraction)
    # Two bits above the significand every rounding to nearest gives zero; shifts by the width of the integer are not defined.
    cut = cut_table(form, layout.form, layout.integers, x.device).index_select(0, field).clamp_(max=layout.fraction + 2)
    ulp = torch.ones_like(cut) << cut
    rest = significand & (ulp - 1)
    rounded = magnitude - rest
    if mode != "rz":
        if mode == "stochastic" and uniform is not None:
            up = uniform.double() < rest.double() * weight_table(form, layout.form, x.device).index_select(0, field)
        elif mode == "rna" or form.encoding == "hif8":
            up = 2 * rest >= ulp
        else:
            up = 2 * rest + (significand >> cut & 1) > ulp
        rounded = torch.where(up, rounded + ulp, rounded)
    if max(cut_bits(form, layout.form)) > layout.fraction:
        # The number is less than the smallest subnormal number: one of two values, whose difference is not an ulp of the carrier's binade.
        least = pattern(form.smallest_subnormal, layout)
        small = torch.zeros_like(rounded) if mode == "rz" else torch.zeros_like(rounded).masked_fill_(up, least)
        rounded = torch.where(cut > layout.fraction, small, rounded)
    return finished(rounded, bits, magnitude, form, rule, mode, flush, layout).view(x.dtype)


def finished(rounded: Tensor, bits: Tensor, magnitude: Tensor, form: Format, rule: Overflow, mode: RoundingMode, flush: bool, layout: Carrier) -> Tensor:
    """Return rounded magnitudes with overflows, specials, flushed results and signs in place."""
    largest = pattern(form.max, layout)
    beyond = {"inf": layout.infinity, "saturate": largest, "nan": pattern(torch.nan, layout)}[rule]
    result = rounded.masked_fill(rounded > largest, largest if mode == "rz" else beyond)
    if mode == "rz" and beyond != largest:
        result.masked_fill_(magnitude == layout.infinity, beyond)
    if flush:
        result.masked_fill_(result < pattern(form.smallest_normal, layout), 0)
    result.masked_fill_(magnitude > layout.infinity, pattern(torch.nan, layout) if form.has_nan else 0)
    signed = result | (bits & ~layout.magnitude)
    if not form.has_negative_zero:
        signed.masked_fill_(result == 0, 0)
    if not form.has_nan:
        signed.masked_fill_(magnitude > layout.infinity, 0)
    return signed
