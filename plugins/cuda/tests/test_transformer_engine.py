"""Every way in which Transformer Engine was seen to fail becomes a reason, never an exception."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbackend_cuda import transformer_engine
from mpbackend_cuda.transformer_engine import Engine, installed, load, state, unavailable

Package = Callable[..., None]
WHOLE = ("libtransformer_engine.so", "transformer_engine_torch.so")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Package]:
    """Put a package on the path: its top level, its ``pytorch`` module, and the libraries beside it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(top: str = "", pytorch: str = "def autocast(): ...\nclass Linear: ...", libraries: tuple[str, ...] = WHOLE) -> None:
        folder = tmp_path / "transformer_engine"
        (folder / "wheel_lib").mkdir(parents=True)
        (folder / "__init__.py").write_text(top, encoding="utf-8")
        (folder / "pytorch.py").write_text(pytorch, encoding="utf-8")
        (folder / "common" / "recipe").mkdir(parents=True)
        (folder / "common" / "__init__.py").touch()
        (folder / "common" / "recipe" / "__init__.py").touch()
        for name in libraries:
            (folder / "wheel_lib" / name).touch()
        importlib.invalidate_caches()

    load.cache_clear()
    yield write
    load.cache_clear()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "transformer_engine":
            del sys.modules[name]


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed here")
def test_not_installed() -> None:
    assert installed().startswith("Transformer Engine is not installed (pip install")
    load.cache_clear()
    assert load().reason == installed()
    assert load().pytorch is None


@pytest.mark.parametrize(
    ("libraries", "missing"),
    [((), "core library"), (("transformer_engine_torch.cpython-311.so",), "core library"), (("libtransformer_engine.so",), "torch extension")],
)
def test_parts_that_are_missing(libraries: tuple[str, ...], missing: str, package: Package) -> None:
    package("raise SystemExit('imported to find out')", libraries=libraries)
    assert f"without its {missing}" in installed()
    assert "transformer_engine" not in sys.modules


def test_parts_of_different_versions(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    package()
    versions = {"transformer-engine": "2.20.2", "transformer-engine-torch": "2.19.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installed() == "the parts of Transformer Engine differ: transformer-engine 2.20.2, transformer-engine-torch 2.19.0"
    versions["transformer-engine-torch"] = "2.20.2"
    assert installed() == ""


def test_without_a_gpu_it_is_not_imported(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    package("raise SystemExit('imported without a GPU')")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load().reason == "Transformer Engine needs a GPU, and torch finds none"


@pytest.mark.usefixtures("with_gpu")
def test_what_imports_is_taken(package: Package) -> None:
    package("import warnings\nwarnings.warn('found no jax', RuntimeWarning)")
    engine = load()
    assert engine.reason == ""
    assert engine.pytorch.__name__ == "transformer_engine.pytorch"
    assert engine.recipes.__name__ == "transformer_engine.common.recipe"
    assert load() is engine


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError('Found empty `transformer-engine` meta package installed...\\nmore')",
        "AssertionError('Could not find `transformer-engine`.')",
        "OSError('libcuda.so.1: cannot open shared object file')",
        "FileNotFoundError('Could not find shared object file')",
        "ImportError('undefined symbol: _ZN3c10')",
        "AttributeError('module has no attribute pytorch')",
        "StopIteration()",
    ],
)
@pytest.mark.parametrize("where", ["top", "pytorch"])
def test_whatever_importing_raises_is_the_reason(error: str, where: str, package: Package) -> None:
    package(**{where: f"raise {error}"})
    reason = load().reason
    assert reason.startswith(f"importing Transformer Engine failed: {error.partition('(')[0]}: ")
    assert "\n" not in reason


@pytest.mark.usefixtures("with_gpu")
def test_an_old_release(package: Package) -> None:
    package(pytorch="class Linear: ...\ndef fp8_autocast(): ...")
    assert load().reason == "Transformer Engine 2.9 or later is needed: the installed one has no transformer_engine.pytorch.autocast"


def test_a_plan_asks_files_until_the_process_holds_a_context(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    package("raise OSError('broken')")
    assert state() == "", "all parts are there"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert state() == "importing Transformer Engine failed: OSError: broken"
    monkeypatch.delitem(sys.modules, "torch")
    load.cache_clear()
    assert state() == ""


def raising(error: Exception) -> Callable[..., Any]:
    def ask(return_reason: bool = False) -> Any:
        raise error

    return ask


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda return_reason: (True, ""), ""),
        (lambda return_reason: (False, "Device compute capability 10.0 or higher required"), "Device compute capability 10.0 or higher required"),
        (raising(AssertionError("Torch not compiled with CUDA enabled")), "AssertionError: Torch not compiled with CUDA enabled"),
        (raising(RuntimeError("no")), "RuntimeError: no"),
        (raising(ValueError("no")), "ValueError: no"),
    ],
)
def test_it_is_asked_itself_about_the_present_gpu(answer: Callable[..., Any], reason: str) -> None:
    engine = Engine(types.SimpleNamespace(is_mxfp8_available=answer), None, "")
    assert unavailable(engine, "is_mxfp8_available") == reason
    assert unavailable(engine, "is_fp8_available") == "the installed Transformer Engine has no is_fp8_available"


def test_a_module_in_the_process_is_looked_at_by_its_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("transformer_engine")
    monkeypatch.setitem(sys.modules, "transformer_engine", module)
    assert "not installed" in installed()
    assert module.__name__ == transformer_engine.PACKAGE
