"""What is installed, judged without loading it: causes and remedies."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpbackend_ascend import software
from mpbackend_ascend.software import Cann, Problem, problem


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions of installed distributions; a test changes them."""
    found = {"torch": "2.13.0+cpu", "torch_npu": "2.13.0"}
    monkeypatch.setattr(software, "installed", lambda name: found.get(name, ""))
    monkeypatch.setattr(software, "cuda_build", lambda: "")
    monkeypatch.setattr(software, "find_cann", lambda environ: Cann("/opt/cann/lib64", True))
    return found


def found() -> Problem:
    result = problem({})
    assert result is not None
    return result


def test_nothing_is_wrong(versions: dict[str, str]) -> None:
    assert problem({}) is None


@pytest.mark.parametrize(
    ("torch", "torch_npu"),
    [("2.13.0+cpu", "2.13.0.post2"), ("2.13.1", "2.13.0rc1"), ("2.13.0", "2.13.0+git.c798c65"), ("2.13.0.dev20260801+cpu", "2.13.0")],
)
def test_release_numbers_are_compared_without_post_and_local(torch: str, torch_npu: str, versions: dict[str, str]) -> None:
    versions |= {"torch": torch, "torch_npu": torch_npu}
    assert problem({}) is None


@pytest.mark.parametrize(("torch", "torch_npu"), [("2.14.0", "2.13.0"), ("2.13.0+cpu", "2.9.1.post1"), ("3.13.0", "2.13.0")])
def test_release_mismatch_names_both(torch: str, torch_npu: str, versions: dict[str, str]) -> None:
    versions |= {"torch": torch, "torch_npu": torch_npu}
    cause, remedy = found()
    assert torch in cause
    assert torch_npu in cause
    assert f"torch_npu=={'.'.join(torch.split('.')[:2])}.*" in remedy
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in remedy


@pytest.mark.parametrize(("missing", "word"), [("torch", "torch is not installed"), ("torch_npu", "torch_npu is not installed")])
def test_missing_package_is_named(missing: str, word: str, versions: dict[str, str]) -> None:
    del versions[missing]
    cause, remedy = found()
    assert cause == word
    assert "pip install" in remedy
    assert "2.13.*" in remedy


def test_case_50_torch_npu_without_cann(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "find_cann", lambda environ: Cann("", False))
    cause, remedy = found()
    assert cause == "torch_npu 2.13.0 is installed and CANN is not (libascendcl.so was not found), so `import torch` fails"
    assert "set_env.sh" in remedy
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 lets torch import" in remedy


def test_case_63_cuda_build_beside_torch_npu_is_named_too(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "find_cann", lambda environ: Cann("", False))
    monkeypatch.setattr(software, "cuda_build", lambda: "13.0")
    cause, remedy = found()
    assert "torch_npu 2.13.0 is installed and CANN is not" in cause
    assert "a build for CUDA 13.0" in cause
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in remedy


def test_cann_that_the_loader_does_not_find(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "find_cann", lambda environ: Cann("/opt/cann/lib64", False))
    cause, remedy = found()
    assert "the loader does not find libascendcl.so" in cause
    assert "set_env.sh" in remedy


def put_library(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "libascendcl.so").touch()
    return folder


def no_cache(*_: Any, **__: Any) -> Any:
    raise OSError("no ldconfig here")


def test_cann_is_found_where_the_loader_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", no_cache)
    folder = put_library(tmp_path / "lib")
    assert software.find_cann({"LD_LIBRARY_PATH": f"/nowhere::{folder}"}) == Cann(str(folder), True)
    assert software.find_cann({"LD_LIBRARY_PATH": "/nowhere"}) == Cann("", False)


@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"])
@pytest.mark.parametrize("folder", ["lib64", "runtime/lib64"])
def test_cann_is_found_under_its_home_and_not_loadable(variable: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", no_cache)
    placed = put_library(tmp_path / folder)
    assert software.find_cann({variable: str(tmp_path)}) == Cann(str(placed), False)


def test_cann_is_found_in_the_loaders_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put_library(tmp_path / "cached")
    listing = f"1 libs found in cache\n\tlibascendcl.so (libc6,x86-64) => {folder}/libascendcl.so\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, listing, ""))
    assert software.find_cann({}) == Cann(str(folder), True)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip = None\n", "13.0"),
        ("cuda: Optional[str] = None\n", ""),
        ('cuda = "12.6"\n', "12.6"),
        ("", ""),
    ],
)
def test_cuda_build_is_read_from_torchs_own_file(text: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(text)
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    (tmp_path / "torch-2.13.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert software.cuda_build() == version
    assert software.installed("torch") == "2.13.0"
    assert software.installed("torch_npu") == ""


def test_no_torch_is_no_cuda_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert software.cuda_build() == ""


def test_a_version_that_is_none() -> None:
    assert software.release("unknown") == ()


@pytest.mark.parametrize(
    ("environ", "modules", "active"),
    [
        ({}, {}, False),
        ({"TORCH_TRANSFER_TO_NPU": "1"}, {}, True),
        ({"TORCH_TRANSFER_TO_NPU": "0"}, {}, False),
        ({}, {"torch_npu.contrib.transfer_to_npu": 1}, True),
    ],
)
def test_case_51_transfer_to_npu(environ: dict[str, str], modules: dict[str, object], active: bool) -> None:
    assert software.transfers(environ, modules) is active


@pytest.mark.parametrize(
    ("environ", "modules", "off"),
    [
        ({}, {}, False),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}, {}, False),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, {}, True),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, {"torch_npu": 1}, False),
    ],
)
def test_autoload_off(environ: dict[str, str], modules: dict[str, object], off: bool) -> None:
    assert software.autoload_off(environ, modules) is off
