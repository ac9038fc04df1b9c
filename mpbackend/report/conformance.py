"""What the checks found: one device, or two side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mpbackend.conformance.evidence import Evidence, Figure, Outcome, Result
from mpbackend.conformance.parity import Parity, code, compare_evidence, same_conditions
from mpbackend.report.view import Block, Column, Facts, Listing, Report, Table

SYMBOLS: Mapping[Outcome, str] = {"passed": "✓ passed", "failed": "✗ failed", "expected": "≠ expected failure", "skipped": "· skipped"}
"""Outcome to its symbol and word, so that color is never the only carrier."""

OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "expected", "skipped")

NOT_RUN = "not run"


def conformance_report(evidence: Evidence) -> Report:
    """Return the results on one device: what failed first, then every check."""
    failed = [f"{result.check}: {result.detail}" for result in evidence.results if result.outcome == "failed"]
    expected = [f"{result.check}: {result.detail}" for result in evidence.results if result.outcome == "expected"]
    skipped = [f"{result.check}: {result.detail}" for result in evidence.results if result.outcome == "skipped"]
    columns = [Column("theme", wide=True), Column("check", keep=True), Column("outcome", keep=True), Column("figures", detail=True)]
    rows = [[result.theme, result.check, SYMBOLS[result.outcome], figures_text(result.figures)] for result in evidence.results]
    blocks: list[Block] = [
        Facts("", device_facts(evidence)),
        Listing("Failed", failed),
        Listing("Failed as expected", expected),
        Listing("Skipped", skipped),
        Table("Checks", columns, rows),
    ]
    return Report(f"Conformance of {evidence.backend} on {evidence.device.key}", blocks)


def parity_report(a: Evidence, b: Evidence) -> Report:
    """Return two devices side by side: checks whose outcomes differ before those with the same."""
    rows = compare_evidence(a, b)
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("same", "differs", "one side only")}
    labels = (label(a), label(b))
    blocks: list[Block] = [
        Facts("", [("a", labels[0]), ("b", labels[1]), ("checks", ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))]),
        Listing("Conditions that differ", same_conditions(a, b)),
    ]
    for title, verdict in (("Outcomes differ", "differs"), ("On one device only", "one side only"), ("Same outcome", "same")):
        found = [parity_cells(row) for row in rows if row.verdict == verdict]
        if found:
            columns = [Column("check", keep=True), Column("a", keep=True), Column("b", keep=True), Column("what differs", detail=True)]
            blocks.append(Table(f"{title} ({len(found)})", columns, found))
    return Report(f"Parity of {a.device.key} and {b.device.key}", blocks)


def parity_document(a: Evidence, b: Evidence) -> dict[str, Any]:
    """Return two devices side by side as plain data."""
    rows = [msgspec.to_builtins(row) for row in compare_evidence(a, b)]
    sides = {name: {"backend": side.backend, "device": side.device.key, "kind": side.device.kind, "code": code(side)} for name, side in (("a", a), ("b", b))}
    return {**sides, "conditions": list(same_conditions(a, b)), "checks": rows}


def device_facts(evidence: Evidence) -> list[tuple[str, str]]:
    """Return what was checked, where and by which code."""
    counts = ", ".join(f"{evidence.count(outcome)} {SYMBOLS[outcome].partition(' ')[2]}" for outcome in OUTCOMES)
    facts = [
        ("verdict", f"{'conforms' if evidence.passes else 'does not conform'}: {counts}"),
        ("device", f"{evidence.device.name} ({evidence.device.kind})"),
        ("backend", " ".join(filter(None, (evidence.backend, f"of {evidence.distribution}" if evidence.distribution else "")))),
        ("checked by", f"{code(evidence)}, {'quick sizes' if evidence.quick else 'all sizes'}, {evidence.date}"),
    ]
    return facts + [(name, evidence.environment[name]) for name in ("torch",) if name in evidence.environment]


def label(evidence: Evidence) -> str:
    """Return device, kind and backend of a side."""
    return f"{evidence.device.key}, {evidence.device.name} ({evidence.device.kind}), backend {evidence.backend}, {evidence.date}"


def parity_cells(row: Parity) -> list[str]:
    """Return one row of the parity table."""
    pairs = [f"{name}: {figure_text(mine)} against {figure_text(theirs)}" for name, (mine, theirs) in row.figures.items()]
    details = [f"{side}: {result.detail}" for side, result in (("a", row.a), ("b", row.b)) if result is not None and result.detail]
    return [row.check, outcome_text(row.a), outcome_text(row.b), "; ".join((*details, *pairs))]


def outcome_text(result: Result | None) -> str:
    """Return the outcome of a side."""
    return NOT_RUN if result is None else SYMBOLS[result.outcome]


def figures_text(figures: Mapping[str, Figure]) -> str:
    """Return figures on one line."""
    return ", ".join(f"{name} {figure_text(value)}" for name, value in figures.items())


def figure_text(value: Figure | None) -> str:
    """Return a figure as text."""
    return "none" if value is None else value if isinstance(value, str) else f"{value:.3g}"


def check_report(rows: Sequence[tuple[str, str, str]]) -> Report:
    """Return the list of checks: theme, name and meaning."""
    columns = [Column("theme"), Column("check", keep=True), Column("property", detail=True)]
    return Report(f"{len(rows)} checks of a backend", [Table("", columns, [list(row) for row in rows])])
