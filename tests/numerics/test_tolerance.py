"""Bounds of products: never exceeded by exact emulation, and tight enough that a narrow accumulator exceeds them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbackend.errors import BackendError
from mpbackend.formats import FORMATS
from mpbackend.numerics.arithmetic import Arithmetic, Rounds
from mpbackend.numerics.oracle import convert, dot
from mpbackend.numerics.tolerance import Bound, gap, product_bound, weight

WIDE = Arithmetic(a="fp16", b="fp16", products_per_step=16, fraction_bits=25, zero_exponent=-132, register_rounding="rz")
NARROW = Arithmetic(a="fp16", b="fp16", products_per_step=32, fraction_bits=13, register_bits=13, register_rounding="rz")
CHAIN = Arithmetic(a="fp32", b="fp32")
UNITS = {
    "wide": WIDE,
    "narrow": NARROW,
    "fused multiply-adds": CHAIN,
    "fp8": Arithmetic(a="fp8_e4m3", b="fp8_e5m2", products_per_step=16, fraction_bits=13, register_bits=13, register_rounding="rz"),
    "promoted": Arithmetic(a="fp16", b="fp16", products_per_step=8, fraction_bits=13, register_bits=13, register_rounding="rz", promotion_interval=16),
    "byte pairs to bf16": Arithmetic(a="bf16", b="bf16", products_per_step=16, fraction_bits=24, order="byte_pairs", output="bf16"),
    "fp16 register": Arithmetic(a="fp8_e4m3", b="fp8_e4m3", products_per_step=4, fraction_bits=24, register="fp16", output="fp16"),
    "flushed output": Arithmetic(a="fp16", b="fp16", products_per_step=4, fraction_bits=23, output="fp16", output_subnormals="flushed"),
    "single products, high zero": Arithmetic(a="bf16", b="bf16", products_per_step=1, fraction_bits=10, zero_exponent=-4, register_rounding="rz"),
}
LENGTHS = [64, 1024, 16384]

Operands = Callable[[int], tuple[list[float], list[float]]]


def exact(a: list[float], b: list[float]) -> Fraction:
    return sum((Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)), Fraction(0))


def gap_of(claim: Arithmetic, unit: Arithmetic, a: list[float], b: list[float]) -> float:
    """The gap of what ``unit`` computes to what ``claim`` allows."""
    return gap(dot(a, b, unit), float(exact(a, b)), product_bound(claim, len(a)), weight(a, b, claim))


def positive(k: int) -> tuple[list[float], list[float]]:
    rng = random.Random(k)
    a, b = ([convert(rng.uniform(0, 1), "fp16", WIDE) for _ in range(k)] for _ in "ab")
    return a, b


def sandwiched(k: int) -> tuple[list[float], list[float]]:
    """Normal numbers between a large product and its negative."""
    rng = random.Random(k + 1)
    a, b = ([convert(rng.gauss(0, 1), "fp16", WIDE) for _ in range(k)] for _ in "ab")
    a[0], a[-1], b[0], b[-1] = 2.0**14, -(2.0**14), 1.0, 1.0
    return a, b


@pytest.mark.parametrize("name", UNITS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_operands_exceed_the_bound_of_their_unit(name: str, data: st.DataObject) -> None:
    unit = UNITS[name]
    number = st.tuples(st.integers(-255, 255), st.integers(-30, 0) | st.integers(-3, 0)).map(lambda pair: math.ldexp(pair[0] / 64, pair[1]))
    k = data.draw(st.integers(1, 48))
    a = [convert(x, unit.a, unit) for x in data.draw(st.lists(number, min_size=k, max_size=k))]
    b = [convert(x, unit.b, unit) for x in data.draw(st.lists(number, min_size=k, max_size=k))]
    limit = product_bound(unit, k).limit(weight(a, b, unit))
    assert abs(Fraction(dot(a, b, unit)) - exact(a, b)) <= Fraction(limit)


@pytest.mark.parametrize("name", ["wide", "narrow", "fp8", "promoted"])
def test_operands_that_lose_nearly_all_they_can_stay_within_the_bound_and_near_it(name: str) -> None:
    unit = UNITS[name]
    # The first product alone fixes the exponent; every later one lies just below what is kept.
    small = 2.0 ** -(unit.effective_bits + 1 if unit.effective_bits < 20 else 12)
    a, b = [1.0] + [small] * 47, [1.0] * 48
    if unit.effective_bits >= 20:
        b[1:] = [2.0**-13 * 1.75] * 47
    if unit.a == "fp8_e4m3":
        a, b = [1.0] + [2.0**-6] * 47, [1.0] + [2.0**-8] * 47
    assert 0.1 < gap_of(unit, unit, a, b) <= 1


@pytest.mark.parametrize("k", [64, 2048, pytest.param(16384, marks=pytest.mark.slow)])  # 4 s each in rationals
@pytest.mark.parametrize("operands", [positive, sandwiched])
def test_a_right_unit_keeps_its_claim_and_a_13_bit_accumulator_breaks_it_at_every_length(k: int, operands: Operands) -> None:
    a, b = operands(k)
    assert gap_of(WIDE, WIDE, a, b) <= 1
    assert gap_of(WIDE, NARROW, a, b) > 1


@pytest.mark.parametrize("k", LENGTHS)
def test_the_bound_of_a_wide_accumulator_is_far_from_vacuous(k: int) -> None:
    assert product_bound(WIDE, k).relative < 2.0**-10
    assert product_bound(CHAIN, k).relative < 2.0**-9


def test_sums_below_the_zero_exponent_are_lost_within_the_absolute_part_of_the_bound() -> None:
    unit = UNITS["single products, high zero"]
    a, b = [2.0**-15] * 64, [1.0] * 64
    bound, w = product_bound(unit, 64), weight(a, b, unit)
    assert dot(a, b, unit) == 0.0
    assert bound.relative * w < w <= bound.limit(w) < 8 * w


def test_a_chain_of_fused_multiply_adds_has_the_bound_of_the_textbook() -> None:
    n, u = 1000, 2.0**-24
    assert n * u <= product_bound(CHAIN, n).relative <= n * u / (1 - n * u)


def test_promotion_makes_the_bound_of_a_narrow_accumulator_almost_independent_of_length() -> None:
    short, long = (product_bound(UNITS["promoted"], k).relative for k in (64, 16384))
    assert long < 1.1 * short
    assert product_bound(NARROW, 16384).relative > 0.5


def test_roundings_of_an_outer_sum_are_part_of_the_bound() -> None:
    unit = Arithmetic(a="fp16", b="fp16", promotion_interval=1, promoted="fp16", output="fp16")
    assert 0.5 < gap_of(unit, unit, [2048.0] + [1.0] * 63, [1.0] * 64) <= 1


def test_a_probabilistic_bound_grows_with_the_root_of_the_length_and_holds_for_random_operands() -> None:
    root = product_bound(CHAIN, 16384, kind="probabilistic").relative / product_bound(CHAIN, 1024, kind="probabilistic").relative
    assert 4 < root < 4.2
    rng = random.Random(7)
    a, b = ([convert(rng.uniform(0, 1), "fp32", CHAIN) for _ in range(4096)] for _ in "ab")
    bound = product_bound(CHAIN, 4096, kind="probabilistic")
    assert (bound.kind, bound.failure) == ("probabilistic", 1e-9)
    assert gap(dot(a, b, CHAIN), float(exact(a, b)), bound, weight(a, b, CHAIN)) <= 1


def test_truncation_is_biased_and_gets_no_probabilistic_bound() -> None:
    toward_zero = Arithmetic(a="fp32", b="fp32", register_rounding="rz")
    aligned = Arithmetic(a="fp32", b="fp32", fraction_bits=30)
    for unit in (WIDE, toward_zero, aligned):
        assert product_bound(unit, 4096, kind="probabilistic") == product_bound(unit, 4096)


def test_conversion_of_the_operands_is_part_of_the_bound_where_asked() -> None:
    unit = Arithmetic(a="tf32", b="tf32", products_per_step=8, fraction_bits=25, register_rounding="rz", operand_rounding="rz")
    rng = random.Random(3)
    a, b = ([convert(rng.uniform(1, 2), "fp32", CHAIN) for _ in range(64)] for _ in "ab")
    result, true, w = dot(a, b, unit), float(exact(a, b)), weight(a, b, unit)
    assert gap(result, true, product_bound(unit, 64), w) > 1
    assert gap(result, true, product_bound(unit, 64, converted=True), w) <= 1


@pytest.mark.parametrize("rounding", ["rne", "rz"])
def test_rounding_of_the_output_is_part_of_the_bound(rounding: Rounds) -> None:
    unit = Arithmetic(a="fp16", b="fp16", products_per_step=4, fraction_bits=25, output="bf16", output_rounding=rounding)
    a, b = [1.0, 2.0**-8 if rounding == "rne" else 127 / 128 * 2.0**-7], [1.0, 1.0]
    assert 0.5 < gap_of(unit, unit, a, b) <= 1


def test_a_subnormal_operand_weighs_as_much_as_the_smallest_normal() -> None:
    least = FORMATS["fp16"].smallest_normal
    assert weight([least / 8, 0.0], [1.0, 1.0], WIDE, addend=-2.0) == least + 2.0


def test_a_gap_counts_multiples_of_the_bound() -> None:
    bound = Bound(relative=0.25, absolute=0.5)
    assert gap(4.0, 1.0, bound, 4.0) == 2.0
    assert gap(math.inf, math.inf, bound, 4.0) == gap(math.nan, math.nan, bound, 4.0) == 0.0
    assert gap(math.nan, 1.0, bound, 4.0) == gap(math.inf, 1.0, bound, 4.0) == gap(1.0, 2.0, Bound(relative=0, absolute=0), 1.0) == math.inf


def test_a_bound_of_nothing_or_of_block_scaled_groups_is_refused() -> None:
    for unit, k, failure in [(WIDE, 0, 0.1), (WIDE, 4, 1.0), (Arithmetic(a="fp4_e2m1", b="fp4_e2m1", exact_group=16), 16, 0.1)]:
        with pytest.raises(BackendError, match="a bound of a product"):
            product_bound(unit, k, failure=failure)
