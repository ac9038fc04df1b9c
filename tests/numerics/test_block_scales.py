"""Scales against their definitions in fractions, one group at a time."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch

from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.numerics.block_scales import GRANULARITIES, RULES, group_amax, rule_for, scales_of
from mpbackend.numerics.rounding_rules import round_value
from mpbackend.roles import Granularity

ELEMENTS = [form.name for form in FORMATS.values() if form.kind == "float" and form.is_low_bit]
SIDES = {"tensor": (0, 0), "row": (1, 0), "1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32), "1x16": (1, 16)}
FP32_MAX = Fraction(FORMATS["fp32"].max)


def amaxes(seed: int) -> list[float]:
    """Return positive fp32 numbers of every size, powers of two, and multiples of the largest values of formats with their neighbors."""
    generator = random.Random(seed)
    edges = [largest * 2.0**e for largest in (1.0, 1.75, 3.5, 6.0, 7.5, 28.0, 240.0, 448.0, 57344.0) for e in (-130, -127, -20, 0, 3, 100)]
    fp32 = [torch.tensor(edge) for edge in edges]
    near = [torch.nextafter(x, torch.tensor(to)).item() for x in fp32 for to in (0.0, math.inf)]
    values = [x.item() for x in fp32] + near + [math.ldexp(generator.uniform(1, 2), generator.randint(-149, 127)) for _ in range(300)]
    values += [2.0**-149, FORMATS["fp32"].max]
    return [value for value in torch.tensor(values).tolist() if 0 < value < math.inf]


def floor_log2(x: Fraction) -> int:
    """Return the exponent of the leading one of a positive number."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e - (x < Fraction(2) ** e)


def exponent_of(amax: float, name: str, rule: str) -> int:
    """Return the exponent of an e8m0 scale as its definition says."""
    largest = Fraction(FORMATS[name].max)
    if rule == "e8m0_floor":
        e = floor_log2(Fraction(amax)) - floor_log2(largest)
    else:
        e = floor_log2(Fraction(amax) / largest)
        e += Fraction(amax) > largest * Fraction(2) ** e
    return max(-127, min(127, e))


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("rule", ["e8m0_floor", "e8m0_round_up"])
def test_powers_of_two_are_those_of_the_definition(name: str, rule: str) -> None:
    values = amaxes(1)
    multiplier, scale, tensor_scale = scales_of(torch.tensor([values]), name, rule)  # type: ignore[arg-type]  # one of two literals
    assert scale.dtype == torch.float8_e8m0fnu and tensor_scale is None
    for value, code, m in zip(values, scale.view(torch.uint8)[0].tolist(), multiplier[0].tolist(), strict=True):
        e = exponent_of(value, name, rule)
        assert (code - 127, m) == (e, 2.0**-e), (value, name, rule)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp4_e2m1"])
def test_rounding_up_lets_nothing_saturate_and_rounding_down_does(name: str) -> None:
    values = torch.tensor([[value for value in amaxes(2) if value > 2.0**-100]])
    largest = FORMATS[name].max
    scaled = values * scales_of(values, name, "e8m0_round_up").multiplier
    assert scaled.max() <= largest and scaled.min() > largest / 2
    assert (values * scales_of(values, name, "e8m0_floor").multiplier).max() > largest


@pytest.mark.parametrize("name", ELEMENTS)
def test_free_scales_are_rounded_once(name: str) -> None:
    values = amaxes(3)
    scales = scales_of(torch.tensor([values]), name, "fp32")
    for value, multiplier, scale in zip(values, scales.multiplier[0].tolist(), scales.scale[0].tolist(), strict=True):
        wanted = min(Fraction(FORMATS[name].max) / Fraction(value), FP32_MAX)
        assert multiplier == round_value(wanted, "fp32")
        assert scale == round_value(1 / Fraction(multiplier), "fp32")


def test_two_levels_are_those_of_the_definition_rounded_step_by_step() -> None:
    generator = random.Random(4)
    values = torch.tensor([[generator.uniform(1e-3, 30.0) * 2.0 ** generator.randint(-9, 0) for _ in range(500)] + [0.0]])
    multiplier, scale, tensor_scale = scales_of(values, "fp4_e2m1", "ue4m3")
    assert scale.dtype == torch.float8_e4m3fn and tensor_scale is not None
    largest = Fraction(values.max().item())
    assert tensor_scale.item() == round_value(largest / (6 * 448), "fp32")
    encode = Fraction(round_value(6 * 448 / largest, "fp32"))
    for value, d, m in zip(values[0].tolist(), scale.float()[0].tolist(), multiplier[0].tolist(), strict=True):
        of_block = Fraction(round_value(Fraction(value) / 6, "fp32"))
        assert d == round_value(Fraction(round_value(of_block * encode, "fp32")), "fp8_e4m3", overflow="saturate")
        if value:
            assert m == (round_value(encode / Fraction(d), "fp32") if d else FORMATS["fp32"].max)


def test_the_amax_of_the_tensor_can_be_that_of_an_earlier_step() -> None:
    values = torch.tensor([[3.0, 12.0, 6.0]])
    scales = scales_of(values, "fp4_e2m1", "ue4m3", tensor_amax=torch.tensor(6.0 * 448))
    assert scales.tensor_scale == 1 and scales.scale.float().tolist() == [[0.5, 2.0, 1.0]]


@pytest.mark.parametrize("rule", RULES)
def test_zeros_have_multiplier_one_and_what_is_not_finite_has_the_scale_nan(rule: str) -> None:
    multiplier, scale, _ = scales_of(torch.tensor([[0.0, 3.0, math.inf, math.nan]]), "fp8_e4m3", rule)  # type: ignore[arg-type]  # one of RULES
    assert [multiplier[0, i].item() for i in (0, 2, 3)] == [1, 1, 1]
    assert scale.float().isnan().tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(150, 200), (128, 256), (1, 1), (3, 16)])
def test_groups_count_what_they_have(granularity: Granularity, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    high, wide = (side or size for side, size in zip(SIDES[granularity], shape, strict=True))
    expected = [[x[i : i + high, j : j + wide].abs().max().item() for j in range(0, shape[1], wide)] for i in range(0, shape[0], high)]
    assert group_amax(x, granularity).tolist() == expected
    x[0, 0] = math.nan
    assert group_amax(x, granularity)[0, 0].isnan()
    assert not group_amax(-x.abs().nan_to_num(), granularity).signbit().any()


def test_a_matrix_without_elements_has_groups_only_where_it_has_rows_and_columns() -> None:
    assert group_amax(torch.empty(3, 0), "1x32").shape == (3, 0)
    assert group_amax(torch.empty(0, 64), "1x32").shape == (0, 2)


def test_what_a_granularity_does_not_have_is_refused() -> None:
    assert [rule_for(granularity, None) for granularity in GRANULARITIES] == ["fp32"] * 4 + ["e8m0_round_up", "ue4m3"]
    with pytest.raises(BackendError, match="groups of 1x32"):
        rule_for("1x32", "ue4m3")
    with pytest.raises(UnknownNameError, match="granularity of scales 'none'"):
        rule_for("none", None)
    with pytest.raises(UnknownNameError, match="rule of scales 'even'"):
        rule_for("1x32", "even")  # type: ignore[arg-type]  # what is refused at run time
