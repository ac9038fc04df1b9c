"""Every check fails on a backend that has the fault it is about, and passes on the same backend without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mpbackend.conformance.registry import CHECKS
from mpbackend.conformance.runner import run_check
from mpbackend.conformance.subject import Subject
from mpbackend.plugins import load_plugins
from mpbackend.selection import select_device
from tests.conformance.faults import FAULTS
from tests.conformance.wrong import Wrong, processor

PLUGIN = """
import sys
{imports}
from mpbackend.backend import MEMBERS
from mpbackend.hookspecs import hookimpl

class Backend:
    name = "wrong"
    device_types = ("xpu",)
    autocast_key = "AutocastXPU"
    def discover(self):
        {discovery}
        return []
    def __getattr__(self, name):
        if name in MEMBERS:
            return lambda *arguments: []
        raise AttributeError(name)

@hookimpl
def mpbackend_backends():
    return [Backend()]
"""

ISOLATED = {
    "plugin_imports_are_light": ("import jinja2", "", "it imports jinja2"),
    "discovery_imports_no_torch": ("", "import torch", "torch was imported"),
    "discovery_makes_no_context": ("", "if 'torch' in sys.modules: sys.modules['torch'].xpu.is_initialized = lambda: True", "torch.xpu is initialized"),
}
"""Check to what its plugin imports, what it does when devices are listed, and the words that the check must find."""


@pytest.mark.parametrize("name", FAULTS)
def test_the_check_finds_its_fault(name: str) -> None:
    right, device, plugins = processor()
    fault = FAULTS[name]
    result = run_check(name, Subject(fault.backend(right), msgspec.structs.replace(device, **(fault.device or {})), plugins, quick=True))
    assert result.outcome == "failed", f"{name} passes a backend with its fault: {result.detail}"
    assert fault.words in result.detail


@pytest.mark.parametrize("name", ISOLATED)
def test_the_check_in_a_fresh_process_finds_its_fault(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imports, discovery, words = ISOLATED[name]
    install(tmp_path, PLUGIN.format(imports=imports, discovery=discovery or "pass"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plugins = load_plugins()
    result = run_check(name, Subject(plugins.backends["wrong"], processor()[1], plugins))
    assert (result.outcome, words in result.detail) == ("failed", True), result.detail


def install(folder: Path, text: str) -> None:
    """Write a plugin as pip installs one."""
    (folder / "wrong_plugin.py").write_text(text, encoding="utf-8")
    metadata = folder / "wrong_backend-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-backend\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[mpbackend]\nwrong = wrong_plugin\n", encoding="utf-8")


def test_every_check_has_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    faulty = {*FAULTS, *ISOLATED}
    assert sorted(faulty) == sorted(CHECKS)
    with capsys.disabled():
        print(f"\nconformance: a wrong backend for {len(faulty)}/{len(CHECKS)} checks")


@pytest.fixture
def subject() -> Iterator[Subject]:
    right, device, plugins = processor()
    yield Subject(Wrong(right), device, plugins, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_check_passes_without_the_fault(name: str, subject: Subject) -> None:
    result = run_check(name, subject)
    assert result.outcome in ("passed", "skipped"), result.detail


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["emu:h100", "emu:ascend-910a"])
@pytest.mark.parametrize("name", CHECKS)
def test_an_emulated_device_conforms(name: str, spec: str) -> None:
    plugins = load_plugins()
    chosen = select_device(spec, plugins, {})
    result = run_check(name, Subject(chosen.backend, chosen.device, plugins, quick=True))
    assert result.outcome in ("passed", "skipped"), result.detail
