"""The installed torch, looked at from outside."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mpbackend_cuda import torch_build
from mpbackend_cuda.torch_build import TorchBuild, autoload_fault, find_fault, read_build
from plugins.cuda.tests.conftest import CUDA_BUILD, DRIVER

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Install a distribution with an entry point of torch, with or without the module that it names."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, module: str, *, present: bool) -> None:
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[torch.backends]\n{module} = {module}.loader:start\n", encoding="utf-8")
        if present:
            (tmp_path / f"{module}.py").write_text("raise SystemExit('imported to find out')\n", encoding="utf-8")
        importlib.invalidate_caches()

    return write


def test_the_installed_torch_is_read_as_text() -> None:
    build = read_build()
    assert build is not None
    assert build.version == torch.__version__
    assert build.cuda == (torch.version.cuda or "")
    assert build.hip == (torch.version.hip or "")


def test_reading_imports_no_torch() -> None:
    program = "import sys\nfrom mpbackend_cuda.torch_build import read_build\nassert read_build()\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", ("2.13.0+cu130", "13.0", "")),
        ('__version__ = "2.9.1"\ncuda = "12.8"\n', ("2.9.1", "12.8", "")),
        ("__version__ = '2.13.0+rocm6.4'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482'\n", ("2.13.0+rocm6.4", "", "6.4.43482")),
        ("nothing", ("", "", "")),
    ],
)
def test_version_files(text: str, expected: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version.py").write_text(text, encoding="utf-8")
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert read_build() == TorchBuild(*expected)
    (tmp_path / "version.py").unlink()
    assert read_build() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert read_build() is None


@pytest.mark.parametrize(
    ("build", "cause"),
    [
        (None, "torch is not installed"),
        (TorchBuild("2.13.0+cpu", "", ""), "torch 2.13.0+cpu is a build without CUDA"),
        (TorchBuild("2.13.0+rocm6.4", "", "6.4"), "torch 2.13.0+rocm6.4 is a ROCm build, for AMD GPUs"),
        (TorchBuild("2.8.0.post1+cu128", "12.8", ""), "torch 2.8.0.post1+cu128 is older than 2.9"),
    ],
)
def test_a_build_that_has_no_gpu(build: TorchBuild | None, cause: str) -> None:
    fault = find_fault(build, DRIVER, {})
    assert fault is not None
    assert fault.cause == cause
    assert fault.remedy


@pytest.mark.parametrize("version", ["2.9.0", "2.13.0+cu130", "2.14.0a0+git1234"])
def test_a_build_that_works(version: str) -> None:
    assert find_fault(TorchBuild(version, "13.0", ""), DRIVER, {}) is None


@pytest.mark.parametrize(
    ("driver", "cuda", "old"),
    [
        ("580.65.06", "13.0", False),
        ("575.57.08", "13.0", True),
        ("525.60.13", "12.8", False),
        ("470.82", "12.8", True),
        ("610.10", "13.4", False),
        ("", "13.0", False),
    ]
    + [("575.1", "99.0", False)],
)
def test_a_driver_that_is_too_old(driver: str, cuda: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "driver_cuda", lambda: 0)
    fault = find_fault(TorchBuild("2.13.0+cuda", cuda, ""), driver, {})
    assert (fault is not None) is old
    if fault is not None:
        assert f"NVIDIA driver {driver} is too old for torch 2.13.0+cuda" in fault.cause
        assert "update the driver" in fault.remedy


def test_a_forward_compatibility_library_makes_an_old_driver_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "ASK_DRIVER", "print(13000)")
    assert torch_build.driver_cuda() == 13
    assert find_fault(CUDA_BUILD, "535.10", {}) is None


@pytest.mark.parametrize("program", ["raise OSError('libcuda.so.1: cannot open shared object file')", "print('nothing')", "import time; time.sleep(60)"])
def test_a_driver_library_that_does_not_answer(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "ASK_DRIVER", program)
    if "sleep" in program:
        monkeypatch.setattr(torch_build, "DRIVER_LIMIT_S", 0.2)
    assert torch_build.driver_cuda() == 0


@pytest.mark.usefixtures("unimported")
def test_entry_points_of_torch(install: Install) -> None:
    assert autoload_fault(CUDA_BUILD, {}) is None
    install("acme-torch", "acme_torch", present=True)
    assert autoload_fault(CUDA_BUILD, {}) is None, "one that is there is torch's own business"
    install("gone-torch", "gone_torch", present=False)
    fault = autoload_fault(CUDA_BUILD, {})
    assert fault is not None
    assert "names the module 'gone_torch', which is not there" in fault.cause
    assert "gone-torch 1.2" in fault.cause
    assert fault.remedy == "export TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall gone-torch"
    assert autoload_fault(CUDA_BUILD, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}) is None


def test_once_torch_is_imported_its_import_cannot_fail(install: Install) -> None:
    install("gone-torch", "gone_torch", present=False)
    assert autoload_fault(CUDA_BUILD, {}) is None


def test_an_entry_point_without_a_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("acme", "gone_torch:start", "torch.backends")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [point])
    monkeypatch.setattr(torch_build, "torch_imported", lambda: False)
    fault = autoload_fault(CUDA_BUILD, {})
    assert fault is not None
    assert "of acme names the module" in fault.cause


def test_a_module_without_a_spec_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("placed")
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "placed", module)
    assert torch_build.importable("placed")
    assert not torch_build.importable("no_such_module_at_all")


def test_a_version_that_is_none() -> None:
    assert torch_build.release("from source") == (0,)
    assert torch_build.release("2.13.0.post2+local") == (2, 13, 0)
