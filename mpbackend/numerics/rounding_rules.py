"""Rounding to a number format, one number at a time, as the definitions say: the oracle of every vectorized rounding.

A finite number is rounded as if there were no largest exponent, and what is then beyond the largest finite value overflows (IEEE 754-2019, 4.3 and 7.4).
"""

from __future__ import annotations

import bisect
import functools
import math
from fractions import Fraction
from typing import Literal

from mpbackend.errors import UnknownNameError
from mpbackend.formats import FORMATS, Format, parse_format
from mpbackend.numerics.arithmetic import Rounds

RoundingMode = Literal[Rounds, "stochastic"]
"""Nearest even, toward zero, halves away from zero; stochastic: up with the probability that the part cut off has of an ulp."""

Overflow = Literal["inf", "saturate", "nan"]
"""What becomes of a finite number beyond the largest: infinity, the largest value, or NaN."""

MODES: tuple[RoundingMode, ...] = ("rne", "rz", "rna", "stochastic")


def natural_overflow(form: Format) -> Overflow:
    """Return what a format makes of numbers beyond its largest: infinity where it has one, else NaN (OFP8, 5.2.1), else the largest (MX, 5.3)."""
    return "inf" if form.has_inf else "nan" if form.has_nan else "saturate"


def rounding_target(name: str, mode: str, overflow: Overflow | None = None) -> tuple[Format, Overflow]:
    """Return the format that a rounding goes to and what its overflows become.

    Args:
        name: a floating-point format.
        mode: one of ``MODES``. hif8's hybrid rounding is none of them: the documents that name it do not define it.
        overflow: None takes the format's own.

    Raises:
        UnknownNameError: no such format or rule, a format without fractions, or an overflow rule that the format has no code for.
    """
    form = parse_format(name)
    rule = overflow or natural_overflow(form)
    possible = [option for option, has in (("inf", form.has_inf), ("saturate", True), ("nan", form.has_nan)) if has]
    if form.kind != "float":
        floats = [other.name for other in FORMATS.values() if other.kind == "float"]
        raise UnknownNameError("floating-point format", name, floats, remedy="integers and scales are not rounded by these rules")
    if mode not in MODES:
        raise UnknownNameError("rounding", mode, MODES, remedy="take one of these")
    if rule not in possible:
        raise UnknownNameError(f"overflow of {name}", rule, possible, remedy="take one that the format has a code for")
    return form, rule


def round_value(
    x: float | Fraction,
    name: str,
    mode: RoundingMode = "rne",
    *,
    overflow: Overflow | None = None,
    subnormals: Literal["kept", "flushed"] = "kept",
    uniform: Fraction = Fraction(1, 2),
) -> float:
    """Return a number in a format.

    Args:
        x: any number.
        name: a floating-point format. hif8 rounds halves away from zero in both nearest modes, as its definition has no other (arXiv 2409.16626).
        mode: the rule.
        overflow: what becomes of a number that is rounded beyond the largest; None takes the format's own. An infinity stays one where the format has it,
            and overflows like a number where it has none. Toward zero a finite number stops at the largest.
        subnormals: ``flushed`` makes a result below the smallest normal number a zero of the same sign.
        uniform: for stochastic rounding, a number in [0, 1): the magnitude goes up if it is less than the fraction cut off.

    Returns:
        The value. A zero keeps its sign where the format has two; NaN becomes 0.0 in a format without it.

    Raises:
        UnknownNameError: as ``rounding_target``.
    """
    form, rule = rounding_target(name, mode, overflow)
    if isinstance(x, float) and math.isnan(x):
        return math.nan if form.has_nan else 0.0
    if isinstance(x, float) and math.isinf(x):
        return x if form.has_inf and rule == "inf" else beyond(x, form, rule)
    if not x:
        return x if isinstance(x, float) and form.has_negative_zero else 0.0
    magnitude = round_magnitude(abs(Fraction(x)), form, mode, uniform)
    if magnitude > Fraction(form.max):
        return math.copysign(form.max, x) if mode == "rz" else beyond(float(x > 0) - 0.5, form, rule)
    if subnormals == "flushed" and magnitude < Fraction(form.smallest_normal):
        magnitude = Fraction(0)
    if not magnitude and not form.has_negative_zero:
        return 0.0
    return math.copysign(float(magnitude), x)


def beyond(sign: float, form: Format, rule: Overflow) -> float:
    """Return what a number beyond the largest becomes, with the sign of another."""
    return math.nan if rule == "nan" else math.copysign(math.inf if rule == "inf" else form.max, sign)


def round_magnitude(x: Fraction, form: Format, mode: RoundingMode, uniform: Fraction) -> Fraction:
    """Return a positive number rounded to one of the two neighbors that a format has for it, as if there were no largest exponent."""
    lower, upper = neighbors(x, form)
    rest = (x - lower) / (upper - lower)
    if mode == "rz":
        return lower
    if mode == "stochastic":
        return upper if uniform < rest else lower
    if rest != Fraction(1, 2):
        return upper if rest > Fraction(1, 2) else lower
    if mode == "rna" or form.encoding == "hif8":
        return upper
    return lower if lower / (upper - lower) % 2 == 0 else upper


def neighbors(x: Fraction, form: Format) -> tuple[Fraction, Fraction]:
    """Return the largest number of a format that is at most ``x`` and the next larger one.

    The format is continued beyond its largest value with the ulp that it has there.

    Args:
        x: a number of at least 0.
        form: a floating-point format.
    """
    if form.encoding == "hif8":
        values = hif8_values()
        above = bisect.bisect_right(values, x)
        if above < len(values):
            return values[above - 1], values[above]
        # The largest, 2^15, stands in a binade with one fraction bit; the code of 1.5 x 2^15 is infinity.
        ulp = values[-1] / 2
        return x // ulp * ulp, (x // ulp + 1) * ulp
    e = x.numerator.bit_length() - x.denominator.bit_length() if x else 0
    e -= bool(x) and x < Fraction(2) ** e
    smallest = math.frexp(form.smallest_normal)[1] - 1
    ulp = Fraction(2) ** (max(e, smallest) - form.mantissa_bits if x else smallest - form.mantissa_bits)
    whole = x // ulp
    return whole * ulp, (whole + 1) * ulp


@functools.cache
def hif8_values() -> tuple[Fraction, ...]:
    """Return the finite values of hif8 that are not negative, in order."""
    form = FORMATS["hif8"]
    values = (form.value(code) for code in range(256))
    return tuple(sorted({Fraction(value) for value in values if math.isfinite(value) and value >= 0}))
