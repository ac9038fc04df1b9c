from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mpbackend.cli.memory import command, parse_count, parse_shapes
from mpbackend.errors import DocumentError, MpbackendError, UnknownNameError
from mpbackend.report.view import size_text


def run(*arguments: str, width: int = 80) -> Result:
    return CliRunner().invoke(command, arguments, env={"COLUMNS": str(width)})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("123456", 123_456),
        ("1e8", 10**8),
        ("1E8", 10**8),
        ("1e+8", 10**8),
        ("1.5e9", 1_500_000_000),
        ("100M", 10**8),
        ("100m", 10**8),
        ("7B", 7 * 10**9),
        ("1.5k", 1500),
        ("0.5K", 500),
        ("1e3K", 10**6),
        ("1000T", 10**15),
        (" 12 ", 12),
        ("999999999999999", 999_999_999_999_999),
        ("10.0", 10),
    ],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "-1e8",
        "+5",
        "nan",
        "inf",
        "-inf",
        "1e16",
        "1000.001T",
        "1e99",
        "1e999999999",
        "1.5",
        "1e-3",
        "1.2345K",
        "0.1",
        "7G",
        "7BB",
        "0x10",
        "1_000",
        "1,000",
        "1.",
        ".5K",
        "1e",
        "e8",
        "\uff11\uff12",
        "12\n13",
        "10000000000.00000000000000000001",
        "9" * 100_000,
    ],
)
def test_what_is_no_count_is_refused_on_one_line(text: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_count(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_shapes() -> None:
    assert parse_shapes(["4096x4096,1024x8", "5", "2x3x4"]) == [(4096, 4096), (1024, 8), (5,), (2, 3, 4)]


@pytest.mark.parametrize(
    "text", ["", "4096x", "x4", "4x-1", "4x0", "0", "4*4", "4x4,,3", "4x4,0", "1.5x2", "4x4x", "1e3x2", "99999999x99999999", "1000000000000000,1"]
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(DocumentError):
        parse_shapes([text])


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (67_108_864, "64.0 MiB"), (-67_108_864, "-64.0 MiB"), (2**60, "1024.0 PiB"), (800_000_000, "762.9 MiB")],
)
def test_units(size: int, text: str) -> None:
    assert size_text(size) == text


def test_the_table_has_bytes_and_a_readable_unit() -> None:
    result = run("bf16-params", "--shape", "4096x4096")
    assert result.exit_code == 0
    assert "33,554,432" in result.output
    assert "32.0 MiB" in result.output
    assert "saved against fp32" in result.output
    assert "50.0%" in result.output
    assert "checkpoint" in result.output
    assert "Activations are not modeled" in result.output


def test_adam_moments_in_the_table() -> None:
    lines = run("fp32", "--params", "1e8", "--optimizer", "adam").output.splitlines()
    moments = [line.split() for line in lines if line.startswith("optimizer.")]
    assert [(row[0], row[2]) for row in moments] == [("optimizer.exp_avg", "400,000,000"), ("optimizer.exp_avg_sq", "400,000,000")]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16-master", "mxfp8", "fp8-block"])
def test_no_line_is_wider_than_the_terminal_and_no_row_is_broken(width: int, recipe: str) -> None:
    output = run(recipe, "--params", "1e15", width=width).output
    assert max(map(len, output.splitlines())) <= width
    for role in ("params", "master", "grads", "optimizer.exp_avg ", "optimizer.exp_avg_sq ", "total"):
        assert sum(line.startswith(role) for line in output.splitlines()) == 1, role


def test_json_is_exact() -> None:
    document = json.loads(run("bf16-master", "--params", "7B", "--format", "json").output)
    assert document["total"] == 18 * 7 * 10**9
    assert document["checkpoint"] == 14 * 7 * 10**9
    assert document["saving_ratio"] == -0.125
    assert [line["role"] for line in document["lines"]] == ["params", "master", "grads", "optimizer.exp_avg", "optimizer.exp_avg_sq"]


def test_markdown_has_the_same_numbers() -> None:
    output = run("bf16", "--params", "1.5e9", "--format", "md").output
    assert "| params | fp32 | 6,000,000,000 | 5.6 GiB | 5.6 GiB |" in output
    assert "working copies: at most 3,000,000,000 B (2.8 GiB)" in output
    assert output.endswith("\n")


def test_shapes_may_be_repeated() -> None:
    one = run("mxfp8", "--shape", "64x64,33x5", "--format", "json").output
    assert run("mxfp8", "--shape", "64x64", "--shape", "33x5", "--format", "json").output == one


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("bf17", "--params", "1e8"), UnknownNameError),
        (("bf16:params=fp8", "--params", "1e8"), UnknownNameError),
        (("bf16", "--params", "nan"), DocumentError),
        (("bf16", "--params=-5"), DocumentError),
        (("bf16", "--shape", "4096"), None),
        (("bf16", "--shape", "4096x"), DocumentError),
        (("bf16", "--params", "1e8", "--optimizer", "adamx"), UnknownNameError),
    ],
)
def test_bad_input_raises_one_line(arguments: tuple[str, ...], kind: type[MpbackendError] | None) -> None:
    result = run(*arguments)
    assert result.exception is None if kind is None else isinstance(result.exception, kind)
    assert kind is None or "\n" not in str(result.exception)


@pytest.mark.parametrize("arguments", [("bf16",), ("bf16", "--params", "1", "--shape", "1")])
def test_one_of_params_and_shape_is_needed(arguments: tuple[str, ...]) -> None:
    assert isinstance(run(*arguments).exception, DocumentError)


@pytest.mark.parametrize("arguments", [("bf16", "--params", "1", "--format", "xml"), ()])
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_output_can_go_to_a_file(tmp_path: Path) -> None:
    target = tmp_path / "memory.json"
    assert run("bf16", "--params", "3", "--format", "json", "--out", str(target)).output == ""
    assert json.loads(target.read_text())["parameters"] == 3


def test_runs_without_torch() -> None:
    program = (
        "import sys; from mpbackend.cli.memory import command; command(['mxfp8', '--params', '7B'], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
