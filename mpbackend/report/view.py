"""What every report is made of: facts, tables and lists of plain text, with the words and symbols of a level in one place.

A report is built once and printed by ``terminal`` or ``markdown``, which make it ``visible`` first. Nothing in it depends on the time, the machine or the width
of a window.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from mpbackend.capability import LEVELS, Cited, EvidenceKind, Level, Row, Source
from mpbackend.errors import escaped, shows
from mpbackend.matrix import Matrix, effective_fraction_bits

SYMBOLS: dict[Level, str] = {
    "native": "●",
    "library": "◐",
    "emulated": "≈",
    "converted": "⇄",
    "storage": "▤",
    "absent": "✕",
    "unknown": "?",
}
"""The symbol that stands before the word of a level, so that color is never the only carrier."""

LEVEL_TEXT: dict[Level, str] = {level: f"{SYMBOLS[level]} {level}" for level in LEVELS}
LEVEL_OF_TEXT: dict[str, Level] = {text: level for level, text in LEVEL_TEXT.items()}

BEYOND_ASCII = re.compile(r"[^\x20-\x7e\n]")

NARROWEST = 40
WIDEST = 1000
"""Columns that a report is laid out for, whatever a window claims to have."""

SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

NO_ROW = "- no row"
"""What stands where a matrix has no row: unknown, which is not the same as absent."""

EVIDENCE_MEANING: dict[EvidenceKind, str] = {
    "documented": "stated by the vendor's documents",
    "compiled": "accepted by the vendor's compiler or read in its code",
    "literature": "published by others",
    "derived": "computed from other facts",
    "replayed": "compared with stored outputs of silicon",
    "queried": "answered by the device's software",
    "probed": "probed on a device",
    "measured": "measured on a device",
}


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: heading.
        keep: never broken over lines.
        wide: left out where there is little room; never holds what the reader cannot do without.
        right: numbers, aligned to the right.
        detail: a sentence; where there is little room it stands below its row instead of in a column.
    """

    name: str
    keep: bool = False
    wide: bool = False
    right: bool = False
    detail: bool = False


class Table(NamedTuple):
    """A table: one cell of plain text per column in every row. A cell that equals a text of ``LEVEL_TEXT`` may be colored."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]


class Facts(NamedTuple):
    """Names with values."""

    title: str
    pairs: Sequence[tuple[str, str]]


class Listing(NamedTuple):
    """A list of sentences, numbered from 1 or not. An empty one is left out."""

    title: str
    items: Sequence[str]
    numbered: bool = False


Block = Table | Facts | Listing


class Report(NamedTuple):
    """A title and what stands below it."""

    title: str
    blocks: Sequence[Block]


def visible(report: Report) -> Report:
    """Return a report in which every character only shows; whoever wrote a name or a note in it cannot steer a terminal or turn its text around."""
    return Report(escaped(report.title), [visible_block(block) for block in report.blocks])


def visible_block(block: Block) -> Block:
    """Return a block in which every character only shows."""
    title = escaped(block.title)
    if isinstance(block, Table):
        columns = [column._replace(name=escaped(column.name)) for column in block.columns]
        return Table(title, columns, [[escaped(cell) for cell in row] for row in block.rows])
    if isinstance(block, Facts):
        return Facts(title, [(escaped(name), escaped(value)) for name, value in block.pairs])
    return Listing(title, [escaped(item) for item in block.items], block.numbered)


def json_escaped(text: str) -> str:
    """Return JSON in which every character that does more than show is an escape; it decodes to the same document."""
    return BEYOND_ASCII.sub(lambda found: found[0] if shows(found[0]) else json.dumps(found[0])[1:-1], text)


class Citations:
    """Numbers sources in the order in which they are first cited, and lists them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def cite(self, texts: Iterable[str]) -> str:
        """Return the numbers of ``texts`` as ``1, 3``; equal texts share a number, empty ones have none."""
        numbers = [self._numbers.setdefault(text, len(self._numbers) + 1) for text in texts if text]
        return ", ".join(str(number) for number in dict.fromkeys(numbers))

    def listing(self, title: str = "Sources") -> Listing:
        """Return everything cited so far as a numbered list."""
        return Listing(title, tuple(self._numbers), numbered=True)


def level_text(level: Level) -> str:
    """Return symbol and word of a level."""
    return LEVEL_TEXT[level]


def sources_of(matrix: Matrix, record: Cited, arch: str) -> list[Source]:
    """Return the sources that a record of an architecture cites, in its order."""
    family = matrix.family_of(arch)
    return [matrix.sources[(family, source)] for source in record.source]


def source_text(source: Source) -> str:
    """Return a source as one line: title, location, date."""
    return ", ".join(part for part in (source.title, source.location, source.date) if part)


def pair_text(a: str, b: str) -> str:
    """Return operand formats: one name when both are equal, else ``a x b``."""
    return a if a == b else f"{a} x {b}"


def operands_text(row: Row) -> str:
    """Return the operands of a row with the scale layout, if there is one."""
    pair = pair_text(row.a, row.b)
    return pair if row.scaling == "none" else f"{pair} ({row.scaling})"


def accumulator_text(row: Row) -> str:
    """Return the accumulator of a row: its format, and the fraction bits and rounding where a source states them."""
    bits = effective_fraction_bits(row.accumulator)
    if row.accumulator is None or bits is None:
        return row.accumulate
    return f"{row.accumulate} ({bits} bits, {row.accumulator.rounding})"


def level_of_row(row: Row) -> str:
    """Return what is really computed beside a level, empty when the level says it all."""
    return f"computes {row.computes}" if row.computes else ""


def bytes_text(count: int) -> str:
    """Return bytes in GB where they are a whole number of them, else in GiB with one decimal."""
    if count % 10**9 == 0:
        return f"{count // 10**9} GB"
    gib = count / 2**30
    return f"{gib:.0f} GiB" if gib == int(gib) else f"{gib:.1f} GiB"


def size_text(size: int) -> str:
    """Return bytes in the largest binary unit that leaves a number of at least 1: ``64.0 MiB``."""
    power = min((abs(size).bit_length() - 1) // 10 if size else 0, len(SIZE_UNITS) - 1)
    if power == 0:
        return f"{size} B"
    tenths = round(Fraction(10 * abs(size), 1024**power))  # a stranger's record may hold more than a float does
    return f"{'-' if size < 0 else ''}{tenths // 10}.{tenths % 10} {SIZE_UNITS[power]}"
