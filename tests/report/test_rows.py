from __future__ import annotations

from typing import Any

import pytest

from mpbackend.errors import DocumentError, UnknownNameError
from mpbackend.matrix import Matrix
from mpbackend.report.rows import RowFilter, row_document, rows_document, rows_report, select_rows, version_key
from mpbackend.report.terminal import render


def count(matrix: Matrix, **wanted: Any) -> int:
    return len(select_rows(matrix, RowFilter(**wanted)))


def test_filters(matrix: Matrix) -> None:
    assert count(matrix) == 9
    assert count(matrix, devices=("acme-1",)) == count(matrix, archs=("one",)) == 5
    assert count(matrix, devices=("first", "acme-2")) == 9
    assert count(matrix, op="conv") == 2
    assert count(matrix, operand="fp8_e5m2") == count(matrix, operand="E5M2") == 1
    assert count(matrix, level="library") == 2
    assert count(matrix, path="triton") == 1
    assert count(matrix, devices=("acme-2",), operand="bf16", level="native") == 0


def test_a_name_that_the_device_resolves_matches_each_of_its_formats(matrix: Matrix) -> None:
    assert count(matrix, operand="hf32") == 1


@pytest.mark.parametrize(("version", "kept"), [("8.6", 9), ("8.10", 9), ("8.5", 8), ("8.6rc1", 8), ("9", 9)])
def test_rows_that_need_a_later_version_are_left_out(matrix: Matrix, version: str, kept: int) -> None:
    assert count(matrix, software={"toolkit": version}) == kept


@pytest.mark.parametrize(
    ("wanted", "kind", "near"),
    [
        ({"devices": ("acme-3",)}, "device", "acme-1"),
        ({"archs": ("on",)}, "architecture", "one"),
        ({"op": "matmull"}, "op", "matmul"),
        ({"path": "tritn"}, "path", "triton"),
        ({"software": {"toolkits": "1"}}, "software", "toolkit"),
        ({"operand": "bf61"}, "format", "bf16"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(matrix: Matrix, wanted: dict[str, Any], kind: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown {kind} .*nearest: .*{near}"):
        count(matrix, **wanted)


def test_versions() -> None:
    assert version_key("8.0.RC2") < version_key("8.0") < version_key("8.0.1") < version_key("8.10")
    with pytest.raises(DocumentError, match="version 'new'"):
        version_key("new")


def test_documents_expand_sources_and_keep_every_field(matrix: Matrix, hostile: str) -> None:
    document = row_document(matrix, matrix.rows(op="conv", arch="one")[0])
    assert document["conflict"] == [{"claim": "It is native.", "source": {"id": "lab", "title": "A | B", "location": hostile, "date": ""}}]
    assert document["sources"][0]["title"] == "Manual"
    assert document["computes"] == "fp16"
    assert document["align"] is None
    assert {"arch", "op", "a", "b", "scaling", "path", "accumulate", "out", "level", "evidence", "facts", "since", "note"} <= set(document)


def test_the_document_has_the_summary_of_the_whole_matrix(matrix: Matrix) -> None:
    document = rows_document(matrix, matrix.rows("one"))
    assert document["summary"] == matrix.summary()
    assert document["summary"]["facts_used"] == 1
    assert (document["shown"], len(document["rows"]), document["summary"]["rows"]) == (5, 5, 9)


def test_the_report_groups_by_architecture_and_operation(matrix: Matrix) -> None:
    report = rows_report(matrix, matrix.rows(), notes=False)
    titles = [block.title for block in report.blocks]
    assert titles[:4] == ["matmul on one: acme-1, acme-1b", "conv on one: acme-1, acme-1b", "matmul on two: acme-2", "conv on two: acme-2"]
    text = render(report, 120)
    assert "It is native. [2]" in text
    assert "A | B" in text
    assert "measured 1" in text
    assert "toolkit 8.6" in text
    assert "rows with a note: 1" in text
    assert "alert" not in text.partition("Sources disagree")[0]


def test_notes_are_listed_when_asked(matrix: Matrix) -> None:
    assert any(block.title == "Notes" for block in rows_report(matrix, matrix.rows(), notes=True).blocks)


def test_no_row_is_said_to_be_unknown(matrix: Matrix) -> None:
    assert "unknown, not absent" in render(rows_report(matrix, [], notes=False), 80)
