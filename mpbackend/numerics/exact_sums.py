"""Sums of steps that are exact and rounded once, whole matrices at a time: fused multiply-adds into any register, and exact dot products of any length.

A step's products and the register are added without error, as an expansion: numbers of float64 whose sum is exact and whose bits do not overlap (J. R.
Shewchuk, Adaptive Precision Floating-Point Arithmetic, 1997, theorem 10). Their sum is then rounded to odd, which every rounding to a format at least two
bits narrower takes for the exact sum (S. Boldo, G. Melquiond, IEEE Trans. Comput. 57(4), 2008).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpbackend.formats import FORMATS
from mpbackend.numerics import oracle
from mpbackend.numerics.arithmetic import Arithmetic, Rounds

NO_TERM = -100_000
"""Exponent of zeros and infinities."""

ROUNDINGS: tuple[Rounds, ...] = ("rne", "rz", "rna")


def models(arithmetic: Arithmetic) -> bool:
    """Return whether the sums of an arithmetic are exact steps whose products float64 holds."""
    single = all(FORMATS[name].exponent_bits <= 8 and FORMATS[name].mantissa_bits <= 23 for name in (arithmetic.a, arithmetic.b))
    exact = arithmetic.model == "aligned" and arithmetic.fraction_bits is None and arithmetic.exact_group == 1
    return single and exact and arithmetic.register != "fp64"


def accumulate(left: Tensor, right: Tensor, start: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return the last sums of a product, before they are written in the output's format: the bits of ``oracle.sums``.

    Args:
        left: (M, K) values of ``arithmetic.a``, in fp32.
        right: (K, N) values of ``arithmetic.b``, in fp32.
        start: (M, N) what the sums start from, in fp32.
        arithmetic: a unit that this module ``models``.

    Returns:
        (M, N) in fp32.
    """
    a, b = left.double(), right.double()
    interval = arithmetic.promotion_interval
    outer, register = (start.double(), torch.zeros(start.shape, dtype=torch.float64)) if interval is not None else (start.double(), start.double())
    rule = torch.tensor(ROUNDINGS.index(arithmetic.register_rounding))
    since = 0
    for step in oracle.steps(left.shape[1], arithmetic):
        register = total([*(a[:, k, None] * b[k] for k in step), register], arithmetic.register, arithmetic.kept_bits, rule)
        since += arithmetic.products_per_step
        if since == interval:
            outer, register, since = promote(outer, register, arithmetic), torch.zeros_like(register), 0
    if interval is not None:
        register = promote(outer, register, arithmetic) if since else outer
    return register.to(left.dtype)


def promote(outer: Tensor, register: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return outer sums with the registers added, rounded to nearest even in the format ``promoted``."""
    return total([outer, register], arithmetic.promoted, FORMATS[arithmetic.promoted].mantissa_bits, torch.tensor(0))


def total(terms: Sequence[Tensor], name: str, bits: int, rule: Tensor) -> Tensor:
    """Return exact sums rounded once, as ``oracle.add_step`` does: overflow to infinity in every rounding, signs of zeros as in IEEE 754-2019, 6.3.

    Args:
        terms: float64 numbers of one shape whose bits lie between 2^-500 and 2^500; infinities and NaN are allowed.
        name: the format whose range the result has.
        bits: fraction bits that it keeps, at most 50.
        rule: index into ``ROUNDINGS``.
    """
    form = FORMATS[name]
    value = rounded(to_odd(expansion(terms)), bits, 1 - form.bias, form.bias, rule)
    sums = torch.stack(tuple(terms))
    negative = ((sums == 0) & sums.signbit()).all(dim=0)
    plain = sums.sum(dim=0)
    return torch.where(plain.isfinite(), value.masked_fill(negative, -0.0), plain)


def expansion(terms: Sequence[Tensor]) -> list[Tensor]:
    """Return numbers of the same sum that do not overlap, the smallest first; some are zero."""
    parts: list[Tensor] = []
    for term in terms:
        carried = term
        for i, part in enumerate(parts):
            carried, parts[i] = two_sum(carried, part)
        parts.append(carried)
    return parts


def two_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded sum and its error (D. E. Knuth, The Art of Computer Programming 2, 4.2.2, theorem B)."""
    s = x + y
    virtual = s - x
    return s, (x - (s - virtual)) + (y - virtual)


def to_odd(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of an expansion: exact, or of its two neighbors the one whose last bit is odd; a zero is positive."""
    whole_part, rest = parts[-1], torch.zeros_like(parts[-1])
    for part in reversed(parts[:-1]):
        sums, error = two_sum(whole_part, part)
        # From the first error on the smaller parts cannot change its sign, and only that is asked.
        exact = rest == 0
        whole_part, rest = torch.where(exact, sums, whole_part), torch.where(exact, error, rest)
    code = whole_part.view(torch.int64)
    toward = torch.where((rest > 0) == (whole_part > 0), 1, -1)
    odd = torch.where((rest != 0) & (code % 2 == 0), code + toward, code)
    return odd.view(torch.float64) + 0.0


def exponent_of(x: Tensor) -> Tensor:
    """Return the exponents of leading ones; ``NO_TERM`` for zeros and infinities."""
    exponent = torch.frexp(x).exponent.long() - 1
    return torch.where((x == 0) | x.isinf(), NO_TERM, exponent)


def scaled(x: Tensor, exponent: Tensor) -> Tensor:
    """Return ``x * 2**exponent`` where neither result nor steps on the way overflow."""
    half = exponent >> 1
    return x * power(half) * power(exponent - half)


def power(exponent: Tensor) -> Tensor:
    """Return ``2.0**exponent`` from its bits, for exponents of normal float64 numbers; torch.ldexp goes through float32 where the exponent is an integer."""
    return (exponent.clamp(-1022, 1023) + 1023 << 52).view(torch.float64)


def whole(x: Tensor, rounding: Tensor) -> Tensor:
    """Return numbers rounded to integers, each by its rule."""
    down = x.abs().floor()
    away = down + (x.abs() - down >= 0.5)
    return torch.where(rounding == 0, x.round(), torch.where(rounding == 1, x.trunc(), torch.copysign(away, x)))


def rounded(x: Tensor, bits: Tensor | int, emin: Tensor | int, emax: Tensor | int, rounding: Tensor) -> Tensor:
    """Return sums rounded to registers, with overflow to infinity."""
    ulp = torch.maximum(exponent_of(x), torch.as_tensor(emin)) - bits
    value = scaled(whole(scaled(x, -ulp), rounding), ulp)
    return torch.where(exponent_of(value) > emax, torch.copysign(torch.tensor(torch.inf, dtype=x.dtype), x), value)
