from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from mpbackend.cli import devices, doctor
from mpbackend.device import Device
from mpbackend.matrix import load_matrix
from mpbackend.plugins import Plugins, Unavailable

Invoke = Callable[..., Result]
BROKEN = Device(key="acme-1", arch="one", name="Acme 1", backend="acme", usable=False, cause="no driver", remedy="install it")


class Listing(Plugins):
    """Plugins that found one device, which does not work."""

    def devices(self) -> list[Device]:
        return [BROKEN]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = Listing(unavailable=[Unavailable("other", "mpbackend-other 1.0", "ImportError: no\nother", "reinstall it")])
    for module in (devices, doctor):
        monkeypatch.setattr(module, "load_plugins", lambda: plugins)


@pytest.mark.usefixtures("broken")
def test_a_device_that_does_not_work_says_why(invoke: Invoke) -> None:
    result = invoke("devices")
    assert result.exit_code == 0
    assert "not usable: no driver; install it" in result.stdout
    assert result.stderr == "warning: other is unavailable: ImportError: no other; `mpbackend doctor` says more\n"
    assert json.loads(invoke("devices", "--format", "json").stdout)[0]["cause"] == "no driver"


def test_known_devices(invoke: Invoke) -> None:
    known = json.loads(invoke("devices", "--known", "--format", "json").stdout)
    assert [device["key"] for device in known] == list(load_matrix().devices)
    assert "dense peaks known" in invoke("devices", "--known").stdout


@pytest.mark.usefixtures("broken")
def test_doctor(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPBACKEND", "acme:1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    text = invoke("doctor").stdout
    for expected in ("python", "no driver; install it", "other of mpbackend-other 1.0", "reinstall it", "acme:1", "not set"):
        assert expected in text
    document = json.loads(invoke("doctor", "--format", "json").stdout)
    assert document["variables"] == {"MPBACKEND": "acme:1", "LOCAL_RANK": "not set"}
    assert document["devices"][0]["remedy"] == "install it"
    assert document["unavailable"][0]["name"] == "other"


def test_doctor_lists_a_plugins_matrix_that_does_not_fit(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "acme.toml"
    path.write_text("schema = 2\n", encoding="utf-8")
    plugins = Plugins()
    plugins.matrices.append(path)
    monkeypatch.setattr(doctor, "load_plugins", lambda: plugins)
    assert "acme.toml" in invoke("doctor").stdout


def test_a_distribution_that_is_not_installed_has_no_version() -> None:
    assert doctor.installed_version("mpbackend-of-nobody") == "not installed"
    assert doctor.installed_version("click")[0].isdigit()
