"""The NPUs of a machine, from what the driver and torch_npu say; nothing of either is loaded here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mpbackend.device import Device
from mpbackend_ascend import discovery, software
from mpbackend_ascend.discovery import Answer, failure_line, find_devices
from mpbackend_ascend.software import Problem

SMI_TABLE = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.5        43                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3161 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Warning       | 91.2        44                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3152 / 65536         |
+===========================+===============+====================================================+
"""

GOOD: dict[str, Any] = {
    "count": 2,
    "name": "Ascend910B3",
    "soc": 223,
    "inf_nan": True,
    "error": "",
    "cann": "8.5.0",
    "driver": "25.2.0",
    "simulator": "",
}


def no_probe() -> Answer:
    raise AssertionError("nothing is asked of torch_npu")


def devices(
    chips: list[str] | None = None,
    answer: Answer | None = None,
    environ: Mapping[str, str] | None = None,
    modules: Mapping[str, object] | None = None,
) -> list[Device]:
    probe: Callable[[], Answer] = no_probe if answer is None else lambda: answer
    return find_devices(environ or {}, modules or {}, probe=probe, chips=lambda: chips or [])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    versions = {"torch": "2.13.0+cpu", "torch_npu": "2.13.0"}
    monkeypatch.setattr(software, "installed", lambda name: versions.get(name, ""))
    monkeypatch.setattr(software, "problem", lambda environ: None)
    monkeypatch.setattr(software, "cuda_build", lambda: "")
    return versions


def test_another_kind_of_machine_lists_nothing(installed: dict[str, str]) -> None:
    del installed["torch_npu"]
    assert devices() == []


def test_devices_are_those_that_torch_npu_sees(installed: dict[str, str]) -> None:
    found = devices(["910B3", "910B3"], Answer(GOOD, ""))
    assert [(d.key, d.arch, d.name, d.index, d.kind, d.usable) for d in found] == [
        ("ascend-910b3", "ascend-a2", "Ascend910B3", i, "hardware", True) for i in (0, 1)
    ]
    assert found[0].versions == {"torch": "2.13.0+cpu", "torch_npu": "2.13.0", "cann": "8.5.0", "driver": "25.2.0"}
    assert (found[0].backend, found[0].type, found[0].address) == ("ascend", "npu", "ascend:0")


def test_simulator_is_labelled(installed: dict[str, str]) -> None:
    found = devices([], Answer({**GOOD, "simulator": "0.1.0"}, ""))
    assert {device.kind for device in found} == {"simulated"}
    assert found[0].versions["simulator"] == "0.1.0"


@pytest.mark.parametrize(
    ("name", "key", "arch"),
    [
        ("Ascend910B", "ascend-910a", "ascend-910a"),
        ("Ascend910B2", "ascend-910b2", "ascend-a2"),
        ("Ascend910_9392", "ascend-910c", "ascend-a3"),
        ("Ascend950PR_9599", "ascend-950pr", "ascend-950"),
        ("Ascend950PR_0000", "ascend-950", "ascend-950"),
        ("Ascend310B1", "ascend-310b", "ascend-310b"),
        ("Ascend777", "unknown", "unknown"),
        ("Ascend910B2X", "unknown", "unknown"),
        ("ascend910b2", "unknown", "unknown"),
    ],
)
def test_case_52_names_are_matched_exactly(name: str, key: str, arch: str, installed: dict[str, str]) -> None:
    found = devices([], Answer({**GOOD, "name": name, "count": 1}, ""))
    assert [(device.key, device.arch, device.name) for device in found] == [(key, arch, name)]


def test_hardware_without_torch_npu_is_listed_with_the_remedy(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    del installed["torch_npu"]
    monkeypatch.setattr(software, "problem", lambda environ: Problem("torch_npu is not installed", "pip install it"))
    found = devices(["310P3", "unknown"])
    assert [(d.key, d.usable, d.cause, d.remedy) for d in found] == [
        ("ascend-310p", False, "torch_npu is not installed", "pip install it"),
        ("unknown", False, "torch_npu is not installed", "pip install it"),
    ]


def test_case_50_torch_npu_without_cann_is_one_device_and_nothing_is_loaded(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(software, "installed", lambda name: {"torch": "2.13.0", "torch_npu": "2.13.0"}.get(name, ""))
    monkeypatch.setattr(software, "find_cann", lambda environ: software.Cann("", False))
    monkeypatch.setattr(software, "cuda_build", lambda: "")
    (found,) = devices()
    assert not found.usable
    assert "CANN is not" in found.cause
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found.remedy
    assert "torch_npu" not in sys.modules


def test_case_49_what_does_not_load_gives_its_first_cause_and_the_variable(installed: dict[str, str]) -> None:
    (found,) = devices([], Answer({}, "ImportError: libhccl.so: cannot open shared object file"))
    assert found.cause == "torch_npu 2.13.0 does not load under torch 2.13.0+cpu: ImportError: libhccl.so: cannot open shared object file"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 lets torch import" in found.remedy


def test_case_63_cuda_build_that_does_not_load_names_both(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "cuda_build", lambda: "13.0")
    (found,) = devices([], Answer({}, "RuntimeError: Two accelerators cannot be used at the same time"))
    assert "torch 2.13.0+cpu is a build for CUDA 13.0 and torch_npu 2.13.0" in found.cause
    assert "Two accelerators" in found.cause
    assert "CPU build of torch" in found.remedy
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found.remedy


def test_case_51_the_device_stays_what_it_is_under_transfer_to_npu(installed: dict[str, str]) -> None:
    for environ, modules in (({"TORCH_TRANSFER_TO_NPU": "1"}, {}), ({}, {"torch_npu.contrib.transfer_to_npu": sys})):
        found = devices([], Answer(GOOD, ""), environ, modules)
        assert {device.key for device in found} == {"ascend-910b3"}
        assert {device.versions["transfer_to_npu"] for device in found} == {"active"}


def test_no_device_names_the_variable_that_may_hide_them(installed: dict[str, str]) -> None:
    (found,) = devices([], Answer({**GOOD, "count": 0, "name": ""}, ""), {"ASCEND_RT_VISIBLE_DEVICES": ""})
    assert "sees no NPU (ASCEND_RT_VISIBLE_DEVICES='')" in found.cause
    assert "npu-smi" in found.remedy
    (found,) = devices([], Answer({**GOOD, "count": 0, "name": "", "error": "driver is down"}, ""))
    assert found.cause == "driver is down"


@pytest.mark.parametrize(
    ("error", "remedy"), [("Unsupported soc version: Ascend777", "update torch_npu"), ("INF_NAN_MODE_ENABLE is 0", "unset INF_NAN_MODE_ENABLE")]
)
def test_a_device_that_torch_npu_refuses(error: str, remedy: str, installed: dict[str, str]) -> None:
    found = devices([], Answer({**GOOD, "error": error}, ""))
    assert all(not device.usable for device in found)
    assert error in found[0].cause
    assert remedy in found[0].remedy


def test_autoload_off_is_said_before_torch_fails(installed: dict[str, str]) -> None:
    (found, _) = devices([], Answer(GOOD, ""), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert not found.usable
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading torch_npu" in found.cause
    assert "import torch_npu before" in found.remedy


def test_smi_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/local/bin/{name}")
    monkeypatch.setattr("glob.glob", lambda pattern: ["a", "b", "c"])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, SMI_TABLE, ""))
    assert discovery.chips() == ["910B3", "910B3"]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 255, "dcmi model initialized failed", ""))
    assert discovery.chips() == ["unknown"] * 3, "one a device node"


@pytest.mark.parametrize("error", [OSError(2, "no such file"), subprocess.TimeoutExpired("npu-smi", 15)])
def test_smi_that_does_not_answer(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    monkeypatch.setattr(subprocess, "run", fails)
    assert discovery.chips() == []


def test_failure_line_is_the_first_exception_of_a_chain() -> None:
    chain = """Traceback (most recent call last):
  File "torch_npu/npu/utils.py", line 8, in <module>
    import torch_npu._C
ImportError: libhccl.so: cannot open shared object file: No such file or directory

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
RuntimeError: Failed to load the backend extension: torch_npu.
"""
    assert failure_line(chain) == "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
    assert failure_line("Segmentation fault\n\n") == "Segmentation fault"
    assert failure_line("") == ""


@pytest.mark.parametrize(
    ("error", "words"), [(subprocess.TimeoutExpired("python", 1), "did not answer within"), (OSError(12, "out of memory"), "out of memory")]
)
def test_probe_that_does_not_end_or_start(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(subprocess, "run", fails)
    assert words in discovery.run_probe().failure


def test_probe_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -11, "Warning: something\n", ""))
    assert discovery.run_probe().failure == "the probe ended with status -11"


FAKE = """
import sys, types
_C = types.SimpleNamespace(_npu_get_soc_version=lambda: 220, _npu_is_support_inf_nan=lambda: True)
def _version(package):
    if package == "DRIVER":
        raise RuntimeError("no driver")
    return "8.5.0"
npu = types.SimpleNamespace(device_count=lambda: 1, get_device_name=lambda index: "Ascend910B1", utils=types.SimpleNamespace(get_cann_version=_version))
print("Warning: a line of the vendor's")
"""


def put_packages(folder: Path, torch_npu: str, torch: str = "") -> None:
    for name, text in (("torch", torch), ("torch_npu", torch_npu)):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text)


def test_probe_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_packages(tmp_path, FAKE)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    answer = discovery.run_probe()
    assert answer.failure == ""
    assert answer.data == {"count": 1, "name": "Ascend910B1", "soc": 220, "inf_nan": True, "error": "", "cann": "8.5.0", "driver": "", "simulator": ""}


def test_case_49_broken_entry_point_is_reported_by_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own way of failing, without its weight: the extension's error first, torch's sentence after it."""
    torch = 'try:\n    import torch_npu\nexcept ImportError as error:\n    raise RuntimeError("Failed to load the backend extension: torch_npu") from error\n'
    put_packages(tmp_path, 'raise ImportError("libhccl.so: cannot open shared object file")\n', torch)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    assert discovery.run_probe().failure == "ImportError: libhccl.so: cannot open shared object file"
