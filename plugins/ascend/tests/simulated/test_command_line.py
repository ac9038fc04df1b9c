"""The command line on a simulated device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from mpbackend.cli.main import main; sys.exit(main())", *arguments]
    wide = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240, env=wide)


def test_doctor_labels_the_device(soc: str, tmp_path: Path) -> None:
    done = run(tmp_path, "doctor")
    assert done.returncode == 0
    assert "usable (simulated)" in done.stdout
    assert soc in done.stdout


def test_demo_on_a2(arch: str, tmp_path: Path) -> None:
    if arch != "ascend-a2":
        pytest.skip("run once")
    done = run(tmp_path, "demo", "--device", "npu", "--steps", "10")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ascend-910b1 (simulated)" in done.stdout
    for recipe in ("fp32", "bf16", "fp16"):
        assert (tmp_path / "demo" / recipe / "record.json").is_file()


def test_demo_on_the_first_910_refuses_bf16_and_runs_fp16(arch: str, tmp_path: Path) -> None:
    if arch != "ascend-910a":
        pytest.skip("run once")
    refused = run(tmp_path, "demo", "--device", "npu", "--steps", "2", "--recipes", "bf16")
    assert refused.returncode == 2
    assert "bf16 is refused on ascend-910a" in refused.stderr
    assert "aclnnMatmul.md:151-157" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = run(tmp_path, "demo", "--device", "npu", "--steps", "10", "--recipes", "fp16")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ascend-910a (simulated)" in done.stdout


def test_policy_is_checked_against_the_dispatcher(arch: str, tmp_path: Path) -> None:
    if arch != "ascend-a2":
        pytest.skip("run once")
    done = run(tmp_path, "policy", "--diff", "cpu", "ascend")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "104 listed" in done.stdout
    assert "the dispatcher has the same 104" in done.stdout
    assert "simulated device" in done.stdout
