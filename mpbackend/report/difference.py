"""The difference of two devices: every (op, a, b, accumulate) that either of them has a row for, exactly once."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from mpbackend.capability import LEVELS, Level, Row
from mpbackend.matrix import Matrix
from mpbackend.report.rows import NO_ROW_MEANS, RowFilter, row_document, select_rows
from mpbackend.report.view import NO_ROW, Block, Citations, Column, Facts, Listing, Report, Table, level_text, pair_text, source_text, sources_of

Status = Literal["same level", "level differs", "only first", "only second"]
STATUSES: tuple[Status, ...] = ("level differs", "only first", "only second", "same level")

Key = tuple[str, str, str, str]

NOTHING_SUMMED = "none"
"""The accumulator of a row that computes nothing: an absent combination."""


class Entry(NamedTuple):
    """One combination on two devices.

    Attributes:
        key: (op, a, b, accumulate).
        status: how the two compare; a side counts as having the combination when it has a row, whatever its level.
        first: rows of the first device, in the order of the matrix.
        second: rows of the second device.
    """

    key: Key
    status: Status
    first: tuple[Row, ...]
    second: tuple[Row, ...]


def best_level(rows: tuple[Row, ...]) -> Level | None:
    """Return the level that supports most among rows, None without rows."""
    return min((row.level for row in rows), key=LEVELS.index, default=None)


def compare_devices(matrix: Matrix, first: str, second: str, wanted: RowFilter | None = None) -> list[Entry]:
    """Compare two devices.

    Args:
        matrix: the loaded matrices.
        first: device key.
        second: device key.
        wanted: which rows take part; its devices and architectures are ignored.

    Returns:
        One entry for each key, sorted by operation, then operands, then accumulator.

    Raises:
        UnknownNameError: no such device, or a name in the filter is unknown.
    """
    sides: list[dict[Key, list[Row]]] = []
    rows = select_rows(matrix, RowFilter() if wanted is None else wanted)
    for device in (first, second):
        arch = matrix.device(device).arch
        groups: dict[Key, list[Row]] = {}
        for row in rows:
            if row.arch == arch:
                groups.setdefault((row.op, row.a, row.b, row.accumulate), []).append(row)
        sides.append(groups)
    left, right = sides
    entries = []
    for key in sorted({*left, *right}):
        if key[3] == NOTHING_SUMMED and any(other[:3] == key[:3] and other[3] != NOTHING_SUMMED for other in (*left, *right)):
            continue  # it stands beside the accumulators that the other device has
        pair = (rows_for(left, key), rows_for(right, key))
        entries.append(Entry(key, compare_sides(*pair), *pair))
    return entries


def rows_for(groups: dict[Key, list[Row]], key: Key) -> tuple[Row, ...]:
    """Return the rows of one device for a key, and those that nothing sums in: what is absent is absent with every accumulator."""
    silent = groups.get((*key[:3], NOTHING_SUMMED), []) if key[3] != NOTHING_SUMMED else []
    return (*groups.get(key, []), *silent)


def compare_sides(first: tuple[Row, ...], second: tuple[Row, ...]) -> Status:
    """Return how the rows of two devices for one key compare."""
    if not second:
        return "only first"
    if not first:
        return "only second"
    return "same level" if best_level(first) == best_level(second) else "level differs"


def status_text(status: Status, first: str, second: str) -> str:
    """Return a status with the devices' keys in it."""
    return {"only first": f"only {first}", "only second": f"only {second}"}.get(status, status)


def difference_document(matrix: Matrix, first: str, second: str, entries: list[Entry]) -> dict[str, Any]:
    """Return a difference as plain data, sources expanded."""
    return {
        "devices": [first, second],
        "architectures": [matrix.device(first).arch, matrix.device(second).arch],
        "counts": {status_text(status, first, second): count for status, count in count_statuses(entries).items()},
        "entries": [
            {
                **dict(zip(("op", "a", "b", "accumulate"), entry.key, strict=True)),
                "status": status_text(entry.status, first, second),
                "levels": [best_level(entry.first), best_level(entry.second)],
                "rows": [[row_document(matrix, row) for row in side] for side in (entry.first, entry.second)],
            }
            for entry in entries
        ],
    }


def count_statuses(entries: list[Entry]) -> dict[Status, int]:
    """Count the entries of every status, zero included."""
    return {status: sum(1 for entry in entries if entry.status == status) for status in STATUSES}


def difference_report(matrix: Matrix, first: str, second: str, entries: list[Entry]) -> Report:
    """Return a difference as one table for each status and operation, sources numbered below."""
    citations = Citations()
    names = (f"{first} ({matrix.device(first).arch})", f"{second} ({matrix.device(second).arch})")
    counts = count_statuses(entries)
    blocks: list[Block] = [Facts("", [(status_text(status, first, second), str(count)) for status, count in counts.items()])]
    for status in STATUSES:
        members = [entry for entry in entries if entry.status == status]
        if members:
            blocks.append(entries_table(matrix, status, (first, second), members, citations))
    blocks.append(citations.listing())
    blocks.append(Listing("", (f"Each device: level, then every path with its scaling and [sources]; {NO_ROW_MEANS}.",)))
    return Report(f"{names[0]} and {names[1]}", blocks)


def entries_table(matrix: Matrix, status: Status, devices: tuple[str, str], entries: list[Entry], citations: Citations) -> Table:
    """Return the entries of one status as a table; a device that has no row for any of them has no column."""
    sides = {"only first": (0,), "only second": (1,)}.get(status, (0, 1))
    columns = (Column("op"), Column("operands"), Column("accumulate"), *(Column(devices[side]) for side in sides))
    rows = []
    for entry in entries:
        op, a, b, accumulate = entry.key
        both = (entry.first, entry.second)
        rows.append((op, pair_text(a, b), accumulate, *(side_text(matrix, both[side], citations) for side in sides)))
    return Table(status_text(status, *devices), columns, rows)


def side_text(matrix: Matrix, rows: tuple[Row, ...], citations: Citations) -> str:
    """Return one device's rows for a key: each level with its paths, scale layouts and source numbers."""
    paths: dict[Level, list[str]] = {}
    for row in rows:
        scaling = "" if row.scaling == "none" else f" {row.scaling}"
        sources = citations.cite(source_text(source) for source in sources_of(matrix, row, row.arch))
        paths.setdefault(row.level, []).append(f"{row.path}{scaling} [{sources}]")
    return ";\n".join(f"{level_text(level)}: {', '.join(shown)}" for level, shown in paths.items()) or NO_ROW
