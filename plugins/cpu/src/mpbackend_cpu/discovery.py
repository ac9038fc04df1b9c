"""What this machine's processor is, from the kernel's own files and package metadata. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

from mpbackend.device import Device

BACKEND = "cpu"
OLDEST_TORCH = (2, 9)
"""The first release with ``torch.backends.mkldnn.matmul.fp32_precision``, which the switches of this plugin set."""

EXTENSIONS = "torch.backends"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
IMPORT_LIMIT = 15.0
"""Seconds that an import of torch may take; 1 to 3 on a machine at rest, and within the time that ``discover()`` has."""

OLDEST_TORCHAO = (0, 18)
"""The first release whose float8 layers were compared with the plain lowering."""

X86_MACHINES = frozenset({"x86_64", "amd64", "i686"})
ARM_MACHINES = frozenset({"aarch64", "arm64"})

X86_ARCHS: tuple[tuple[str, frozenset[str]], ...] = (
    ("x86-64-amx", frozenset({"amx_tile", "amx_bf16"})),
    ("x86-64-avx512_fp16", frozenset({"avx512_fp16"})),
    ("x86-64-avx512_bf16", frozenset({"avx512_bf16"})),
    ("x86-64-avx512", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})),
    ("x86-64", frozenset()),
)
"""Architecture key of the matrix to the flags of ``/proc/cpuinfo`` that it takes; the first that fits is the processor's."""

ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that keep oneDNN from instructions that the processor has; torch's bf16 products are oneDNN's."""

ISA_LIMITS: dict[str, str] = {
    **dict.fromkeys(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), "x86-64"),
    **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), "x86-64-avx512"),
    "AVX512_CORE_BF16": "x86-64-avx512_bf16",
    **dict.fromkeys(("AVX512_CORE_FP16", "AVX10_1_512"), "x86-64-avx512_fp16"),
}
"""Values of these variables to the architecture whose arithmetic is left (oneDNN developer guide, CPU dispatcher control); other values limit nothing."""

ARM_ARCH = "aarch64"
UNKNOWN_ARCH = "unknown"


def read_text(path: str) -> str:
    """Return the content of a file of the kernel; empty where there is none, as outside Linux."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def field(cpuinfo: str, *names: str) -> str:
    """Return the first value of the first of ``names`` in the text of ``/proc/cpuinfo``; empty when there is none."""
    for name in names:
        for line in cpuinfo.splitlines():
            key, colon, value = line.partition(":")
            if colon and key.strip() == name and value.strip():
                return value.strip()
    return ""


def features(cpuinfo: str) -> frozenset[str]:
    """Return the instruction-set flags in the text of ``/proc/cpuinfo`` (``flags`` on x86, ``Features`` on Arm)."""
    return frozenset(field(cpuinfo, "flags", "Features").split())


def isa_limit(environ: Mapping[str, str]) -> str:
    """Return the value of the first set variable that limits oneDNN's instructions; empty when none does."""
    return next((environ[name].strip().upper() for name in ISA_VARIABLES if environ.get(name, "").strip().upper() in ISA_LIMITS), "")


def architecture(cpuinfo: str, machine: str, limit: str = "") -> str:
    """Return the architecture key of the matrix: the processor's, or the lesser one whose arithmetic oneDNN is limited to.

    Args:
        cpuinfo: text of ``/proc/cpuinfo``; empty where there is none, which leaves an x86 processor at its baseline.
        machine: ``platform.machine()``.
        limit: as ``isa_limit`` returns it.
    """
    if machine.lower() in ARM_MACHINES:
        return ARM_ARCH
    if machine.lower() not in X86_MACHINES:
        return UNKNOWN_ARCH
    flags = features(cpuinfo)
    keys = [key for key, _ in X86_ARCHS]
    first = keys.index(ISA_LIMITS[limit]) if limit in ISA_LIMITS else 0
    return next(key for key, needed in X86_ARCHS[first:] if needed <= flags)


def memory_bytes(meminfo: str) -> int | None:
    """Return the bytes of main memory from the text of ``/proc/meminfo``, whose unit is KiB; None where it does not say."""
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def torch_state() -> tuple[dict[str, str], str, str]:
    """Return (versions, cause, remedy): cause and remedy are empty when the installed torch can be used."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return {}, "torch is not installed", "pip install torch"
    if Version(version).release < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return {"torch": version}, f"torch {version} is older than {oldest}", f"pip install 'torch>={oldest}'"
    return {"torch": version}, "", ""


def import_fault(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return (cause, remedy) where ``import torch`` fails because of a package that extends it; empty strings where it does not.

    torch imports every entry point of the group ``torch.backends`` unless ``TORCH_DEVICE_BACKEND_AUTOLOAD`` is 0. Only where there is one is torch imported, in
    a process of its own.
    """
    extensions = importlib.metadata.entry_points(group=EXTENSIONS)
    if not extensions or environ.get(AUTOLOAD) == "0":
        return "", ""
    owners = ", ".join(sorted({entry.dist.name if entry.dist is not None else entry.name for entry in extensions}))
    remedy = f"set {AUTOLOAD}=0, or repair or uninstall {owners}"
    try:
        run = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True, timeout=IMPORT_LIMIT, check=False, env=dict(environ))
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"import torch did not finish: {type(error).__name__}", remedy
    if run.returncode == 0:
        return "", ""
    last = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
    return f"import torch fails: {last}", remedy


def torchao_state() -> tuple[str, str]:
    """Return (version, why it does not convert layers): the version is empty when torchao is not installed, the reason when it does."""
    try:
        version = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        return "", "torchao is not installed (pip install 'mpbackend-cpu[torchao]')"
    if Version(version).release < OLDEST_TORCHAO:
        return version, f"torchao {version} is older than {'.'.join(map(str, OLDEST_TORCHAO))}"
    return version, ""


def find_device() -> Device:
    """Return the processor of this machine."""
    cpuinfo = read_text("/proc/cpuinfo")
    machine = platform.machine()
    limit = isa_limit(os.environ)
    arch = architecture(cpuinfo, machine, limit)
    versions, cause, remedy = torch_state()
    if not cause:
        cause, remedy = import_fault(os.environ)
    if limit:
        versions["oneDNN limited to"] = limit
    return Device(
        key=arch,
        arch=arch,
        name=field(cpuinfo, "model name", "Model") or platform.processor() or machine,
        backend=BACKEND,
        type="cpu",
        index=0,
        versions=versions,
        memory_bytes=memory_bytes(read_text("/proc/meminfo")),
        usable=not cause,
        cause=cause,
        remedy=remedy,
    )
