"""What this plugin runs on a processor, and why it does not run the rest. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from mpbackend.backend import Implementation
from mpbackend.capability import Level
from mpbackend.formats import FORMATS
from mpbackend_cpu.discovery import ARM_ARCH

OPS = ("matmul", "conv")

BF16_INSTRUCTIONS = frozenset({"x86-64-amx", "x86-64-avx512_bf16", "x86-64-avx512_fp16"})
"""Architectures with a bf16 dot product. A processor that reports avx512_fp16 has avx512_bf16 too: both came to x86 servers before it."""

BF16_BY_ONEDNN = BF16_INSTRUCTIONS | {"x86-64-avx512"}
"""Where torch hands bf16 to oneDNN, which needs avx512bw, avx512vl and avx512dq (``mkldnn_bf16_device_check``); elsewhere torch's own loop runs it."""

FP8 = ("fp8_e4m3", "fp8_e5m2")
MIXED = (("fp8_e5m2", "fp8_e4m3"), ("fp8_e4m3", "fp8_e5m2"))
"""Operand pairs of two formats that a recipe can ask for."""

FP8_SCALINGS = ("tensor", "row")
"""Scale layouts that torch's scaled product takes on a CPU."""

FP16_ROUNDED = "computed in fp32 from fp16 operands, each result rounded to fp16; attention keeps its probabilities in fp32"
TF32 = "torch's setting 'tf32' changes the arithmetic only with AMX-FP16, which no architecture key here stands for"
SCALED_PRODUCT = "linear layers are quantized with torch and multiplied by torch._scaled_mm, in fp32 from fp8 operands"
LOW_BIT = "this plugin converts linear layers to fp8_e4m3 and fp8_e5m2 with tensor or row scales only; plan bf16, or a backend that does more"
OTHER = "torch has no CPU matrix product in this format"


def implementations(arch: str, features: frozenset[str], torchao: str = "") -> list[Implementation]:
    """Return what runs on an architecture, then what does not, with reasons.

    Args:
        arch: architecture key.
        features: flags of ``/proc/cpuinfo``; tell whether an Arm processor has bf16 instructions.
        torchao: why torchao does not convert layers here; empty when it does.
    """
    runs = [row for op in OPS for row in running(op, arch, features)] + list(scaled(torchao))
    kinds = [name for name, spec in FORMATS.items() if spec.kind == "float"]
    pairs = [(op, name, name) for op in OPS for name in kinds] + [(op, *pair) for op in OPS for pair in MIXED]
    spoken = {(row.op, row.a, row.b) for row in runs}
    return runs + [Implementation(op=op, a=a, b=b, accumulate="none", path="none", reason=refusal(a)) for op, a, b in pairs if (op, a, b) not in spoken]


def scaled(torchao: str) -> Iterator[Implementation]:
    """Yield the products of scaled fp8 operands: by torchao where it is installed, and by plain torch; see ``implementations``."""
    for a in FP8:
        for b in FP8:
            for scaling in FP8_SCALINGS:
                row = Implementation(op="matmul", a=a, b=b, scaling=scaling, path="torchao", level=None if torchao else "emulated", reason=torchao)
                yield row
                yield msgspec.structs.replace(row, path="aten", level="emulated", reason=SCALED_PRODUCT)


def running(op: str, arch: str, features: frozenset[str]) -> Iterator[Implementation]:
    """Yield what runs for one operation."""
    fp32_path = "mkl" if op == "matmul" else "onednn"
    yield Implementation(op=op, a="fp32", b="fp32", accumulate="fp32", path=fp32_path, level="native")
    yield Implementation(op=op, a="fp64", b="fp64", accumulate="fp64", path="mkl" if op == "matmul" else "aten", level="native")
    bf16 = bf16_level(arch, features)
    by_onednn = arch in BF16_BY_ONEDNN or (arch == ARM_ARCH and bf16 == "native")
    yield Implementation(op=op, a="bf16", b="bf16", accumulate="fp32", path="onednn" if by_onednn else "aten", level=bf16)
    yield Implementation(op=op, a="fp16", b="fp16", accumulate="fp32", path=fp32_path, level="emulated", reason=FP16_ROUNDED)


def bf16_level(arch: str, features: frozenset[str]) -> Level:
    """Return whether bf16 products have an instruction."""
    return "native" if arch in BF16_INSTRUCTIONS or (arch == ARM_ARCH and "bf16" in features) else "emulated"


def refusal(name: str) -> str:
    """Return why products in a format do not run."""
    if FORMATS[name].is_low_bit:
        return LOW_BIT
    return TF32 if name == "tf32" else OTHER
