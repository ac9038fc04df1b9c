from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Invoke = Callable[..., Result]
TINY = "tests.support.audited:tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audits")


def test_text_of_a_live_audit(invoke: Invoke) -> None:
    result = invoke("audit", TINY, "--device", "cpu", "--recipe", "bf16")
    assert result.exit_code == 0
    for heading in ("Findings", "Asked and run", "Memory", "Casts"):
        assert f"\n{heading}\n" in result.stdout
    assert "ran on the device" in result.stdout
    assert "Operations (20 of " in result.stdout
    assert len(invoke("audit", TINY, "--recipe", "bf16", "--full").stdout.splitlines()) > len(result.stdout.splitlines())


def test_json_and_diff(invoke: Invoke, folder: Path) -> None:
    first, second = folder / "bf16.json", folder / "fp32.json"
    for path, recipe in ((first, "bf16"), (second, "fp32")):
        assert invoke("audit", TINY, "--recipe", recipe, "--format", "json", "--out", str(path)).stdout == ""
    assert json.loads(first.read_text(encoding="utf-8"))["effective"] == "bf16"
    text = invoke("audit", "--diff", str(first), str(second)).stdout
    assert "recipe" in text and "fp32: fp32 100.0%" in text
    found = json.loads(invoke("audit", "--diff", str(first), str(second), "--format", "json").stdout)
    assert {"kind": "condition", "what": "recipe", "first": "bf16", "second": "fp32"} in found
    assert "none" in invoke("audit", "--diff", str(first), str(first)).stdout


def test_a_file_of_the_users(invoke: Invoke, folder: Path) -> None:
    path = folder / "my_workload.py"
    path.write_text(
        "import torch\n\n\ndef build(device):\n    model = torch.nn.Linear(8, 8).to(device)\n    x = torch.ones(4, 8, device=device)\n"
        "    return model, lambda: model(x).sum()\n",
        encoding="utf-8",
    )
    assert "effective compute format  bf16" in invoke("audit", f"{path}:build").stdout


def test_a_device_that_is_not_here(invoke: Invoke) -> None:
    result = invoke("audit", TINY, "--device", "h100")
    assert result.exit_code == 0
    assert "no device was used" in result.stdout
    assert "_scaled_dot_product_flash_attention" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "neither a workload nor --diff"),
        ((TINY, "--diff", "a", "b"), "a workload with --diff"),
        (("--diff", "no-such-file.json", "no-such-file.json"), "cannot read"),
        ((TINY, "--device", "h100", "--steps", "3"), "--steps: h100 is no device of this machine"),
        ((TINY, "--device", "h100", "--strict"), "--strict: h100 is no device of this machine"),
        (("tests.support.audited",), "not a module and a function"),
        ((TINY, "--recipe", "bf17"), "bf17"),
        ((TINY, "--device", "h1000"), "h1000"),
    ],
)
def test_refusals_are_one_line(refused: Callable[..., str], arguments: tuple[str, ...], message: str) -> None:
    assert message in refused("audit", *arguments)
