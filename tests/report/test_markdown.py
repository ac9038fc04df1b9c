from __future__ import annotations

import re

import pytest

from mpbackend.matrix import Matrix
from mpbackend.report.markdown import escape, render
from mpbackend.report.rows import rows_report
from mpbackend.report.view import Column, Facts, Listing, Report, Table


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a | b", r"a \| b"),
        ("<script>", r"\<script\>"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("_emphasis_", r"\_emphasis\_"),
        ("two\nlines", "two lines"),
        ("1. one", r"1\. one"),
        ("12.0", "12.0"),
        ("- dash", r"\- dash"),
        ("---", r"\---"),
        ("# head", r"\# head"),
        ("C# 3", "C# 3"),
        ("`code` \\ *b* [l](x) &amp;", r"\`code\` \\ \*b\* \[l\](x) \&amp;"),
    ],
)
def test_escape(text: str, escaped: str) -> None:
    assert escape(text) == escaped


def test_tables_have_as_many_cells_in_every_line(matrix: Matrix, hostile: str) -> None:
    text = render(rows_report(matrix, matrix.rows(), notes=True))
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert tables
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    assert "<script>" not in text
    assert escape(hostile) in text


def test_blocks() -> None:
    report = Report(
        "R",
        [
            Facts("F", [("name", "v|w")]),
            Table("T", (Column("a"), Column("n", right=True)), [("x", "1")]),
            Listing("L", ("one", "two"), numbered=True),
            Listing("gone", ()),
        ],
    )
    assert render(report) == "# R\n\n## F\n\n- name: v\\|w\n\n## T\n\n| a | n |\n| --- | ---: |\n| x | 1 |\n\n## L\n\n1. one\n2. two\n"
