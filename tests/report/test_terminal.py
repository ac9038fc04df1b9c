from __future__ import annotations

import pytest
from rich.cells import cell_len

from mpbackend.capability import LEVELS
from mpbackend.matrix import Matrix
from mpbackend.report.devices import known_report
from mpbackend.report.difference import compare_devices, difference_report
from mpbackend.report.rows import rows_report
from mpbackend.report.terminal import render, share
from mpbackend.report.view import Column, Facts, Listing, Report, Table, level_text

COLUMNS = (Column("role"), Column("level", keep=True), Column("extra", wide=True), Column("reason", detail=True))
REPORT = Report("Title", [Table("Table", COLUMNS, [("compute.{dgrad,wgrad}", level_text("native"), "aside", "because a source says so")])])


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_too_long(shipped: Matrix, width: int) -> None:
    reports = [known_report(shipped)]
    reports += [rows_report(shipped, shipped.rows(arch), notes=True) for arch in shipped.archs]
    first, *_, last = shipped.devices
    reports.append(difference_report(shipped, first, last, compare_devices(shipped, first, last)))
    for report in reports:
        too_long = [line for line in render(report, width).splitlines() if cell_len(line) > width]
        assert too_long == []


@pytest.mark.parametrize("width", [80, 120])
def test_levels_and_short_names_are_never_broken(shipped: Matrix, width: int) -> None:
    for arch in shipped.archs:
        rows = shipped.rows(arch)
        text = render(rows_report(shipped, rows, notes=False), width)
        table, _, _ = text.partition("\nSources\n")
        counts = {level: sum(row.level == level for row in rows) for level in LEVELS}
        assert {level: table.count(level_text(level)) for level in LEVELS} == counts, arch


def test_what_is_wide_or_a_detail_moves_where_there_is_little_room() -> None:
    narrow, middle, roomy = (render(REPORT, width).splitlines() for width in (80, 100, 120))
    assert narrow[3].split() == ["role", "level"]
    assert middle[3].split() == ["role", "level", "extra"]
    assert roomy[3].split() == ["role", "level", "extra", "reason"]
    assert narrow[-1] == middle[-1] == "    because a source says so"
    assert roomy[-1].endswith("because a source says so")


def test_columns_are_narrowed_without_breaking_words_first() -> None:
    columns = (Column("a"), Column("b"), Column("c", keep=True))
    rows = [("one two three four", "compute.forward", "kept as it is")]
    assert share(columns, rows, 80) == [18, 15, 13]
    assert share(columns, rows, 40) == [8, 15, 13]
    assert share(columns, rows, 30) == [5, 8, 13]


def test_blocks() -> None:
    text = render(Report("R", [Facts("F", [("name", "value")]), Listing("L", ("one", "two"), numbered=True), Listing("gone", ())]), 80)
    assert text == "R\n\nF\n  name  value\n\nL\n  1. one\n  2. two\n"


def test_color_is_added_only_when_asked_and_never_alone() -> None:
    plain, colored = render(REPORT, 80), render(REPORT, 80, color=True)
    assert "\x1b[" not in plain
    assert "\x1b[32m● native" in colored


def test_markup_of_the_terminal_library_is_text() -> None:
    text = render(Report("[bold]t[/bold]", [Listing("", ("[red]x[/red] :smile:",))]), 80)
    assert "[bold]t[/bold]" in text
    assert "[red]x[/red] :smile:" in text


def test_it_is_pure(shipped: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    before = render(known_report(shipped), 80)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert render(known_report(shipped), 80) == before
