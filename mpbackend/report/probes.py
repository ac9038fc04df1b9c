"""A fingerprint for people: what was asked, what the products showed, and how that stands to what a row claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mpbackend.numerics.fingerprint import QUESTIONS, Answer, Finding, Fingerprint, ShapeAnswer, Tree, Value, Verdict, overall
from mpbackend.report.view import Block, Column, Facts, Listing, Report, Table

VERDICT_TEXT: dict[Verdict, str] = {"agrees": "= agrees", "contradicts": "≠ contradicts", "adds": "+ adds", "open": "? open"}
"""Symbol and word of a verdict, so that color is never the only carrier."""

OVERALL_TEXT: dict[Verdict, str] = {
    "contradicts": "contradicts: a claim of the row is not what the device does",
    "adds": "adds: the device shows what the row does not say, and contradicts nothing",
    "agrees": "agrees: every claim that could be probed is what the device does",
    "open": "open: nothing that was asked tells",
}

KIND_NOTE = {"emulated": "emulated: products of a model of the device, not of the device", "simulated": "simulated: products of a stand-in for the device"}


def probe_document(fingerprint: Fingerprint, findings: Sequence[Finding] = (), *, device: str, kind: str = "hardware", claimed: str = "") -> dict[str, Any]:
    """Return a fingerprint and its comparison as plain data.

    Args:
        fingerprint: what was probed.
        findings: the comparison with a row; empty without one.
        device: key of the device.
        kind: ``hardware``, ``emulated`` or ``simulated``.
        claimed: the row that was compared.
    """
    document: dict[str, Any] = {"device": device, "kind": kind, "fingerprint": msgspec.to_builtins(fingerprint)}
    if findings:
        document |= {"claimed": claimed, "verdict": overall(findings), "findings": msgspec.to_builtins(findings)}
    return document


def probe_report(fingerprint: Fingerprint, findings: Sequence[Finding] = (), *, device: str, kind: str = "hardware", claimed: str = "") -> Report:
    """Return a fingerprint as a report; ``report.terminal`` and ``report.markdown`` print it.

    Args:
        fingerprint: what was probed.
        findings: the comparison with a row; empty without one.
        device: key of the device.
        kind: ``hardware``, ``emulated`` or ``simulated``: whatever is not hardware says so in the title.
        claimed: the row that was compared.
    """
    operands = fingerprint.a if fingerprint.a == fingerprint.b else f"{fingerprint.a} x {fingerprint.b}"
    title = f"Products of {operands} to {fingerprint.output} on {device}" + ("" if kind == "hardware" else f" ({kind})")
    pairs = [
        ("device", f"{device}, {KIND_NOTE.get(kind, kind)}"),
        ("stored as", f"{fingerprint.storage_a} and {fingerprint.storage_b}"),
        ("products asked", str(fingerprint.calls)),
        ("answers give", "all bits of random products" if fingerprint.explained else "not all bits of random products: read them as hints"),
    ]
    if findings:
        pairs += [("row", claimed or "a row of the matrix"), ("verdict", OVERALL_TEXT[overall(findings)])]
    blocks: list[Block] = [Facts("", pairs), findings_table(findings) if findings else answers_table(fingerprint)]
    blocks.append(Table("Shapes", (Column("M x N x K", keep=True), Column("elements with these bits"), Column("differs")), shape_rows(fingerprint.shapes)))
    if fingerprint.tree is not None:
        blocks.append(Listing("Order of the sums", tree_lines(fingerprint.tree)))
    evidence = [f"{QUESTIONS[name]}: {line}" for name, entry in fingerprint.answers.items() for line in entry.evidence]
    blocks.append(Listing("Products that excluded other values", evidence))
    return Report(title, blocks)


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return a comparison as a table."""
    columns = (Column("question"), Column("probed"), Column("row claims"), Column("verdict", keep=True), Column("reason", detail=True))
    rows = [
        (QUESTIONS[entry.question], answer_text(entry.probed), "-" if entry.claimed is None else str(entry.claimed), VERDICT_TEXT[entry.verdict], entry.reason)
        for entry in findings
    ]
    return Table("Findings", columns, rows)


def answers_table(fingerprint: Fingerprint) -> Table:
    """Return a fingerprint without a comparison as a table."""
    columns = (Column("question"), Column("probed"), Column("reason", detail=True))
    return Table("Answers", columns, [(QUESTIONS[name], answer_text(entry), entry.reason) for name, entry in fingerprint.answers.items()])


def answer_text(answer: Answer) -> str:
    """Return the values of an answer, neighboring numbers as a range; a dash where nothing is known."""
    numbers = sorted(value for value in answer.values if isinstance(value, int))
    words = [value for value in answer.values if isinstance(value, str)]
    return " or ".join([*ranges(numbers), *words]) or "-"


def ranges(numbers: Sequence[int]) -> list[str]:
    """Return numbers as texts, three or more neighbors as ``26 to 40``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return [text for run in found for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(number) for number in run])]


def shape_rows(shapes: Sequence[ShapeAnswer]) -> list[tuple[str, str, str]]:
    """Return a row for every shape."""
    rows = []
    for entry in shapes:
        m, n, k = entry.shape
        rows.append((f"{m} x {n} x {k}", f"{entry.verified} of {entry.verified + entry.differing}", "; ".join(entry.differs) or "-"))
    return rows


def tree_lines(tree: Tree) -> list[str]:
    """Return a tree in words: chains of products, and where they are joined."""
    chains: dict[int, list[Value]] = {}
    lines = []
    for number, children in enumerate(tree.nodes):
        index = tree.k + number
        leaves = [child for child in children if child < tree.k]
        sums = [child for child in children if child >= tree.k]
        if len(children) > 2:
            lines.append(f"sum {index} adds {len(children)} terms at once")
        if leaves and len(sums) <= 1:
            chains[index] = [*(chains.pop(sums[0], [f"sum {sums[0]}"]) if sums else []), *leaves]
    for index, members in chains.items():
        shown = ", ".join(str(member) for member in members[:6]) + (f", ... {members[-1]}" if len(members) > 6 else "")
        lines.append(f"sum {index}: {len(members)} terms one after the other: {shown}")
    joins = [f"sum {tree.k + number} joins {' and '.join(str(c) for c in children)}" for number, children in enumerate(tree.nodes) if min(children) >= tree.k]
    lines += joins[:8] + ([f"and {len(joins) - 8} more"] if len(joins) > 8 else [])
    rounded = sum(not exact for exact in tree.exact)
    lines.append(f"{rounded} of {tree.k} products are rounded before they are added" if rounded else "no product is rounded before it is added")
    return lines
