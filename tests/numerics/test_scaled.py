"""Products with block scales against MMA-Sim (arXiv 2511.10909) and against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpbackend.errors import BackendError
from mpbackend.matrix import load_matrix
from mpbackend.numerics import kernel, matmul, scaled
from mpbackend.numerics.accumulate import arithmetic_for
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.matmul import Engine, mm
from mpbackend.numerics.scaled import scaled_mm

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def arithmetic(name: str, scaling: str) -> Arithmetic:
    return arithmetic_for(load_matrix(), "sm_100", name, name, scaling=scaling)


def scales(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return scales around 1, in some rows of every exponent."""
    if dtype == torch.float8_e4m3fn:
        return torch.randint(0, 0x7F, shape, generator=generator).to(torch.uint8).view(dtype)
    near = torch.randint(120, 135, shape, generator=generator)
    wide = torch.randint(0, 256, shape, generator=generator)
    return torch.where(torch.rand(shape[0], 1, generator=generator) < 0.7, near, wide).to(torch.uint8).view(dtype)


@pytest.mark.parametrize(("dtype", "name", "ptx"), [(torch.float8_e4m3fn, "fp8_e4m3", "e4m3"), (torch.float8_e5m2, "fp8_e5m2", "e5m2")])
def test_mx_products_agree_with_an_independent_model(dtype: torch.dtype, name: str, ptx: str) -> None:
    simulator = pytest.importorskip("mmasim.nv_ptx", reason="mmasim is not installed")
    generator = torch.Generator().manual_seed(3)
    model = simulator.TCGen05MMABlockScale("Blackwell", f"m128n8k32.kind::mxf8f6f4.block32.f32.{ptx}.{ptx}.ue8m0")
    a, b = (torch.randint(0, 256, shape, generator=generator).to(torch.uint8).view(dtype) for shape in ((128, 32), (32, 8)))
    a = torch.where(torch.rand(128, 1, generator=generator) < 0.8, a.float().nan_to_num(posinf=1.0, neginf=-1.0), a.float()).to(dtype)
    b = b.float().nan_to_num(posinf=1.0, neginf=-1.0).to(dtype)
    scale_a, scale_b = scales((128, 1), torch.float8_e8m0fnu, generator), scales((8, 1), torch.float8_e8m0fnu, generator).T
    addend = torch.randn(128, 8, generator=generator) * torch.exp2(torch.randint(-30, 30, (128, 8), generator=generator).float())
    expected = model(a, b, addend, scale_a, scale_b)
    found = scaled_mm(a.float(), b.float(), scale_a, scale_b, arithmetic(name, "mx_1x32"), addend=addend)
    assert int(expected.isfinite().sum()) > 400
    assert torch.equal(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize(("scaling", "block", "dtype", "ptx"), [("nv_1x16", 16, torch.float8_e4m3fn, "ue4m3"), ("mx_1x32", 32, torch.float8_e8m0fnu, "ue8m0")])
def test_fp4_products_agree_with_an_independent_model(scaling: str, block: int, dtype: torch.dtype, ptx: str) -> None:
    simulator = pytest.importorskip("mmasim.nv_ptx", reason="mmasim is not installed")
    generator = torch.Generator().manual_seed(4)
    kind = "mxf4nvf4" if block == 16 else "mxf4"
    model = simulator.TCGen05MMABlockScale("Blackwell", f"m128n8k64.kind::{kind}.block{block}.f32.e2m1.e2m1.{ptx}")
    codes = torch.randint(0, 16, (136, 64), generator=generator)
    codes[:20] = torch.where(torch.rand(20, 64, generator=generator) < 0.9, 0, codes[:20])
    values = torch.where(codes > 7, -FP4[codes & 7], FP4[codes & 7])
    a, b = values[:128], values[128:].T
    scale_a, scale_b = scales((128, 64 // block), dtype, generator), scales((8, 64 // block), dtype, generator).T
    addend = torch.randn(128, 8, generator=generator) * torch.exp2(torch.randint(-20, 20, (128, 8), generator=generator).float())
    pair = scaled_mm(a, b, scale_a, scale_b, arithmetic("fp4_e2m1", scaling), addend=addend)
    packed = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    expected = model(packed[:128], packed[128:].T, addend, scale_a, scale_b)
    assert int(expected.isfinite().sum()) > 400
    assert torch.equal(pair.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


def test_subnormal_scales_have_the_exponent_of_the_smallest_normal_one() -> None:
    """Two groups cancel under the scale 2^-9, which is aligned as 2^-6: 35 bits below, 2^-42 is cut off the running sum."""
    a, b = torch.zeros(1, 64), torch.ones(64, 1)
    a[0, 0], a[0, 16] = 1.0, -1.0
    scale, addend = torch.full((1, 4), 2.0**-9), torch.tensor([[2.0**-42]])
    ones = torch.ones(4, 1)
    unit = arithmetic("fp4_e2m1", "nv_1x16")
    assert scaled_mm(a, b, scale.to(torch.float8_e4m3fn), ones.to(torch.float8_e4m3fn), unit, addend=addend).item() == 0.0
    assert scaled_mm(a, b, scale, ones, unit, addend=addend).item() == 2.0**-42, "fp32 has it as a normal number"


def test_scales_of_one_change_nothing() -> None:
    torch.manual_seed(0)
    unit = arithmetic("fp8_e4m3", "mx_1x32")
    a, b = torch.randn(5, 96), torch.randn(96, 4)
    assert torch.equal(scaled_mm(a, b, torch.ones(5, 3), torch.ones(3, 4), unit), mm(a, b, unit))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("engine", ["extension", "numba"] if kernel.library() is not None else ["numba"])
def test_the_fast_engines_take_powers_of_two(name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subnormal elements keep the exponent of the smallest normal one under their scale."""
    torch.manual_seed(0)
    unit = arithmetic(name, "mx_1x32")
    a, b = torch.randn(40, 160) * torch.rand(40, 1) ** 8, torch.randn(160, 33) * torch.rand(1, 33) ** 8
    scale_a, scale_b = torch.randint(-90, 90, (40, 5)).float().exp2(), torch.randint(-60, 60, (5, 33)).float().exp2()
    asked: list[Engine] = []
    real: Any = matmul.sums

    def by_engine(*arguments: Any) -> Any:
        asked.append(engine)
        return real(*arguments[:4], engine, *arguments[5:])

    monkeypatch.setattr(scaled, "sums", by_engine)
    fast = scaled_mm(a, b, scale_a, scale_b, unit)
    monkeypatch.setattr(scaled, "best_engine", lambda: "oracle")
    assert torch.equal(fast, scaled_mm(a, b, scale_a, scale_b, unit))
    assert asked == [engine]


def test_rows_are_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    unit = arithmetic("fp8_e4m3", "mx_1x32")
    a, b, scale = torch.randn(7, 64), torch.randn(64, 4), torch.rand(7, 2).exp2()
    monkeypatch.setattr(scaled, "best_engine", lambda: "oracle")
    whole = scaled_mm(a, b, scale, torch.ones(2, 4), unit)
    monkeypatch.setattr("mpbackend.numerics.scaled.TERMS", 300)
    assert torch.equal(scaled_mm(a, b, scale, torch.ones(2, 4), unit), whole)


def test_unknown_sums_are_the_hosts() -> None:
    torch.manual_seed(0)
    unit = Arithmetic(a="fp8_e4m3", b="fp8_e4m3", model="host")
    a, b = torch.randn(5, 64).to(torch.float8_e4m3fn).float(), torch.randn(64, 4).to(torch.float8_e4m3fn).float()
    assert torch.equal(scaled_mm(a, b, torch.full((5, 2), 4.0), torch.full((2, 4), 0.5), unit), (4 * a) @ (b * 0.5))


@pytest.mark.parametrize("shape", [(5, 3), (4, 2), (5, 0), (5, 1)])
def test_scales_that_do_not_fit_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(BackendError, match="blocks of 16 or 32"):
        scaled_mm(torch.ones(5, 64), torch.ones(64, 4), torch.ones(shape), torch.ones(2, 4), arithmetic("fp8_e4m3", "mx_1x32"))
