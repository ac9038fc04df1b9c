"""Devices of a machine, usable or with the reason why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpbackend.device import Device
from mpbackend.errors import UnknownNameError
from mpbackend_cuda import discovery, torch_build
from mpbackend_cuda.discovery import capability, find_device, find_devices
from mpbackend_cuda.torch_build import TorchBuild
from plugins.cuda.tests.conftest import CUDA_BUILD, Machine, gpu

CPU_BUILD = TorchBuild("2.13.0+cpu", "", "")


def test_a_known_model(machine: Machine) -> None:
    machine(gpu(0), gpu(1))
    first, second = find_devices()
    assert (first.key, first.arch, first.name) == ("h100", "sm_90", "NVIDIA H100 80GB HBM3")
    assert (first.backend, first.type, first.index, second.index, first.kind) == ("cuda", "cuda", 0, 1, "hardware")
    assert first.versions == {"driver": "580.65.06", "torch": "2.13.0+cu130", "cuda": "13.0"}
    assert first.memory_bytes == 81559 << 20
    assert (first.usable, first.cause, first.remedy) == (True, "", "")
    assert first.address == "cuda:0"


def test_an_unknown_name_on_a_known_capability_is_its_architecture(machine: Machine) -> None:
    machine(gpu(name="NVIDIA H100 NVL"))
    (device,) = find_devices()
    assert (device.key, device.arch, device.usable) == ("sm_90", "sm_90", True)


def test_an_unknown_capability_stays_unknown(machine: Machine) -> None:
    machine(gpu(name="NVIDIA Thor", capability="11.0"))
    (device,) = find_devices()
    assert (device.key, device.arch, device.usable) == ("sm_110", "unknown", True)
    assert capability(device) == (11, 0)


def test_a_capability_that_is_not_told_is_not_guessed(machine: Machine) -> None:
    machine(gpu(name="NVIDIA Something", capability="[N/A]"))
    (device,) = find_devices()
    assert (device.key, device.arch, device.usable) == ("unknown", "unknown", False)
    assert "does not tell the compute capability" in device.cause
    assert capability(device) == (0, 0)


def test_an_instance_has_the_architecture_of_its_gpu_and_not_its_peaks(machine: Machine) -> None:
    name = "NVIDIA A100-SXM4-40GB"
    listing = f"GPU 0: {name} (UUID: GPU-0aaaaaaa-0000-0000-0000-000000000000)\n  MIG 1g.5gb      Device  0: (UUID: MIG-1)"
    machine(gpu(name=name, capability="8.0", mig="Enabled"), listing=listing)
    (device,) = find_devices()
    assert (device.key, device.arch, device.name, device.memory_bytes) == ("sm_80", "sm_80", f"{name} MIG 1g.5gb", None)


def test_indices_are_those_of_the_visible_devices(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(gpu(0, "NVIDIA L4", "8.9"), gpu(1))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (device,) = find_devices()
    assert (device.key, device.index) == ("h100", 0)


def test_hidden_gpus_are_one_device_that_says_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(gpu(0), gpu(1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (device,) = find_devices()
    assert (device.key, device.usable) == ("gpu", False)
    assert device.cause == "CUDA_VISIBLE_DEVICES='' leaves none of 2 GPUs visible"


def test_several_models_in_an_order_of_their_own(machine: Machine) -> None:
    machine(gpu(0, "NVIDIA L4", "8.9"), gpu(1))
    devices = find_devices()
    assert [device.usable for device in devices] == [False, False]
    assert devices[0].remedy == "export CUDA_DEVICE_ORDER=PCI_BUS_ID"


@pytest.mark.parametrize("build", [None, CPU_BUILD])
def test_a_gpu_with_a_torch_that_does_not_use_it(build: TorchBuild | None, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(gpu())
    monkeypatch.setattr(torch_build, "read_build", lambda: build)
    (device,) = find_devices()
    assert (device.key, device.usable) == ("h100", False)
    assert "torch" in device.cause
    assert "pytorch.org" in device.remedy
    assert ("torch" in device.versions) == (build is not None)


@pytest.mark.parametrize("build", [None, CPU_BUILD])
def test_where_nothing_expects_a_gpu_there_is_no_device(build: TorchBuild | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "read_build", lambda: build)
    assert find_devices() == []
    with pytest.raises(UnknownNameError, match="this machine has no NVIDIA driver, and its torch is no CUDA build"):
        find_device("0")


def test_a_cuda_build_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "read_build", lambda: CUDA_BUILD)
    (device,) = find_devices()
    assert (device.key, device.usable) == ("gpu", False)
    assert device.cause == "torch 2.13.0+cu130 is a CUDA build, and this machine has no NVIDIA driver"
    assert find_device("0") == device


def test_a_driver_without_its_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "DRIVER", tmp_path)
    monkeypatch.setattr(torch_build, "read_build", lambda: CPU_BUILD)
    (device,) = find_devices()
    assert device.cause == "the NVIDIA driver is loaded, but nvidia-smi is not on the path"


def test_a_command_that_fails_is_a_device_that_says_so(machine: Machine) -> None:
    machine("No devices were found", status=6)
    (device,) = find_devices()
    assert (device.key, device.usable) == ("gpu", False)
    assert "No devices were found" in device.cause
    assert device.remedy == "pass a GPU to this machine or container"


def test_addresses(machine: Machine) -> None:
    machine(gpu(0), gpu(1), gpu(2))
    assert find_device("2").index == 2
    assert find_device("h100").index == 0
    assert find_device("h100-sxm") == find_device("h100"), "an alias of the matrix"
    for text in ("3", "h200", "", "00"):
        with pytest.raises(UnknownNameError, match=f"unknown device of backend cuda '{text}'"):
            find_device(text)


@pytest.mark.parametrize(
    ("arch", "key", "expected"),
    [("sm_90", "h100", (9, 0)), ("sm_103", "gb300", (10, 3)), ("unknown", "sm_110", (11, 0)), ("unknown", "gpu", (0, 0)), ("sm_x", "sm_", (0, 0))],
)
def test_capability(arch: str, key: str, expected: tuple[int, int]) -> None:
    assert capability(Device(key=key, arch=arch, name="")) == expected
