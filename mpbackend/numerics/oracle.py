"""Exact dot products as an ``Arithmetic`` defines them: rationals, one output element at a time, the text that every fast kernel is tested against.

Nothing here is fast. The rules are those of the module ``arithmetic``, in its order: operands, steps, promotion, output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from mpbackend.errors import BackendError
from mpbackend.formats import FORMATS
from mpbackend.numerics.arithmetic import Arithmetic, Rounds
from mpbackend.numerics.rounding_rules import Overflow, round_value

BYTE_PAIRS = 32
"""Products among which the order ``byte_pairs`` permutes."""

FIXED_WIDTH = ("ieee", "fn", "fnuz", "finite")
"""Encodings of formats whose fraction has the same width everywhere."""


def dot(a: Sequence[float], b: Sequence[float], arithmetic: Arithmetic, addend: float = 0.0) -> float:
    """Return the sum of ``a[k] * b[k]`` and of ``addend`` with the bits that a unit gives it.

    Args:
        a: K numbers, converted to ``arithmetic.a`` first.
        b: K numbers, converted to ``arithmetic.b`` first.
        arithmetic: the unit, of model ``aligned``; block scales are not applied.
        addend: what the sum starts from: the register, or the outer sum where there is promotion. A value of that format.

    Returns:
        A value of ``arithmetic.output``; NaN has no payload.

    Raises:
        BackendError: ``a`` and ``b`` differ in length, the arithmetic is not defined bit for bit, or a format has no fraction of fixed width.
    """
    if len(a) != len(b):
        raise BackendError("a dot product", found=f"{len(a)} and {len(b)} numbers", remedy="give as many of one operand as of the other")
    if arithmetic.model != "aligned" or arithmetic.exact_group != 1:
        found = "exact groups" if arithmetic.model == "aligned" else "sums in an order of the host's library"
        raise BackendError("an exact dot product", found=found, remedy="the oracle defines model 'aligned' without groups")
    for name in (arithmetic.a, arithmetic.b, arithmetic.output):
        if name not in FORMATS or FORMATS[name].encoding not in FIXED_WIDTH:
            found = f"format {name}"
            raise BackendError("an exact dot product", found=found, remedy="the oracle rounds to floating-point formats whose fields have fixed widths")
    left = [convert(x, arithmetic.a, arithmetic) for x in a]
    right = [convert(x, arithmetic.b, arithmetic) for x in b]
    return write(sums(left, right, arithmetic, addend), arithmetic)


def sums(left: Sequence[float], right: Sequence[float], arithmetic: Arithmetic, addend: float = 0.0) -> float:
    """Return the last sum of converted operands, before it is written in the output's format.

    Args:
        left: K values of ``arithmetic.a``.
        right: K values of ``arithmetic.b``.
        arithmetic: the unit.
        addend: as in ``dot``.
    """
    promotes = arithmetic.promotion_interval is not None
    register, outer, since = (0.0, addend, 0) if promotes else (addend, 0.0, 0)
    for step in steps(len(left), arithmetic):
        register = add_step([(left[k], right[k]) for k in step], register, arithmetic)
        since += arithmetic.products_per_step
        if promotes and since == arithmetic.promotion_interval:
            register, outer, since = 0.0, promote(outer, register, arithmetic), 0
    if promotes:
        return promote(outer, register, arithmetic) if since else outer
    return register


def steps(k: int, arithmetic: Arithmetic) -> Iterator[list[int]]:
    """Yield the indices that each step adds; a step at the end may have fewer than ``products_per_step``, as if the rest were zeros.

    Args:
        k: number of products.
        arithmetic: says how many to a step, and in which order.
    """
    size = arithmetic.products_per_step
    indices = range(k) if arithmetic.order == "sequential" else byte_pairs(k + -k % BYTE_PAIRS)
    for start in range(0, len(indices), size):
        yield [index for index in indices[start : start + size] if index < k]


def byte_pairs(k: int) -> list[int]:
    """Return the order ``byte_pairs`` of a multiple of 32 products."""
    return [start + i for start in range(0, k, BYTE_PAIRS) for i in sorted(range(BYTE_PAIRS), key=lambda i: (i % 4 > 1, i))]


def convert(x: float, name: str, arithmetic: Arithmetic) -> float:
    """Return an operand as the unit sees it: rounded to its format, with the format's own overflow, subnormals as they are or as zero of the same sign."""
    return round_value(x, name, arithmetic.operand_rounding, subnormals=arithmetic.operand_subnormals)


def add_step(pairs: Sequence[tuple[float, float]], register: float, arithmetic: Arithmetic) -> float:
    """Return the register after one step.

    Args:
        pairs: the operands of at most ``products_per_step`` products.
        register: the running sum, a value of the register's format.
        arithmetic: the unit.
    """
    special = special_sum([*(times(x, y) for x, y in pairs), register])
    if special is not None:
        return special
    terms = [(Fraction(x) * Fraction(y), exponent(x, arithmetic.a) + exponent(y, arithmetic.b)) for x, y in pairs if x and y]
    if register:
        terms.append((Fraction(register), exponent(register, arithmetic.register)))
    if arithmetic.fraction_bits is None:
        total = sum((value for value, _ in terms), Fraction(0))
        if total:
            # What underflows keeps its sign (IEEE 754-2019, 6.3); an aligned unit has no negative zero.
            return math.copysign(to_register(total, arithmetic), total)
        return signed_zero([*(math.copysign(1, x) * math.copysign(1, y) for x, y in pairs), register], terms)
    if not terms:
        return 0.0
    top = max(e for _, e in terms)
    if arithmetic.zero_exponent is not None:
        top = max(top, arithmetic.zero_exponent)
    ulp = Fraction(2) ** (top - arithmetic.fraction_bits)
    return to_register(sum(math.trunc(value / ulp) for value, _ in terms) * ulp, arithmetic)


def signed_zero(signs: Sequence[float], terms: Sequence[object]) -> float:
    """Return the zero of an exact sum: negative only if every term is a negative zero (IEEE 754-2019, 6.3)."""
    return -0.0 if not terms and all(math.copysign(1.0, sign) < 0 for sign in signs) else 0.0


def times(x: float, y: float) -> float:
    """Return a product as far as specials are concerned: infinite, NaN, or 0.0 for every finite one."""
    return x * y if not (math.isfinite(x) and math.isfinite(y)) else 0.0


def special_sum(terms: Sequence[float]) -> float | None:
    """Return the infinity or NaN that a sum is, or None where every term is finite."""
    if all(math.isfinite(term) for term in terms):
        return None
    return math.fsum(terms) if not {math.inf, -math.inf} <= set(terms) else math.nan


def exponent(x: float, name: str) -> int:
    """Return the exponent of a number that is not zero: of its leading one, and the smallest normal exponent of its format for a subnormal number."""
    return max(math.frexp(x)[1] - 1, math.frexp(FORMATS[name].smallest_normal)[1] - 1)


def to_register(value: Fraction, arithmetic: Arithmetic) -> float:
    """Return an exact sum rounded to the register: subnormals kept, overflow to infinity in every rounding, zero positive."""
    form = FORMATS[arithmetic.register]
    rounded = nearest(value, arithmetic.kept_bits, 1 - form.bias, arithmetic.register_rounding)
    if abs(rounded) >= Fraction(2) ** form.bias * 2:
        return math.inf if rounded > 0 else -math.inf
    return float(rounded)


def promote(outer: float, register: float, arithmetic: Arithmetic) -> float:
    """Return the outer sum with the register added, rounded to nearest even in the format ``promoted``."""
    special = special_sum([outer, register])
    if special is not None:
        return special
    form = FORMATS[arithmetic.promoted]
    total = Fraction(outer) + Fraction(register)
    if not total:
        return outer + register
    rounded = nearest(total, form.mantissa_bits, 1 - form.bias, "rne")
    return math.copysign(float(rounded) if abs(rounded) <= Fraction(form.max) else math.inf, total)


def write(value: float, arithmetic: Arithmetic) -> float:
    """Return the last sum in the output's format."""
    saturates = arithmetic.overflow == "saturating"
    if saturates and math.isnan(value):
        return 0.0
    overflow: Overflow | None = "saturate" if saturates else None
    return round_value(value, arithmetic.output, arithmetic.output_rounding, overflow=overflow, subnormals=arithmetic.output_subnormals)


def nearest(value: Fraction, bits: int, emin: int, rounding: Rounds) -> Fraction:
    """Return the multiple of an ulp that a number is rounded to, as if there were no largest exponent.

    Args:
        value: any number.
        bits: fraction bits of the format.
        emin: exponent of its smallest normal number; below it the ulp stays as it is there.
        rounding: the rule.
    """
    if not value:
        return value
    magnitude = abs(value)
    # The exponent of the leading one: bit lengths give it but for one.
    e = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    e -= magnitude < Fraction(2) ** e
    ulp = Fraction(2) ** (max(e, emin) - bits)
    whole, rest = divmod(magnitude / ulp, 1)
    half = Fraction(1, 2)
    up = rounding != "rz" and (rest > half or (rest == half and (rounding == "rna" or whole % 2 == 1)))
    return (whole + up) * ulp * (1 if value > 0 else -1)
