"""Axes of a chart: where a value stands between the two ends, and which values are labeled."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import NamedTuple

LOG_FROM = 20.0
"""Positive values of which the largest is this many times the smallest, or more, are drawn on a logarithmic axis."""

TICKS = 4
"""Labels that a logarithmic axis aims at."""

LEAST_TICKS = 3
"""Labels that a linear axis has at least."""

FLAT = 1e-9
"""Values whose spread is this share of their size, or less, are drawn as one level: an axis could not label them apart."""


class Axis(NamedTuple):
    """An axis.

    Attributes:
        low: value at its start.
        high: value at its end, larger than ``low``.
        log: whether it is logarithmic; both ends are positive then.
        ticks: labeled values, from low to high.
        labels: their texts.
    """

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    def place(self, value: float) -> float:
        """Return where a finite value stands: 0 at the start, 1 at the end, and no further."""
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0
        else:
            part = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)  # halves: the difference of two finite values can be infinite
        return min(max(part, 0.0), 1.0)


def make_axis(values: Iterable[float], *, powers_of_two: bool = False) -> Axis | None:
    """Return the axis of values; None when none of them is finite.

    Args:
        values: what is drawn; NaN and infinities have no place on an axis.
        powers_of_two: label powers of two, as for loss scales.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    size = max(abs(low), abs(high))
    if high / 2 - low / 2 <= size / 2 * FLAT or size < 1e-300:
        low, high = flat_ends(low, powers_of_two)
    if low > 0 and (powers_of_two or high / low >= LOG_FROM) and math.isfinite(high / low):
        base = 2.0 if powers_of_two else 10.0
        return logarithmic(low, high, base)
    return linear(low, high)


def flat_ends(value: float, powers_of_two: bool) -> tuple[float, float]:
    """Return ends around the only value."""
    if powers_of_two and 2.0**-1000 < value < 2.0**1000:
        return value / 2, value * 2
    if abs(value) < 1e-290:
        return -1.0, 1.0
    return max(value - abs(value) / 10, -sys.float_info.max), min(value + abs(value) / 10, sys.float_info.max)


def linear(low: float, high: float) -> Axis:
    """Return an axis whose ticks are 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10(high / 2 - low / 2))
    steps = (factor * power for factor in (10.0, 5.0, 2.0, 1.0, 0.5, 0.2, 0.1))
    step = next(step for step in steps if math.floor(high / step) - math.ceil(low / step) >= LEAST_TICKS - 1)
    ticks = tuple(number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1))
    digits = max(0, -math.floor(math.log10(step)))
    plain = digits <= 4 and max(abs(low), abs(high)) < 1e6
    labels = tuple(f"{tick:.{digits}f}" if plain else f"{tick:.6g}" for tick in ticks)
    return Axis(low, high, False, ticks, labels)


def logarithmic(low: float, high: float, base: float) -> Axis:
    """Return an axis whose ticks are powers of its base, as many apart as leaves room for the labels; 1, 2 and 5 times a power of ten on a short one."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    last = min(last, sys.float_info.max_exp - 1 if base == 2.0 else sys.float_info.max_10_exp)
    stride = max(1, -(-(last - first) // TICKS))
    exponents = range(first, last + 1, stride)
    if base == 2.0:
        return Axis(low, high, True, tuple(2.0**n for n in exponents), tuple(f"2^{n}" for n in exponents))
    if last - first >= 2:
        ticks = tuple(10.0**n for n in exponents)
    else:
        ticks = tuple(factor * 10.0**n for n in range(first - 1, last + 1) for factor in (1.0, 2.0, 5.0) if low <= factor * 10.0**n <= high)
    return Axis(low, high, True, ticks, tuple(f"{tick:g}" for tick in ticks))
