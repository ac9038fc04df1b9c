"""The simulated lane's own parts: what it makes an environment from, and what a process on a simulated device sees."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def lane() -> Any:
    spec = importlib.util.spec_from_file_location("mpbackend_ascend_lane", HERE / "lane.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif("CANN_STUB_SOC" not in os.environ, reason="simulated/ needs the real torch_npu and a simulated device: make test-ascend")
def test_simulated_devices() -> None:
    assert (HERE / "simulated").is_dir()


def test_environment_of_a_simulated_device(lane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", "/usr/local/Ascend")
    monkeypatch.setenv("CANN_STUB_DEVICES", "7")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    found = lane.environment("Ascend910A")
    assert (found["CANN_STUB_SOC"], found["TASK_QUEUE_ENABLE"]) == ("Ascend910A", "0")
    assert "ASCEND_HOME_PATH" not in found, "torch_npu would want a real CANN there"
    assert "CANN_STUB_DEVICES" not in found
    assert found["LD_LIBRARY_PATH"].endswith(":/elsewhere")


def test_environment_is_made_anew_when_its_sources_change(lane: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {path.name for path in lane.sources()}
    assert {"lane-requirements.txt", "pyproject.toml", "build.py", "device.c", "stand_in.h"} <= names
    before = lane.fingerprint()
    assert lane.fingerprint() == before
    changed = tmp_path / "requirements.txt"
    changed.write_text("torch==2.14.0\n")
    monkeypatch.setattr(lane, "ROOT", Path("/"))
    monkeypatch.setattr(lane, "sources", lambda: [changed])
    assert lane.fingerprint() != before


def test_one_soc_of_each_architecture_that_trains(lane: Any) -> None:
    from mpbackend.matrix import load_matrix
    from mpbackend_ascend.discovery import matrix_files

    matrix = load_matrix(matrix_files())
    models = [matrix.identify(soc)[0] for soc in lane.SOCS]
    assert [model.arch if model is not None else "" for model in models] == ["ascend-910a", "ascend-310p", "ascend-a2", "ascend-a3", "ascend-950"]


def test_simulator_is_own_code_and_says_so() -> None:
    readme = " ".join((HERE / "simulator" / "README.md").read_text(encoding="utf-8").split())
    assert "own code" in readme
    assert "no header of the vendor" in readme
    for path in (HERE / "simulator").rglob("*.[ch]"):
        text = path.read_text(encoding="utf-8")
        assert "Huawei" not in text
        assert '#include "acl' not in text
        assert "#include <acl" not in text


@pytest.mark.parametrize("source", sorted(path.name for path in (HERE / "simulator" / "native").glob("*.c")))
def test_native_sources_compile_without_a_warning(source: str, tmp_path: Path, lane: Any) -> None:
    from shutil import which

    if which("gcc") is None:
        pytest.skip("gcc is not installed")
    folder = HERE / "simulator" / "native"
    subprocess.run(["gcc", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", str(folder / source)], check=True, timeout=60)
