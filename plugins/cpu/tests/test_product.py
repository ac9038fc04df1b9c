"""One product for probes: what torch's own gives, and for fp16 one rounding of the fp32 sum."""

from __future__ import annotations

import pytest
import torch

from mpbackend.errors import UnknownNameError
from mpbackend_cpu.backend import CpuBackend

SEED = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return (torch.randn(5, 33, generator=generator).to(dtype).double(), torch.randn(33, 4, generator=generator).to(dtype).double())


@pytest.mark.parametrize("name", DTYPES)
def test_a_product_is_torchs(name: str) -> None:
    backend = CpuBackend()
    a, b = operands(DTYPES[name])
    found = backend.product(next(iter(backend.discover())), name)(a, b)
    assert found.dtype is torch.float64
    assert torch.equal(found, (a.to(DTYPES[name]) @ b.to(DTYPES[name])).double()), f"seed {SEED}"


def test_fp16_is_rounded_once() -> None:
    """2048 + 1 + 1 is 2050, and 2048 where each partial sum is rounded to fp16; 2049 is halfway and goes to the even 2048."""
    backend = CpuBackend()
    multiply = backend.product(next(iter(backend.discover())), "fp16")
    assert multiply(torch.tensor([[2048.0, 1.0, 1.0]]).double(), torch.ones(3, 1).double()).item() == 2050.0
    assert multiply(torch.tensor([[2048.0, 1.0]]).double(), torch.ones(2, 1).double()).item() == 2048.0


def test_other_formats_are_unknown() -> None:
    backend = CpuBackend()
    with pytest.raises(UnknownNameError, match="unknown format of products on a CPU 'hif8'"):
        backend.product(next(iter(backend.discover())), "hif8")
