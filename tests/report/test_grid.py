"""Recipes on devices, and the filter by version, of the page of the matrix."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from mpbackend.capability import Row
from mpbackend.documents import MatrixFile
from mpbackend.matrix import Matrix
from mpbackend.report.html import grid_data, matrix_page, page_data, read_template, script_json, software_versions
from mpbackend.report.recipes import Cell
from mpbackend.report.rows import RowFilter, select_rows

NODE = shutil.which("node")


def cell(recipe: str, device: str, refused: str = "", warnings: tuple[str, ...] = ()) -> Cell:
    return Cell(
        recipe=recipe,
        device=device,
        level="absent" if refused else "native",
        granted=() if refused else ("fp8_e4m3", "fp8_e5m2"),
        refused=refused,
        scaling="none",
        peak_ratio=None,
        bytes_per_parameter=16.0,
        warnings=warnings,
    )


def data_of(page: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    return found


def dependent(matrix: Matrix, since: list[Mapping[str, str]]) -> Matrix:
    """Return a matrix with one row for each of the versions, all on one architecture."""
    arch, device = matrix.archs["one"], matrix.devices["acme-1"]
    plain = {
        "arch": "one",
        "op": "matmul",
        "b": "bf16",
        "path": "simt",
        "accumulate": "fp32",
        "level": "native",
        "source": ("manual",),
        "evidence": "documented",
    }
    rows = tuple(Row(a=f"int{number}", since=dict(versions), **plain) for number, versions in enumerate(since))  # type: ignore[arg-type] # a test's shorthand
    document = MatrixFile(schema=1, family="acme", source=(matrix.sources[("acme", "manual")],), arch=(arch,), device=(device,), row=rows)
    return Matrix([("acme.toml", document)])


SINCE: list[Mapping[str, str]] = [
    {},
    {"kit": "8.0"},
    {"kit": "8.0.RC2"},
    {"kit": "10.0"},
    {"kit": "9.1", "driver": "5"},
    {"driver": "4"},
    {"driver": "no version"},
]


def test_versions_are_in_release_order(matrix: Matrix) -> None:
    assert software_versions(dependent(matrix, SINCE).rows()) == {"driver": ["4", "5"], "kit": ["8.0.RC2", "8.0", "9.1", "10.0"]}


@pytest.mark.skipif(NODE is None, reason="no node here to run the page's script")
def test_the_page_filters_by_version_as_the_command_does(matrix: Matrix, tmp_path: Path) -> None:
    assert NODE is not None
    made = dependent(matrix, SINCE[:-1])
    versions = software_versions(made.rows())
    asked = [{"kit": "1"}, {"driver": "1"}, *({name: version} for name in versions for version in versions[name]), {"kit": "9.1", "driver": "4"}]
    reached = [{name: (versions[name].index(version) + 1 if version in versions[name] else 0) for name, version in one.items()} for one in asked]
    program = f"""{read_template("logic.js")}
    const data = {script_json(page_data(made, made.rows(), None))};
    console.log(JSON.stringify({json.dumps(reached)}.map((software) => data.rows.map((row) => passes(row, {{ software }})))));
    """
    (tmp_path / "program.js").write_text(program, encoding="utf-8")
    done = subprocess.run([NODE, str(tmp_path / "program.js")], capture_output=True, text=True, timeout=60, check=True)
    expected = [[row in select_rows(made, RowFilter(software=one)) for row in made.rows()] for one in asked]
    assert json.loads(done.stdout) == expected
    assert len({tuple(row) for row in expected}) > 4


def test_cells_share_their_sentences() -> None:
    data = grid_data([cell("a", "x", warnings=("w", "v")), cell("b", "x", "no"), cell("a", "y", warnings=("w",)), cell("b", "y", "no")])
    assert data["recipes"] == ["a", "b"]
    assert data["sentences"] == ["w", "v", "no"]
    assert data["devices"]["x"] == [("native", "fp8_e4m3 / fp8_e5m2", [0, 1]), ("absent", "", [2])]
    assert data["devices"]["y"] == [("native", "fp8_e4m3 / fp8_e5m2", [0]), ("absent", "", [2])]


def test_a_page_has_the_view_only_with_cells(matrix: Matrix) -> None:
    assert 'id="view-grid"' not in matrix_page(matrix, matrix.rows())
    page = matrix_page(matrix, matrix.rows(), cells=[cell("a", "acme-1")])
    assert 'id="view-grid"' in page
    assert data_of(page)["grid"] == {"devices": {"acme-1": [["native", "fp8_e4m3 / fp8_e5m2", []]]}, "recipes": ["a"], "sentences": []}


def test_text_of_cells_stays_text(matrix: Matrix, hostile: str) -> None:
    page = matrix_page(matrix, matrix.rows(), cells=[cell(hostile, "acme-1", hostile)])
    assert len(re.findall(r"<script", page)) == 2
    assert data_of(page)["grid"] == {"devices": {"acme-1": [["absent", "", [0]]]}, "recipes": [hostile], "sentences": [hostile]}
