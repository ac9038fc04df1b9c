"""Quantized matrices against their scalar definition, the plain lowering of recipes, and torchao."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch

from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.lowbit import Operand, low_bit
from mpbackend.numerics import quantize as module
from mpbackend.numerics.block_scales import GRANULARITIES, ScaleRule, rule_for, scales_of
from mpbackend.numerics.quantize import Quantized, code_table, codes_of, decode_into, dequantize, native_dtype, quantize
from mpbackend.numerics.rounding import round_to
from mpbackend.numerics.rounding_rules import round_value
from mpbackend.recipe import parse_recipe
from mpbackend.roles import Granularity
from mpbackend.train.quantize import decode
from mpbackend.train.quantize import quantize as plain_quantize

ELEMENTS = [form.name for form in FORMATS.values() if form.kind == "float" and form.is_low_bit]
SIDES = {"tensor": (0, 0), "row": (1, 0), "1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32), "1x16": (1, 16)}
RECIPES = {"tensor": "fp8", "row": "fp8:scaling.inputs=row,scaling.weights=row", "1x128": "fp8-block", "128x128": "fp8-block", "1x32": "mxfp8", "1x16": "nvfp4"}


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return normal numbers whose rows and columns differ in size, a row of zeros and a negative zero among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.randint(-12, 12, (rows, 1), generator=generator).float().exp2()
    x *= torch.randint(-3, 3, (1, columns), generator=generator).float().exp2()
    x[rows // 2] = 0
    x[0, 0] = -0.0
    return x


def stored_values(quantized: Quantized) -> torch.Tensor:
    """Return the stored elements as fp32, by the definition of their format."""
    form = FORMATS[quantized.format]
    codes = quantized.stored.view(torch.uint8).int()
    return torch.tensor([float(form.value(code)) for code in range(1 << form.bits)])[codes]


def spread(groups: torch.Tensor, granularity: str, shape: torch.Size) -> torch.Tensor:
    """Return a value per group as one per element."""
    high, wide = (side or size for side, size in zip(SIDES[granularity], shape, strict=True))
    return groups.repeat_interleave(high, 0).repeat_interleave(wide, 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_are_those_of_the_scalar_definition(name: str, granularity: Granularity) -> None:
    x = matrix(6, 150, 1)
    found = quantize(x, name, granularity)
    values = stored_values(found)
    high, wide = (side or size for side, size in zip(SIDES[granularity], x.shape, strict=True))
    multipliers = scales_of(found.amax, name, found.rule).multiplier
    for i in range(x.shape[0]):
        for j in range(0, x.shape[1], 7):
            multiplier = multipliers[i // high, j // wide].item()
            product = round_value(Fraction(x[i, j].item()) * Fraction(multiplier), "fp32")
            wanted = round_value(product, name, overflow="saturate")
            assert values[i, j].item() == wanted, (x[i, j].item(), multiplier)
    assert torch.equal(dequantize(found), values * spread(found.multiplier, granularity, x.shape))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_plain_lowering_of_a_recipe_stores_the_same(granularity: Granularity) -> None:
    meaning = low_bit(parse_recipe(RECIPES[granularity]))
    for name in ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp4_e2m1") if granularity != "1x16" else ("fp4_e2m1",):
        x = matrix(150, 200, 2)
        rule: ScaleRule = "e8m0_round_up" if meaning.scale_format == "e8m0" else "ue4m3" if meaning.scale_format == "ue4m3" else "fp32"
        theirs = plain_quantize(x, Operand(format=name, granularity=granularity), meaning)
        ours = quantize(x, name, granularity, rule=rule)
        assert torch.equal(ours.amax, theirs.amax)
        # The plain lowering stores no negative zero in formats that are no dtype; as numbers they are equal.
        assert torch.equal(stored_values(ours), decode(theirs.stored, name))
        if rule != "ue4m3":
            assert torch.equal(ours.multiplier, theirs.inverse)
        # The same d times a scale, or through its rounded reciprocal: four roundings of 2^-24 in all.
        assert torch.all((ours.multiplier - theirs.inverse).abs() <= theirs.inverse * 2.0**-22)


@pytest.mark.parametrize("name", ELEMENTS)
def test_codes_are_those_of_the_format_both_ways(name: str) -> None:
    form = FORMATS[name]
    codes = torch.arange(1 << form.bits, dtype=torch.int32).to(torch.uint8)
    dtype = native_dtype(form)
    stored = codes if dtype is None else codes.view(dtype)
    values = torch.tensor([form.value(code) for code in range(1 << form.bits)])
    # The first reading has no NaN where the format keeps it for last, the second has all codes, the third is not contiguous.
    for part in (slice(0, 100), slice(None), slice(None, None, 3)):
        out = torch.empty_like(values[part])
        decode_into(stored[part], form, out)
        number = ~values[part].isnan()
        assert torch.equal(out.isnan(), ~number) and torch.equal(out[number].view(torch.int32), values[part][number].view(torch.int32))
    if dtype is None:
        kept = ~values.isinf()  # nothing saturated is infinite
        assert torch.equal(codes_of(values, form)[kept], codes[kept])
        assert code_table(name)[0][0] == form.min


def test_a_group_that_is_not_finite_is_not_hidden_and_harms_no_other() -> None:
    x = matrix(4, 96, 3)
    for name in ELEMENTS:
        for rule in ("fp32", "e8m0_floor", "e8m0_round_up"):
            clean = dequantize(quantize(x, name, "1x32", rule=rule))
            for bad in (math.inf, -math.inf, math.nan):
                dirty = x.clone()
                dirty[1, 40] = bad
                found = dequantize(quantize(dirty, name, "1x32", rule=rule))
                assert found[1, 32:64].isnan().all()
                found[1, 32:64] = clean[1, 32:64]
                assert torch.equal(found, clean)


def test_an_infinity_in_nvfp4_leaves_the_scale_of_the_tensor_finite() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(4))
    x[0, 0] = math.inf
    found = dequantize(quantize(x, "fp4_e2m1", "1x16"))
    assert found[0, :16].isnan().all() and found.isnan().sum() == 16


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_size_of_bands_and_the_layout_of_the_input_change_nothing(granularity: Granularity, monkeypatch: pytest.MonkeyPatch) -> None:
    x = matrix(300, 140, 5)
    whole = quantize(x, "fp8_e4m3", granularity)
    turned = quantize(x.t().contiguous().t(), "fp8_e4m3", granularity)
    monkeypatch.setattr(module, "BAND", 1000)
    narrow = quantize(x, "fp8_e4m3", granularity)
    for other in (turned, narrow):
        assert torch.equal(whole.stored.view(torch.uint8), other.stored.view(torch.uint8))
        assert torch.equal(whole.scale.view(torch.uint8), other.scale.view(torch.uint8))
        assert torch.equal(dequantize(whole), dequantize(other))


def test_ragged_groups_are_those_of_a_matrix_with_zeros_added() -> None:
    x = matrix(130, 200, 6)
    padded = torch.nn.functional.pad(x, (0, 56, 0, 126))
    for granularity in GRANULARITIES:
        assert torch.equal(dequantize(quantize(x, "fp8_e4m3", granularity)), dequantize(quantize(padded, "fp8_e4m3", granularity))[:130, :200])


def test_16_bit_inputs_are_what_they_are_in_fp32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = matrix(40, 64, 7).to(dtype)
        for granularity in GRANULARITIES:
            assert torch.equal(dequantize(quantize(x, "fp8_e4m3", granularity)), dequantize(quantize(x.float(), "fp8_e4m3", granularity)))


def test_stochastic_rounding_takes_its_numbers_element_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BAND", 500)
    x = matrix(30, 64, 8)
    uniform = torch.rand(x.shape, generator=torch.Generator().manual_seed(9))
    for name in ("fp8_e4m3", "fp4_e2m1"):
        found = quantize(x, name, "tensor", rounding="stochastic", uniform=uniform)
        multiplier = scales_of(found.amax, name, "fp32").multiplier
        expected = round_to(x * multiplier, name, "stochastic", overflow="saturate", uniform=uniform)
        assert torch.equal(stored_values(found), expected)
        drawn = quantize(x, name, "tensor", rounding="stochastic", generator=torch.Generator().manual_seed(9))
        assert torch.equal(drawn.stored.view(torch.uint8), found.stored.view(torch.uint8))
    assert not torch.equal(dequantize(quantize(x, "fp8_e4m3", "tensor", rounding="rz")), dequantize(quantize(x, "fp8_e4m3", "tensor")))


def test_scales_can_be_made_from_an_amax_of_an_earlier_step() -> None:
    x = torch.tensor([[1.0, -3.0, 448.0, 1000.0]])
    found = quantize(x, "fp8_e4m3", "tensor", amax=torch.tensor(448.0))
    assert dequantize(found).tolist() == [[1.0, -3.0, 448.0, 448.0]] and found.amax.item() == 1000
    assert dequantize(quantize(x, "fp8_e4m3", "1x32", rule="e8m0_floor", amax=torch.tensor([[896.0]]))).tolist() == [[1.0, -3.0, 448.0, 896.0]]
    x[0, 0] = math.nan
    for rule in ("fp32", "e8m0_floor"):
        assert dequantize(quantize(x, "fp8_e4m3", "tensor", rule=rule, amax=torch.tensor(448.0))).isnan().all()
    assert quantize(torch.ones(1, 4), "hif8", "tensor", amax_to=15.0).scale.item() == torch.tensor(15.0).reciprocal().item()


def test_values_can_be_written_to_a_tensor() -> None:
    found = quantize(matrix(20, 100, 10), "fp8_e4m3", "1x32")
    out = torch.full((20, 100), torch.nan)
    assert dequantize(found, out=out) is out and torch.equal(out, dequantize(found))
    for bad in (out.double(), torch.empty(20, 99), torch.empty(100, 20).t()):
        with pytest.raises(BackendError, match="dequantization into a tensor"):
            dequantize(found, out=bad)
    assert dequantize(quantize(torch.empty(0, 64), "fp8_e4m3", "1x32")).shape == (0, 64)
    assert dequantize(quantize(torch.empty(3, 0), "fp8_e4m3", "tensor")).shape == (3, 0)


def test_what_cannot_be_quantized_is_refused() -> None:
    x = torch.ones(2, 32)
    with pytest.raises(UnknownNameError, match="low-bit format 'bf16'"):
        quantize(x, "bf16", "tensor")
    with pytest.raises(UnknownNameError, match="floating-point format 'int8'"):
        quantize(x, "int8", "tensor")
    with pytest.raises(BackendError, match=r"torch\.float64"):
        quantize(x.double(), "fp8_e4m3", "tensor")
    with pytest.raises(BackendError, match=r"shape \(32,\)"):
        quantize(x[0], "fp8_e4m3", "tensor")
    with pytest.raises(BackendError, match="neither a generator nor"):
        quantize(x, "fp8_e4m3", "tensor", rounding="stochastic")


@functools.cache
def torchao(name: str) -> Any:
    """Return a module of torchao; what it says about kernels that it cannot load is left out."""
    level = logging.root.manager.disable
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            return importlib.import_module(f"torchao.{name}")
    finally:
        logging.disable(level)


has_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@has_torchao
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1"])
@pytest.mark.parametrize(("rule", "mode"), [("e8m0_floor", "FLOOR"), ("e8m0_round_up", "RCEIL")])
def test_mx_blocks_are_those_of_torchao(name: str, rule: ScaleRule, mode: str) -> None:
    mx, config = torchao("prototype.mx_formats.mx_tensor"), torchao("prototype.mx_formats.config")
    x = matrix(64, 256, 11)
    x[32] = x[31]  # a block of zeros has another scale there, 2^-127
    x[x == 0] = 1e-3
    element = {"fp4_e2m1": torch.float4_e2m1fn_x2, "fp6_e2m3": "fp6_e2m3", "fp6_e3m2": "fp6_e3m2"}.get(name) or native_dtype(FORMATS[name])
    scale, elements = mx.to_mx(x, element, 32, scaling_mode=config.ScaleCalculationMode[mode])
    found = quantize(x, name, "1x32", rule=rule)
    assert torch.equal(found.scale.view(torch.uint8), scale.view(torch.uint8).reshape(found.scale.shape))
    codes = found.stored.view(torch.uint8)
    theirs = torchao("prototype.mx_formats.kernels").unpack_uint4(elements) if name == "fp4_e2m1" else elements.view(torch.uint8)
    assert torch.equal(codes, theirs.reshape(codes.shape))


@has_torchao
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_fp8_is_that_of_torchao(name: str, granularity: Granularity) -> None:
    config, utils = torchao("float8.config"), torchao("float8.float8_utils")
    x = matrix(64, 256, 12)
    x[32] = x[31]  # torchao limits an amax to 1e-12 below
    dtype = native_dtype(FORMATS[name])
    kind = config.ScalingGranularity.TENSORWISE if granularity == "tensor" else config.ScalingGranularity.AXISWISE
    multiplier = utils.tensor_to_scale(x, dtype, scaling_granularity=kind, axiswise_dim=None if granularity == "tensor" else -1)
    elements = utils.to_fp8_saturated(x * multiplier, dtype)
    found = quantize(x, name, granularity)
    assert torch.equal(found.stored.view(torch.uint8), elements.view(torch.uint8))
    assert torch.equal(found.scale, multiplier.reciprocal().reshape(found.scale.shape))


@has_torchao
def test_nvfp4_is_that_of_torchao() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(13))
    # With a power of two for the tensor's scale both orders of operations round alike. torchao has no block scale below 2^-6.
    x[3, 5] = 6 * 448 * 2.0**-8
    scale, elements = torchao("prototype.mx_formats.nvfp4_tensor").nvfp4_quantize(x, 16, torch.tensor(2.0**-8))
    found = quantize(x, "fp4_e2m1", "1x16")
    assert found.tensor_scale == 2.0**-8 and found.rule == rule_for("1x16", None)
    assert torch.equal(found.scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(found.stored, torchao("prototype.mx_formats.kernels").unpack_uint4(elements))
