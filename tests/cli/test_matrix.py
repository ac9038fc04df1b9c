from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from mpbackend.matrix import Matrix, load_matrix

Invoke = Callable[..., Result]


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load_matrix()


@pytest.fixture(scope="module")
def pair(matrix: Matrix) -> tuple[str, str]:
    """Return the keys of two devices of different architectures."""
    first = next(iter(matrix.devices.values()))
    return first.key, next(model.key for model in matrix.devices.values() if model.arch != first.arch)


def test_json_has_the_summary_and_rows_with_their_sources(invoke: Invoke, matrix: Matrix) -> None:
    result = invoke("matrix", "--format", "json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["summary"] == matrix.summary()
    assert {"rows", "facts", "facts_used", "facts_dropped"} <= set(document["summary"])
    assert len(document["rows"]) == document["shown"] == len(matrix.rows())
    assert all(row["sources"] and row["sources"][0]["title"] for row in document["rows"])


def test_filters_reach_the_rows(invoke: Invoke, matrix: Matrix, pair: tuple[str, str]) -> None:
    arch = matrix.device(pair[0]).arch
    result = invoke("matrix", "--device", pair[0], "--op", "matmul", "--operand", "fp16", "--level", "native", "--format", "json")
    expected = [row for row in matrix.rows(arch, op="matmul", level="native") if "fp16" in (row.a, row.b)]
    assert [(row["a"], row["path"]) for row in json.loads(result.stdout)["rows"]] == [(row.a, row.path) for row in expected]
    by_arch = invoke("matrix", "--arch", arch, "--path", matrix.rows(arch)[0].path, "--format", "json")
    assert json.loads(by_arch.stdout)["shown"] == len(matrix.rows(arch, path=matrix.rows(arch)[0].path))
    both = invoke("matrix", "--device", ",".join(pair), "--format", "json")
    assert json.loads(both.stdout)["shown"] == sum(len(matrix.rows(matrix.device(key).arch)) for key in pair)


def test_software(invoke: Invoke, matrix: Matrix) -> None:
    name = next(name for row in matrix.rows() for name in row.since)
    shown = json.loads(invoke("matrix", "--software", f"{name}=0.1", "--format", "json").stdout)["shown"]
    assert shown == sum(name not in row.since for row in matrix.rows()) < len(matrix.rows())


@pytest.mark.parametrize("output", ["text", "md", "html"])
def test_other_formats(invoke: Invoke, pair: tuple[str, str], output: str, tmp_path: Path) -> None:
    out = tmp_path / "matrix"
    for arguments in (["--device", pair[0]], ["--diff", *pair]):
        result = invoke("matrix", *arguments, "--format", output, "--out", str(out))
        assert (result.exit_code, result.stdout) == (0, "")
        text = out.read_text(encoding="utf-8")
        assert pair[0] in text
        assert "native" in text


def test_difference_in_json(invoke: Invoke, matrix: Matrix, pair: tuple[str, str]) -> None:
    document = json.loads(invoke("matrix", "--diff", *pair, "--format", "json").stdout)
    keys = [(entry["op"], entry["a"], entry["b"], entry["accumulate"]) for entry in document["entries"]]
    expected = {(row.op, row.a, row.b, row.accumulate) for key in pair for row in matrix.rows(matrix.device(key).arch)}
    assert len(keys) == len(set(keys))
    summed = {key[:3] for key in expected if key[3] != "none"}
    assert set(keys) == {key for key in expected if key[3] != "none" or key[:3] not in summed}
    assert sum(document["counts"].values()) == len(keys)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--op", "matmull"], "unknown op 'matmull': no op has that name (nearest: matmul"),
        (["--operand", "bf61"], "nearest: bf16"),
        (["--operand", "fp8"], "fp8_e4m3"),
        (["--path", "wgma"], "nearest: wgmma"),
        (["--software", "cuda"], "--software 'cuda': not name=version"),
        (["--software", "a=1,a=2"], "a is given twice"),
        (["--diff", "nothing-1", "nothing-2"], "unknown device 'nothing-1'"),
    ],
)
def test_bad_input_is_one_line(refused: Callable[..., str], arguments: list[str], expected: str) -> None:
    assert expected in refused("matrix", *arguments)


def test_a_bad_version_is_one_line(refused: Callable[..., str], matrix: Matrix) -> None:
    name = next(name for row in matrix.rows() for name in row.since)
    assert "version 'newest': not a version" in refused("matrix", "--software", f"{name}=newest")


def test_two_ways_to_choose_devices_are_refused(refused: Callable[..., str], pair: tuple[str, str]) -> None:
    assert "leave --device and --arch out" in refused("matrix", "--diff", *pair, "--device", pair[0])


def test_a_level_that_is_none_is_a_usage_error(invoke: Invoke) -> None:
    result = invoke("matrix", "--level", "nativ")
    assert result.exit_code == 2
    assert "'native'" in result.stderr


def test_a_misspelt_device_is_answered_with_the_nearest(refused: Callable[..., str], pair: tuple[str, str]) -> None:
    assert f"nearest: {pair[0]}" in refused("matrix", "--device", f"{pair[0]}x")


def test_nothing_is_written_when_the_rows_cannot_be_chosen(refused: Callable[..., str], tmp_path: Path) -> None:
    refused("matrix", "--op", "matmull", "--out", str(tmp_path / "out.md"))
    assert list(tmp_path.iterdir()) == []
