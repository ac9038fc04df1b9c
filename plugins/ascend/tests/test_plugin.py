"""The entry point: found by its name, complete, free to import, silent where there is no NPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mpbackend.backend import MEMBERS, Backend
from mpbackend.plugins import load_plugins
from mpbackend_ascend.backend import AscendBackend

IMPORTS_NOTHING = """
import sys
import mpbackend_ascend.plugin as plugin
(backend,) = plugin.mpbackend_backends()
from mpbackend.device import Device
device = Device(key="ascend-910b1", arch="ascend-a2", name="Ascend910B1", backend="ascend", type="npu")
list(backend.discover()), backend.implements(device), backend.collectives(device), backend.environment(device), backend.memory, backend.clock
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "torch_npu", "numpy"))
assert not loaded, loaded
"""


def test_the_entry_point_is_found() -> None:
    plugins = load_plugins()
    assert isinstance(plugins.backends["ascend"], AscendBackend)
    assert plugins.backend("npu") is plugins.backends["ascend"]
    assert "mpbackend-ascend" in plugins.distributions
    assert not [entry for entry in plugins.unavailable if entry.name in ("ascend", "npu")]


def test_the_backend_has_every_member() -> None:
    assert isinstance(AscendBackend(), Backend)
    assert all(hasattr(AscendBackend(), member) for member in MEMBERS)


def test_import_discovery_and_planning_load_neither_torch_nor_torch_npu() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS_NOTHING], check=True, timeout=60)


def test_torch_npu_is_no_dependency() -> None:
    """With it and without CANN, `import torch` fails: it must never come along."""
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = [line for line in project.splitlines() if line.startswith("dependencies")]
    assert "torch_npu" not in line
    assert "torch-npu" not in line
