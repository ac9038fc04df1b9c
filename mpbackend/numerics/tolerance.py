"""How far a product may lie from the exact one: bounds derived from the record of the arithmetic and K, never tuned.

Every bound is a multiple of the weight of the operands, the sum of ``|a[k]| * |b[k]|``, plus a constant for what underflows. With ``n`` steps of ``L``
products, ``F`` fraction bits of the alignment and unit roundoff ``u`` of the register (``2**-(bits + 1)`` to nearest, ``2**-bits`` toward zero):

* A step truncates at most ``L + 1`` terms, each by less than ``2**-F`` of the largest, and rounds once: ``c = (L + 1) * 2**-F + u``, of a sum that is at
  most the weight times the growth ``(1 + u)**n`` (1 where the register rounds toward zero). All steps: ``n * c`` times that growth.
  ``F`` absent is the chain of fused multiply-adds, ``n * u * (1 + u)**n``: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1.
* Promotion restarts ``n`` after every interval and adds ``m`` outer roundings: the two-level sum of Blanchard, Higham, Lopez, Mary and Pranesh (2020).
* To nearest without alignment the rounding errors have no bias, and ``lambda * sqrt(n)`` takes the place of ``n``: Higham and Mary (2019), theorem 3.1.
  Truncation is biased: the loss of a positive sum grows like ``n``, so there the bound stays the deterministic one.

A bound of the worst case is slack on operands whose signs cancel, the more the longer K. To tell a narrow accumulator from a wide one, choose operands that
lose much: all positive, or small terms between a large one and its negative. On those a 13-bit sum exceeds the bound of a 24-bit claim at every K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from mpbackend.errors import BackendError
from mpbackend.formats import FORMATS
from mpbackend.numerics.arithmetic import Arithmetic, Rounds

Kind = Literal["deterministic", "probabilistic"]
"""``deterministic``: never exceeded. ``probabilistic``: exceeded with a stated probability, under rounding errors of mean zero."""

UPWARD = 1 + 2.0**-40
"""Covers the rounding of this module's own few operations in fp64."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """The largest distance of a computed product from the exact one.

    Attributes:
        relative: multiple of the weight of the operands.
        absolute: in units of the result; for what underflows.
        kind: what the bound promises; ``deterministic`` also where a probabilistic one was asked for and does not hold or is no better.
        failure: probability that one element exceeds it; 0 for deterministic.
    """

    relative: float
    absolute: float
    kind: Kind = "deterministic"
    failure: float = 0.0

    def limit(self, weight: float) -> float:
        """Return the largest distance for operands of a weight, in units of the result."""
        return self.relative * weight + self.absolute


def product_bound(arithmetic: Arithmetic, k: int, *, kind: Kind = "deterministic", failure: float = 1e-9, converted: bool = False) -> Bound:
    """Return the bound of one element of a product, as long as nothing overflows.

    Args:
        arithmetic: the unit. Subnormal operands that it flushes count as the zeros they become.
        k: number of products, at least 1.
        kind: which bound to look for.
        failure: probability that an element may exceed a probabilistic bound, between 0 and 1.
        converted: whether the exact product is that of the operands before their conversion to the formats of the unit.

    Raises:
        BackendError: ``k`` or ``failure`` is out of range, or the unit adds groups under a block scale, which the weight does not bound.
    """
    if k < 1 or not 0 < failure < 1:
        raise BackendError("a bound of a product", found=f"k={k}, failure={failure}", remedy="give k >= 1 and a probability between 0 and 1")
    if arithmetic.exact_group != 1:
        raise BackendError("a bound of a product", found=f"exact groups of {arithmetic.exact_group}", remedy="compare bit for bit with the emulation")
    host = arithmetic.model == "host"
    size = 1 if host else arithmetic.products_per_step
    bits = None if host else arithmetic.fraction_bits
    rounding: Rounds = "rne" if host else arithmetic.register_rounding
    # Where the order permutes 32 products, a step at the end of K may hold few of them: count the whole block.
    padded = k if arithmetic.order == "sequential" else 32 * math.ceil(k / 32)
    interval = None if host else arithmetic.promotion_interval
    steps = math.ceil(padded / size)
    inner = steps if interval is None else min(steps, math.ceil(interval / size))
    outer = 0 if interval is None else math.ceil(padded / interval)

    u = roundoff(arithmetic.kept_bits, rounding)
    align = 0.0 if bits is None else (size + 1) * 2.0**-bits
    growth = 1.0 if rounding == "rz" else (1 + u) ** inner
    v = roundoff(FORMATS[arithmetic.promoted].mantissa_bits, "rne")
    chain = inner * (align + u) * growth
    relative = chain if not outer else chain + outer * v * (1 + v) ** outer * growth
    relative = min(relative, 1 + growth * (1 + v) ** outer)
    chosen: Kind = "deterministic"
    if kind == "probabilistic" and bits is None and rounding != "rz":
        widest = max(u, v) if outer else u
        count = inner + outer
        better = likely(count, steps + outer, widest, failure)
        if better < relative:
            relative, chosen = better, "probabilistic"

    absolute = steps * tiny(arithmetic.register, arithmetic.kept_bits)
    if bits is not None:
        floor = 1 - FORMATS[arithmetic.register].bias
        lowest = floor if arithmetic.zero_exponent is None else max(floor, arithmetic.zero_exponent)
        absolute += steps * (size + 1) * 2.0 ** (lowest - bits)
    if outer:
        absolute += outer * tiny(arithmetic.promoted, FORMATS[arithmetic.promoted].mantissa_bits)
    # What underflows enters the sums whose later steps are truncated in proportion to them.
    absolute *= 1 + chain
    if arithmetic.output != (arithmetic.promoted if outer else arithmetic.register) or arithmetic.output_subnormals == "flushed":
        form = FORMATS[arithmetic.output]
        last = roundoff(form.mantissa_bits, arithmetic.output_rounding)
        relative += last * (1 + relative)
        absolute = absolute * (1 + last) + (form.smallest_normal if arithmetic.output_subnormals == "flushed" else tiny(arithmetic.output, form.mantissa_bits))
    if converted:
        change = (1 + conversion(arithmetic.a, arithmetic)) * (1 + conversion(arithmetic.b, arithmetic)) - 1
        relative = change + (1 + change) * relative
    return Bound(relative=relative * UPWARD, absolute=absolute * UPWARD, kind=chosen, failure=failure if chosen == "probabilistic" else 0.0)


def weight(a: Sequence[float], b: Sequence[float], arithmetic: Arithmetic, addend: float = 0.0) -> float:
    """Return the sum of ``|a[k]| * |b[k]|`` and ``|addend|``, where a subnormal operand counts as the smallest normal number of its format.

    A unit aligns a subnormal operand by the smallest normal exponent, so a product of one costs the other terms as much as a normal one.

    Args:
        a: K numbers.
        b: K numbers.
        arithmetic: says the formats of the operands.
        addend: what the sum starts from.
    """
    least, lesser = FORMATS[arithmetic.a].smallest_normal, FORMATS[arithmetic.b].smallest_normal
    return math.fsum([max(abs(x), least) * max(abs(y), lesser) for x, y in zip(a, b, strict=True) if x and y] + [abs(addend)])


def gap(measured: float, reference: float, bound: Bound, weight: float) -> float:
    """Return the distance of a result from the exact one in multiples of its bound: at most 1 for a unit that keeps its claim.

    Args:
        measured: what the device gave.
        reference: the exact product, at most a rounding in fp64 away.
        bound: of ``product_bound``.
        weight: of the operands.

    Returns:
        A number from 0; infinity where one of the two is not finite and the other differs, or where the bound is zero and they differ.
    """
    if measured == reference or (math.isnan(measured) and math.isnan(reference)):
        return 0.0
    limit = bound.limit(weight)
    distance = abs(measured - reference)
    return distance / limit if limit and math.isfinite(distance) else math.inf


def roundoff(bits: int, rounding: Rounds) -> float:
    """Return the largest relative error of a rounding to ``bits`` fraction bits: half an ulp to nearest, a whole one toward zero."""
    return 2.0 ** -(bits if rounding == "rz" else bits + 1)


def tiny(name: str, bits: int) -> float:
    """Return the largest absolute error of a rounding, in any direction, below the smallest normal number of a format with ``bits`` fraction bits."""
    return math.ldexp(FORMATS[name].smallest_normal, -bits)


def conversion(name: str, arithmetic: Arithmetic) -> float:
    """Return the relative error of an operand's conversion to a format."""
    return roundoff(FORMATS[name].mantissa_bits, arithmetic.operand_rounding)


def likely(count: int, roundings: int, u: float, failure: float) -> float:
    """Return ``exp(lambda * sqrt(n) * u + n * u**2 / (1 - u)) - 1`` with the lambda that a failure probability needs.

    Higham and Mary (2019), A New Approach to Probabilistic Rounding Error Analysis, theorems 2.4 and 3.1:
    an element fails with probability at most ``2 * n * exp(-lambda**2 * (1 - u)**2 / 2)``.

    Args:
        count: roundings that one product passes through.
        roundings: all roundings of the element, at least ``count``.
        u: unit roundoff.
        failure: probability, between 0 and 1.
    """
    spread = math.sqrt(2 * math.log(2 * roundings / failure)) / (1 - u)
    return math.expm1(spread * math.sqrt(count) * u + count * u * u / (1 - u))
