"""A comparison for people: the verdict first, then why, then everything that it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from mpbackend.comparison.conditions import Condition, Status
from mpbackend.comparison.curves import CUSTOM
from mpbackend.comparison.differences import Difference
from mpbackend.comparison.equality import LEVEL, Verdict
from mpbackend.comparison.runs import bounded, digits
from mpbackend.comparison.verdict import Comparison
from mpbackend.report.runs import formats_cell
from mpbackend.report.view import Block, Column, Facts, Listing, Report, Table, size_text
from mpbackend.roles import PASSES

STATUS_TEXT: dict[Status, str] = {"same": "= same", "different": "≠ different", "unknown": "? unknown"}
"""Symbol and word of a status, so that color is never the only carrier."""

VERDICT_TEXT: dict[Verdict, str] = {
    "equivalent": "= equivalent",
    "different": "≠ different",
    "inconclusive": "? inconclusive",
    "not comparable": "⊘ not comparable",
}

QUESTION_TEXT = {
    "vendor": "one recipe, on devices that may differ: did the vendor change the quality?",
    "recipe": "one device, under recipes that may differ: did the recipe change the quality?",
}

NOT_KNOWN = "unknown"


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data; numbers that JSON cannot hold are the strings ``nan``, ``inf`` and ``-inf``, as in a record."""
    document: dict[str, Any] = writable(msgspec.to_builtins(comparison))
    return document


def writable(value: Any) -> Any:
    """Return plain data in which every number is one that JSON has and 64 bits hold."""
    if isinstance(value, dict):
        return {name: writable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [writable(item) for item in value]
    if isinstance(value, int) and abs(value) >= 2**63:
        return str(bounded(value))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def comparison_report(comparison: Comparison) -> Report:
    """Return a comparison as a report."""
    blocks: list[Block] = [
        Facts("", verdict_facts(comparison)),
        Listing("Why", comparison.reasons),
        conditions_table(comparison),
        *differences_blocks(comparison),
        runs_table(comparison),
        Facts("Quality", quality_facts(comparison)),
        Facts("Loss curves", curve_facts(comparison)),
        speed_table(comparison),
        skips_table(comparison),
        classes_table(comparison),
        Listing("What this comparison", comparison.limits),
        Listing("Notes", comparison.notes),
    ]
    return Report(f"{VERDICT_TEXT[comparison.verdict]}: {side_title(comparison)}", [block for block in blocks if not isinstance(block, Table) or block.rows])


def side_title(comparison: Comparison) -> str:
    """Return what is compared with what: recipes and devices, each once."""
    sides = [list(dict.fromkeys(f"{run.recipe} on {run.device}" for run in side)) for side in (comparison.candidate, comparison.baseline)]
    return " against ".join(", ".join(side[:2]) + (f" and {len(side) - 2} more" if len(side) > 2 else "") for side in sides)


def verdict_facts(comparison: Comparison) -> list[tuple[str, str]]:
    """Return what a reader needs first."""
    quality = comparison.quality
    return [
        ("verdict", VERDICT_TEXT[comparison.verdict]),
        ("question", f"{comparison.question}: {QUESTION_TEXT[comparison.question]} ({comparison.question_basis})"),
        ("scope", comparison.scope),
        ("design", f"{comparison.design}, {len(comparison.baseline)} and {len(comparison.candidate)} runs"),
        ("quality", f"{quality.basis}, at step {digits(quality.step)}"),
        ("margin", f"{number_text(quality.margin)} ({quality.margin_text}{' of the baseline' if quality.margin_text.endswith('%') else ''})"),
    ]


def conditions_table(comparison: Comparison) -> Table:
    """Return the conditions; what does not matter for the question says so."""
    columns = (Column("condition"), Column("status", keep=True), Column("decides", keep=True), Column("baseline"), Column("candidate"), Column("", detail=True))
    rows = [
        (item.name, STATUS_TEXT[item.status], "yes" if item.matters else "no", item.baseline, *same_or(item.baseline, item.candidate), note_text(item))
        for item in comparison.conditions
    ]
    return Table("Conditions", columns, rows)


def note_text(condition: Condition) -> str:
    """Return the note of a condition where it is needed: the reader asks why of what is not the same."""
    return "" if condition.status == "same" else condition.note


def same_or(one: str, other: str) -> tuple[str]:
    """Return the cell of the candidate, ``same`` where it repeats that of the baseline."""
    return ("same" if one == other else other,)


def differences_blocks(comparison: Comparison) -> list[Block]:
    """Return the differences of the arithmetic as a table, or a sentence where there are none."""
    if not comparison.differences:
        return [Listing("Differences in the arithmetic", ("none is recorded: decisions, switches, classes, conversions and observed products are the same",))]
    columns = (Column("what"), Column("baseline"), Column("candidate"), Column("decides", keep=True), Column("", detail=True))
    rows = [
        (f"{difference.kind}: {difference.name}", difference.baseline, difference.candidate, "yes" if difference.decides else "no", difference.reason)
        for difference in fold(comparison.differences)
    ]
    return [Table("Differences in the arithmetic", columns, rows)]


def fold(differences: Sequence[Difference]) -> list[Difference]:
    """Join differences about the passes of one role that say the same: ``compute.{forward,dgrad,wgrad}`` becomes ``compute``."""
    groups: dict[tuple[Any, ...], list[Difference]] = {}
    for number, difference in enumerate(differences):
        role, _, op = difference.name.partition(" ")
        group, _, part = role.rpartition(".")
        key = (group, op, *msgspec.structs.astuple(msgspec.structs.replace(difference, name=""))) if part in PASSES else (number,)
        groups.setdefault(key, []).append(difference)
    return [joined(members) for members in groups.values()]


def joined(members: Sequence[Difference]) -> Difference:
    """Return one difference for members that differ only in their pass."""
    if len(members) == 1:
        return members[0]
    role, _, op = members[0].name.partition(" ")
    group = role.rpartition(".")[0]
    passes = list(dict.fromkeys(member.name.partition(" ")[0].rpartition(".")[2] for member in members))
    name = group if tuple(passes) == PASSES else f"{group}.{{{','.join(passes)}}}"
    return msgspec.structs.replace(members[0], name=f"{name} {op}".strip())


def runs_table(comparison: Comparison) -> Table:
    """Return every run with its quality."""
    columns = (Column("side"), Column("run"), Column("recipe"), Column("device"), Column("seed", right=True), Column(comparison.quality.metric, right=True))
    rows = []
    for side, runs in (("baseline", comparison.baseline), ("candidate", comparison.candidate)):
        for run in runs:
            device = run.device if run.kind == "hardware" else f"{run.device} ({run.kind})"
            rows.append((side, run.name, run.recipe, device, NOT_KNOWN if run.seed is None else digits(run.seed), number_text(run.quality)))
    return Table("Runs", columns, rows)


def quality_facts(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the tests and the noise floor."""
    facts = []
    test, floor = comparison.equivalence, comparison.floor
    if test is None:
        facts.append(("test", "none: see above"))
    else:
        names = {
            "paired": "two one-sided t tests, paired by seed",
            "two-sample": "two one-sided t tests, Welch",
            "repeats": "two one-sided t tests, one variance",
        }
        facts += [
            ("test", f"{names[test.design]}, {test.df:.3g} degrees of freedom"),
            ("difference", f"{test.difference:+.4g}, {LEVEL} interval {test.low:+.4g} to {test.high:+.4g}"),
            ("deviation", number_text(test.deviation)),
            ("power", f"{test.power:.0%} to show equal means with runs like these"),
            ("runs needed", f"{'more than 10,000' if test.needed is None else test.needed} on each side for a power of 80 %"),
        ]
    if floor is None:
        facts.append(("noise floor", "unknown: no run was repeated with its seed"))
    else:
        alike = ", bit for bit alike" if floor.identical else ""
        gap = "" if floor.mean_gap is None else f", curves {floor.mean_gap:.2%} apart"
        facts.append(("noise floor", f"{floor.runs} repeats, deviation {number_text(floor.deviation)}, at most {number_text(floor.largest)}{gap}{alike}"))
    return facts


def curve_facts(comparison: Comparison) -> list[tuple[str, str]]:
    """Return what the curves of the pair that lies furthest apart say."""
    curve = max(comparison.curves, key=lambda item: -1.0 if item.mean_gap is None else item.mean_gap)
    facts = [
        (
            "pair",
            f"{curve.names[0]} and {curve.names[1]}, {curve.steps} common steps"
            + (" (of the pairs, the one furthest apart)" if len(comparison.curves) > 1 else ""),
        )
    ]
    if curve.identical:
        return [*facts, ("gap", "none: every step is bit for bit alike")]
    if curve.nonfinite:
        facts.append(("non-finite", f"at {curve.nonfinite} steps one loss is finite and the other is not"))
    if curve.first_gap is None or curve.worst_gap is None or curve.mean_gap is None:
        return [*facts, ("gap", "unknown: no step has a finite loss in both runs")]
    facts += [
        ("first step apart", step_text(curve.parted_step)),
        ("gap of the first step", f"{curve.first_gap:.3g}" + ("" if curve.first_units is None else f", {curve.first_units:.3g} tolerance units")),
        ("first step beyond one unit", NOT_KNOWN if curve.unit is None else step_text(curve.diverged_step)),
        ("tolerance unit", f"{curve.unit_source}" if curve.unit is None else f"{curve.unit:.3g} of the loss: one product in {curve.unit_source}"),
        ("largest gap", f"{curve.worst_gap:.3g} at step {step_text(curve.worst_step)}"),
    ]
    if curve.norm_gap is not None and curve.worst_norm_gap is not None:
        facts.append(("gradient norm", f"mean gap {curve.norm_gap:.3g}, largest {curve.worst_norm_gap:.3g} at step {step_text(curve.worst_norm_step)}"))
    if comparison.custom_gap is not None:
        within = "within" if comparison.within_custom else "beyond"
        facts.append(("mean gap", f"{comparison.custom_gap:.3g}: {within} the {CUSTOM:.0%} that custom calls equal, which decides nothing here"))
    return facts


def step_text(step: int | None) -> str:
    """Return the number of a step, ``none`` where there is no such step."""
    return "none" if step is None else digits(step)


def speed_table(comparison: Comparison) -> Table:
    """Return speed by the step and to one quality, side by side."""
    speed = comparison.speed
    one, other = speed.baseline, speed.candidate
    target = "no target" if speed.target is None else f"{comparison.quality.metric} {number_text(speed.target)}"
    rows = [
        ("step time, median ms", number_text(one.step_ms), number_text(other.step_ms), ratio_text(speed.step_ratio)),
        (f"steps to {target}", count_text(one.steps_to_target, speed.target), count_text(other.steps_to_target, speed.target), ""),
        ("steps x step time, s", number_text(one.seconds_to_target), number_text(other.seconds_to_target), ratio_text(speed.seconds_ratio)),
        ("time of all steps, s", number_text(one.total_seconds), number_text(other.total_seconds), ""),
        (
            f"peak memory{memory_basis(one.memory_basis, other.memory_basis)}",
            memory_text(one.peak_bytes),
            memory_text(other.peak_bytes),
            ratio_text(speed.memory_ratio),
        ),
    ]
    if speed.words:
        rows.append(("together", "", speed.words, ""))
    return Table("Speed at one quality", (Column(""), Column("baseline"), Column("candidate"), Column("ratio", right=True)), rows)


def memory_basis(one: str, other: str) -> str:
    """Return what the peak measures, or that the sides measure it differently."""
    return f", {one}" if one and one == other else ", measured differently" if one != other else ""


def skips_table(comparison: Comparison) -> Table:
    """Return the skipped steps of every run."""
    columns = (
        Column("run"),
        Column("steps", right=True),
        Column("skipped", right=True),
        Column("in the search for a scale", right=True),
        Column("share"),
        Column("non-finite", right=True),
        Column("finding"),
    )
    rows = [
        (item.name, digits(item.steps), digits(item.skipped), digits(item.search), f"{item.share:.2%}", digits(item.nonfinite), item.finding)
        for item in comparison.skips
    ]
    return Table("Skipped steps", columns, rows)


def classes_table(comparison: Comparison) -> Table:
    """Return the five classes side by side."""
    columns = (Column("class"), Column("asked, baseline"), Column("observed"), Column("asked, candidate"), Column("observed"))
    rows = [
        (pair.name, pair.baseline.asked, formats_cell(pair.baseline.observed), pair.candidate.asked, formats_cell(pair.candidate.observed))
        for pair in comparison.classes
    ]
    return Table("The five classes", columns, rows)


def number_text(value: float | None) -> str:
    """Return a number with five digits, ``unknown`` where there is none."""
    return NOT_KNOWN if value is None else f"{value:.5g}"


def ratio_text(value: float | None) -> str:
    """Return a ratio, empty where there is none."""
    return "" if value is None else f"{value:.3g}x"


def count_text(value: int | None, target: float | None) -> str:
    """Return a number of steps, ``never`` where a target is not reached."""
    return NOT_KNOWN if target is None else "never" if value is None else str(value)


def memory_text(value: float | None) -> str:
    """Return bytes as people read them."""
    return NOT_KNOWN if value is None or not math.isfinite(value) else size_text(int(value))
