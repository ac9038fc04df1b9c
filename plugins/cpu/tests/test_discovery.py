"""Discovery from the kernel's files and package metadata."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from mpbackend_cpu import discovery

AVX512 = "avx512f avx512dq avx512cd avx512bw avx512vl"


def x86(*flags: str) -> str:
    return f"processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Some Processor @ 2.0GHz\nflags\t\t: fpu sse2 avx2 {' '.join(flags)}\n\nprocessor\t: 1\n"


ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd bf16\nCPU implementer\t: 0x41\n"


@pytest.mark.parametrize(
    ("cpuinfo", "machine", "arch"),
    [
        (x86(), "x86_64", "x86-64"),
        (x86("avx512f"), "x86_64", "x86-64"),
        (x86(AVX512), "x86_64", "x86-64-avx512"),
        (x86(AVX512, "avx512_bf16"), "AMD64", "x86-64-avx512_bf16"),
        (x86(AVX512, "avx512_bf16 avx512_fp16"), "x86_64", "x86-64-avx512_fp16"),
        (x86(AVX512, "avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8"), "x86_64", "x86-64-amx"),
        (x86(AVX512, "avx512_bf16 amx_int8 amx_tile"), "x86_64", "x86-64-avx512_bf16"),
        ("", "x86_64", "x86-64"),
        (ARM, "aarch64", "aarch64"),
        ("", "arm64", "aarch64"),
        ("", "riscv64", "unknown"),
    ],
)
def test_architecture(cpuinfo: str, machine: str, arch: str) -> None:
    assert discovery.architecture(cpuinfo, machine) == arch


def test_flags_are_whole_words_of_the_flags_line() -> None:
    assert discovery.features(x86("avx512_bf16")) >= {"avx512_bf16", "sse2"}
    assert "bf16" not in discovery.features(x86("avx512_bf16"))
    assert discovery.features(ARM) == {"fp", "asimd", "bf16"}
    assert discovery.features("") == frozenset()


def test_memory_is_read_in_kib() -> None:
    assert discovery.memory_bytes("MemTotal:       24683652 kB\nMemFree:  1 kB\n") == 24683652 * 1024
    assert discovery.memory_bytes("") is None


def test_the_device_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    files = {"/proc/cpuinfo": x86(AVX512, "avx512_bf16"), "/proc/meminfo": "MemTotal: 1024 kB"}
    monkeypatch.setattr(discovery, "read_text", files.__getitem__)
    device = discovery.find_device()
    assert (device.key, device.arch, device.name) == ("x86-64-avx512_bf16", "x86-64-avx512_bf16", "Some Processor @ 2.0GHz")
    assert (device.backend, device.type, device.index, device.kind) == ("cpu", "cpu", 0, "hardware")
    assert device.memory_bytes == 1024 * 1024
    assert device.versions == {"torch": importlib.metadata.version("torch")}
    assert (device.usable, device.cause, device.remedy) == (True, "", "")
    assert device.address == "cpu:0"


def test_without_torch_the_device_is_there_but_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    device = discovery.find_device()
    assert (device.usable, device.cause, device.remedy) == (False, "torch is not installed", "pip install torch")
    assert device.versions == {}


@pytest.mark.parametrize(("version", "usable"), [("2.8.1+cpu", False), ("2.9.0a0+git1234", True), ("2.13.0+cpu", True), ("3.0", True)])
def test_an_old_torch_is_not_usable(version: str, usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)
    device = discovery.find_device()
    assert device.usable is usable
    assert device.versions == {"torch": version}
    if not usable:
        assert device.cause == f"torch {version} is older than 2.9"
        assert device.remedy == "pip install 'torch>=2.9'"


def test_a_missing_file_reads_as_empty() -> None:
    assert discovery.read_text("/proc/no-such-file") == ""


@pytest.mark.parametrize(
    ("version", "found", "refusal"),
    [
        ("0.18.0", "0.18.0", ""),
        ("0.18.0+git1", "0.18.0+git1", ""),
        ("0.17.9", "0.17.9", "torchao 0.17.9 is older than 0.18"),
        (None, "", "torchao is not installed"),
    ],
)
def test_torchao(version: str | None, found: str, refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    state = discovery.torchao_state()
    assert state[0] == found
    assert state[1].startswith(refusal)
    assert bool(state[1]) is bool(refusal)


FULL = "flags : avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_fp16 amx_tile amx_bf16"


@pytest.mark.parametrize(
    ("limit", "arch"),
    [
        ("", "x86-64-amx"),
        ("DEFAULT", "x86-64-amx"),
        ("avx10_1_512", "x86-64-avx512_fp16"),
        ("AVX512_CORE_BF16", "x86-64-avx512_bf16"),
        ("AVX512_CORE", "x86-64-avx512"),
        ("AVX2", "x86-64"),
    ],
)
def test_what_onednn_may_not_use_the_processor_does_not_have(limit: str, arch: str) -> None:
    assert discovery.architecture(FULL, "x86_64", discovery.isa_limit({"ONEDNN_MAX_CPU_ISA": limit})) == arch


def test_a_limit_does_not_add_instructions() -> None:
    assert discovery.architecture("flags : sse2", "x86_64", "AVX512_CORE_BF16") == "x86-64"


def test_a_limited_machine_refuses_bf16_and_says_why() -> None:
    code = "import mpbackend; p = mpbackend.select('cpu'); print(p.info.versions['oneDNN limited to']); p.plan('bf16')"
    environ = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    if platform.machine() != "x86_64":
        pytest.skip("the variable limits x86 processors only")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False)
    assert run.stdout.strip() == "AVX2"
    assert "bf16 is refused on x86-64" in run.stderr


@pytest.fixture
def broken_extension(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with a package that extends torch and cannot be imported."""
    metadata = tmp_path / "acme-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nacme = acme_is_not_there:_autoload\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def test_case_49_a_broken_extension_of_torch_makes_the_cpu_unusable_with_cause_and_remedy(broken_extension: dict[str, str]) -> None:
    code = "from mpbackend.cli.main import main; main(['devices'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=broken_extension, check=False)
    words = " ".join(run.stdout.split())
    assert "import torch fails" in words
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in words


def test_case_49_selecting_with_a_broken_extension_is_one_error(broken_extension: dict[str, str]) -> None:
    code = "import mpbackend\ntry:\n    mpbackend.select('cpu')\nexcept mpbackend.BackendError as error:\n    print('one error:', error)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=broken_extension, check=False)
    assert run.stdout.startswith("one error: "), run.stderr
    working = broken_extension | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = subprocess.run(
        [sys.executable, "-c", "import mpbackend; print(mpbackend.select('cpu').info.usable)"], capture_output=True, text=True, env=working, check=False
    )
    assert run.stdout.strip() == "True", run.stderr
