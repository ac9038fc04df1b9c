"""The noise floor: how far two runs of one side lie apart that differ in nothing, because sums are made in an order that is not fixed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from mpbackend.comparison.curves import compare_curves
from mpbackend.comparison.quality import Quality
from mpbackend.comparison.runs import ComparedRun, Matched, average


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """The noise floor from repeats: runs of one side that share their seed.

    Attributes:
        runs: runs that were repeated, those of both sides.
        deviation: standard deviation of the quality of a run around the mean of its repeats.
        df: degrees of freedom of that: runs less groups of repeats.
        largest: largest distance of the qualities of two repeats.
        identical: whether every repeat has the steps of the first run of its group, bit for bit.
        mean_gap: mean relative gap of the loss curves of repeats, None where no losses can be compared.
    """

    runs: int
    deviation: float
    df: int
    largest: float
    identical: bool
    mean_gap: float | None


def noise_floor(matched: Matched, quality: Quality, last: int) -> Floor | None:
    """Return the noise floor of the repeats of both sides, None where no run was repeated with a finite quality.

    Args:
        matched: the two sides.
        quality: what the quality is.
        last: step at which it is read.
    """
    groups = [side for group in matched.groups for side in group if len(side) > 1 and side[0].seed is not None]
    squares, df, runs, largest = 0.0, 0, 0, 0.0
    curves = []
    for group in groups:
        values = [value for run in group if (value := quality.at_the_end(run, last)) is not None and math.isfinite(value)]
        if len(values) < 2:
            continue
        center = average(values)
        squares += sum((value - center) * (value - center) for value in values)
        df += len(values) - 1
        runs += len(values)
        largest = max(largest, max(values) - min(values))
        curves += [compare_curves(group[0], run) for run in group[1:]]
    if not df:
        return None
    gaps = [curve.mean_gap for curve in curves if curve.mean_gap is not None]
    return Floor(
        runs=runs,
        deviation=math.sqrt(squares / df),
        df=df,
        largest=largest,
        identical=all(curve.identical for curve in curves),
        mean_gap=average(gaps) if gaps else None,
    )


def qualities(runs: Sequence[ComparedRun], quality: Quality, last: int) -> list[float]:
    """Return the quality of every run that has one at a step."""
    return [value for run in runs if (value := quality.at_the_end(run, last)) is not None]
