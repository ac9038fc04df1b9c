"""The GPUs of this machine as torch would count them. Makes no context and imports no torch."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from mpbackend.device import Device
from mpbackend.errors import UnknownNameError
from mpbackend.matrix import Matrix, load_matrix
from mpbackend_cuda import smi, torch_build, visible
from mpbackend_cuda.smi import Answer, Instance
from mpbackend_cuda.torch_build import Fault, TorchBuild

BACKEND = "cuda"
DRIVER = Path("/proc/driver/nvidia")
"""Stands where the kernel module is loaded, on Linux outside WSL."""

UNKNOWN = "unknown"
SOME_GPU = "gpu"
"""Key of what is shown when the reason why there is no GPU is known, and the GPU is not."""


def find_devices() -> list[Device]:
    """Return the visible GPUs in the order of their indices, usable or not.

    Where something is wrong with all of them, one unusable device carries the cause. Where this machine has neither driver nor ``nvidia-smi`` and its torch is
    no CUDA build, nothing asks for a GPU here, and there is no device at all.
    """
    build = torch_build.read_build()
    answer = smi.ask()
    if not answer.gpus:
        return [absent(fault, build)] if (fault := machine_fault(answer, build)) else []
    seen = visible.view(answer, os.environ)
    if not seen.entries:
        return [absent(Fault(seen.cause, seen.remedy), build)]
    fault = torch_build.find_fault(build, answer.gpus[0].driver, os.environ)
    if fault is None and seen.cause:
        fault = Fault(seen.cause, seen.remedy)
    return [describe(index, entry, build, fault) for index, entry in enumerate(seen.entries)]


def machine_fault(answer: Answer, build: TorchBuild | None) -> Fault | None:
    """Return why there is no GPU, or None where nothing on this machine expects one."""
    if answer.installed:
        return Fault(answer.cause, answer.remedy)
    if DRIVER.exists():
        return Fault("the NVIDIA driver is loaded, but nvidia-smi is not on the path", "add its folder to PATH")
    if build is not None and build.cuda:
        return Fault(f"torch {build.version} is a CUDA build, and this machine has no NVIDIA driver", answer.remedy)
    return None


def absent(fault: Fault, build: TorchBuild | None) -> Device:
    """Return the device that stands for GPUs which cannot be told apart or are not there."""
    return Device(
        key=SOME_GPU,
        arch=UNKNOWN,
        name="NVIDIA GPU",
        backend=BACKEND,
        type="cuda",
        versions=software(build),
        usable=False,
        cause=fault.cause,
        remedy=fault.remedy,
    )


def describe(index: int, entry: visible.Entry, build: TorchBuild | None, fault: Fault | None) -> Device:
    """Return a device.

    A model of the matrix is found by its exact name, else the architecture by the compute capability. A MIG instance is a part of a model, so that it has the
    architecture's key.
    """
    gpu = entry.gpu if isinstance(entry, Instance) else entry
    name = f"{gpu.name} MIG {entry.profile}" if isinstance(entry, Instance) else gpu.name
    model, arch = matrix().identify(name, gpu.capability)
    by_capability = f"sm_{gpu.capability.replace('.', '')}" if gpu.capability else UNKNOWN
    if fault is None and not gpu.capability and arch is None:
        fault = Fault(f"the driver does not tell the compute capability of {name!r}", "update the NVIDIA driver")
    return Device(
        key=model.key if model is not None else arch.key if arch is not None else by_capability,
        arch=arch.key if arch is not None else UNKNOWN,
        name=name,
        backend=BACKEND,
        type="cuda",
        index=index,
        versions={"driver": gpu.driver, **software(build)},
        memory_bytes=None if isinstance(entry, Instance) else gpu.memory_bytes,
        usable=fault is None,
        cause=fault.cause if fault is not None else "",
        remedy=fault.remedy if fault is not None else "",
    )


def software(build: TorchBuild | None) -> dict[str, str]:
    """Return the versions of torch and of its CUDA."""
    if build is None:
        return {}
    return {"torch": build.version} | ({"cuda": build.cuda} if build.cuda else {})


def find_device(text: str) -> Device:
    """Return the device that digits or a device key name; of several with the same key the first that is usable.

    Raises:
        UnknownNameError: there is none.
    """
    devices = find_devices()
    key = canonical(text)
    matching = [device for device in devices if (str(device.index) == text if text.isdecimal() else device.key == key)]
    if matching:
        return next((device for device in matching if device.usable), matching[0])
    allowed = [name for device in devices for name in (str(device.index), device.key)]
    remedy = "`mpbackend devices` lists them" if devices else "this machine has no NVIDIA driver, and its torch is no CUDA build"
    raise UnknownNameError("device of backend cuda", text, allowed, remedy=remedy)


def canonical(key: str) -> str:
    """Return the device key that an alias of the matrix stands for; the text itself where it is none."""
    try:
        return matrix().device(key).key
    except UnknownNameError:
        return key


def capability(device: Device) -> tuple[int, int]:
    """Return the compute capability in a device's architecture or key (``sm_103`` is 10.3); (0, 0) when neither tells it."""
    for text in (device.arch, device.key):
        digits = text.removeprefix("sm_")
        if text.startswith("sm_") and digits.isdecimal() and len(digits) > 1:
            return int(digits[:-1]), int(digits[-1])
    return 0, 0


@functools.cache
def matrix() -> Matrix:
    """Return the shipped matrices."""
    return load_matrix()
