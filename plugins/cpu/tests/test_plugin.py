"""The entry point: found by its name, complete, and free to import."""

from __future__ import annotations

import subprocess
import sys

from mpbackend.backend import MEMBERS, Backend
from mpbackend.plugins import load_plugins
from mpbackend_cpu.backend import CpuBackend

IMPORTS_NO_TORCH = """
import sys
import mpbackend_cpu.plugin as plugin
(backend,) = plugin.mpbackend_backends()
(device,) = backend.discover()
backend.implements(device), backend.address("0"), backend.collectives(device), backend.overflow(device)
backend.memory(device).read(), backend.clock(device).mark()
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "numpy"))
assert not loaded, loaded
assert device.usable, device
"""


def test_the_entry_point_is_found_and_usable() -> None:
    plugins = load_plugins()
    assert isinstance(plugins.backends["cpu"], CpuBackend)
    assert plugins.backend("cpu") is plugins.backends["cpu"]
    assert "mpbackend-cpu" in plugins.distributions
    assert not [entry for entry in plugins.unavailable if entry.name == "cpu"]


def test_the_backend_has_every_member() -> None:
    assert isinstance(CpuBackend(), Backend)
    assert all(hasattr(CpuBackend(), member) for member in MEMBERS)


def test_import_discovery_and_planning_load_no_torch() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS_NO_TORCH], check=True, timeout=60)
