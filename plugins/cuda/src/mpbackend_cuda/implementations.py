"""What this plugin runs on a GPU, and why it does not run the rest. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mpbackend.backend import Implementation
from mpbackend.formats import FORMATS

OPS = ("matmul", "conv")
PATHS = {"matmul": "cublaslt", "conv": "torch_cudnn"}

Capability = tuple[int, int]

TENSOR_CORES_8 = (8, 0)
"""Ampere: the first compute capability with bf16 and tf32 instructions (PTX ISA, target notes of mma)."""

BF16_EMULATED = "no bf16 instruction before compute capability 8.0: torch computes in fp32 and rounds"
TF32_ABSENT = "no tf32 instruction before compute capability 8.0: torch computes in fp32"
CONV_LOW_BIT = "a low-bit recipe converts linear layers; convolutions run in bf16"
OTHER = "neither torch nor Transformer Engine multiplies in this format on a GPU"


class Scheme(NamedTuple):
    """A scale layout of Transformer Engine.

    Attributes:
        pairs: operand formats.
        first: lowest compute capability.
        end: compute capability from which it is refused; None for no end.
        cuda: lowest release of CUDA.
        late: why it is refused from ``end`` on.
        check: the function of ``transformer_engine.pytorch`` that says whether the present device has it.
        multiple: what tokens and features must be a multiple of, in all three products: the extent of a scale, at least 16; for 1x16 scales the 128 that
            Transformer Engine pads to itself (``get_align_size_for_quantization``).
    """

    pairs: tuple[tuple[str, str], ...]
    first: Capability
    end: Capability | None
    cuda: tuple[int, int]
    late: str
    check: str
    multiple: int


FP8_PAIRS = (("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"), ("fp8_e4m3", "fp8_e5m2"))
BLOCK_LATE = "from compute capability 10.0 on Transformer Engine runs block scales through the mxfp8 units, with scales that are powers of two"
MX_LATE = "Transformer Engine has no mxfp8 product for every layout on compute capability 12.0 and later"

SCHEMES: Mapping[str, Scheme] = {
    "tensor": Scheme(FP8_PAIRS, (8, 9), None, (12, 1), "", "is_fp8_available", 16),
    "block_1x128_128x128": Scheme(FP8_PAIRS, (9, 0), (10, 0), (12, 9), BLOCK_LATE, "is_fp8_block_scaling_available", 128),
    "block_1x128": Scheme(FP8_PAIRS, (9, 0), (10, 0), (12, 9), BLOCK_LATE, "is_fp8_block_scaling_available", 128),
    "mx_1x32": Scheme(FP8_PAIRS, (10, 0), (12, 0), (12, 8), MX_LATE, "is_mxfp8_available", 32),
    "nv_1x16": Scheme((("fp4_e2m1", "fp4_e2m1"),), (10, 0), None, (12, 8), "", "is_nvfp4_available", 128),
}
"""Scale layouts of the matrix vocabulary to what Transformer Engine 2.9 to 2.20 does with them (``transformer_engine/pytorch/quantization.py``)."""


def implementations(capability: Capability, cuda: str, engine: str) -> list[Implementation]:
    """Return what runs on a GPU, then what does not, with reasons.

    Args:
        capability: compute capability.
        cuda: release of CUDA that torch was built with; empty when unknown.
        engine: why Transformer Engine cannot be used; empty when it can.
    """
    rows = [row for op in OPS for row in (*plain(op, capability), *low_bit(op, capability, cuda, engine))]
    spoken = {row.a for row in rows}
    names = [name for name, spec in FORMATS.items() if spec.kind == "float" and name not in spoken]
    return rows + [Implementation(op=op, a=name, b=name, accumulate="none", path="none", reason=OTHER) for op in OPS for name in names]


def plain(op: str, capability: Capability) -> Iterator[Implementation]:
    """Yield what torch runs by itself for one operation."""
    path = PATHS[op]
    recent = capability >= TENSOR_CORES_8
    yield Implementation(op=op, a="fp32", b="fp32", accumulate="fp32", path=path, level="library")
    yield Implementation(op=op, a="fp64", b="fp64", accumulate="fp64", path=path, level="library")
    yield Implementation(op=op, a="fp16", b="fp16", accumulate="fp32", path=path, level="library")
    if recent:
        yield Implementation(op=op, a="bf16", b="bf16", accumulate="fp32", path=path, level="library")
        yield Implementation(op=op, a="tf32", b="tf32", accumulate="fp32", path=path, level="library")
        return
    emulated = "torch_blas" if op == "matmul" else "torch_im2col"
    yield Implementation(op=op, a="bf16", b="bf16", accumulate="fp32", path=emulated, level="emulated", reason=BF16_EMULATED)
    yield Implementation(op=op, a="tf32", b="tf32", accumulate="none", path="none", reason=TF32_ABSENT)


def low_bit(op: str, capability: Capability, cuda: str, engine: str) -> Iterator[Implementation]:
    """Yield what Transformer Engine runs for one operation."""
    for scaling, scheme in SCHEMES.items():
        reason = CONV_LOW_BIT if op == "conv" else refusal(scaling, capability, cuda) or engine
        for a, b in scheme.pairs:
            if reason:
                yield Implementation(op=op, a=a, b=b, scaling=scaling, accumulate="none", path="none", reason=reason)
            else:
                yield Implementation(op=op, a=a, b=b, scaling=scaling, accumulate="fp32", path="cublaslt", level="library")


def refusal(scaling: str, capability: Capability, cuda: str) -> str:
    """Return why Transformer Engine does not run a scale layout on a GPU; empty when it does."""
    scheme = SCHEMES[scaling]
    found = ".".join(map(str, capability))
    if capability < scheme.first:
        return f"Transformer Engine needs compute capability {'.'.join(map(str, scheme.first))} for {scaling} scales; this is {found}"
    if scheme.end is not None and capability >= scheme.end:
        return scheme.late
    if cuda and tuple(int(part) for part in cuda.split(".")[:2]) < scheme.cuda:
        return f"Transformer Engine needs CUDA {'.'.join(map(str, scheme.cuda))} for {scaling} scales; torch was built with {cuda}"
    return ""
