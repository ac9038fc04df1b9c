"""The entry point: found by its name, complete, and free to import."""

from __future__ import annotations

import subprocess
import sys

from mpbackend.backend import MEMBERS, Backend
from mpbackend.plugins import load_plugins
from mpbackend_cuda.backend import CudaBackend

IMPORTS_NO_TORCH = """
import sys
import mpbackend_cuda.plugin as plugin
from mpbackend.device import Device
(backend,) = plugin.mpbackend_backends()
list(backend.discover())
device = Device(key="h100", arch="sm_90", name="NVIDIA H100 PCIe")
backend.implements(device), backend.collectives(device), backend.overflow(device)
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "numpy", "transformer_engine"))
assert not loaded, loaded
"""


def test_the_entry_point_is_found_and_usable() -> None:
    plugins = load_plugins()
    assert isinstance(plugins.backends["cuda"], CudaBackend)
    assert plugins.backend("cuda") is plugins.backends["cuda"]
    assert "mpbackend-cuda" in plugins.distributions
    assert not [entry for entry in plugins.unavailable if entry.name == "cuda"]


def test_the_backend_has_every_member() -> None:
    assert isinstance(CudaBackend(), Backend)
    assert all(hasattr(CudaBackend(), member) for member in MEMBERS)


def test_import_discovery_and_planning_load_no_torch() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS_NO_TORCH], check=True, timeout=120)
