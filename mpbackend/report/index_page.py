"""The first page of a folder of reports: what it holds, each with a line that says what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpbackend import __version__
from mpbackend.report.comparison_page import VERDICT_SYMBOLS, slug
from mpbackend.report.markup import block_markup, environment
from mpbackend.report.view import Block

PAGE = "index.html"


class Link(NamedTuple):
    """A file of the folder: its relative path, its name for readers, and what it holds."""

    href: str
    name: str
    text: str


class Outcome(NamedTuple):
    """A comparison in one line: what was compared, the word of its verdict, the first reason."""

    title: str
    word: str
    reason: str


def index_page(title: str, text: str, pages: Sequence[Link], outcomes: Sequence[Outcome], runs: Sequence[Link], blocks: Sequence[Block]) -> str:
    """Return the page.

    Args:
        title: of the page.
        text: what the folder is.
        pages: reports, most important first.
        outcomes: verdicts of the comparisons.
        runs: records.
        blocks: tables shown below.
    """
    return (
        environment()
        .get_template(PAGE)
        .render(
            version=__version__,
            title=title,
            text=text,
            pages=pages,
            outcomes=[(outcome, VERDICT_SYMBOLS.get(outcome.word, ""), slug(outcome.word)) for outcome in outcomes],
            runs=runs,
            blocks=[block_markup(block) for block in blocks],
        )
    )
