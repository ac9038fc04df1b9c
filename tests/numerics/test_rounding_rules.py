from __future__ import annotations

import math
import random
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from mpbackend.errors import UnknownNameError
from mpbackend.formats import FORMATS, Format
from mpbackend.numerics.rounding_rules import neighbors, round_value

SMALL = [form for form in FORMATS.values() if form.kind == "float" and form.bits <= 16]
ML_DTYPES = {
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


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@pytest.mark.parametrize("form", SMALL, ids=str)
def test_a_value_of_a_format_is_rounded_to_itself(form: Format) -> None:
    for code in range(0, 1 << form.bits, 1 if form.bits <= 8 else 61):
        value = form.value(code)
        for mode in ("rne", "rz", "rna"):
            assert same(round_value(value, form.name, mode), value), (form.name, value, mode)


@pytest.mark.parametrize("name", sorted(set(ML_DTYPES) & set(FORMATS)))
def test_nearest_even_is_that_of_an_outside_library(name: str) -> None:
    form, generator = FORMATS[name], random.Random(3)
    scale = [min(form.max * 1.2, FORMATS["fp32"].max), 1.0, form.smallest_normal * 2, form.smallest_subnormal * 4]
    numbers = [np.float32(generator.uniform(-s, s)) for s in scale for _ in range(500)]
    numbers += [np.float32(value) for value in (math.inf, -math.inf, math.nan, 0.0, -0.0) if form.has_nan or not math.isnan(value)]
    if not form.has_inf and not form.has_nan:
        numbers = [number for number in numbers if np.isfinite(number)]
    for number in numbers:
        with np.errstate(over="ignore"):
            expected = float(number.astype(ML_DTYPES[name]))
        assert same(round_value(float(number), name), expected), (name, number)


@pytest.mark.parametrize("form", SMALL, ids=str)
def test_a_midpoint_goes_where_its_rule_says(form: Format) -> None:
    generator = random.Random(1)
    values = sorted({form.value(code) for code in range(1 << form.bits - 1) if math.isfinite(form.value(code)) and form.value(code) >= 0})
    for i in generator.sample(range(len(values) - 1), min(60, len(values) - 1)):
        lower, upper = Fraction(values[i]), Fraction(values[i + 1])
        middle, hair = (lower + upper) / 2, (upper - lower) / 2**40
        assert neighbors(middle, form) == (lower, upper)
        assert round_value(middle, form.name, "rna") == upper
        assert round_value(middle, form.name, "rz") == lower
        assert round_value(middle - hair, form.name) == lower
        assert round_value(middle + hair, form.name) == upper
        if form.encoding != "hif8":
            assert round_value(middle, form.name) in (lower, upper)
            assert int(Fraction(round_value(middle, form.name)) / (upper - lower)) % 2 == 0


def test_stochastic_rounding_goes_up_with_the_probability_of_the_part_cut_off() -> None:
    x = 1 + Fraction(1, 8) * Fraction(3, 10)
    found = [round_value(x, "fp8_e4m3", "stochastic", uniform=Fraction(i, 1000)) for i in range(1000)]
    assert (found.count(1.125), found.count(1.0)) == (300, 700)


def test_overflow_follows_the_format_or_what_was_asked() -> None:
    assert round_value(1e6, "fp16") == math.inf
    assert math.isnan(round_value(1e6, "fp8_e4m3"))
    assert round_value(-1e6, "fp8_e4m3", overflow="saturate") == -448
    assert round_value(1e6, "fp4_e2m1") == 6
    assert round_value(1e6, "fp16", "rz") == 65504
    assert round_value(65519.0, "fp16") == 65504
    assert round_value(65520.0, "fp16") == math.inf
    assert round_value(math.inf, "fp16", overflow="saturate") == 65504
    assert (round_value(1.24 * 2**15, "hif8"), round_value(1.25 * 2**15, "hif8")) == (2.0**15, math.inf)


def test_flushed_results_are_zero_of_the_same_sign() -> None:
    assert same(round_value(-(2.0**-15), "fp16", subnormals="flushed"), -0.0)
    assert round_value(2.0**-14, "fp16", subnormals="flushed") == 2.0**-14


def test_what_has_no_rule_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="floating-point format"):
        round_value(1.0, "int8")
    with pytest.raises(UnknownNameError, match="overflow of fp4_e2m1"):
        round_value(1.0, "fp4_e2m1", overflow="nan")
    with pytest.raises(UnknownNameError, match="unknown rounding 'hybrid'"):
        round_value(1.0, "hif8", "hybrid")  # type: ignore[arg-type] # what is refused at run time
