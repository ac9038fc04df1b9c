"""What differs between two audits. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from mpbackend.observe.audit_document import AuditDocument, Entry

Kind = Literal["condition", "request", "operation", "casts", "fallbacks", "memory", "finding"]

CONDITIONS = ("workload", "recipe", "granted", "device", "kind", "basis", "torch", "parameters", "flops", "tokens", "uncounted", "overflow")


class Difference(Entry, frozen=True, kw_only=True):
    """One thing that two audits do not share; an empty side has none of it."""

    kind: Kind
    what: str
    first: str
    second: str


def audit_differences(first: AuditDocument, second: AuditDocument) -> tuple[Difference, ...]:
    """Return what differs, times and rates left out. Operations are compared by pass, module, formats and number of calls.

    Two backends name fused operations differently; those stand as one that is gone and one that is new.
    """
    return tuple(
        Difference(kind=kind, what=what, first=one.get(what, ""), second=other.get(what, ""))
        for kind, one, other in tables(first, second)
        for what in dict.fromkeys([*one, *other])
        if one.get(what, "") != other.get(what, "")
    )


def tables(first: AuditDocument, second: AuditDocument) -> Iterator[tuple[Kind, Mapping[str, str], Mapping[str, str]]]:
    """Yield each comparable part of two audits, as texts by what they are about."""
    yield "condition", conditions(first), conditions(second)
    yield "request", requests(first), requests(second)
    yield "operation", operations(first), operations(second)
    yield "casts", casts(first), casts(second)
    yield "fallbacks", fallbacks(first), fallbacks(second)
    yield "memory", memory(first), memory(second)
    yield "finding", findings(first), findings(second)


def conditions(audit: AuditDocument) -> dict[str, str]:
    """Return what an audit was made of."""
    return {name: str(getattr(audit, name)) for name in CONDITIONS}


def requests(audit: AuditDocument) -> dict[str, str]:
    """Return what ran, by role."""
    return {row.role: f"{row.granted}: {row.ran}" for row in audit.requests}


def operations(audit: AuditDocument) -> dict[str, str]:
    """Return calls and formats of the operations, by pass, module and name."""
    found: dict[str, list[str]] = {}
    for row in audit.ops:
        text = f"{row.calls} x {','.join(dict.fromkeys(row.inputs))} -> {row.compute or '-'} -> {','.join(dict.fromkeys(row.outputs)) or '-'}"
        found.setdefault(f"{row.phase} {row.module or '-'} {row.op}", []).append(text)
    return {what: "; ".join(sorted(texts)) for what, texts in found.items()}


def casts(audit: AuditDocument) -> dict[str, str]:
    """Return the conversions, by pass, module and formats."""
    return {f"{row.phase} {row.module or '-'} {row.source} -> {row.target}": f"{row.count} tensors, {row.bytes} B" for row in audit.casts}


def fallbacks(audit: AuditDocument) -> dict[str, str]:
    """Return what was left to the host, by pass and operation; seconds vary and are left out."""
    return {f"{row.phase} {row.op}": f"{row.count} calls, {row.bytes} B" + (", timed" if row.timed else "") for row in audit.fallbacks}


def memory(audit: AuditDocument) -> dict[str, str]:
    """Return the measured bytes, by class and format."""
    return {f"{row.klass} {row.format}": f"{row.measured} B" for row in audit.memory}


def findings(audit: AuditDocument) -> dict[str, str]:
    """Return the findings, by rule and place."""
    return {f"{finding.rule} {finding.where}": finding.message for finding in audit.findings}
