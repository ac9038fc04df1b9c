"""Blocks of a report as HTML. Every text is made visible and escaped; nothing of a record becomes markup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup, escape

from mpbackend.errors import escaped
from mpbackend.report.html import read_template
from mpbackend.report.view import LEVEL_OF_TEXT, Block, Facts, Listing, Table

STATES = {"=": "same", "≠": "different", "?": "unknown"}
"""Signs of cells that say whether sides agree, alone or before their word; the words are classes of the style sheet too."""


def environment() -> jinja2.Environment:
    """Return the environment of the pages: everything that is no ``Markup`` already is made visible and escaped."""
    return jinja2.Environment(
        autoescape=True, finalize=shown, keep_trailing_newline=True, loader=jinja2.FunctionLoader(read_template), undefined=jinja2.StrictUndefined
    )


def shown(value: Any) -> Any:
    """Return a text in which every character only shows; markup is left as it is."""
    return escaped(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def text(value: str) -> Markup:
    """Return a text as HTML."""
    return escape(escaped(value))


def block_markup(block: Block, level: int = 2) -> Markup:
    """Return a block with its title as a heading of a level; nothing for an empty one."""
    if isinstance(block, Table):
        body = table_markup(block) if block.rows else Markup("")
    elif isinstance(block, Facts):
        body = facts_markup(block.pairs) if block.pairs else Markup("")
    else:
        body = list_markup(block) if block.items else Markup("")
    heading = Markup("<h{}>{}</h{}>\n").format(level, text(block.title), level) if block.title and body else Markup("")
    return heading + body


def table_markup(table: Table) -> Markup:
    """Return a table whose first cell of a line is its heading; where there is little room a line becomes a card: cells carry their column's name."""
    head = Markup("").join(Markup('<th scope="col" role="columnheader"{}>{}</th>').format(right(column.right), text(column.name)) for column in table.columns)
    rows = Markup("\n").join(row_markup(table, row) for row in table.rows)
    caption = text(table.title or "table")
    frame = Markup('<div class="scroll" tabindex="0" role="region" aria-label="{}">\n<table role="table"><caption>{}</caption>\n').format(caption, caption)
    body = Markup('<thead role="rowgroup"><tr role="row">{}</tr></thead>\n<tbody role="rowgroup">\n{}\n</tbody></table>\n</div>\n').format(head, rows)
    return frame + body


def row_markup(table: Table, row: Sequence[str]) -> Markup:
    """Return a line of a table."""
    cells = [
        Markup('<td role="cell" data-label="{}"{}>{}</td>').format(text(column.name), right(column.right), cell_markup(cell))
        for column, cell in zip(table.columns[1:], row[1:], strict=True)
    ]
    return Markup('<tr role="row"><th scope="row" role="rowheader"{}>{}</th>{}</tr>').format(
        right(table.columns[0].right), cell_markup(row[0]), Markup("").join(cells)
    )


def right(wanted: bool) -> Markup:
    """Return the class of a column of numbers."""
    return Markup(' class="number"') if wanted else Markup("")


def cell_markup(cell: str) -> Markup:
    """Return a cell; the text of a level becomes its badge."""
    level = LEVEL_OF_TEXT.get(cell)
    if level is not None:
        return Markup('<span class="badge {}">{}</span>').format(level, cell)
    if cell[:1] in STATES and cell[1:].strip() in ("", STATES[cell[:1]]):
        return Markup('<span class="state {}" title="{}">{}</span>').format(STATES[cell[0]], STATES[cell[0]], cell)
    return Markup("<br>").join(text(line) for line in cell.split("\n"))


def facts_markup(pairs: Sequence[tuple[str, str]]) -> Markup:
    """Return names with values."""
    items = Markup("\n").join(Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(text(name), text(value)) for name, value in pairs)
    return Markup('<dl class="facts">\n{}\n</dl>\n').format(items)


def list_markup(listing: Listing) -> Markup:
    """Return sentences as a list."""
    tag = Markup("ol" if listing.numbered else "ul")
    items = Markup("\n").join(Markup("<li>{}</li>").format(text(item)) for item in listing.items)
    return Markup('<{} class="listing">\n{}\n</{}>\n').format(tag, items, tag)
