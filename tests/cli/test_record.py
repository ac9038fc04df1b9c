from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from mpbackend.observe.record import load_record

Invoke = Callable[..., Result]


def table(folder: Path, text: str) -> Path:
    path = folder / "log.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_command_states_what_it_does_not_know(invoke: Invoke, tmp_path: Path) -> None:
    path = table(tmp_path, "step,loss\n1,2.0\n2,1.5\n")
    result = invoke("record", "import", str(path), "--out", str(tmp_path / "run"), "--recipe", "bf16", "--device", "h100", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1:] == [
        "note: imported from log.csv: recipe, device, kind and seed are as stated by whoever imported it, nothing of the arithmetic was observed",
        "note: the log has no grad_norm, ms",
    ]
    record = load_record(tmp_path / "run").record
    assert (record.recipe.text, record.recipe.granted, record.device.key, record.device.versions, record.run.seed) == ("bf16", "unknown", "h100", {}, 3)
    again = invoke("record", "import", str(path), "--out", str(tmp_path / "run"), "--recipe", "bf16")
    assert (again.exit_code, len(again.stderr.splitlines())) == (2, 1)
    assert "already holds a record" in again.stderr


@pytest.mark.parametrize("arguments", [["--recipe", "no-such"], ["--recipe", "bf16", "--device", "no-such"], ["--recipe", "bf16", "--column", "loss"]])
def test_a_bad_argument_is_one_line(invoke: Invoke, tmp_path: Path, arguments: list[str]) -> None:
    path = table(tmp_path, "step,loss\n1,2.0\n")
    result = invoke("record", "import", str(path), "--out", str(tmp_path / "run"), *arguments)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert not (tmp_path / "run").exists()


def test_stated_settings_are_recorded_and_said(invoke: Invoke, tmp_path: Path) -> None:
    path = table(tmp_path, "step,loss,lr\n1,2.0,0.1\n2,1.5,0.1\n")
    stated = ["ranks=8", "samples=64", "clip_norm=1", "clip_value=none", "average=true", "optimizers=AdamW", "data=corpus 3", "weights=1f"]
    for name in ("one", "two"):
        options = [part for item in stated for part in ("--setting", item)]
        result = invoke("record", "import", str(path), "--out", str(tmp_path / name), "--recipe", "bf16", "--seed", "3", *options)
        assert result.exit_code == 0, result.output
    assert "note: stated of the settings: ranks 8, samples 64, " in result.stdout
    content = load_record(tmp_path / "one")
    assert content.record.settings == {"ranks": "8", "clip_norm": "1", "clip_value": "none", "average": "true", "optimizers": "AdamW"}
    assert [row.samples for row in content.steps] == [64, 64]
    compared = invoke("compare", str(tmp_path / "one"), str(tmp_path / "two"))
    assert "equivalent" in compared.stdout
    assert "not known" not in compared.stdout


@pytest.mark.parametrize("setting", ["ranks", "ranks=", "ranks=none", "batch=4", "average=1"])
def test_a_bad_setting_is_one_line(invoke: Invoke, tmp_path: Path, setting: str) -> None:
    path = table(tmp_path, "step,loss\n1,2.0\n")
    result = invoke("record", "import", str(path), "--out", str(tmp_path / "run"), "--recipe", "bf16", "--setting", setting)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert setting.partition("=")[0] in result.stderr
    assert not (tmp_path / "run").exists()
