"""Discovery with a torch_npu that answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

import mpbackend
from mpbackend.device import Device
from mpbackend.errors import BackendError, UnknownNameError
from mpbackend_ascend.backend import AscendBackend

KEYS = {
    "Ascend910A": "ascend-910a",
    "Ascend310P3": "ascend-310p",
    "Ascend910B1": "ascend-910b1",
    "Ascend910_9392": "ascend-910c",
    "Ascend950PR_9599": "ascend-950pr",
}

LISTING = """
import json, sys
import mpbackend
from mpbackend.backend import Backend
plugins = mpbackend.load_plugins()
found = [[d.key, d.name, d.kind, d.usable, d.cause, d.remedy] for d in plugins.devices() if d.backend == "ascend"]
loaded = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "torch_npu"})
print("ANSWER", json.dumps([found, loaded]))
"""


def listing(**variables: str) -> tuple[list[list[Any]], list[str]]:
    """Return the devices of a fresh process, and which of torch and torch_npu it had imported."""
    done = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True, env=os.environ | variables, check=False, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stderr[-2000:]
    found, loaded = json.loads(lines[0].removeprefix("ANSWER "))
    return found, loaded


def test_devices_are_simulated_and_named_exactly(soc: str, arch: str, target: mpbackend.Target) -> None:
    devices = list(target.backend.discover())
    assert [(d.key, d.arch, d.name, d.kind, d.index, d.usable) for d in devices] == [(KEYS[soc], arch, soc, "simulated", i, True) for i in range(2)]
    assert devices[0].versions["torch_npu"].startswith("2.13.0")
    assert {"torch", "cann", "driver", "simulator"} <= set(devices[0].versions)


def test_addresses(soc: str, target: mpbackend.Target) -> None:
    backend = target.backend
    assert backend.address("1").index == 1
    assert backend.address(KEYS[soc]).index == 0
    with pytest.raises(UnknownNameError, match="doctor"):
        backend.address("7")


def test_case_36_listing_imports_nothing_and_makes_no_context(soc: str) -> None:
    found, loaded = listing()
    assert [row[:4] for row in found] == [[KEYS[soc], soc, "simulated", True]] * 2
    assert loaded == []


def only_on_a2(arch: str) -> None:
    if arch != "ascend-a2":
        pytest.skip("the same on every SoC; run once")


def test_case_52_unknown_name_stays_unknown(arch: str) -> None:
    only_on_a2(arch)
    found, _ = listing(CANN_STUB_SOC="Ascend777")
    key, name, kind, usable, cause, remedy = found[0]
    assert (key, name, kind, usable) == ("unknown", "Ascend777", "simulated", False)
    assert "Unsupported soc version" in cause
    assert "update torch_npu" in remedy


def test_no_device_is_said_with_the_variable_that_hides_them(arch: str) -> None:
    only_on_a2(arch)
    found, _ = listing(CANN_STUB_DEVICES="0", ASCEND_RT_VISIBLE_DEVICES="3")
    assert len(found) == 1
    assert "sees no NPU (ASCEND_RT_VISIBLE_DEVICES='3')" in found[0][4]
    assert "npu-smi" in found[0][5]


def test_refused_overflow_variable_is_named(arch: str) -> None:
    only_on_a2(arch)
    found, _ = listing(INF_NAN_MODE_ENABLE="0")
    assert not found[0][3]
    assert "INF_NAN_MODE" in found[0][4]
    assert "INF_NAN_MODE_ENABLE" in found[0][5]


def test_autoload_off_makes_the_device_unusable_instead_of_failing_in_torch(arch: str) -> None:
    only_on_a2(arch)
    found, _ = listing(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert not found[0][3]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in found[0][4]


def test_case_50_without_cann_the_cause_is_named(arch: str) -> None:
    only_on_a2(arch)
    found, loaded = listing(LD_LIBRARY_PATH="")
    assert not found[0][3]
    assert "CANN is not" in found[0][4]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found[0][5]
    assert loaded == []


def test_case_51_transfer_to_npu_is_detected(arch: str) -> None:
    only_on_a2(arch)
    code = LISTING.replace("found = [[d.key,", "assert any(d.versions.get('transfer_to_npu') == 'active' for d in plugins.devices()); found = [[d.key,")
    environment = os.environ | {"TORCH_TRANSFER_TO_NPU": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False, timeout=120)
    answer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("ANSWER ")).removeprefix("ANSWER "))
    assert answer[0][0][:2] == ["ascend-910b1", "Ascend910B1"], "the device stays what it is"


def test_session_refuses_an_unusable_device(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    monkeypatch.setattr(
        AscendBackend, "discover", lambda self: [Device(**{**{f: getattr(device, f) for f in device.__struct_fields__}, "usable": False, "cause": "why"})]
    )
    with pytest.raises(BackendError, match="why"):
        mpbackend.select("npu")
