"""What is installed for an NPU, from package metadata and the file system. Nothing is imported to find out.

torch loads torch_npu by itself, through an entry point of the group ``torch.backends``; when torch_npu's libraries miss CANN's, ``import torch`` fails.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

TORCH = "torch"
TORCH_NPU = "torch_npu"

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""``0`` keeps torch from loading torch_npu, and so lets ``import torch`` work without CANN."""

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
TRANSFER = "TORCH_TRANSFER_TO_NPU"
TRANSFER_MODULE = "torch_npu.contrib.transfer_to_npu"

HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
LIBRARY = "libascendcl.so"
LIBRARY_FOLDERS = ("lib64", "runtime/lib64")
LOADER_LIMIT_S = 10.0

LET_TORCH_IMPORT = f"{AUTOLOAD}=0 lets torch import without torch_npu"
SOURCE_CANN = "source set_env.sh of the CANN toolkit (by default /usr/local/Ascend/ascend-toolkit/set_env.sh)"


class Problem(NamedTuple):
    """Why an NPU cannot be used, and what to do about it."""

    cause: str
    remedy: str


class Cann(NamedTuple):
    """Where CANN's runtime library is.

    Attributes:
        folder: the folder that holds it; empty when it was not found.
        loadable: whether the dynamic loader finds it there.
    """

    folder: str
    loadable: bool


def installed(distribution: str) -> str:
    """Return the version of an installed distribution; empty when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cuda_build() -> str:
    """Return the CUDA version that the installed torch was built with; empty for a build without it, or without torch.

    The local part of the version does not tell: the default package of PyPI is a CUDA build and has none.
    """
    try:
        path = importlib.metadata.distribution(TORCH).locate_file("torch/version.py")
        text = Path(str(path)).read_text(encoding="utf-8")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return ""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, without ``.postN`` and ``+local``; empty when it is none."""
    try:
        return Version(version).release
    except InvalidVersion:
        return ()


def loader_folders(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the folders in which the dynamic loader finds the runtime library: those of ``LD_LIBRARY_PATH``, then those of its cache."""
    yield from (folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder)
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=LOADER_LIMIT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return
    for line in listing.splitlines():
        if line.strip().startswith(LIBRARY) and "=>" in line:
            yield str(Path(line.partition("=>")[2].strip()).parent)


def find_cann(environ: Mapping[str, str]) -> Cann:
    """Find CANN's runtime library."""
    for folder in loader_folders(environ):
        if Path(folder, LIBRARY).is_file():
            return Cann(folder, True)
    for variable in HOMES:
        for folder in LIBRARY_FOLDERS:
            path = Path(environ[variable], folder) if environ.get(variable) else None
            if path is not None and (path / LIBRARY).is_file():
                return Cann(str(path), False)
    return Cann("", False)


def problem(environ: Mapping[str, str]) -> Problem | None:
    """Return what keeps the installed software from using an NPU, as far as that shows without loading it; None when nothing does."""
    torch, torch_npu = installed(TORCH), installed(TORCH_NPU)
    if not torch:
        return Problem("torch is not installed", f"pip install torch=={major_minor(torch_npu)}.*" if torch_npu else "pip install torch torch_npu")
    if not torch_npu:
        return Problem("torch_npu is not installed", f"pip install 'torch_npu=={major_minor(torch)}.*', after CANN")
    if release(torch)[:2] != release(torch_npu)[:2]:
        cause = f"torch_npu {torch_npu} is made for torch {major_minor(torch_npu)}, and torch {torch} is installed"
        return Problem(cause, f"pip install 'torch_npu=={major_minor(torch)}.*'; {LET_TORCH_IMPORT}")
    cann = find_cann(environ)
    if not cann.loadable:
        build = f"; torch {torch} is a build for CUDA {cuda_build()}, and torch takes one kind of accelerator" if cuda_build() else ""
        if cann.folder:
            return Problem(
                f"CANN is installed, but the loader does not find {LIBRARY}, so torch_npu {torch_npu} cannot load{build}", f"{SOURCE_CANN}; {LET_TORCH_IMPORT}"
            )
        cause = f"torch_npu {torch_npu} is installed and CANN is not ({LIBRARY} was not found), so `import torch` fails{build}"
        return Problem(cause, f"install CANN and {SOURCE_CANN}, or uninstall torch_npu; {LET_TORCH_IMPORT}")
    return None


def major_minor(version: str) -> str:
    """Return the first two release numbers of a version as text."""
    return ".".join(map(str, release(version)[:2]))


def transfers(environ: Mapping[str, str], modules: Mapping[str, object]) -> bool:
    """Tell whether ``transfer_to_npu`` is active, by which ``torch.cuda`` answers for the NPU."""
    return TRANSFER_MODULE in modules or environ.get(TRANSFER) == "1"


def autoload_off(environ: Mapping[str, str], modules: Mapping[str, object]) -> bool:
    """Tell whether torch will not load torch_npu in this process, so that it will not know the device type."""
    return environ.get(AUTOLOAD, "1") != "1" and TORCH_NPU not in modules
