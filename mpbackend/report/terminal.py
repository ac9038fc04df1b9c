"""Reports for a terminal, laid out by rich for a given width."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from mpbackend.capability import Level
from mpbackend.report.view import LEVEL_OF_TEXT, NARROWEST, WIDEST, Block, Column, Facts, Listing, Report, Table, visible

NARROW = 100
"""Below this many columns a table leaves its ``wide`` columns out."""

ROOMY = 120
"""From this many columns on a detail stands in a column of its own."""

GAP = 2
"""Blanks between columns."""

SMALLEST = 8
"""What a column that may break is not narrowed below, unless its cells need less."""

STYLES: dict[Level, str] = {
    "native": "green",
    "library": "green",
    "emulated": "yellow",
    "converted": "magenta",
    "storage": "cyan",
    "absent": "red",
    "unknown": "bright_black",
}


def render(report: Report, width: int, *, color: bool = False) -> str:
    """Return a report as text.

    Args:
        report: what to print.
        width: columns, from 40 to 1000; no line is longer.
        color: add ANSI styles.
    """
    report = visible(report)
    console = Console(
        file=io.StringIO(),
        width=min(max(width, NARROWEST), WIDEST),
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        legacy_windows=False,
        _environ={},
    )
    console.print(Text(report.title, style="bold"))
    for block in report.blocks:
        print_block(console, block)
    stream = console.file
    text = stream.getvalue() if isinstance(stream, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"


def print_block(console: Console, block: Block) -> None:
    """Print one block after an empty line; an empty list prints nothing."""
    if isinstance(block, Listing):
        if block.items:
            print_title(console, block.title)
            print_list(console, block)
        return
    print_title(console, block.title)
    if isinstance(block, Facts):
        console.print(Padding(facts(block), (0, 0, 0, 2)))
    else:
        print_table(console, block)


def print_title(console: Console, title: str) -> None:
    """Print an empty line, and the title of a block if it has one."""
    console.print()
    if title:
        console.print(Text(title, style="bold"))


def facts(block: Facts) -> RichTable:
    """Lay out names with values."""
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in block.pairs:
        grid.add_row(Text(name, style="dim"), styled(value))
    return grid


def print_table(console: Console, block: Table) -> None:
    """Print a table; where there is little room its wide columns are left out and its details stand below their rows."""
    below = [index for index, column in enumerate(block.columns) if column.detail and console.width < ROOMY]
    shown = [index for index, column in enumerate(block.columns) if index not in below and (console.width >= NARROW or not column.wide)]
    columns = [block.columns[index] for index in shown]
    rows = [[row[index] for index in shown] for row in block.rows]
    widths = share(columns, rows, console.width)
    console.print(line(columns, widths, [Text(column.name, style="bold") for column in columns]))
    console.print(Text("─" * min(sum(widths) + GAP * (len(widths) - 1), console.width), style="dim"))
    for row, cells in zip(block.rows, rows, strict=True):
        console.print(line(columns, widths, [styled(cell) for cell in cells]))
        for index in below:
            if row[index]:
                console.print(Padding(Text(row[index], style="dim"), (0, 0, 0, 4)))


def line(columns: Sequence[Column], widths: Sequence[int], cells: Sequence[Text]) -> RichTable:
    """Lay out one row in columns of given widths."""
    grid = RichTable.grid(padding=(0, GAP, 0, 0))
    for column, width in zip(columns, widths, strict=True):
        grid.add_column(width=width, justify="right" if column.right else "left", overflow="fold")
    grid.add_row(*cells)
    return grid


def share(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the widths of columns: what their cells need, the widest narrowed until the line fits, first without breaking words, then with."""
    table = list(zip(*([column.name for column in columns], *rows), strict=True))
    widths = [max(longest(cell) for cell in cells) for cells in table]
    whole = [max(longest_word(cell) for cell in cells) for cells in table]
    broken = [max(longest_word(column.name), min(words, SMALLEST)) for words, column in zip(whole, columns, strict=True)]
    for floors in (whole, broken):
        limits = [wanted if column.keep else floor for wanted, floor, column in zip(widths, floors, columns, strict=True)]
        narrow(widths, limits, width - GAP * (len(widths) - 1))
    return widths


def narrow(widths: list[int], limits: Sequence[int], room: int) -> None:
    """Narrow the widest column, one step at a time and in place, until all fit in ``room`` or each is at its limit."""
    while sum(widths) > room:
        widest = max((index for index in range(len(widths)) if widths[index] > limits[index]), key=lambda index: widths[index], default=None)
        if widest is None:
            return
        widths[widest] -= 1


def longest(cell: str) -> int:
    """Return the columns that the longest line of a cell takes."""
    return max((cell_len(part) for part in cell.splitlines()), default=0)


def longest_word(cell: str) -> int:
    """Return the columns that the longest word of a cell takes."""
    return max((cell_len(part) for part in cell.split()), default=0)


def print_list(console: Console, block: Listing) -> None:
    """Print a list with hanging numbers or dashes."""
    grid = RichTable.grid(padding=(0, 1, 0, 0))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    for number, item in enumerate(block.items, 1):
        grid.add_row(Text(f"{number}." if block.numbered else "-", style="dim"), Text(item))
    console.print(Padding(grid, (0, 0, 0, 2)))


def styled(cell: str) -> Text:
    """Return a cell, colored when it is a level."""
    level = LEVEL_OF_TEXT.get(cell)
    return Text(cell, style=STYLES[level]) if level is not None else Text(cell)
