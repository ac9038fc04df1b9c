from __future__ import annotations

import math
import random
import struct
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from mpbackend.errors import BackendError
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.oracle import dot, nearest, steps

UNIT = Arithmetic(a="fp16", b="fp16", products_per_step=4, fraction_bits=13, register_bits=13, register_rounding="rz", zero_exponent=-133)


def unit(**changes: Any) -> Arithmetic:
    return msgspec.structs.replace(UNIT, **changes)


def test_terms_are_truncated_at_the_largest_exponent_of_their_step() -> None:
    assert dot([1, 2.0**-13], [1, 1], UNIT) == 1 + 2.0**-13
    assert dot([1, 2.0**-14], [1, 1], UNIT) == 1
    assert dot([1, 2.0**-14, 2.0**-14], [1, 1, 1], UNIT) == 1, "each is cut off before they are added"
    assert dot([1, -(2.0**-14)], [1, 1], UNIT) == 1, "toward zero, term by term"


def test_the_exponent_of_a_product_is_the_sum_of_its_operands_exponents() -> None:
    # 1.5 x 1.5 = 2.25 has exponent 0 here, not 1: the term 2^-13 beside it is kept.
    wide = unit(register_bits=None)
    assert dot([1.5, 2.0**-13], [1.5, 1], wide) == 2.25 + 2.0**-13


def test_a_subnormal_operand_has_the_smallest_exponent_of_its_format() -> None:
    # 2^-24 counts as exponent -14: beside it the product 2^-28 x 1 is one bit below the 13 that are kept of 2^-14.
    assert dot([2.0**-24, 2.0**-14], [1, 2.0**-14], unit(fraction_bits=13)) == 2.0**-24
    assert dot([2.0**-24, 2.0**-14], [1, 2.0**-13], unit(fraction_bits=13)) == 2.0**-24 + 2.0**-27


def test_the_running_sum_is_aligned_too() -> None:
    assert dot([2.0**-14] * 4, [1] * 4, UNIT, addend=1.0) == 1
    assert dot([2.0**-14] * 8, [1] * 8, UNIT) == 2.0**-11


def test_promotion_keeps_what_the_register_would_lose() -> None:
    small = [1.0, 0, 0, 0] + [2.0**-14, 0, 0, 0] * 4
    assert dot(small, [1.0] * 20, UNIT) == 1
    assert dot(small, [1.0] * 20, unit(promotion_interval=4)) == 1 + 2.0**-12


def test_one_product_and_nearest_even_is_a_fused_multiply_add() -> None:
    fma = Arithmetic(a="fp32", b="fp32")
    x = 1 + 2.0**-12
    assert dot([x], [x], fma, addend=-(1 + 2.0**-11)) == 2.0**-24
    assert math.copysign(1, dot([-0.0], [1.0], fma, addend=-0.0)) == -1
    assert math.copysign(1, dot([-0.0], [1.0], fma)) == 1


def test_fma_chains_equal_sums_in_double_rounded_once() -> None:
    # A product of fp32 numbers is exact in fp64; with an addend of the same size the sum in fp64 may round twice, so operands have few bits.
    generator, fma = random.Random(7), Arithmetic(a="fp32", b="fp32")
    for _ in range(300):
        a = [generator.randint(-(2**10), 2**10) / 2**8 for _ in range(9)]
        b = [generator.randint(-(2**10), 2**10) / 2**8 for _ in range(9)]
        expected = 0.0
        for x, y in zip(a, b, strict=True):
            (expected,) = struct.unpack("f", struct.pack("f", expected + x * y))
        assert dot(a, b, fma) == expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([math.inf], [2.0], math.inf), ([math.inf], [0.0], math.nan), ([math.inf, -math.inf], [1, 1], math.nan), ([math.nan], [0.0], math.nan)],
)
def test_specials_are_those_of_ieee(a: list[float], b: list[float], expected: float) -> None:
    found = dot(a, b, UNIT)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_a_saturating_unit_gives_neither_infinity_nor_nan() -> None:
    saturating = unit(output="fp16", overflow="saturating", register_bits=None)
    assert dot([60000.0], [60000.0], saturating) == 65504
    assert dot([-60000.0], [60000.0], saturating) == -65504
    assert dot([math.nan], [1.0], saturating) == 0
    assert dot([60000.0], [60000.0], unit(output="fp16", register_bits=None)) == math.inf


def test_a_sum_of_fp16_overflows_where_fp16_does() -> None:
    half = unit(register="fp16", register_bits=None, register_rounding="rne", fraction_bits=24, zero_exponent=-20, output="fp16")
    assert dot([65504.0, 15.0], [1, 1], half) == 65504
    assert dot([65504.0, 16.0], [1, 1], half) == math.inf


def test_flushed_operands_and_results_are_zero() -> None:
    assert dot([2.0**-15], [1.0], unit(operand_subnormals="flushed")) == 0
    assert dot([2.0**-15], [1.0], UNIT) == 2.0**-15
    assert dot([2.0**-15], [1.0], unit(output="fp16", output_subnormals="flushed")) == 0


def test_byte_pairs_take_two_of_every_four() -> None:
    found = list(steps(32, unit(order="byte_pairs", products_per_step=16)))
    assert found[0] == [0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29]
    assert sorted(found[0] + found[1]) == list(range(32))
    assert list(steps(6, unit(order="byte_pairs", products_per_step=16))) == [[0, 1, 4, 5], [2, 3]]


def test_operands_are_converted_by_the_unit() -> None:
    tf32 = Arithmetic(a="tf32", b="tf32", operand_rounding="rz")
    assert dot([1 + 2.0**-11 + 2.0**-12], [1.0], tf32) == 1
    assert dot([1 + 2.0**-11 + 2.0**-12], [1.0], Arithmetic(a="tf32", b="tf32")) == 1 + 2.0**-10


def test_nearest_follows_its_rule_at_a_tie() -> None:
    tie = Fraction(5, 2)
    assert [int(nearest(tie, 1, -10, rounding)) for rounding in ("rne", "rz", "rna")] == [2, 2, 3]


def test_what_has_no_definition_is_refused() -> None:
    with pytest.raises(BackendError, match="2 and 1 numbers"):
        dot([1, 2], [1], UNIT)
    with pytest.raises(BackendError, match="host's library"):
        dot([1], [1], unit(model="host"))
    for name in ("hif8", "int8", "e8m0", "none"):
        with pytest.raises(BackendError, match=f"format {name}"):
            dot([1], [1], unit(a=name))
