"""A fake torch_npu for tests in an environment without the real one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


def load_support(name: str) -> Any:
    """Return a module of ``support/``, which is no package: pytest imports test files by their paths."""
    qualified = f"mpbackend_ascend_tests_{name}"
    if qualified not in sys.modules:
        spec = importlib.util.spec_from_file_location(qualified, HERE / "support" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[qualified] = module
        spec.loader.exec_module(module)
    return sys.modules[qualified]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch_npu on a device with inf and NaN, and torch.npu."""
    fakes = load_support("fakes")
    made = fakes.Library()
    monkeypatch.setitem(sys.modules, "torch_npu", made)
    monkeypatch.setitem(vars(torch), "npu", fakes.Npu())
    return made


@pytest.fixture
def npu(library: Any) -> Any:
    """torch.npu."""
    return vars(torch)["npu"]
