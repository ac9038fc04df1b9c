from __future__ import annotations

from pathlib import Path

import pytest

from mpbackend.capability import EVIDENCE_KINDS, LEVELS
from mpbackend.matrix import Matrix
from mpbackend.report import terminal
from mpbackend.report.view import (
    EVIDENCE_MEANING,
    LEVEL_OF_TEXT,
    SYMBOLS,
    Citations,
    accumulator_text,
    bytes_text,
    level_text,
    operands_text,
    source_text,
    sources_of,
)


def test_every_level_has_a_symbol_of_its_own_and_its_word() -> None:
    assert set(SYMBOLS) == set(LEVELS) == set(terminal.STYLES)
    assert len(set(SYMBOLS.values())) == len(LEVELS)
    for level in LEVELS:
        assert level_text(level) == f"{SYMBOLS[level]} {level}"
        assert LEVEL_OF_TEXT[level_text(level)] == level


def test_symbols_stand_nowhere_else() -> None:
    package = Path(terminal.__file__).parent
    for path in (*package.glob("*.py"), *package.glob("templates/*.*")):
        if path.name != "view.py":
            text = path.read_text(encoding="utf-8")
            assert [symbol for symbol in SYMBOLS.values() if symbol != "?" and symbol in text] == [], path.name


def test_every_evidence_kind_has_a_meaning() -> None:
    assert set(EVIDENCE_MEANING) == set(EVIDENCE_KINDS)


def test_sources_are_numbered_as_they_are_first_cited() -> None:
    citations = Citations()
    assert citations.cite(["b", "a"]) == "1, 2"
    assert citations.cite(["a", "", "c", "a"]) == "2, 3"
    assert citations.cite([""]) == ""
    assert list(citations.listing().items) == ["b", "a", "c"]
    assert citations.listing().numbered


def test_cells_of_a_row(matrix: Matrix) -> None:
    first, *_, scaled, _, _, _ = matrix.rows()
    assert accumulator_text(first) == "fp32 (25 bits, rz)"
    assert accumulator_text(scaled) == "fp32"
    assert operands_text(first) == "bf16"
    assert operands_text(scaled) == "bf16 (mx_1x32)"
    assert operands_text(matrix.rows(a="fp8_e4m3")[0]) == "fp8_e4m3 x fp8_e5m2"
    assert [source_text(source) for source in sources_of(matrix, first, "one")] == ["Manual, https://acme.example/x, 2026-01-02"]


@pytest.mark.parametrize(("count", "text"), [(80 * 10**9, "80 GB"), (2**36, "64 GiB"), (3 * 2**29, "1.5 GiB")])
def test_bytes(count: int, text: str) -> None:
    assert bytes_text(count) == text
