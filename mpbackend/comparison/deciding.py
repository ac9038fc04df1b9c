"""One verdict from everything that was found: comparable first, then known, then the arithmetic, then the quality."""

from __future__ import annotations

from collections.abc import Sequence

from mpbackend.comparison.conditions import Condition
from mpbackend.comparison.curves import Curve
from mpbackend.comparison.differences import Difference
from mpbackend.comparison.equality import Answer, Verdict
from mpbackend.comparison.runs import Matched
from mpbackend.comparison.skips import LIMIT, Skips


def decide(
    conditions: Sequence[Condition], differences: Sequence[Difference], off_plan: Sequence[str], answer: Answer, skips: tuple[Verdict, str] | None
) -> tuple[Verdict, list[str]]:
    """Return the verdict with its reasons: first what makes runs not comparable, then what is not known, then what differs, then the quality."""
    apart = [f"{item.name} differs: {values(item)}" for item in conditions if item.matters and item.status == "different"]
    if apart or off_plan:
        return "not comparable", [*apart, *off_plan]
    arithmetic = [
        f"{difference.name}: {difference.baseline} and {difference.candidate}; {difference.reason}" for difference in differences if difference.decides
    ]
    reasons = [*arithmetic, answer.reason, *([skips[1]] if skips else [])]
    unknown = [f"not known to be the same, {item.name}: {values(item)}" for item in conditions if item.matters and item.status == "unknown"]
    if unknown:
        return "inconclusive", [*unknown, *reasons]
    if arithmetic:
        return "different", reasons
    if skips and answer.verdict == "equivalent":
        return skips[0], [skips[1], answer.reason]
    return (skips[0] if skips and answer.verdict == "inconclusive" else answer.verdict), reasons


def values(condition: Condition) -> str:
    """Return both values of a condition as a clause, with its note."""
    return f"{condition.baseline} and {condition.candidate}" + (f" ({condition.note})" if condition.note else "")


def skipped(skips: Sequence[Skips], matched: Matched, answer: Answer, curves: Sequence[Curve]) -> tuple[Verdict, str] | None:
    """Return what skipped steps make of an equality; None where they say nothing. Runs that are bit for bit alike skip alike."""
    if answer.verdict == "equivalent" and all(curve.identical for curve in curves):
        return None
    sides = (skips[: len(matched.baseline)], skips[len(matched.baseline) :])
    worst = [max((skip for skip in side if skip.finding == "at or above the limit"), key=lambda skip: skip.share, default=None) for side in sides]
    if (worst[0] is None) != (worst[1] is None):
        word, found = ("baseline", worst[0]) if worst[0] is not None else ("candidate", worst[1])
        if found is not None:
            return "different", f"only the {word} skips {found.share:.1%} of its steps; stable training skips less than {LIMIT:.0%}"
    few = [skip for skip in skips if skip.finding == "too few steps"]
    if few:
        return "inconclusive", f"{few[0].steps} steps are too few to show that fewer than {LIMIT:.0%} of them are skipped"
    return None
