"""Student's t distribution and the normal one, in fp64 and without any library beyond Python's own."""

from __future__ import annotations

import math
from statistics import NormalDist

NORMAL = NormalDist()

TERMS = 1000
"""Terms of the continued fraction at most; it converges in about ``sqrt(max(a, b))`` of them."""

CLOSE = 2.0**-50
TINY = 1e-300

LARGEST_DF = 1e9
"""Degrees of freedom from which the normal distribution stands in: its quantiles differ by less than ``1 / df`` relatively."""


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function ``I_x(a, b)``.

    The continued fraction is 8.17.22 of the Digital Library of Mathematical Functions, evaluated by Lentz's method; ``I_x(a, b) = 1 - I_(1-x)(b, a)``
    (8.17.4) where that converges faster.

    Args:
        a: positive.
        b: positive.
        x: from 0 to 1.

    Returns:
        A number from 0 to 1.
    """
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1.0 / nonzero(1.0 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, TERMS):
        for term in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)), -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            d = 1.0 / nonzero(1.0 + term * d)
            c = nonzero(1.0 + term / c)
            fraction *= c * d
        if abs(c * d - 1.0) < CLOSE:
            break
    return min(front * fraction, 1.0)


def nonzero(value: float) -> float:
    """Return a number, or one that is nearly zero in the place of zero, as Lentz's method needs."""
    return value if abs(value) > TINY else TINY


def t_cdf(t: float, df: float) -> float:
    """Return the probability that Student's t with ``df`` degrees of freedom is at most ``t`` (DLMF 8.17.2 and 35.4; Abramowitz and Stegun 26.7.1).

    Args:
        t: any number.
        df: positive, need not be whole.
    """
    if df >= LARGEST_DF:
        return NORMAL.cdf(t)
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    tail = incomplete_beta(df / 2, 0.5, df / (df + t * t)) / 2
    return 1.0 - tail if t > 0 else tail


def t_quantile(p: float, df: float) -> float:
    """Return the ``t`` that Student's t with ``df`` degrees of freedom stays below with probability ``p``, to about 12 digits.

    Args:
        p: between 0 and 1.
        df: positive.
    """
    if p == 0.5:
        return 0.0
    if p < 0.5:
        return -t_quantile(1.0 - p, df)
    if df >= LARGEST_DF:
        return NORMAL.inv_cdf(p)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p and high < 1e300:
        low, high = high, high * 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if t_cdf(middle, df) < p:
            low = middle
        else:
            high = middle
    return high
