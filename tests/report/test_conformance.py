"""Reports of checks: failures first, every outcome with a word, nothing of a stranger's left raw."""

from __future__ import annotations

import msgspec
import pytest

from mpbackend.conformance.evidence import Outcome, Result
from mpbackend.report import markdown, terminal
from mpbackend.report.conformance import OUTCOMES, SYMBOLS, check_report, conformance_report, parity_document, parity_report
from mpbackend.report.view import Facts, Listing, Table
from tests.conformance.test_evidence import DEVICE, evidence

HOSTILE = "</script><script>alert('x')</script> | a *note* \x1b[31m"


def results(*outcomes: Outcome) -> tuple[Result, ...]:
    return tuple(Result(check=f"check {number}", theme="theme", outcome=outcome, detail=f"why {number}") for number, outcome in enumerate(outcomes))


def test_failures_stand_before_the_table() -> None:
    report = conformance_report(evidence(results=results("passed", "failed", "expected", "skipped")))
    listings = {block.title: list(block.items) for block in report.blocks if isinstance(block, Listing)}
    assert listings == {"Failed": ["check 1: why 1"], "Failed as expected": ["check 2: why 2"], "Skipped": ["check 3: why 3"]}
    assert isinstance(report.blocks[-1], Table)
    assert [row[2] for row in report.blocks[-1].rows] == [SYMBOLS[outcome] for outcome in ("passed", "failed", "expected", "skipped")]
    facts = report.blocks[0]
    assert isinstance(facts, Facts)
    assert dict(facts.pairs)["verdict"] == "does not conform: 1 passed, 1 failed, 1 expected failure, 1 skipped"


def test_every_outcome_has_a_symbol_and_a_word() -> None:
    assert set(OUTCOMES) == set(SYMBOLS)
    assert len({text[0] for text in SYMBOLS.values()}) == len({text[2:] for text in SYMBOLS.values()}) == 4


def test_the_device_s_kind_and_the_code_are_told() -> None:
    text = terminal.render(conformance_report(evidence()), 120)
    for words in (
        "conforms: 1 passed, 0 failed, 0 expected failure, 1 skipped",
        "Acme X1 (emulated)",
        "mpbackend 0.1.0 at aaaaaaaaaaaa, all sizes, 2026-01-02",
    ):
        assert words in text


def test_parity_shows_differing_outcomes_first() -> None:
    other = evidence(results=(msgspec.structs.replace(evidence().results[0], outcome="failed", detail="off", figures={"bf16 gap": 7.0}), *results("passed")))
    report = parity_report(evidence(), other)
    titles = [block.title for block in report.blocks if isinstance(block, Table)]
    assert titles == ["Outcomes differ (1)", "On one device only (2)"]
    table = next(block for block in report.blocks if isinstance(block, Table))
    assert list(table.rows[0]) == ["matmul", "✓ passed", "✗ failed", "b: off; bf16 gap: 0.5 against 7"]
    document = parity_document(evidence(), other)
    assert document["checks"][0]["figures"] == {"bf16 gap": (0.5, 7.0)}
    assert document["a"] == {"backend": "acme", "device": "acme-x1", "kind": "emulated", "code": "mpbackend 0.1.0 at aaaaaaaaaaaa"}


def test_a_device_is_the_same_as_itself() -> None:
    text = terminal.render(parity_report(evidence(), evidence()), 120)
    assert "2 same, 0 differs, 0 one side only" in text


@pytest.mark.parametrize("width", [40, 120])
def test_what_a_stranger_wrote_steers_nothing(width: int) -> None:
    hostile = Result(check=HOSTILE, theme=HOSTILE, outcome="failed", detail=HOSTILE, figures={HOSTILE: HOSTILE})
    strange = evidence(backend=HOSTILE, device=msgspec.structs.replace(DEVICE, name=HOSTILE), environment={"torch": HOSTILE}, results=(hostile,))
    for report in (conformance_report(strange), parity_report(strange, evidence()), parity_report(strange, strange)):
        assert "\x1b" not in terminal.render(report, width)
        assert "<script>" not in markdown.render(report)


def test_the_list_has_a_row_for_each_check() -> None:
    report = check_report([("theme", "name", "It does.")])
    assert report.title == "1 checks of a backend"
    assert "It does." in markdown.render(report)
