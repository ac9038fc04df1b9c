"""Equivalence of two means: two one-sided tests, their power, and the number of runs that they need.

Two means are called equal within a margin when the confidence interval of their difference at level ``1 - 2 * alpha`` lies inside the margin: Schuirmann
(1987), A Comparison of the Two One-Sided Tests Procedure and the Power Approach. A difference that is not shown is not an equality that is shown, so the
interval has three places: inside the margin, outside of it, and across one of its ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from mpbackend.comparison.distributions import NORMAL, t_quantile
from mpbackend.errors import BackendError

ALPHA = 0.05
"""Probability of calling two means equal whose difference is the margin, or of calling them different where they are equal within it."""

POWER = 0.8
"""Probability of showing an equality that is there for which the needed number of runs is given; the usual choice."""

MOST_RUNS = 10_000
"""Runs a side beyond which no number is given."""

POINTS = 200
"""Intervals of Simpson's rule; doubling them changes no digit that is shown."""

Place = Literal["inside", "outside", "across"]
Design = Literal["paired", "two-sample", "repeats"]


class Equivalence(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of two one-sided tests, in units of the quality that is compared.

    Attributes:
        design: ``paired`` by seed; ``two-sample`` with unequal variances; ``repeats``: runs of one seed, one variance for both sides.
        runs: runs of the baseline and of the candidate; twice the number of pairs.
        difference: mean of the candidate less that of the baseline.
        deviation: standard deviation of a difference of two runs, estimated.
        low: lower end of the interval.
        high: upper end.
        margin: half the width of what counts as equal.
        df: degrees of freedom.
        place: of the interval relative to the margin.
        power: probability that runs like these show an equality, if the means are equal and the deviation is the estimated one.
        needed: runs on each side for a power of 0.8; None where it is more than 10,000.
    """

    design: Design
    runs: tuple[int, int]
    difference: float
    deviation: float
    low: float
    high: float
    margin: float
    df: float
    place: Place
    power: float
    needed: int | None


def paired(differences: Sequence[float], margin: float, alpha: float = ALPHA) -> Equivalence:
    """Test differences of pairs that share their seed.

    Args:
        differences: candidate less baseline, of at least two pairs, finite.
        margin: at least 0, in the same unit.
        alpha: level of each one-sided test, between 0 and 0.5.

    Raises:
        BackendError: there are fewer than two differences.
    """
    n = len(differences)
    check(n >= 2, "a paired test", f"{n} pairs")
    deviation = spread(differences)
    return outcome("paired", (n, n), mean(differences), deviation, 1 / math.sqrt(n), n - 1, margin, alpha)


def two_sample(baseline: Sequence[float], candidate: Sequence[float], margin: float, alpha: float = ALPHA) -> Equivalence:
    """Test two independent samples, by Welch (1947): the variances may differ.

    Args:
        baseline: at least two values, finite.
        candidate: at least two values, finite.
        margin: at least 0.
        alpha: as in ``paired``.

    Raises:
        BackendError: a side has fewer than two values.
    """
    nb, nc = len(baseline), len(candidate)
    check(min(nb, nc) >= 2, "a two-sample test", f"{nb} and {nc} runs")
    vb, vc = squares(baseline) / (nb - 1) / nb, squares(candidate) / (nc - 1) / nc
    total = vb + vc
    parts = (vb / total) * (vb / total) / (nb - 1) + (vc / total) * (vc / total) / (nc - 1) if 0 < total < math.inf else 0.0
    df = 1 / parts if parts else float(nb + nc - 2)
    scale = math.sqrt(1 / nb + 1 / nc)
    return outcome("two-sample", (nb, nc), mean(candidate) - mean(baseline), math.sqrt(total) / scale, scale, df, margin, alpha)


def repeats(baseline: Sequence[float], candidate: Sequence[float], margin: float, alpha: float = ALPHA) -> Equivalence:
    """Test runs of one seed of which at least one side was repeated; the other side is taken to scatter as much as the repeated one.

    Args:
        baseline: at least one value, finite.
        candidate: at least one value, finite; three values in all.
        margin: at least 0.
        alpha: as in ``paired``.

    Raises:
        BackendError: no side was repeated.
    """
    nb, nc = len(baseline), len(candidate)
    check(min(nb, nc) >= 1 and nb + nc >= 3, "a test of repeats", f"{nb} and {nc} runs")
    df = nb + nc - 2
    deviation = math.sqrt((squares(baseline) + squares(candidate)) / df)
    return outcome("repeats", (nb, nc), mean(candidate) - mean(baseline), deviation, math.sqrt(1 / nb + 1 / nc), df, margin, alpha)


def outcome(design: Design, runs: tuple[int, int], difference: float, deviation: float, scale: float, df: float, margin: float, alpha: float) -> Equivalence:
    """Return what a difference, the deviation it was estimated with and a margin amount to; the standard error is ``deviation * scale``."""
    reach = t_quantile(1 - alpha, df) * deviation * scale if deviation else 0.0
    low, high = difference - reach, difference + reach
    if -margin < low and high < margin:
        place: Place = "inside"
    else:
        place = "outside" if low > margin or high < -margin else "across"
    return Equivalence(
        design=design,
        runs=runs,
        difference=difference,
        deviation=deviation,
        low=low,
        high=high,
        margin=margin,
        df=df,
        place=place,
        power=power(margin, deviation, scale, df, alpha),
        needed=needed_runs(design, margin, deviation, alpha),
    )


def power(margin: float, deviation: float, scale: float, df: float, alpha: float = ALPHA) -> float:
    """Return the probability that the interval lies inside the margin when the true difference is zero.

    Given the estimate ``s`` of the deviation, the interval lies inside when the mean, which is independent of ``s``, is nearer to zero than
    ``margin - t * s * scale``. The average over the distribution of ``s``, ``deviation * chi(df) / sqrt(df)``, is an integral in one dimension: Phillips
    (1990), Power of the Two One-Sided Tests Procedure in Bioequivalence.

    Args:
        margin: at least 0.
        deviation: true standard deviation, at least 0.
        scale: factor from the deviation to the standard error.
        df: degrees of freedom of the estimate.
        alpha: level of each one-sided test.
    """
    if not (margin > 0 and math.isfinite(margin) and math.isfinite(deviation)):
        return 0.0
    if not deviation:
        return 1.0
    error = deviation * scale
    t = t_quantile(1 - alpha, df)
    mode = math.sqrt(max(df - 1, 0) / df)
    width = 12 / math.sqrt(df)
    start, end = max(mode - width, 0.0), min(mode + width, margin / (t * error) if t * error else math.inf)
    if end <= start:
        return 0.0
    step = (end - start) / POINTS
    total = 0.0
    for index in range(POINTS + 1):
        ratio = start + index * step
        within = max(2 * NORMAL.cdf((margin - t * error * ratio) / error) - 1, 0.0)
        total += within * chi_density(ratio, df) * (1 if index in (0, POINTS) else 4 if index % 2 else 2)
    return min(max(total * step / 3, 0.0), 1.0)


def chi_density(ratio: float, df: float) -> float:
    """Return the density of ``sqrt(chi2(df) / df)``, the ratio of an estimated deviation to the true one."""
    if ratio <= 0:
        return math.sqrt(2 / math.pi) if df == 1 and ratio == 0 else 0.0
    half = df / 2
    return 2 * math.exp(half * math.log(half) - math.lgamma(half) + (df - 1) * math.log(ratio) - half * ratio * ratio)


def needed_runs(design: Design, margin: float, deviation: float, alpha: float = ALPHA, wanted: float = POWER) -> int | None:
    """Return the runs on each side that show an equality with probability ``wanted``, at least 2; None where 10,000 do not.

    Args:
        design: ``paired`` counts pairs; the others count runs on each side.
        margin: at least 0.
        deviation: of a difference within a pair, or of one run.
        alpha: level of each one-sided test.
        wanted: between 0 and 1.
    """

    def reached(n: int) -> bool:
        scale, df = (1 / math.sqrt(n), n - 1) if design == "paired" else (math.sqrt(2 / n), 2 * n - 2)
        return power(margin, deviation, scale, df, alpha) >= wanted

    low, high = 1, 2
    while not reached(high):
        low, high = high, high * 2
        if high > MOST_RUNS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def mean(values: Sequence[float]) -> float:
    """Return the mean; infinite rather than an error where the sum overflows."""
    return sum(values) / len(values)


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample of at least two."""
    return math.sqrt(squares(values) / (len(values) - 1))


def squares(values: Sequence[float]) -> float:
    """Return the sum of squared distances from the mean; infinite where it overflows, as ``**`` would refuse to."""
    center = mean(values)
    found = sum((value - center) * (value - center) for value in values)
    return found if math.isfinite(found) else math.inf


def check(holds: bool, asked: str, found: str) -> None:
    """Raise ``BackendError`` about too few runs."""
    if not holds:
        raise BackendError(asked, found=found, remedy="add runs")
