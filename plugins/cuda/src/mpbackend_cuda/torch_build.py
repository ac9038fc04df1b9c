"""What the installed torch can do with an NVIDIA GPU, read from its files and from package metadata. Nothing is imported to find out.

``import torch`` loads every package of the entry-point group ``torch.backends``, so one broken package, or one that takes no second accelerator beside it,
makes torch itself fail to import.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

OLDEST_TORCH = (2, 9)
"""The first release with ``torch.backends.cuda.matmul.fp32_precision`` and its siblings, which the switches of this plugin set."""

OLDEST_DRIVER: Mapping[int, int] = {11: 450, 12: 525, 13: 580}
"""Major release of CUDA to the oldest driver branch that runs it: CUDA Compatibility, table of minimum driver versions for minor version compatibility."""

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
AUTOLOAD_GROUP = "torch.backends"
WITHOUT_AUTOLOAD = f"export {AUTOLOAD}=0"

NPU_PACKAGE = "torch_npu"
TRANSFER = "TORCH_TRANSFER_TO_NPU"
TRANSFER_MODULE = "torch_npu.contrib.transfer_to_npu"

INSTALL = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
DRIVER_LIMIT_S = 10.0
ASK_DRIVER = """
import ctypes
version = ctypes.c_int()
status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
print(version.value if status == 0 else 0)
"""
"""Asks the driver library for the CUDA release that it runs; makes no context. A forward-compatibility library on the loader's path answers for itself."""


class TorchBuild(NamedTuple):
    """The installed torch.

    Attributes:
        version: its version, ``2.13.0+cu130``.
        cuda: release of CUDA that it was built with, ``13.0``; empty for a build without CUDA.
        hip: release of HIP that it was built with; empty for any but a ROCm build.
    """

    version: str
    cuda: str
    hip: str


class Fault(NamedTuple):
    """Why a GPU cannot be used by the installed torch, and what to do about it."""

    cause: str
    remedy: str


def read_build() -> TorchBuild | None:
    """Return what the installed torch was built with, from the text of its ``version.py``; None when there is no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    return TorchBuild(*(assigned(text, name) for name in ("__version__", "cuda", "hip")))


def assigned(text: str, name: str) -> str:
    """Return the string that a line of a module assigns to a name; empty when it assigns None or the name is not there."""
    match = re.search(rf"^{name}(?:\s*:[^=\n]+)?\s*=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def find_fault(build: TorchBuild | None, driver: str, environ: Mapping[str, str]) -> Fault | None:
    """Return the first reason why the installed torch cannot use a GPU, or None.

    Args:
        build: the installed torch.
        driver: version of the NVIDIA driver; empty when unknown.
        environ: the environment.
    """
    if build is None:
        return Fault("torch is not installed", INSTALL)
    return transfer_fault(environ) or build_fault(build) or driver_fault(build, driver) or autoload_fault(build, environ)


def build_fault(build: TorchBuild) -> Fault | None:
    """Return what is wrong with the build itself."""
    if build.hip:
        return Fault(f"torch {build.version} is a ROCm build, for AMD GPUs", INSTALL)
    if not build.cuda:
        return Fault(f"torch {build.version} is a build without CUDA", INSTALL)
    if release(build.version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Fault(f"torch {build.version} is older than {oldest}", f"pip install 'torch>={oldest}'")
    return None


def release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, without ``.postN`` and ``+local``; ``(0,)`` for a text that is no version."""
    try:
        return Version(version).release
    except InvalidVersion:
        return (0,)


def driver_fault(build: TorchBuild, driver: str) -> Fault | None:
    """Return what is wrong when the driver is too old for the CUDA release of torch and no forward-compatibility library stands in for it."""
    needed = OLDEST_DRIVER.get(release(build.cuda)[0], 0)
    branch = release(driver)[0]
    if branch == 0 or branch >= needed or driver_cuda() >= release(build.cuda)[0]:
        return None
    cause = f"NVIDIA driver {driver} is too old for torch {build.version}, whose CUDA {build.cuda} needs driver {needed} or later"
    return Fault(cause, f"update the driver, or install a build of torch for an older CUDA: {INSTALL.rpartition(' ')[2]}")


def driver_cuda() -> int:
    """Return the major CUDA release that the driver library runs, asked in a process of its own; 0 when it does not answer."""
    try:
        done = subprocess.run([sys.executable, "-I", "-c", ASK_DRIVER], capture_output=True, text=True, timeout=DRIVER_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    text = done.stdout.strip()
    return int(text) // 1000 if done.returncode == 0 and text.isdecimal() else 0


def autoload_fault(build: TorchBuild, environ: Mapping[str, str]) -> Fault | None:
    """Return what makes ``import torch`` fail: an entry point whose module is gone, or torch_npu beside a CUDA build. None once torch is imported."""
    if environ.get(AUTOLOAD, "1") != "1" or torch_imported():
        return None
    for entry_point in importlib.metadata.entry_points(group=AUTOLOAD_GROUP):
        top = entry_point.module.partition(".")[0]
        owner = f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist is not None else entry_point.name
        if not importable(top):
            cause = f"`import torch` fails: the entry point {entry_point.name!r} of {owner} names the module {top!r}, which is not there"
            return Fault(cause, f"{WITHOUT_AUTOLOAD}, or uninstall {owner.partition(' ')[0]}")
        if top == NPU_PACKAGE:
            cause = f"`import torch` fails: it loads {owner}, which refuses a second accelerator beside the CUDA build torch {build.version}"
            return Fault(cause, f"{WITHOUT_AUTOLOAD} to use the GPU, or uninstall {owner.partition(' ')[0]}")
    return None


def torch_imported() -> bool:
    """Tell whether this process has imported torch, so that its import cannot fail any more."""
    return "torch" in sys.modules


def transfer_fault(environ: Mapping[str, str]) -> Fault | None:
    """Return what is wrong when ``torch.cuda`` answers for an NPU."""
    if TRANSFER_MODULE in sys.modules:
        how = f"{TRANSFER_MODULE} is imported"
    elif environ.get(TRANSFER) == "1" and importable(NPU_PACKAGE):
        how = f"{TRANSFER}=1"
    else:
        return None
    return Fault(f"torch.cuda answers for an Ascend NPU here, not for a GPU: {how}", "select the NPU by its own name, npu:0, and drop the transfer")


def importable(name: str) -> bool:
    """Tell whether a top-level module can be found; imports nothing."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return name in sys.modules  # a module that was put there without a spec
