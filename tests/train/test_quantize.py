"""Scales, rounding and products against their definitions, element by element."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from mpbackend.conformance.streams import nearest, probes, uneven
from mpbackend.formats import FORMATS
from mpbackend.lowbit import LowBit, Operand, low_bit
from mpbackend.recipe import parse_recipe
from mpbackend.roles import Granularity
from mpbackend.train import quantize as module
from mpbackend.train.quantize import UNIFORM, decode, encode, group_amax, multiply, quantize, scale_of, value_table

LOW_BIT_FLOATS = [name for name, spec in FORMATS.items() if spec.kind == "float" and spec.is_low_bit]
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "row", "1x128", "128x128", "1x32", "1x16")
JUDGES = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
}
SIDES = {"tensor": (None, None), "row": (1, None), "1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32), "1x16": (1, 16)}
RAGGED = (150, 200)


def rules(text: str = "fp8") -> LowBit:
    return low_bit(parse_recipe(text))


def operand(name: str, granularity: Granularity = "tensor", amax_to: float | None = None) -> Operand:
    return Operand(format=name, granularity=granularity, amax_to=amax_to)


@pytest.mark.parametrize("name", LOW_BIT_FLOATS)
def test_rounding_is_that_of_the_definition(name: str) -> None:
    wanted = operand(name)
    values = probes(wanted)
    found = decode(encode(torch.tensor(values), wanted), name)
    assert found.tolist() == [nearest(value, wanted) for value in values]


@pytest.mark.parametrize("name", JUDGES)
def test_rounding_is_that_of_another_library(name: str) -> None:
    values = torch.tensor(probes(operand(name)))
    judged = values.numpy().astype(JUDGES[name]).astype(np.float32)
    assert np.array_equal(decode(encode(values, operand(name)), name).numpy(), judged)


@pytest.mark.parametrize("name", [*LOW_BIT_FLOATS, "int4", "int8"])
def test_neighbors_differ_in_parity_so_that_ties_are_decided(name: str) -> None:
    codes = value_table(name, "rne").codes
    assert all(low % 2 != high % 2 for low, high in itertools.pairwise(codes))


@pytest.mark.parametrize("name", LOW_BIT_FLOATS)
def test_what_lies_beyond_saturates_and_nan_stays_where_the_format_has_it(name: str) -> None:
    largest = FORMATS[name].max
    found = decode(encode(torch.tensor([math.inf, -math.inf, 1e30, -1e30, largest * 1.01, math.nan]), operand(name)), name)
    assert found[:5].tolist() == [largest, -largest, largest, -largest, largest]
    assert math.isnan(found[5]) if FORMATS[name].has_nan else found[5] == 0


def test_half_away_from_zero_differs_from_half_to_even_in_hif8() -> None:
    values = torch.tensor(probes(operand("hif8")))
    away = decode(encode(values, operand("hif8")), "hif8")
    even = torch.tensor([nearest(value, operand("fp8_e4m3")) for value in values.tolist()])
    assert not torch.equal(away, even)
    assert encode(torch.tensor([1 + 1 / 16, -1 - 1 / 16]), operand("hif8")).tolist() == encode(torch.tensor([1.125, -1.125]), operand("hif8")).tolist()


def test_a_scale_is_the_correctly_rounded_quotient() -> None:
    amax = torch.logspace(-30, 30, 4001)
    for top in (448.0, 57344.0, 6.0, 15.0, 224.0):
        wanted = np.float32(top) / amax.numpy()
        assert np.array_equal(scale_of(amax, top, rules()).numpy(), wanted)
        assert np.array_equal(scale_of(amax, top, rules("fp8:scaling.margin=3")).numpy(), wanted / np.float32(8))


def test_a_power_of_two_scale_uses_more_than_half_of_the_range_and_no_more_than_all() -> None:
    amax = torch.logspace(-30, 30, 4001)
    scale = scale_of(amax, 448.0, rules("mxfp8"))
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    filled = scale.double() * amax.double()
    assert 224 < filled.min() <= filled.max() <= 448


@pytest.mark.parametrize(("text", "largest"), [("fp8", FORMATS["fp32"].max), ("fp8:scaling.format=e8m0", 2.0**127)])
def test_a_scale_beyond_fp32_is_its_largest(text: str, largest: float) -> None:
    assert scale_of(torch.tensor([1e-40, 1e-37]), 448.0, rules(text)).tolist() == [largest, largest]


def test_an_amax_that_says_nothing_gives_one() -> None:
    assert scale_of(torch.tensor([0.0, math.inf, math.nan]), 448.0, rules()).tolist() == [1.0, 1.0, 1.0]


def largest_by_loops(tensor: Tensor, granularity: Granularity) -> list[list[float]]:
    rows, columns = tensor.shape
    high, wide = (side or size for side, size in zip(SIDES[granularity], (rows, columns), strict=True))
    return [[float(tensor[row : row + high, column : column + wide].abs().max()) for column in range(0, columns, wide)] for row in range(0, rows, high)]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_amax_of_every_group_ragged_ones_too(granularity: Granularity, dtype: torch.dtype) -> None:
    tensor = uneven(RAGGED).to(dtype)
    found = group_amax(tensor, granularity)
    assert found.dtype is torch.float32
    assert found.tolist() == largest_by_loops(tensor, granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("text", ["fp8", "mxfp8"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "hif8"])
def test_elements_are_scaled_by_their_group_and_rounded(granularity: Granularity, text: str, name: str) -> None:
    tensor = uneven(RAGGED)
    wanted = operand(name, granularity)
    found = quantize(tensor, wanted, rules(text))
    values, back = decode(found.stored, name), found.dequantized()
    high, wide = (side or size for side, size in zip(SIDES[granularity], RAGGED, strict=True))
    for row, column in itertools.product(range(0, RAGGED[0], 13), range(0, RAGGED[1], 7)):
        scale = found.scale[row // high, column // wide]
        stored = nearest(float(tensor[row, column] * scale), wanted)
        assert values[row, column] == stored
        assert back[row, column] == torch.tensor(stored) * (1 / scale)


def test_two_level_scales() -> None:
    tensor = uneven((32, 64)) * 1e3
    tensor[0, :16] = 1e-9  # a block that its stored scale cannot reach
    found = quantize(tensor, operand("fp4_e2m1", "1x16"), rules("nvfp4"))
    over_tensor = np.float32(448.0 * 6.0) / np.float32(tensor.abs().max())
    for row, block in itertools.product(range(32), range(4)):
        amax = tensor[row, 16 * block : 16 * block + 16].abs().max().numpy()
        stored = np.float32(nearest(float(amax / np.float32(6.0) * over_tensor), operand("fp8_e4m3")))
        assert found.inverse[row, block].numpy() == stored / over_tensor
        assert found.scale[row, block].numpy() == (over_tensor / stored if stored else np.float32(FORMATS["fp32"].max))
    back = found.dequantized()
    assert torch.equal(back[0, :16], torch.zeros(16))
    # Half of the largest step is 1 of 6, and the block's own scale is off by at most 2^-4: values then reach 6 * 17/16, or saturate by that much.
    rest = tensor[1:]
    assert ((back[1:] - rest).abs() <= 17 / 16 / 6 * group_amax(rest, "1x16").repeat_interleave(16, 1)).all()


def test_a_delayed_scale_saturates_what_has_grown() -> None:
    tensor = torch.tensor([[1.0, 1000.0, -1e5, 3e38]])
    found = quantize(tensor, operand("fp8_e4m3"), rules("fp8-delayed"), torch.tensor(448.0))
    assert found.dequantized().tolist() == [[1.0, 448.0, -448.0, 448.0]]
    assert found.amax.item() == torch.tensor(3e38)
    assert quantize(tensor, operand("fp8_e5m2"), rules("fp8-delayed"), torch.tensor(0.0)).dequantized().tolist() == [[1.0, 1024.0, -57344.0, 57344.0]]


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "hif8"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("granularity", ["row", "1x16"])
def test_a_group_with_a_non_finite_value_is_nan_and_its_neighbors_are_not(name: str, value: float, granularity: Granularity) -> None:
    tensor = torch.ones(3, 32)
    tensor[1, 2] = value
    back = quantize(tensor, operand(name, granularity), rules()).dequantized()
    hit = back.isnan()
    assert hit[1, :16].all()
    assert hit.sum() == (32 if granularity == "row" else 16)


def test_a_format_that_needs_no_scale_is_cast() -> None:
    tensor = uneven((8, 8))
    found = quantize(tensor, operand("bf16", "none"), rules())
    assert found.stored.dtype is torch.bfloat16
    assert torch.equal(found.dequantized(), tensor.bfloat16().float())
    assert found.amax.item() == tensor.abs().max()


@pytest.mark.parametrize("granularity", sorted(UNIFORM - {"none"}))
def test_the_transpose_is_the_quantized_transpose(granularity: Granularity) -> None:
    tensor = uneven(RAGGED)
    turned = quantize(tensor, operand("fp8_e4m3", granularity), rules()).transposed()
    assert torch.equal(turned.dequantized(), quantize(tensor.t(), operand("fp8_e4m3", granularity), rules()).dequantized())


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("a", "b"), [("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"), ("fp4_e2m1", "fp4_e2m1"), ("hif8", "hif8"), ("bf16", "fp8_e4m3")])
@pytest.mark.parametrize("shape", [(20, 70, 30), (1, 16, 1), (16, 1, 16)])
def test_a_product_is_that_of_the_dequantized_operands(granularity: Granularity, a: str, b: str, shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    left = quantize(uneven((rows, inner)), operand(a, "none" if a == "bf16" else granularity), rules())
    right = quantize(uneven((columns, inner)), operand(b, granularity), rules())
    found = multiply(left, right)
    assert found.dtype is torch.float32
    x, y = left.dequantized().double(), right.dequantized().double()
    # Inner + 2 roundings of at most half a unit (2^-24): the products' sum, and the scales where they are applied to it.
    bound = (inner + 2) * 2.0**-24 * (x.abs() @ y.abs().t())
    assert ((found - x @ y.t()).abs() <= bound).all()


@pytest.mark.parametrize(("granularity", "calls"), [("tensor", 1), ("row", 1), ("1x32", 0)])
def test_what_torch_can_scale_it_multiplies(granularity: Granularity, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    real = torch._scaled_mm

    def scaled_product(*args: Any, **options: Any) -> Tensor:
        seen.append(args)
        return real(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_product)
    quantized = quantize(uneven((16, 64)), operand("fp8_e4m3", granularity), rules())
    multiply(quantized, quantized)
    assert len(seen) == calls
    assert module.takes_scaled_product(quantized, quantized) is bool(calls)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(0, 32), (32, 0)])
def test_nothing_to_quantize(granularity: Granularity, shape: tuple[int, int]) -> None:
    empty = quantize(torch.zeros(shape), operand("fp8_e4m3", granularity), rules())
    other = quantize(torch.ones(5, shape[1]), operand("fp8_e4m3", granularity), rules())
    assert torch.equal(multiply(empty, other), torch.zeros(shape[0], 5))
    if granularity == "tensor":
        assert empty.amax.item() == 0


def test_the_input_is_not_changed() -> None:
    tensor = uneven((16, 32))
    before = tensor.clone()
    quantize(tensor, operand("fp8_e4m3", "row"), rules())
    encode(tensor, operand("hif8"))
    assert torch.equal(tensor, before)
