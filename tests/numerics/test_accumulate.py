from __future__ import annotations

import pytest

from mpbackend.errors import UnknownNameError
from mpbackend.matrix import Matrix, load_matrix
from mpbackend.numerics.accumulate import COMPUTING, REGISTERS, arithmetic_for, from_row


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load_matrix()


def test_every_product_of_every_architecture_has_an_arithmetic_or_a_reason(matrix: Matrix) -> None:
    models = {"aligned": 0, "host": 0, "integers": 0}
    for arch in matrix.archs:
        siblings = matrix.rows(arch, op="matmul")
        for row in siblings:
            if row.level not in COMPUTING:
                continue
            if row.accumulate not in (*REGISTERS, "unknown"):
                with pytest.raises(UnknownNameError, match="format of sums"):
                    from_row(row, siblings)
                models["integers"] += 1
                continue
            arithmetic = from_row(row, siblings)
            models[arithmetic.model] += 1
            assert (arithmetic.model == "host") == any("nominal" in words for words in arithmetic.assumed)
    assert min(models.values()) > 0, models


def test_the_instruction_decides_and_not_the_chip(matrix: Matrix) -> None:
    group = arithmetic_for(matrix, "sm_90", "fp8_e4m3", "fp8_e4m3")
    warp = arithmetic_for(matrix, "sm_90", "fp8_e4m3", "fp8_e4m3", path="mma.sync")
    assert (group.products_per_step, group.fraction_bits, group.register_bits, group.order) == (32, 13, 13, "sequential")
    assert (warp.products_per_step, warp.fraction_bits, warp.register_bits, warp.order, warp.promotion_interval) == (16, 25, None, "byte_pairs", 32)
    assert warp.a == "fp16", "it converts its operands first"


def test_a_library_is_taken_to_sum_as_the_instruction_and_says_so(matrix: Matrix) -> None:
    found = arithmetic_for(matrix, "sm_90", "bf16", "bf16", path="cublaslt")
    assert (found.products_per_step, found.fraction_bits) == (16, 25)
    assert any("is taken to sum as" in words for words in found.assumed)


def test_a_stated_promotion_is_taken(matrix: Matrix) -> None:
    assert arithmetic_for(matrix, "sm_90", "fp8_e4m3", "fp8_e4m3", path="cutlass").promotion_interval == 128


def test_sums_of_fp16_take_the_bits_of_their_fp32_sibling(matrix: Matrix) -> None:
    found = arithmetic_for(matrix, "sm_90", "fp16", "fp16", accumulate="fp16")
    assert (found.fraction_bits, found.register, found.register_rounding, found.output, found.zero_exponent) == (25, "fp16", "rne", "fp16", -21)
    assert found.assumed == ("25 fraction bits as in sums of fp32",)


def test_what_no_source_states_is_nominal(matrix: Matrix) -> None:
    found = arithmetic_for(matrix, matrix.device("ascend-910b3").arch, "bf16", "bf16")
    assert found.model == "host"
    assert any("nominal fp32" in words for words in found.assumed)


def test_a_converted_format_is_what_is_computed(matrix: Matrix) -> None:
    assert arithmetic_for(matrix, matrix.device("ascend-910a").arch, "fp32", "fp32").a == "fp16"


def test_an_absent_product_is_refused_with_what_there_is(matrix: Matrix) -> None:
    with pytest.raises(UnknownNameError, match="fp4_e2m1 x fp4_e2m1"):
        arithmetic_for(matrix, "sm_90", "fp4_e2m1", "fp4_e2m1")
    with pytest.raises(UnknownNameError, match="summed in fp64"):
        arithmetic_for(matrix, "sm_90", "bf16", "bf16", accumulate="fp64")
