from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Invoke = Callable[..., Result]


def test_text(invoke: Invoke, granting_device: str) -> None:
    result = invoke("plan", "bf16", "--device", granting_device)
    assert result.exit_code == 0
    for heading in ("Decisions", "Switches", "Waits for the device", "Sources"):
        assert f"\n{heading}\n" in result.stdout
    assert "no installed plugin runs this" in result.stdout
    assert sum(line.startswith("compute ") for line in result.stdout.splitlines()) == 1


def test_json(invoke: Invoke, granting_device: str) -> None:
    result = invoke("plan", "bf16:accumulate=fp32", "--device", granting_device, "--micro-batches", "4", "--format", "json")
    plan = json.loads(result.stdout)
    assert (plan["recipe"], plan["micro_batches"], plan["on_unsupported"]) == ("bf16", 4, "error")
    assert [decision["role"] for decision in plan["decisions"]][:3] == ["compute.forward", "compute.dgrad", "compute.wgrad"]
    assert plan["hash"]


def test_markdown_to_a_file(invoke: Invoke, granting_device: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.md"
    assert invoke("plan", "bf16", "--device", granting_device, "--format", "md", "--out", str(out)).exit_code == 0
    assert out.read_text(encoding="utf-8").startswith(f"# bf16 on {granting_device}\n")


def test_a_refusal_is_one_line_with_the_nearest_recipe(refused: Callable[..., str], absent_device: str) -> None:
    line = refused("plan", "hif8", "--device", absent_device)
    assert f"hif8 is refused on {absent_device}: compute.forward" in line
    assert "--on-unsupported nearest" in line


def test_the_nearest_rung_is_taken_and_shown(invoke: Invoke, absent_device: str) -> None:
    result = invoke("plan", "hif8", "--device", absent_device, "--on-unsupported", "nearest")
    assert result.exit_code == 0
    assert "granted" in result.stdout
    assert "was refused" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bf15"], "nearest: bf16"),
        (["bf16:parms=fp32"], "nearest: params"),
        (["bf16", "--micro-batches", "0"], "micro_batches = 0: below 1"),
    ],
)
def test_bad_input_is_one_line(refused: Callable[..., str], granting_device: str, arguments: list[str], expected: str) -> None:
    assert expected in refused("plan", *arguments, "--device", granting_device)


def test_unknown_devices_are_refused(refused: Callable[..., str], granting_device: str) -> None:
    assert f"nearest: {granting_device}" in refused("plan", "bf16", "--device", f"{granting_device}x")
