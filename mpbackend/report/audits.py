"""An audit for people: findings first, then what was asked and what ran, the operations by module, casts, shapes and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpbackend.observe.audit_diff import Difference
from mpbackend.observe.audit_document import AuditDocument, OpRow, folded_path
from mpbackend.report.view import Block, Column, Facts, Listing, Report, Table, size_text

MOST_ROWS = 20
"""Rows of a table in the text; JSON has them all."""

SHOWN_SHARE = 0.001
"""Least share of the FLOPs that a product needs to be listed."""

SAME = {True: "yes", False: "NO", None: "not seen"}
FAKE = "tensors without memory, the target's operator policy; no device was used"


def audit_report(audit: AuditDocument, *, full: bool = False) -> Report:
    """Return an audit as a report.

    Args:
        audit: the audit.
        full: show every row.
    """
    limit = 10**9 if full else MOST_ROWS
    findings = [f"{finding.rule}: {finding.where}: {finding.message}; {finding.remedy}" for finding in audit.findings]
    blocks: list[Block] = [
        Facts("", facts(audit)),
        Listing("Findings", findings or ["none"]),
        Table(
            "Asked and run",
            (Column("role"), Column("asked"), Column("granted"), Column("ran"), Column("same")),
            [(row.role, row.asked, row.granted, row.ran, SAME[row.same]) for row in audit.requests],
        ),
        op_table(folded_rows(audit.ops), limit),
        cast_table(audit, limit),
        product_table(audit, limit),
        fallback_table(audit),
        memory_table(audit),
        Listing("Notes", audit.notes),
    ]
    device = audit.device if audit.kind == "hardware" else f"{audit.device} ({audit.kind})"
    return Report(f"{audit.workload}: {audit.recipe} on {device}", [block for block in blocks if not isinstance(block, Table) or block.rows])


def facts(audit: AuditDocument) -> list[tuple[str, str]]:
    """Return what a reader needs before the tables."""
    pairs = [
        ("recipe", audit.recipe if audit.granted == audit.recipe else f"{audit.recipe}, granted {audit.granted}"),
        ("basis", f"{FAKE if audit.basis == 'fake' else live_text(audit)}; torch {audit.torch}"),
        ("parameters", f"{audit.parameters:,}"),
        ("effective compute format", audit.effective),
        ("FLOPs of a step", f"{audit.flops:,}"),
        ("casts", f"{sum(row.count for row in audit.casts):,}, {size_text(sum(row.bytes for row in audit.casts))} written"),
        ("left to the host", host_text(audit)),
    ]
    if audit.seconds:
        pairs.append(("step", f"{audit.seconds * 1e3:.2f} ms" + ("" if audit.tokens_per_s is None else f", {audit.tokens_per_s:,.0f} tokens/s")))
    if audit.seconds or audit.mfu is not None:
        pairs.append(("MFU", f"none: {audit.mfu_basis}" if audit.mfu is None else f"{audit.mfu:.1%} ({audit.mfu_basis})"))
    if audit.overflow:
        pairs.append(("overflow", audit.overflow))
    if audit.uncounted:
        pairs.append(("uncounted", ", ".join(audit.uncounted)))
    return pairs


def live_text(audit: AuditDocument) -> str:
    """Return where an audit ran."""
    return (
        "ran on the device" if audit.kind == "hardware" else f"ran on this machine's processor; the device is {audit.kind}, and operators are those of the host"
    )


def host_text(audit: AuditDocument) -> str:
    """Return how many calls the device left to the host, where that can be known."""
    if audit.basis == "fake":
        return "unknown without the device"
    count = sum(row.count for row in audit.fallbacks)
    return f"{count:,} calls" + (" (inside a timed step)" if any(row.timed for row in audit.fallbacks) else "")


def folded_rows(rows: Iterable[OpRow]) -> list[OpRow]:
    """Join rows of modules that differ in their numbers only; most FLOPs first."""
    joined: dict[tuple[object, ...], list[OpRow]] = {}
    for row in rows:
        joined.setdefault((row.phase, folded_path(row.module), row.op, row.inputs, row.compute, row.outputs), []).append(row)
    found = [
        OpRow(
            phase=members[0].phase,
            module=folded_path(members[0].module),
            op=members[0].op,
            inputs=members[0].inputs,
            compute=members[0].compute,
            outputs=members[0].outputs,
            calls=sum(row.calls for row in members),
            flops=sum(row.flops for row in members),
            share=sum(row.share for row in members),
        )
        for members in joined.values()
    ]
    return sorted(found, key=lambda row: (-row.flops, -row.calls, row.phase, row.module, row.op))


def formats_text(row: OpRow) -> str:
    """Return ``input -> compute -> output`` formats of an operation."""
    inputs, outputs = ", ".join(dict.fromkeys(row.inputs)) or "-", ", ".join(dict.fromkeys(row.outputs)) or "-"
    return f"{inputs} → {row.compute or '-'} → {outputs}"


def op_table(rows: Sequence[OpRow], limit: int) -> Table:
    """Return the operations as a table."""
    columns = (
        Column("pass", keep=True),
        Column("module"),
        Column("operation"),
        Column("in → compute → out"),
        Column("calls", right=True),
        Column("FLOPs", right=True),
    )
    shown = [(row.phase, row.module or "-", row.op.removeprefix("aten::"), formats_text(row), f"{row.calls:,}", f"{row.share:.1%}") for row in rows[:limit]]
    return Table(titled("Operations", len(rows), limit), columns, shown)


def cast_table(audit: AuditDocument, limit: int) -> Table:
    """Return the conversions by pass, module and formats."""
    joined: dict[tuple[str, str, str, str], list[int]] = {}
    for row in audit.casts:
        counts = joined.setdefault((row.phase, folded_path(row.module), row.source, row.target), [0, 0])
        counts[0] += row.count
        counts[1] += row.bytes
    rows = sorted(joined.items(), key=lambda item: -item[1][1])
    columns = (Column("pass", keep=True), Column("module"), Column("from → to"), Column("tensors", right=True), Column("written", right=True))
    shown = [(phase, module or "-", f"{source} → {target}", f"{count:,}", size_text(size)) for (phase, module, source, target), (count, size) in rows[:limit]]
    return Table(titled("Casts", len(rows), limit), columns, shown)


def product_table(audit: AuditDocument, limit: int) -> Table:
    """Return the products whose shapes miss the alignment of the target."""
    rows = [row for row in audit.products if row.misses and (row.share >= SHOWN_SHARE or row.phase == "optimizer")]
    columns = (Column("pass", keep=True), Column("m x n x k"), Column("formats"), Column("calls", right=True), Column("FLOPs", right=True), Column("misses"))
    shown = [
        (
            row.phase,
            f"{row.m} x {row.n} x {row.k}",
            row.a if row.a == row.b else f"{row.a} x {row.b}",
            f"{row.calls:,}",
            f"{row.share:.1%}",
            "; ".join(row.misses),
        )
        for row in rows[:limit]
    ]
    return Table(titled(f"Shapes that miss the alignment ({sum(row.share for row in rows):.1%} of the FLOPs)", len(rows), limit), columns, shown)


def fallback_table(audit: AuditDocument) -> Table:
    """Return what the device left to the host."""
    columns = (
        Column("pass", keep=True),
        Column("operation"),
        Column("calls", right=True),
        Column("moved", right=True),
        Column("ms", right=True),
        Column("in a timed step"),
    )
    shown = [(row.phase, row.op, f"{row.count:,}", size_text(row.bytes), f"{row.seconds * 1e3:.2f}", "yes" if row.timed else "no") for row in audit.fallbacks]
    return Table("Left to the host", columns, shown)


def memory_table(audit: AuditDocument) -> Table:
    """Return the ledger with a sum."""
    columns = (
        Column("class"),
        Column("format"),
        Column("predicted", right=True),
        Column("measured", right=True),
        Column("off", right=True),
        Column("in fp32", right=True),
    )
    shown = [
        (row.klass, row.format, optional_size(row.predicted), size_text(row.measured), off_text(row.predicted, row.measured), optional_size(row.fp32))
        for row in audit.memory
    ]
    if shown:
        fp32 = [row.fp32 or 0 for row in audit.memory if row.klass != "communication"]
        known = all(any(row.fp32 is not None for row in audit.memory if row.klass == klass) for klass in {row.klass for row in audit.memory})
        shown.append(("total", "", "", size_text(sum(row.measured for row in audit.memory)), "", size_text(sum(fp32)) if known else "unknown"))
    return Table("Memory", columns, shown)


def optional_size(size: int | None) -> str:
    """Return bytes, or that they are not known."""
    return "unknown" if size is None else size_text(size)


def off_text(predicted: int | None, measured: int) -> str:
    """Return how far the measurement is from the prediction; empty where there is none."""
    if not predicted:
        return "" if predicted is None or not measured else "not predicted"
    return f"{(measured - predicted) / predicted:+.2%}"


def titled(title: str, count: int, limit: int) -> str:
    """Return a title that says how many rows are not shown."""
    return title if count <= limit else f"{title} ({limit} of {count} rows; --full shows all)"


def differences_report(found: Sequence[Difference], first: str, second: str, speed: str = "") -> Report:
    """Return what differs between two audits as a report.

    Args:
        found: the differences.
        first: name of the first audit.
        second: name of the second.
        speed: how their times compare, in words; empty when they were not timed.
    """
    facts = Facts("", [("first", first), ("second", second), *([("speed", speed)] if speed else [])])
    if not found:
        return Report(f"{first} and {second}", (facts, Listing("Differences", ["none"])))
    columns = (Column("kind", keep=True), Column("what"), Column("first"), Column("second"))
    rows = [(item.kind, item.what, item.first or "-", item.second or "-") for item in found]
    return Report(f"{first} and {second}", (facts, Table("Differences", columns, rows)))
