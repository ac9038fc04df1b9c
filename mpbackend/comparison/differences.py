"""What differs between the arithmetic of two runs: decisions, switches, classes, converted layers, observed products, and departures from the plans.

Under the question ``vendor`` the same recipe should have become the same arithmetic, so some differences decide: a role that the recipe fixes was granted
another format, or a run departed from its plan. What the recipe leaves open, such as an ordered choice or the unit's own accumulator, is named only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from mpbackend.comparison.conditions import Question, shortened
from mpbackend.comparison.departures import Departure, computes, departures, effective, lowered, switch_meanings
from mpbackend.comparison.runs import ComparedRun, digits
from mpbackend.decisions import Decision
from mpbackend.formats import FORMATS
from mpbackend.matrix import Matrix
from mpbackend.recipe import FAST

HELD = ("parameters", "gradients", "optimizer state")
"""Classes whose formats a recipe fixes. Activations and communication follow from operators and wrappers, so theirs are named only."""

SMALL_SHARE = 0.01
"""Share of a class below which a format does not count: step counters and the like."""

NONE = "none"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One difference.

    Attributes:
        kind: ``departure``, ``decision``, ``switch``, ``class``, ``conversion``, ``compute``, ``audit`` or ``counter``.
        name: role, switch or class.
        baseline: value there.
        candidate: value there.
        decides: whether it shows that the two runs did not do the same arithmetic although they should have.
        reason: one clause.
    """

    kind: str
    name: str
    baseline: str
    candidate: str
    decides: bool
    reason: str = ""


def find_differences(one: ComparedRun, other: ComparedRun, question: Question, matrix: Matrix) -> list[Difference]:
    """Return the differences between the arithmetic of two runs, those that decide first.

    Args:
        one: a run of the baseline.
        other: a run of the candidate.
        question: under ``recipe`` the arithmetic is what is asked about, so that nothing decides.
        matrix: says what switches mean.
    """
    strayed = list(departed(departures(one, matrix), departures(other, matrix)))
    told_already = {difference.name for difference in strayed}
    found = [
        *strayed,
        *decided(one.record.plan, other.record.plan),
        *(difference for difference in switched(one, other, matrix) if difference.name not in told_already),
        *held(one, other),
        *converted(one, other),
        *observed(one, other),
        *audited(one, other),
        *counted(one, other),
    ]
    if question == "recipe":
        found = [msgspec.structs.replace(difference, decides=False) for difference in found]
    unique = list({(difference.kind, difference.name): difference for difference in reversed(found)}.values())[::-1]
    return sorted(unique, key=lambda difference: not difference.decides)


def departed(one: Sequence[Departure], other: Sequence[Departure]) -> Iterator[Difference]:
    """Yield the departures of each side that the other one does not share."""
    sides = [{departure.what: departure for departure in side} for side in (one, other)]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        pair = [side.get(name) for side in sides]
        ran = [None if departure is None else departure.ran for departure in pair]
        if ran[0] != ran[1]:
            reasons = [f"in the {word} {departure.reason}" for word, departure in zip(("baseline", "candidate"), pair, strict=True) if departure is not None]
            values = ["as planned" if value is None else value for value in ran]
            yield Difference(kind="departure", name=name, baseline=values[0], candidate=values[1], decides=True, reason="; ".join(reasons))


def decided(one: Sequence[Decision], other: Sequence[Decision]) -> Iterator[Difference]:
    """Yield the roles that the two plans grant differently."""
    sides = [{(decision.role, decision.op): decision for decision in plan} for plan in (one, other)]
    for role, op in dict.fromkeys([*sides[0], *sides[1]]):
        name = f"{role} ({op})" if op else role
        first, second = (side.get((role, op)) for side in sides)
        if first is None or second is None:
            values = [NONE if decision is None else decision.granted for decision in (first, second)]
            yield Difference(kind="decision", name=name, baseline=values[0], candidate=values[1], decides=False, reason="one plan has no such decision")
            continue
        if first.granted != second.granted:
            decides = first.asked == second.asked and is_fixed(first.asked) and not vague(first, second)
            yield Difference(kind="decision", name=name, baseline=told(first), candidate=told(second), decides=decides, reason=why_granted(first, second))
        elif first.level != second.level or (role.startswith("accumulate.") and first.reason != second.reason):
            yield Difference(kind="decision", name=name, baseline=told(first), candidate=told(second), decides=False, reason=why_granted(first, second))


def is_fixed(asked: str) -> bool:
    """Tell whether a recipe leaves no choice about a role."""
    return "|" not in asked and asked != FAST


def vague(one: Decision, other: Decision) -> bool:
    """Tell whether two grants differ in words only, or because a source does not say: ``fp32`` and ``fp32 by promotion``, or ``unknown``."""
    names = {one.granted.partition(" ")[0], other.granted.partition(" ")[0]}
    return len(names) == 1 or "unknown" in names


def told(decision: Decision) -> str:
    """Return what was granted, with its level."""
    return f"{decision.granted} ({decision.level})"


def why_granted(one: Decision, other: Decision) -> str:
    """Return the reasons of two decisions."""
    return shortened(one.reason) if one.reason == other.reason else f"{shortened(one.reason)} / {shortened(other.reason)}"


def switched(one: ComparedRun, other: ComparedRun, matrix: Matrix) -> Iterator[Difference]:
    """Yield the switches that stood otherwise; one of them decides where the plan set it and the matrix does not say that both settings mean one format."""
    meanings = [{key[0]: switch for key, switch in switch_meanings(run, matrix).items()} for run in (one, other)]
    same_stack = one.record.device.arch == other.record.device.arch
    for name in dict.fromkeys([*one.record.switches, *other.record.switches]):
        pair = [run.record.switches.get(name) for run in (one, other)]
        first, second = pair
        if first is None or second is None:
            if same_stack:
                values = [NONE if reading is None else effective(reading) for reading in pair]
                yield Difference(kind="switch", name=name, baseline=values[0], candidate=values[1], decides=False, reason="recorded on one side only")
            continue
        values = [effective(first), effective(second)]
        if lowered(values[0]) == lowered(values[1]):
            continue
        means = [computes(side.get(name), value) for side, value in zip(meanings, values, strict=True)]
        known = means[0] != "" and means[1] != ""
        decides = means[0] != means[1] if known else same_stack and bool(first.set or second.set)
        reason = f"that is {means[0]} and {means[1]}" if known else "the plan sets it" if decides else "no plan decided it"
        yield Difference(kind="switch", name=name, baseline=values[0], candidate=values[1], decides=decides, reason=reason)


def held(one: ComparedRun, other: ComparedRun) -> Iterator[Difference]:
    """Yield the classes of numbers that were held in other formats."""
    for name, first in one.record.classes.items():
        second = other.record.classes.get(name)
        if second is None:
            continue
        formats = [main_formats(reading.observed) for reading in (first, second)]
        if formats[0] and formats[1] and formats[0] != formats[1]:
            values = [", ".join(side) for side in formats]
            decides = name in HELD and first.asked == second.asked
            yield Difference(kind="class", name=name, baseline=values[0], candidate=values[1], decides=decides, reason=f"asked: {first.asked}")


def main_formats(observed: Mapping[str, int]) -> list[str]:
    """Return the floating-point formats that hold more than a hundredth of a class, sorted."""
    floats = {name: size for name, size in observed.items() if name in FORMATS and FORMATS[name].kind == "float" and size > 0}
    total = sum(floats.values())
    return sorted(name for name, size in floats.items() if size * round(1 / SMALL_SHARE) >= total)


def converted(one: ComparedRun, other: ComparedRun) -> Iterator[Difference]:
    """Yield how many layers were converted on one side only."""
    sides = [{row.get("layer", row.get("name", "")): row.get("action", "") for row in run.record.conversion} for run in (one, other)]
    low = [{layer for layer, action in side.items() if action in ("converted", "padded")} for side in sides]
    apart = sorted(low[0] ^ low[1])
    if apart:
        values = [f"{len(side)} layers" for side in low]
        reason = f"on one side only: {', '.join(shortened(layer) for layer in apart[:3])}" + (f" and {len(apart) - 3} more" if len(apart) > 3 else "")
        yield Difference(kind="conversion", name="converted layers", baseline=values[0], candidate=values[1], decides=True, reason=reason)


def observed(one: ComparedRun, other: ComparedRun) -> Iterator[Difference]:
    """Yield observed products in other formats, by more than a hundredth of the FLOPs, and another number of casts."""
    first, second = one.record.compute, other.record.compute
    if first.shares and second.shares and not first.uncounted and not second.uncounted:
        names = dict.fromkeys([*first.shares, *second.shares])
        if any(abs(first.shares.get(name, 0.0) - second.shares.get(name, 0.0)) > SMALL_SHARE for name in names):
            values = [", ".join(f"{name} {share:.0%}" for name, share in side.shares.items()) for side in (first, second)]
            yield Difference(kind="compute", name="observed products", baseline=values[0], candidate=values[1], decides=False, reason="share of the FLOPs")
    for name in ("casts", "cast_bytes"):
        counts = [getattr(side, name) for side in (first, second)]
        if counts[0] != counts[1] and first.shares and second.shares:
            label = "bytes written by casts" if name == "cast_bytes" else "casts"
            yield Difference(kind="compute", name=label, baseline=digits(counts[0]), candidate=digits(counts[1]), decides=False, reason="of an observed step")


def audited(one: ComparedRun, other: ComparedRun) -> Iterator[Difference]:
    """Yield the operations whose operands, and the phases whose conversions, were seen in other formats or numbers."""
    sides = [
        {**run.record.compute.products, **{f"conversions, {phase}": calls for phase, calls in run.record.compute.conversions.items()}} for run in (one, other)
    ]
    if not all(run.record.compute.products for run in (one, other)):
        return
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        values = [calls_text(side.get(name, {})) for side in sides]
        if values[0] != values[1]:
            yield Difference(kind="audit", name=name, baseline=values[0], candidate=values[1], decides=False, reason="calls in an observed step")


def calls_text(calls: Mapping[str, int]) -> str:
    """Return how often each format was seen."""
    return ", ".join(f"{name} x {digits(count)}" for name, count in sorted(calls.items())) or NONE


def counted(one: ComparedRun, other: ComparedRun) -> Iterator[Difference]:
    """Yield the events that the two sessions counted differently; one that a record does not name did not happen there."""
    first, second = one.record.counters, other.record.counters
    for name in dict.fromkeys([*first, *second]):
        values = [side.get(name, 0) for side in (first, second)]
        if values[0] != values[1]:
            yield Difference(kind="counter", name=name, baseline=digits(values[0]), candidate=digits(values[1]), decides=False, reason="events in the session")
