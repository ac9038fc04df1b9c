"""The vectorized rounding has the bits of the scalar definition, and those of outside libraries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import gfloat  # type: ignore[import-untyped]  # gfloat 0.5 ships no py.typed
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gfloat_formats

from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.formats import FORMATS, Format
from mpbackend.numerics.rounding import BLOCK, CARRIERS, round_to, rounded_bits, rounded_by_cast, torch_cast
from mpbackend.numerics.rounding_rules import MODES, Overflow, RoundingMode, natural_overflow, round_value

FLOATS = [form for form in FORMATS.values() if form.kind == "float"]
SMALL = [form for form in FLOATS if form.bits <= 16]
DTYPES = (torch.float32, torch.float64)
NEAREST: tuple[RoundingMode, ...] = ("rne", "rz", "rna")
ML_DTYPES: dict[str, Any] = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
}
GFLOAT = {
    "fp8_e4m3": gfloat_formats.format_info_ocp_e4m3,
    "fp8_e5m2": gfloat_formats.format_info_ocp_e5m2,
    "fp6_e2m3": gfloat_formats.format_info_ocp_e2m3,
    "fp6_e3m2": gfloat_formats.format_info_ocp_e3m2,
    "fp4_e2m1": gfloat_formats.format_info_ocp_e2m1,
    "bf16": gfloat_formats.format_info_bfloat16,
    "fp16": gfloat_formats.format_info_binary16,
}
GFLOAT_MODES: dict[RoundingMode, Any] = {
    "rne": gfloat.RoundMode.TiesToEven,
    "rz": gfloat.RoundMode.TowardZero,
    "rna": gfloat.RoundMode.TiesToAway,
}


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the indices of elements whose bits differ; all NaNs are one."""
    integers = CARRIERS[a.dtype].integers
    return ((a.view(integers) != b.view(integers)) & ~(a.isnan() & b.isnan())).nonzero().flatten()


def random_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return numbers of random bit patterns: every exponent, infinities and NaN among them."""
    integers = CARRIERS[dtype].integers
    info = torch.iinfo(integers)
    return torch.randint(info.min, info.max, (count,), dtype=integers, generator=torch.Generator().manual_seed(seed)).view(dtype)


def in_range_of(form: Format, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return numbers whose exponents are those of a format, two more on either side, and special ones."""
    generator = torch.Generator().manual_seed(seed)
    low, high = math.frexp(form.smallest_subnormal)[1] - 2, min(math.frexp(form.max)[1] + 2, 127)
    exponents = torch.randint(low, high + 1, (count,), generator=generator)
    values = (torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1) * 2.0**exponents
    specials = [0.0, -0.0, math.inf, -math.inf, math.nan, form.max, -form.max, form.smallest_subnormal / 2, form.smallest_normal]
    return torch.cat([values, torch.tensor(specials, dtype=torch.float64)]).to(dtype)


def rules(form: Format) -> list[Overflow]:
    """Return what a format can make of overflows."""
    possible: list[tuple[Overflow, bool]] = [("inf", form.has_inf), ("nan", form.has_nan), ("saturate", True)]
    return [rule for rule, has in possible if has]


def settings(form: Format, modes: tuple[RoundingMode, ...] = MODES) -> Iterator[dict[str, Any]]:
    """Yield every way to round to a format."""
    for mode in modes:
        for rule in rules(form):
            for subnormals in ("kept", "flushed"):
                yield {"mode": mode, "overflow": rule, "subnormals": subnormals}


def check(x: torch.Tensor, form: Format, seed: int = 0, **how: Any) -> None:
    """Check that a tensor is rounded as the scalar definition says."""
    uniform = None
    fractions = [Fraction(1, 2)] * x.numel()
    if how["mode"] == "stochastic":
        uniform = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
        uniform[::7] = 0
        fractions = [Fraction(u) for u in uniform.tolist()]
    expected = [round_value(value, form.name, uniform=u, **how) for value, u in zip(x.tolist(), fractions, strict=True)]
    found = round_to(x, form.name, uniform=uniform, **how)
    wrong = differing(found, torch.tensor(expected, dtype=x.dtype))
    assert wrong.numel() == 0, [(x[i].item(), found[i].item(), expected[i], how, f"seed {seed}") for i in wrong[:3].tolist()]


def points(form: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a format, what lies in the middle between two of them and the neighbors of that in a dtype."""
    codes = [form.value(code) for code in range(1 << form.bits)]
    values = torch.tensor(sorted({value for value in codes if math.isfinite(value)}), dtype=torch.float64)
    beyond = torch.tensor([form.max + (values[-1] - values[-2]).item() / 2], dtype=torch.float64)
    middles = torch.cat([(values[1:] + values[:-1]) / 2, beyond, -beyond]).to(dtype)
    infinity = torch.tensor(math.inf, dtype=dtype)
    return torch.cat([values.to(dtype), middles, torch.nextafter(middles, infinity), torch.nextafter(middles, -infinity)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", SMALL, ids=str)
def test_every_code_point_is_rounded_to_itself(form: Format, dtype: torch.dtype) -> None:
    values = torch.tensor([form.value(code) for code in range(1 << form.bits)], dtype=dtype)
    for mode in MODES:
        uniform = torch.zeros_like(values) if mode == "stochastic" else None
        assert differing(round_to(values, form.name, mode, uniform=uniform), values).numel() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", SMALL, ids=str)
def test_midpoints_and_their_neighbors_are_those_of_the_definition(form: Format, dtype: torch.dtype) -> None:
    x = points(form, dtype)
    if form.bits > 8:
        x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(5))[:1500]]
    for mode in MODES:
        check(x, form, mode=mode, overflow=None)


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in SMALL if form.bits > 8], ids=str)
def test_all_midpoints_of_16_bit_formats_are_those_of_the_definition(form: Format) -> None:
    for mode in NEAREST:
        check(points(form, torch.float32), form, mode=mode, overflow=None)


@pytest.mark.parametrize(("form", "dtype"), [(form, dtype) for form in FLOATS for dtype in DTYPES if (form.name, dtype) != ("fp64", torch.float32)], ids=str)
def test_random_numbers_are_rounded_as_defined(form: Format, dtype: torch.dtype) -> None:
    x = torch.cat([random_bits(60, dtype, 11), in_range_of(form, 60, dtype, 12)])
    for number, how in enumerate(settings(form)):
        check(x, form, seed=number, **how)


@pytest.mark.slow
@pytest.mark.parametrize("form", FLOATS, ids=str)
def test_many_random_numbers_are_rounded_as_defined(form: Format) -> None:
    for dtype in DTYPES if form.name != "fp64" else DTYPES[1:]:
        ways = list(settings(form))
        for number, how in enumerate(ways):
            count = 50_000 // (2 * len(ways)) + 1
            check(torch.cat([random_bits(count, dtype, number), in_range_of(form, count, dtype, number)]), form, seed=number, **how)


def outside(name: str, count: int, seed: int) -> torch.Tensor:
    """Return float32 numbers that an outside library can round to a format: no NaN where it has none."""
    form = FORMATS[name]
    x = torch.cat([random_bits(count // 2, torch.float32, seed), in_range_of(form, count // 2, torch.float32, seed)])
    return x if form.has_nan else x.nan_to_num(0.0)


def compare_with_ml_dtypes(name: str, count: int) -> None:
    x = outside(name, count, 21)
    x = x if FORMATS[name].has_inf or FORMATS[name].has_nan else x.clamp(FORMATS[name].min, FORMATS[name].max)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = torch.from_numpy(x.numpy().astype(ML_DTYPES[name]).astype(np.float32))
    assert differing(round_to(x, name), expected).numel() == 0
    # The loop over bits, which the cast of torch otherwise stands in for.
    found = rounded_bits(x, FORMATS[name], natural_overflow(FORMATS[name]), "rne", False, None)
    assert differing(found, expected).numel() == 0


def compare_with_gfloat(name: str, count: int) -> None:
    x = outside(name, count, 22)
    for mode, theirs in GFLOAT_MODES.items():
        for saturates in (False, True) if FORMATS[name].has_nan else (True,):
            expected = gfloat.round_ndarray(GFLOAT[name], x.double().numpy(), theirs, saturates)
            # It rounds toward zero to the largest value; an infinity it makes infinity or NaN, as here.
            found = round_to(x, name, mode, overflow="saturate" if saturates else None)
            wrong = differing(found, torch.from_numpy(expected).float())
            assert wrong.numel() == 0, [(x[i].item(), found[i].item(), expected[i], mode, saturates) for i in wrong[:3].tolist()]


@pytest.mark.parametrize("name", sorted(ML_DTYPES))
def test_nearest_even_is_that_of_ml_dtypes(name: str) -> None:
    compare_with_ml_dtypes(name, 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ML_DTYPES))
def test_nearest_even_of_ten_million_numbers_is_that_of_ml_dtypes(name: str) -> None:
    compare_with_ml_dtypes(name, 10_000_000)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # gfloat turns NaN into integers before it masks them
@pytest.mark.parametrize("name", sorted(GFLOAT))
def test_rounding_is_that_of_gfloat(name: str) -> None:
    compare_with_gfloat(name, 100_000)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # as above
@pytest.mark.parametrize("name", sorted(GFLOAT))
def test_rounding_of_ten_million_numbers_is_that_of_gfloat(name: str) -> None:
    compare_with_gfloat(name, 10_000_000)


@pytest.mark.parametrize("form", [form for form in FLOATS if torch_cast(form, "saturate") or torch_cast(form, "inf")], ids=str)
def test_the_cast_of_torch_has_the_bits_of_the_loop_over_bits(form: Format) -> None:
    x = torch.cat([random_bits(200_000, torch.float32, 31), in_range_of(form, 200_000, torch.float32, 32), points(form, torch.float32)])
    for rule in rules(form):
        dtype = torch_cast(form, rule)
        if dtype is not None:
            assert differing(rounded_by_cast(x, form, rule, dtype), rounded_bits(x, form, rule, "rne", False, None)).numel() == 0


def test_a_host_that_flushes_subnormal_numbers_changes_nothing() -> None:
    x = torch.cat([torch.arange(1, 1 << 23, 4097, dtype=torch.int32).view(torch.float32), in_range_of(FORMATS["bf16"], 2000, torch.float32, 41)])
    ways: list[tuple[str, RoundingMode]] = [("bf16", "rne"), ("bf16", "rz"), ("tf32", "rna"), ("hf32_e8m11", "stochastic"), ("fp8_e4m3", "rne"), ("fp16", "rz")]
    uniform = torch.rand(x.shape, generator=torch.Generator().manual_seed(42))
    expected = [round_to(x, name, mode, uniform=uniform if mode == "stochastic" else None).view(torch.int32) for name, mode in ways]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        found = [round_to(x, name, mode, uniform=uniform if mode == "stochastic" else None).view(torch.int32) for name, mode in ways]
    finally:
        torch.set_flush_denormal(False)
    for way, before, flushing in zip(ways, expected, found, strict=True):
        nan = (before & 0x7FFF_FFFF) > 0x7F80_0000
        assert torch.equal(before[~nan], flushing[~nan]), way


def test_stochastic_rounding_repeats_and_has_the_mean_of_what_it_rounds() -> None:
    x = torch.full((BLOCK + 3,), 1 + 2.0**-3 * 0.3)
    found = round_to(x, "fp8_e4m3", "stochastic", generator=torch.Generator().manual_seed(7))
    assert torch.equal(found, round_to(x, "fp8_e4m3", "stochastic", generator=torch.Generator().manual_seed(7)))
    assert not torch.equal(found, round_to(x, "fp8_e4m3", "stochastic", generator=torch.Generator().manual_seed(8)))
    assert set(found.unique().tolist()) == {1.0, 1.125}
    # The share that goes up is binomial: six standard deviations are missed once in 10^9 seeds.
    share = (found == 1.125).double().mean().item()
    assert abs(share - 0.3) < 6 * math.sqrt(0.3 * 0.7 / len(x)), f"seed 7: {share}"


def test_shapes_strides_and_blocks_are_kept() -> None:
    x = torch.randn(3, BLOCK, generator=torch.Generator().manual_seed(51))
    for mode in NEAREST:
        whole = round_to(x, "fp8_e4m3", mode)
        assert whole.is_contiguous() and torch.equal(round_to(x.t(), "fp8_e4m3", mode), whole.t())
        assert torch.equal(round_to(x[1, 5], "fp8_e4m3", mode), whole[1, 5]) and round_to(x[:, :0], "fp8_e4m3", mode).shape == (3, 0)
    assert not round_to(x.requires_grad_(), "bf16").requires_grad


def test_what_cannot_be_rounded_is_refused() -> None:
    x = torch.ones(3)
    with pytest.raises(UnknownNameError, match="floating-point format"):
        round_to(x, "int8")
    with pytest.raises(UnknownNameError, match="unknown rounding 'hybrid'"):
        round_to(x, "hif8", "hybrid")  # type: ignore[arg-type]  # what is refused at run time
    with pytest.raises(BackendError, match=r"torch\.float16"):
        round_to(x.half(), "fp8_e4m3")
    with pytest.raises(BackendError, match="does not hold its values"):
        round_to(x, "fp64")
    with pytest.raises(BackendError, match="neither a generator nor"):
        round_to(x, "bf16", "stochastic")
    with pytest.raises(BackendError, match="both a generator and"):
        round_to(x, "bf16", "stochastic", generator=torch.Generator(), uniform=x)
    with pytest.raises(BackendError, match=r"shape \(2,\)"):
        round_to(x, "bf16", "stochastic", uniform=torch.zeros(2))
