"""The oracle against MMA-Sim (arXiv 2511.10909), an independent model of the same instructions."""

from __future__ import annotations

import math
import re

import pytest
import torch

from mpbackend.matrix import load_matrix
from mpbackend.numerics.accumulate import arithmetic_for
from mpbackend.numerics.matmul import mm
from mpbackend.numerics.oracle import dot

simulator = pytest.importorskip("mmasim.nv_ptx", reason="mmasim is not installed")

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
INSTRUCTIONS = [
    ("Volta", "sm_70", "m8n8k4.f32.f16.f16.f32", "fp16", "fp32", "mma.sync"),
    ("Volta", "sm_70", "m8n8k4.f16.f16.f16.f16", "fp16", "fp16", "mma.sync"),
    ("Ampere", "sm_80", "m16n8k16.f32.f16.f16.f32", "fp16", "fp32", "mma.sync"),
    ("Ampere", "sm_80", "m16n8k16.f32.bf16.bf16.f32", "bf16", "fp32", "mma.sync"),
    ("Ampere", "sm_80", "m16n8k8.f32.tf32.tf32.f32", "tf32", "fp32", "mma.sync"),
    ("Ampere", "sm_80", "m16n8k16.f16.f16.f16.f16", "fp16", "fp16", "mma.sync"),
    ("Ada Lovelace", "sm_89", "m16n8k32.f32.e4m3.e4m3.f32", "fp8_e4m3", "fp32", "mma.sync"),
    ("Ada Lovelace", "sm_89", "m16n8k32.f32.e5m2.e5m2.f32", "fp8_e5m2", "fp32", "mma.sync"),
    ("Ada Lovelace", "sm_89", "m16n8k32.f16.e4m3.e4m3.f16", "fp8_e4m3", "fp16", "mma.sync"),
    ("Hopper", "sm_90", "m64n8k16.f32.f16.f16", "fp16", "fp32", "wgmma"),
    ("Hopper", "sm_90", "m64n8k16.f16.f16.f16", "fp16", "fp16", "wgmma"),
    ("Hopper", "sm_90", "m64n8k16.f32.bf16.bf16", "bf16", "fp32", "wgmma"),
    ("Hopper", "sm_90", "m64n8k8.f32.tf32.tf32", "tf32", "fp32", "wgmma"),
    ("Hopper", "sm_90", "m64n8k32.f32.e4m3.e4m3", "fp8_e4m3", "fp32", "wgmma"),
    ("Hopper", "sm_90", "m64n8k32.f32.e5m2.e5m2", "fp8_e5m2", "fp32", "wgmma"),
    ("Hopper", "sm_90", "m64n8k32.f16.e4m3.e4m3", "fp8_e4m3", "fp16", "wgmma"),
    ("Turing", "sm_75", "m16n8k8.f32.f16.f16.f32", "fp16", "fp32", "mma.sync"),
    ("Turing", "sm_75", "m16n8k8.f16.f16.f16.f16", "fp16", "fp16", "mma.sync"),
    ("RTX Blackwell", "sm_120", "m16n8k16.f32.bf16.bf16.f32", "bf16", "fp32", "mma.sync"),
    ("RTX Blackwell", "sm_120", "m16n8k32.kind::f8f6f4.f32.e4m3.e4m3.f32", "fp8_e4m3", "fp32", "mma.sync"),
    ("RTX Blackwell", "sm_120", "m16n8k32.kind::f8f6f4.f16.e5m2.e5m2.f16", "fp8_e5m2", "fp16", "mma.sync"),
    ("Blackwell", "sm_100", "m128n8k16.kind::f16.f32.f16.f16", "fp16", "fp32", "tcgen05"),
    ("Blackwell", "sm_100", "m128n8k16.kind::f16.f16.f16.f16", "fp16", "fp16", "tcgen05"),
    ("Blackwell", "sm_100", "m128n8k16.kind::f16.f32.bf16.bf16", "bf16", "fp32", "tcgen05"),
    ("Blackwell", "sm_100", "m128n8k8.kind::tf32.f32.tf32.tf32", "tf32", "fp32", "tcgen05"),
    ("Blackwell", "sm_100", "m128n8k32.kind::f8f6f4.f32.e4m3.e4m3", "fp8_e4m3", "fp32", "tcgen05"),
    ("Blackwell", "sm_100", "m128n8k32.kind::f8f6f4.f16.e5m2.e5m2", "fp8_e5m2", "fp16", "tcgen05"),
]
"""MMA-Sim's architecture and instruction; ours, the formats of operands and sums, and the path."""

MODELS = {"mma.sync": simulator.MMA, "wgmma": simulator.WGMMA, "tcgen05": simulator.TCGen05MMA}


def random_operands(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return numbers near 1, of every exponent, or of random bits: subnormals, zeros, infinities and NaN among them."""
    near = torch.randn(shape, generator=generator)
    wide = near * torch.exp2(torch.randint(-20, 20, shape, generator=generator).float())
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).view(torch.float32)
    if dtype in (torch.float16, torch.bfloat16):
        bits = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(dtype).float()
    elif dtype.itemsize == 1:
        bits = torch.randint(0, 256, shape, generator=generator).to(torch.uint8).view(dtype).float()
    kind = torch.randint(0, 16, (shape[0], 1), generator=generator)
    return torch.where(kind < 8, near, torch.where(kind < 12, wide, torch.where(kind < 14, bits, torch.zeros(())))).to(dtype)


@pytest.mark.parametrize(("theirs", "arch", "instruction", "name", "accumulate", "path"), INSTRUCTIONS, ids=str)
def test_the_oracle_and_an_independent_model_agree(theirs: str, arch: str, instruction: str, name: str, accumulate: str, path: str) -> None:
    generator = torch.Generator().manual_seed(5)
    arithmetic = arithmetic_for(load_matrix(), arch, name, name, accumulate=accumulate, path=path)
    model = MODELS[path](theirs, instruction)
    k = int(instruction.split("k")[1].split(".")[0])
    a = random_operands(DTYPES[name], (160, k), generator)
    b = random_operands(DTYPES[name], (160, k), generator)
    c = random_operands(torch.float16 if accumulate == "fp16" else torch.float32, (160, 1), generator)[:, 0]
    expected = model.dpa(a, b, c).double()
    differing = 0
    for x, y, z, want in zip(a.double().tolist(), b.double().tolist(), c.double().tolist(), expected.tolist(), strict=True):
        found = dot(x, y, arithmetic, z)
        differing += not (found == want or (math.isnan(found) and math.isnan(want)))
    assert expected.isfinite().sum() > 60, "most sums are numbers"
    assert differing == 0


@pytest.mark.parametrize(("theirs", "arch", "instruction", "name", "accumulate", "path"), INSTRUCTIONS, ids=str)
def test_whole_tiles_of_the_fast_engine_and_an_independent_model_agree(theirs: str, arch: str, instruction: str, name: str, accumulate: str, path: str) -> None:
    generator = torch.Generator().manual_seed(6)
    arithmetic = arithmetic_for(load_matrix(), arch, name, name, accumulate=accumulate, path=path)
    model = MODELS[path](theirs, instruction)
    m, n, k = (int(size) for size in re.findall(r"[mnk](\d+)", instruction.split(".")[0]))
    a, b = random_operands(DTYPES[name], (m, k), generator), random_operands(DTYPES[name], (n, k), generator).T
    c = random_operands(torch.float16 if accumulate == "fp16" else torch.float32, (m, n), generator)
    expected = model(a, b, c).float()
    found = mm(a.float(), b.float(), arithmetic, addend=c.float())
    assert expected.isfinite().sum() > m * n // 4
    assert torch.equal(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
