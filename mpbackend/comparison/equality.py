"""Whether two comparable sides reached one quality, and what their design can and cannot show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from mpbackend.comparison.curves import Curve
from mpbackend.comparison.floor import Floor, qualities
from mpbackend.comparison.quality import Quality
from mpbackend.comparison.runs import Matched, average
from mpbackend.comparison.statistics import ALPHA, Equivalence, paired, repeats, two_sample

Verdict = Literal["equivalent", "different", "inconclusive", "not comparable"]

LEVEL = f"{1 - 2 * ALPHA:.0%}"

SINGLE_CAN = "can show that two runs are bit for bit alike, where they part, and that one of them diverged"
SINGLE_CANNOT = (
    "cannot tell a rounding error that training has amplified from a worse quality: one run says nothing about how far two runs of one side lie apart"
)
REPEATS_CAN = "can compare the gap of the two sides with the gap of repeats on one side"
REPEATS_CANNOT = "cannot speak about other seeds: data, weights and their order are those of one seed"
SEEDS_CAN = "can show that the means are equal within the margin, over the seeds that were drawn"
SEEDS_CANNOT = "cannot speak about longer runs, other data or other models"


class Answer(NamedTuple):
    """What the qualities say.

    Attributes:
        verdict: the verdict, if the runs are comparable and nothing else is in its way.
        reason: one sentence.
        equivalence: the tests, None where none could be made.
        limits: what the design can and cannot show.
    """

    verdict: Verdict
    reason: str
    equivalence: Equivalence | None = None
    limits: tuple[str, ...] = ()


def judge_equality(matched: Matched, quality: Quality, last: int, margin: float, curves: Sequence[Curve], floor: Floor | None) -> Answer:
    """Return whether the two sides reached one quality.

    Args:
        matched: the two sides.
        quality: what the quality is.
        last: step at which it is read.
        margin: at least 0, in the unit of the quality.
        curves: of every pair.
        floor: noise floor, None without repeats.
    """
    sides = [qualities(side, quality, last) for side in (matched.baseline, matched.candidate)]
    if not sides[0] or not sides[1]:
        return Answer("inconclusive", f"there is nothing to compare: no step of one side records the {quality.metric}")
    limits = {"single": (SINGLE_CAN, SINGLE_CANNOT), "repeats": (REPEATS_CAN, REPEATS_CANNOT)}.get(matched.design, (SEEDS_CAN, SEEDS_CANNOT))
    broken = [sum(not math.isfinite(value) for value in side) for side in sides]
    if broken[0] and broken[1]:
        return Answer("inconclusive", f"the {quality.metric} is not finite at the end of runs of both sides: there is no quality to compare", limits=limits)
    if broken[0] or broken[1]:
        which = 0 if broken[0] else 1
        word = ("baseline", "candidate")[which]
        return Answer("different", f"the {quality.metric} ends non-finite in {broken[which]} of {len(sides[which])} runs of the {word} only", limits=limits)
    if all(curve.identical for curve in curves):
        return Answer("equivalent", "every step has the same loss, gradient norm and scale in both runs, bit for bit", limits=limits)
    gap = average(sides[1]) - average(sides[0])
    told = f"the {quality.metric} differs by {gap:+.3g}, {size_in_margins(gap, margin)}"
    if matched.design == "unmatched":
        return Answer("inconclusive", f"{told}, and no seed stands on both sides", limits=limits)
    if matched.design == "single":
        found = f"{told}, and with one run a side nothing says how much of that is noise; repeat a run with its seed for a noise floor, or add seeds"
        return Answer("inconclusive", found, limits=limits)
    if matched.design == "repeats":
        if floor is None or not floor.deviation:
            repeated = "the repeats are bit for bit alike" if floor is not None and floor.identical else "the repeats ended with the same quality"
            found = f"{told}; {repeated}, which says nothing about how far another arithmetic moves a run; add seeds"
            return Answer("inconclusive", found, limits=limits)
        return placed(repeats(sides[0], sides[1], margin), quality, limits)
    if matched.design == "paired":
        groups = [[qualities(side, quality, last) for side in group] for group in matched.groups]
        differences = [average(two) - average(one) for one, two in groups if one and two]
        if len(differences) < 2:
            return Answer("inconclusive", f"{told}, and fewer than two seeds have it on both sides", limits=limits)
        return placed(paired(differences, margin), quality, limits)
    if min(map(len, sides)) < 2:
        return Answer("inconclusive", f"{told}, and a side has it in fewer than two runs", limits=limits)
    return placed(two_sample(sides[0], sides[1], margin), quality, limits)


def placed(found: Equivalence, quality: Quality, limits: tuple[str, ...]) -> Answer:
    """Return the answer of the tests."""
    interval = f"the {LEVEL} interval of the difference in {quality.metric} is {found.low:+.3g} to {found.high:+.3g}"
    if found.place == "inside":
        return Answer("equivalent", f"{interval}, inside the margin of {found.margin:.3g}", found, limits)
    if found.place == "outside":
        return Answer("different", f"{interval}, outside the margin of {found.margin:.3g}", found, limits)
    unit = "seeds" if found.design == "paired" else "runs a side"
    if found.margin == 0:
        more = "a margin of zero is never shown to be kept"
    elif found.needed is None:
        more = "more than 10,000 runs would be needed; a wider margin may be what is meant"
    else:
        more = f"if the means are equal, {found.needed} {unit} show it with a probability of 80 %"
    return Answer("inconclusive", f"{interval}, across the margin of {found.margin:.3g}; {more}", found, limits)


def size_in_margins(gap: float, margin: float) -> str:
    """Return a gap in margins."""
    return f"{abs(gap) / margin:.3g} times the margin" if margin else "with a margin of zero"
