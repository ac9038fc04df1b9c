"""Rows of a matrix: choosing them, and showing them with their sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from mpbackend.capability import EVIDENCE_KINDS, LEVELS, Arch, Level, Row
from mpbackend.documents import load_vocabulary
from mpbackend.errors import DocumentError, UnknownNameError
from mpbackend.formats import DEVICE_RESOLVED, format_name
from mpbackend.matrix import Matrix
from mpbackend.report.view import (
    Block,
    Citations,
    Column,
    Facts,
    Listing,
    Report,
    Table,
    accumulator_text,
    level_of_row,
    level_text,
    operands_text,
    source_text,
    sources_of,
)

NO_ROW_MEANS = "a combination without a row is unknown, not absent"


class RowFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows are wanted; what is empty lets every row pass.

    Attributes:
        devices: device keys; a row passes when it belongs to the architecture of one of them.
        archs: architecture keys, together with those of ``devices``.
        op: operation.
        operand: format of the first or the second operand.
        level: level.
        path: path.
        software: software name to version; a row that needs a later one does not pass.
    """

    devices: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    op: str = ""
    operand: str = ""
    level: Level | None = None
    path: str = ""
    software: Mapping[str, str] = {}


def chosen_archs(matrix: Matrix, wanted: RowFilter) -> list[Arch]:
    """Return the architectures that a filter lets pass, in the order of the matrix.

    Raises:
        UnknownNameError: no such device or architecture.
    """
    keys = {matrix.device(key).arch for key in wanted.devices} | {matrix.arch(key).key for key in wanted.archs}
    return [arch for arch in matrix.archs.values() if not keys or arch.key in keys]


def select_rows(matrix: Matrix, wanted: RowFilter) -> list[Row]:
    """Return the rows that pass a filter, in the order of the matrix.

    Raises:
        UnknownNameError: a name that neither the vocabulary nor a row knows.
        DocumentError: a version that cannot be compared.
    """
    rows = matrix.rows()
    vocabulary = load_vocabulary()
    known = {
        "op": {*vocabulary.op, *(row.op for row in rows)},
        "path": {*vocabulary.path, *(row.path for row in rows)},
    }
    for kind, names in known.items():
        if (name := getattr(wanted, kind)) and name not in names:
            raise UnknownNameError(kind, name, names)
    archs = {arch.key for arch in chosen_archs(matrix, wanted)}
    operand = format_name(wanted.operand) if wanted.operand else ""
    operands = DEVICE_RESOLVED.get(operand, (operand,) if operand else ())
    versioned = check_software(wanted.software, rows)
    return [
        row
        for row in rows
        if row.arch in archs
        and wanted.op in ("", row.op)
        and wanted.path in ("", row.path)
        and wanted.level in (None, row.level)
        and (not operands or row.a in operands or row.b in operands)
        and all(name not in row.since or version_key(row.since[name]) <= version for name, version in versioned.items())
    ]


def check_software(software: Mapping[str, str], rows: Iterable[Row]) -> dict[str, Any]:
    """Return software names with comparable versions; a name on which no row depends is refused with the nearest names."""
    names = {name for row in rows for name in row.since}
    for name in software:
        if name not in names:
            raise UnknownNameError("software", name, names, remedy="only software that a row depends on can leave rows out")
    return {name: version_key(version) for name, version in software.items()}


def version_key(text: str) -> Any:
    """Return a version that compares in release order (``8.0.RC2`` is before ``8.0``).

    Raises:
        DocumentError: not a version.
    """
    from packaging.version import InvalidVersion, Version  # costs more than the rest of the filter, and is seldom needed

    try:
        return Version(text)
    except InvalidVersion as error:
        raise DocumentError(f"version {text!r}", found="not a version", remedy="write name=version, for example torch=2.9") from error


def row_document(matrix: Matrix, row: Row) -> dict[str, Any]:
    """Return a row as plain data, every field present and its sources expanded."""
    document = {name: msgspec.to_builtins(getattr(row, name)) for name in row.__struct_fields__ if name not in ("source", "conflict")}
    family = matrix.family_of(row.arch)
    document["sources"] = [source_document(matrix, family, source) for source in row.source]
    document["conflict"] = [{"claim": conflict.claim, "source": source_document(matrix, family, conflict.source)} for conflict in row.conflict]
    return document


def source_document(matrix: Matrix, family: str, source: str) -> dict[str, str]:
    """Return a source as plain data."""
    found = matrix.sources[(family, source)]
    return {"id": found.id, "title": found.title, "location": found.location, "date": found.date}


def rows_document(matrix: Matrix, rows: list[Row]) -> dict[str, Any]:
    """Return rows as plain data with the summary of the whole matrix."""
    return {"summary": matrix.summary(), "shown": len(rows), "rows": [row_document(matrix, row) for row in rows]}


def devices_of(matrix: Matrix, arch: str) -> list[str]:
    """Return the keys of the devices of an architecture."""
    return [device.key for device in matrix.devices.values() if device.arch == arch]


def rows_report(matrix: Matrix, rows: list[Row], *, notes: bool) -> Report:
    """Return rows as one table for each architecture and operation, sources numbered below.

    Args:
        matrix: the loaded matrices.
        rows: rows to show.
        notes: list the notes of rows too; otherwise only how many there are.
    """
    citations = Citations()
    remarks = Citations()
    blocks: list[Block] = [] if rows else [Listing("", (f"No row passes; {NO_ROW_MEANS}.",))]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.arch, row.op), []).append(row)
    for (arch, op), members in groups.items():
        title = f"{op} on {arch}: {', '.join(devices_of(matrix, arch)) or 'no device'}"
        blocks.append(rows_table(matrix, members, title, citations, remarks if notes else None))
    blocks.append(remarks.listing("Notes"))
    blocks.append(disagreements(matrix, rows, citations))
    blocks.append(citations.listing())
    blocks.append(summary_facts(matrix.summary(), len(rows)))
    hidden = sum(1 for row in rows if row.note) if not notes else 0
    if hidden:
        blocks.append(Listing("", (f"rows with a note: {hidden}; --format md, json or html shows it",)))
    return Report("Capability matrix", blocks)


def rows_table(matrix: Matrix, rows: list[Row], title: str, citations: Citations, remarks: Citations | None) -> Table:
    """Return rows of one architecture and operation as a table."""
    columns = [
        Column("operands"),
        Column("accumulate"),
        Column("results", wide=True),
        Column("path"),
        Column("level", keep=True),
        Column("evidence", wide=True),
        Column("since", wide=True),
        Column("sources"),
    ]
    if remarks is not None:
        columns.append(Column("notes"))
    table: list[list[str]] = []
    for row in rows:
        cells = [
            operands_text(row),
            accumulator_text(row),
            ", ".join(row.out),
            "\n".join(part for part in (row.path, level_of_row(row)) if part),
            level_text(row.level),
            row.evidence,
            ", ".join(f"{name} {version}" for name, version in sorted(row.since.items())),
            citations.cite(source_text(source) for source in sources_of(matrix, row, row.arch)),
        ]
        table.append([*cells, remarks.cite([row.note])] if remarks is not None else cells)
    return Table(title, columns, table)


def disagreements(matrix: Matrix, rows: list[Row], citations: Citations) -> Listing:
    """Return what other sources claim against the rows."""
    items = []
    for row in rows:
        for conflict in row.conflict:
            source = citations.cite([source_text(matrix.sources[(matrix.family_of(row.arch), conflict.source)])])
            items.append(f"{row.arch} {row.op} {operands_text(row)} by {row.path}: {conflict.claim} [{source}]")
    return Listing("Sources disagree", items)


def summary_facts(summary: Mapping[str, Any], shown: int) -> Facts:
    """Return the counts of a whole matrix."""
    levels = ", ".join(f"{level} {summary['levels'][level]}" for level in LEVELS if level in summary["levels"])
    evidence = ", ".join(f"{kind} {summary['evidence'].get(kind, 0)}" for kind in EVIDENCE_KINDS)
    return Facts(
        "Matrix",
        (
            ("rows", f"{shown} shown of {summary['rows']}, {summary['conflicts']} with sources that disagree"),
            ("devices", f"{summary['devices']}, of {summary['architectures']} architectures"),
            ("facts", f"{summary['facts_used']} used and {summary['facts_dropped']} dropped of {summary['facts']}, from {summary['sources']} sources"),
            ("levels", levels),
            ("evidence", evidence),
        ),
    )
