"""``mpbackend probe``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpbackend.cli.main import main

EMULATED = ("probe", "--device", "emu:h100", "--format", "fp8_e4m3")


def test_the_probe_of_an_emulated_unit_agrees_with_its_row() -> None:
    result = CliRunner().invoke(main, [*EMULATED, "--print", "json"])
    assert result.exit_code == 0, result.output
    (document,) = json.loads(result.stdout)
    assert (document["device"], document["kind"], document["verdict"]) == ("h100", "emulated", "agrees")
    answers = document["fingerprint"]["answers"]
    assert answers["products_per_step"]["values"] == [32]
    assert answers["fraction_bits"]["values"] == [13]
    assert answers["register_rounding"]["values"] == ["rz"]
    assert document["claimed"] == "sm_90 fp8_e4m3 x fp8_e4m3 by wgmma"


def test_several_formats_stand_under_their_titles(tmp_path: Path) -> None:
    out = tmp_path / "probe.md"
    result = CliRunner().invoke(main, [*EMULATED, "--format", "fp8_e5m2,fp8_e4m3fnuz", "--print", "md", "--out", str(out)])
    assert result.exit_code == 2, "the last one is not multiplied, so nothing is probed"
    assert not out.exists()
    result = CliRunner().invoke(main, [*EMULATED, "--format", "fp8_e5m2", "--print", "md", "--out", str(out)])
    assert result.exit_code == 0, result.output
    text = out.read_text()
    titles = [line.replace("\\", "").lstrip("# ") for line in text.splitlines() if "Products of" in line and "excluded" not in line]
    assert titles == ["Products of fp8_e4m3 to fp32 on h100 (emulated)", "Products of fp8_e5m2 to fp32 on h100 (emulated)"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "emu:h100", "--format", "int8"], "probes ask about floating-point formats"),
        (["--device", "emu:h100", "--format", "hif8"], "format to probe"),
        (["--device", "emu:nothing"], "nothing"),
        (["--device", "cpu", "--format", "fp8_e4m3"], "format of products on a CPU"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["probe", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
