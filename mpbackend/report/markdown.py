"""Reports as GitHub-flavored Markdown."""

from __future__ import annotations

import re

from mpbackend.report.view import Block, Facts, Listing, Report, Table, visible

SPECIAL = re.compile(r"[\\`*\[\]<>|~&]|(?<!\w)_|_(?!\w)")
"""What would start markup inside a cell or a sentence; an underscore within a word starts none."""

LEADING = re.compile(r"^(\d+)([.)])(?=\s|$)|^(#{1,6}|[-+])(?=\s|$)|^(?==+$|-+$)")
"""What would start a list, a heading or a rule at the beginning of a line."""


def escape(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    line = SPECIAL.sub(lambda found: f"\\{found[0]}", " ".join(text.split()))
    return LEADING.sub(lambda found: f"{found[1]}\\{found[2]}" if found[1] else f"\\{found[0]}", line)


def render(report: Report) -> str:
    """Return a report as Markdown, ending in one newline."""
    report = visible(report)
    parts = [f"# {escape(report.title)}"]
    for block in report.blocks:
        body = render_block(block)
        if body:
            parts.append(f"## {escape(block.title)}\n\n{body}" if block.title else body)
    return "\n\n".join(parts) + "\n"


def render_block(block: Block) -> str:
    """Return the body of a block, empty for an empty list."""
    if isinstance(block, Table):
        return render_table(block)
    if isinstance(block, Facts):
        return "\n".join(f"- {escape(name)}: {escape(value)}" for name, value in block.pairs)
    return render_list(block)


def render_table(table: Table) -> str:
    """Return a table with aligned columns; every column is shown."""
    head = [escape(column.name) for column in table.columns]
    rule = ["---:" if column.right else "---" for column in table.columns]
    lines = [head, rule, *([escape(cell) for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def render_list(listing: Listing) -> str:
    """Return a list of items, numbered or not."""
    return "\n".join(f"{number}. {escape(item)}" if listing.numbered else f"- {escape(item)}" for number, item in enumerate(listing.items, 1))
