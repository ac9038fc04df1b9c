from __future__ import annotations

import itertools

import pytest

from mpbackend.errors import UnknownNameError
from mpbackend.matrix import Matrix
from mpbackend.report.difference import best_level, compare_devices, count_statuses, difference_document, difference_report
from mpbackend.report.rows import RowFilter
from mpbackend.report.terminal import render
from mpbackend.report.view import NO_ROW, Table


def test_statuses(matrix: Matrix) -> None:
    found = {entry.key: entry.status for entry in compare_devices(matrix, "acme-1", "acme-2")}
    assert found == {
        ("conv", "fp32", "fp32", "fp32"): "level differs",
        ("matmul", "bf16", "bf16", "fp32"): "level differs",
        ("matmul", "fp8_e4m3", "fp8_e5m2", "none"): "only first",
        ("matmul", "hf32_e8m11", "hf32_e8m11", "fp32"): "only first",
        ("matmul", "int8", "int8", "int32"): "only second",
    }


def test_a_device_does_not_differ_from_another_of_its_architecture(matrix: Matrix) -> None:
    assert {entry.status for entry in compare_devices(matrix, "acme-1", "acme-1b")} == {"same level"}


def test_every_key_of_both_devices_appears_once_with_all_its_rows(shipped: Matrix) -> None:
    devices = {model.arch: model.key for model in shipped.devices.values()}
    for first, second in itertools.combinations(devices.values(), 2):
        entries = compare_devices(shipped, first, second)
        sides = [shipped.rows(shipped.device(key).arch) for key in (first, second)]
        keys = {(row.op, row.a, row.b, row.accumulate) for rows in sides for row in rows}
        summed = {key[:3] for key in keys if key[3] != "none"}
        assert sorted(entry.key for entry in entries) == sorted(key for key in keys if key[3] != "none" or key[:3] not in summed)
        for rows, shown in zip(sides, ([entry.first for entry in entries], [entry.second for entry in entries]), strict=True):
            assert {row.key for row in rows} == {row.key for side in shown for row in side}


def test_what_is_absent_is_absent_with_every_accumulator(shipped: Matrix) -> None:
    entries = {entry.key: entry for entry in compare_devices(shipped, "h100", "ascend-910b1")}
    entry = entries["matmul", "fp8_e5m2", "fp8_e5m2", "fp32"]
    assert (entry.status, best_level(entry.first), best_level(entry.second)) == ("level differs", "native", "absent")
    assert ("matmul", "fp8_e5m2", "fp8_e5m2", "none") not in entries


def test_turning_the_devices_round_turns_the_statuses(shipped: Matrix) -> None:
    first, *_, last = shipped.devices
    there, back = (count_statuses(compare_devices(shipped, *pair)) for pair in ((first, last), (last, first)))
    assert (there["only first"], there["only second"]) == (back["only second"], back["only first"])
    assert (there["same level"], there["level differs"]) == (back["same level"], back["level differs"])


def test_every_entry_stands_in_the_report_once(matrix: Matrix) -> None:
    entries = compare_devices(matrix, "acme-1", "acme-2")
    report = difference_report(matrix, "acme-1", "acme-2", entries)
    tables = [block for block in report.blocks if isinstance(block, Table)]
    assert sorted(tuple(row[:3]) for table in tables for row in table.rows) == [
        ("conv", "fp32", "fp32"),
        ("matmul", "bf16", "fp32"),
        ("matmul", "fp8_e4m3 x fp8_e5m2", "none"),
        ("matmul", "hf32_e8m11", "fp32"),
        ("matmul", "int8", "int32"),
    ]
    assert [table.title for table in tables] == ["level differs", "only acme-1", "only acme-2"]
    assert [[column.name for column in table.columns][3:] for table in tables] == [["acme-1", "acme-2"], ["acme-1"], ["acme-2"]]
    text = render(report, 120)
    assert "● native: simt [1], wgmma [1]" in text
    assert "◐ library: triton mx_1x32 [2, 1], simt [1]" in text
    assert NO_ROW not in text


def test_the_document_expands_both_sides(matrix: Matrix) -> None:
    document = difference_document(matrix, "acme-1", "acme-2", compare_devices(matrix, "acme-1", "acme-2"))
    assert document["devices"] == ["acme-1", "acme-2"]
    assert document["counts"] == {"level differs": 2, "only acme-1": 2, "only acme-2": 1, "same level": 0}
    entry = next(entry for entry in document["entries"] if entry["a"] == "int8")
    assert entry["status"] == "only acme-2"
    assert entry["levels"] == [None, "unknown"]
    assert entry["rows"][0] == []
    assert entry["rows"][1][0]["sources"][0]["id"] == "manual"


def test_filters_take_part(matrix: Matrix) -> None:
    assert [entry.key[0] for entry in compare_devices(matrix, "acme-1", "acme-2", RowFilter(op="conv"))] == ["conv"]


def test_unknown_devices_are_refused(matrix: Matrix) -> None:
    with pytest.raises(UnknownNameError, match="acme-9"):
        compare_devices(matrix, "acme-1", "acme-9")
