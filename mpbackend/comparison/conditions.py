"""The conditions of a comparison: what was the same in two runs, what was not, and what the records do not say.

A condition that matters for the question and differs makes runs not comparable; one that is unknown leaves the comparison inconclusive at best. The others
are told because they may explain a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from mpbackend.comparison.readings import (
    batch_text,
    device_text,
    environment_text,
    fingerprint,
    recipe_text,
    scale_mode,
    setting,
    settings,
    start_text,
    text_of,
    tokens_text,
    torch_version,
)
from mpbackend.comparison.runs import ComparedRun, Matched, digits, distinct, number
from mpbackend.observe.stated import STATED

Question = Literal["vendor", "recipe"]
"""``vendor``: the same recipe, on devices that may differ. ``recipe``: the same device, under recipes that may differ."""

Status = Literal["same", "different", "unknown"]

LR_TOLERANCE = 2.0**-23
"""Two learning rates are the same up to two roundings to fp32: either side may hold its rate in an fp32 tensor, with a relative error of ``2**-24``."""

SHOWN = 3
"""Values of a side that a cell names; more are counted."""

LONGEST = 160
"""Characters of a value that a cell keeps."""

UNKNOWN = "not recorded"


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """One condition.

    Attributes:
        name: what it is about.
        status: ``same``, ``different`` or ``unknown``.
        baseline: value or values of the baseline.
        candidate: of the candidate.
        matters: whether the question needs it to be the same.
        note: why it matters or does not, or what is not known; empty where the name says it.
    """

    name: str
    status: Status
    baseline: str
    candidate: str
    matters: bool
    note: str = ""


class Reading(NamedTuple):
    """How a condition is read from the record of one run.

    Attributes:
        name: what it is about.
        read: the value, None where the record does not say.
        vendor: whether the question ``vendor`` needs it to be the same.
        recipe: whether ``recipe`` does.
        note: why.
    """

    name: str
    read: Callable[[ComparedRun], str | None]
    vendor: bool
    recipe: bool
    note: str = ""


def judge_conditions(matched: Matched, question: Question) -> list[Condition]:
    """Return every condition of a comparison, those that matter first."""
    found = [*(judge(reading, matched.pairs, question) for reading in READINGS), *one_of_each(matched)]
    found += [tokens_condition(matched), seed_condition(matched), weights_condition(matched), data_condition(matched), learning_rates(matched.pairs)]
    return sorted(found, key=lambda condition: not condition.matters)


def judge(reading: Reading, pairs: Sequence[tuple[ComparedRun, ComparedRun]], question: Question) -> Condition:
    """Return one condition over every pair."""
    values = [(reading.read(one), reading.read(other)) for one, other in pairs]
    status = status_of(values)
    return condition(reading.name, status, values, reading.vendor if question == "vendor" else reading.recipe, reading.note)


def status_of(values: Iterable[tuple[str | None, str | None]]) -> Status:
    """Return ``different`` where a pair differs, else ``unknown`` where a value is not known, else ``same``."""
    known = True
    for one, other in values:
        if one is None or other is None:
            known = False
        elif one != other:
            return "different"
    return "same" if known else "unknown"


def condition(name: str, status: Status, values: Sequence[tuple[str | None, str | None]], matters: bool, note: str = "") -> Condition:
    """Return a condition with the values of both sides as text."""
    sides = [told(pair[side] for pair in values) for side in (0, 1)]
    return Condition(name=name, status=status, baseline=sides[0], candidate=sides[1], matters=matters, note=note)


def told(values: Iterable[str | None]) -> str:
    """Return the values of one side as text, each once."""
    unique = [shortened(UNKNOWN if value is None else value) for value in dict.fromkeys(values)]
    more = f" and {len(unique) - SHOWN} more" if len(unique) > SHOWN else ""
    return ", ".join(unique[:SHOWN]) + more


def shortened(text: str) -> str:
    """Return a value that fits a cell."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def one_of_each(matched: Matched) -> list[Condition]:
    """Return a condition for each side whose runs do not share their recipe or their device."""
    faults = []
    for what, read in (("recipe", recipe_text), ("device", device_text)):
        sides = [distinct(side, read) for side in (matched.baseline, matched.candidate)]
        if max(map(len, sides)) > 1:
            values = [told(side) for side in sides]
            note = f"the runs of one side must share their {what}"
            faults.append(Condition(name=f"one {what} a side", status="different", baseline=values[0], candidate=values[1], matters=True, note=note))
    return faults


def tokens_condition(matched: Matched) -> Condition:
    """Return the condition of the tokens; data without tokens has none on either side."""
    values = [(tokens_text(one), tokens_text(other)) for one, other in matched.pairs]
    if all(value is None for pair in values for value in pair):
        return condition("tokens", "same", [("none counted", "none counted")], True)
    return condition("tokens", status_of(values), values, True)


def seed_condition(matched: Matched) -> Condition:
    """Return the condition of the seeds; independent samples need none in common."""
    values = [(text_of(one.seed), text_of(other.seed)) for one, other in matched.pairs]
    if matched.design == "two-sample":
        note = "no seed stands on both sides: they are compared as independent samples"
        return condition("seed", "different" if None not in {value for pair in values for value in pair} else "unknown", values, False, note)
    note = "it decides weights, order of the data and dropout" if matched.design != "paired" else "matched as sets"
    return condition("seed", status_of(values), values, True, note)


def weights_condition(matched: Matched) -> Condition:
    """Return the condition of the weights at the start; fingerprints of other formats or layers cannot be compared."""
    values = [(fingerprint(one, "weights"), fingerprint(other, "weights")) for one, other in matched.pairs]
    if matched.design == "two-sample":
        return condition("initial weights", status_of(values), values, False, "independent samples have weights of their own")
    status = status_of(values)
    if status == "different" and (note := stated_beside_computed(values)):
        return condition("initial weights", "unknown", values, True, note)
    if status == "different" and all(a == b or held(one) != held(other) for (a, b), (one, other) in zip(values, matched.pairs, strict=True)):
        return condition("initial weights", "unknown", values, True, "fingerprints of parameters in other formats or layers cannot be compared")
    return condition("initial weights", status, values, True)


def stated_beside_computed(values: Sequence[tuple[str | None, str | None]]) -> str:
    """Return a note where a fingerprint that somebody stated stands beside one that was computed in every pair that differs, else nothing."""
    mixed = all(a == b or a is None or b is None or a.startswith(STATED) != b.startswith(STATED) for a, b in values)
    return "one was stated and the other computed" if mixed else ""


def held(run: ComparedRun) -> tuple[str, list[tuple[str, ...]]]:
    """Return what decides the fingerprint of weights besides their values: format of the parameters, and layers that were converted."""
    asked = run.record.classes.get("parameters")
    return (format_of(asked.asked) if asked else "", [tuple(sorted(row.values())) for row in run.record.conversion])


def format_of(asked: str) -> str:
    """Return the format at the beginning of an asked class such as ``bf16 + fp32 master``."""
    return asked.partition(" ")[0].rstrip(",")


def data_condition(matched: Matched) -> Condition:
    """Return the condition of the data; its fingerprint covers a whole run, in order."""
    values = [(fingerprint(one, "data"), fingerprint(other, "data")) for one, other in matched.pairs]
    status = status_of(values)
    note = "a fingerprint of the batches in their order"
    if status == "different":
        if told_apart := stated_beside_computed(values):
            return condition("data", "unknown", values, True, told_apart)
        if matched.design == "two-sample":
            return condition("data", "unknown", values, True, "another seed may have another order; the records do not tell it from other data")
        if all(a == b or one.last_step != other.last_step for (a, b), (one, other) in zip(values, matched.pairs, strict=True)):
            return condition("data", "unknown", values, True, "the runs differ in length, and a fingerprint covers a whole run")
    return condition("data", status, values, True, note)


def learning_rates(pairs: Sequence[tuple[ComparedRun, ComparedRun]]) -> Condition:
    """Return the condition of the learning rates, by steps that were taken: a skipped step delays the schedule and does not change it."""
    note, values, known = "by taken steps, up to two roundings to fp32", [], True
    status: Status = "same"
    for one, other in pairs:
        rates = [[number(row.lr) for row in run.rows if row.stepped and row.lr is not None] for run in (one, other)]
        values.append((rates_text(rates[0]), rates_text(rates[1])))
        if not rates[0] or not rates[1]:
            known = False
        elif rates[0] != rates[1] and (part := first_apart(rates[0], rates[1])) is not None and status == "same":
            status, note = "different", f"from taken step {part + 1} on: {rates[0][part]:.9g} and {rates[1][part]:.9g}"
    return condition("learning rates", status if known or status == "different" else "unknown", values, True, note)


def first_apart(one: Sequence[float | None], other: Sequence[float | None]) -> int | None:
    """Return the index of the first of two rates that differ, None where none of the steps that both have does."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a is None or b is None or (a != b and not abs(a - b) <= LR_TOLERANCE * max(abs(a), abs(b)) and not (a != a and b != b)):
            return index
    return None


def rates_text(rates: Sequence[float | None]) -> str | None:
    """Return the range of the learning rates of a run."""
    known = [rate for rate in rates if rate is not None]
    if not known:
        return None
    low, high = min(known), max(known)
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"


READINGS = (
    Reading("recipe", recipe_text, True, False),
    Reading("device", device_text, False, True),
    Reading("effective batch", batch_text, True, True, "from the samples of the steps and the number of ranks"),
    Reading("first step", start_text, True, True),
    Reading("clipping and averaging", settings("clip_norm", "clip_value", "average"), True, True),
    Reading("optimizers", setting("optimizers"), True, True),
    Reading("torch", torch_version, False, True, "another version is another cause than the recipe"),
    Reading("steps", lambda run: digits(run.last_step), False, False, "runs of unequal length are compared at the last step that both have"),
    Reading("micro-batches", setting("micro_batches"), False, False, "they change the order of sums; the effective batch decides"),
    Reading("schedulers", setting("schedulers"), False, False, "the learning rates decide"),
    Reading("loss scale mode", scale_mode, False, False),
    Reading("communication", setting("communication"), False, False),
    Reading("fence", setting("fence"), False, False),
    Reading("versions and variables", environment_text, False, False),
)
