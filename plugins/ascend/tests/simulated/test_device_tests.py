"""The tests for a real NPU, run on the simulated one, so that their lines have run; what only silicon can answer is left out there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_they_pass_and_label_their_evidence(soc: str, arch: str, tmp_path: Path) -> None:
    if arch in ("ascend-310p", "ascend-a3"):
        pytest.skip("takes the paths of the first 910 and of A2; a third of the lane's time")
    folder = Path(__file__).parents[1] / "device"
    environment = os.environ | {"MPBACKEND_DEVICE_TESTS_ON_SIMULATOR": "1", "OUT": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:]
    (path,) = tmp_path.glob("*.json")
    assert path.name.endswith("-simulated.json")
    found = json.loads(path.read_text())
    assert found["kind"] == found["device"]["kind"] == "simulated"
    assert found["device"]["name"] == soc


def test_without_the_variable_a_simulated_device_is_no_npu(arch: str, tmp_path: Path) -> None:
    if arch != "ascend-a2":
        pytest.skip("the same on every SoC; run once")
    folder = Path(__file__).parents[1] / "device"
    environment = {name: value for name, value in os.environ.items() if name != "MPBACKEND_DEVICE_TESTS_ON_SIMULATOR"} | {"OUT": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(folder), "-k", "discovery"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert "1 skipped" in done.stdout
    assert "is simulated" in done.stdout
    assert not list(tmp_path.glob("*.json"))
