"""What the matrix of CPUs says about the cases that are easiest to get wrong."""

from __future__ import annotations

import pytest

from mpbackend.capability import Row
from mpbackend.granting import judge
from mpbackend.matrix import Matrix, load_matrix
from tests.matrices.rules import MATRICES

MEASURED = "x86-64-avx512_bf16"
X86 = ("x86-64", "x86-64-amx", "x86-64-avx512", MEASURED, "x86-64-avx512_fp16")
EVERY = (*X86, "aarch64")
PLAIN = ("none", "none")


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load_matrix([MATRICES / "cpu.toml"])


def one(matrix: Matrix, arch: str, a: str, **fields: str) -> Row:
    """Return the only row of an architecture with these fields, a plain matmul unless they say otherwise."""
    rows = matrix.rows(arch, **{"op": "matmul", "a": a, "b": a, "scaling": "none", **fields})
    assert len(rows) == 1, [row.key for row in rows]
    return rows[0]


def test_each_architecture_is_a_device_without_rates(matrix: Matrix) -> None:
    assert tuple(matrix.archs) == tuple(sorted(EVERY)) == tuple(matrix.devices)
    for key in EVERY:
        assert matrix.device(key).arch == key
        assert matrix.peaks(key) == []


def test_identifiers_are_feature_flags_or_machine_names(matrix: Matrix) -> None:
    found = {
        arch.key for name in ("x86_64", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "aarch64") if (arch := matrix.identify("", name)[1]) is not None
    }
    assert found == set(EVERY)


@pytest.mark.parametrize("op", ["matmul", "conv"])
@pytest.mark.parametrize("arch", EVERY)
def test_fp32_is_native_everywhere(matrix: Matrix, arch: str, op: str) -> None:
    verdict = judge(matrix, arch, op, ("fp32", "fp32"), PLAIN, "fp32")
    assert verdict.level == "native"


@pytest.mark.parametrize("op", ["matmul", "conv"])
@pytest.mark.parametrize(
    ("arch", "level"),
    [
        ("x86-64", "emulated"),
        ("x86-64-avx512", "emulated"),
        (MEASURED, "native"),
        ("x86-64-avx512_fp16", "native"),
        ("x86-64-amx", "native"),
        ("aarch64", "unknown"),
    ],
)
def test_bf16_needs_its_instructions(matrix: Matrix, arch: str, op: str, level: str) -> None:
    assert judge(matrix, arch, op, ("bf16", "bf16"), PLAIN, "fp32").level == level


@pytest.mark.parametrize("op", ["matmul", "conv"])
@pytest.mark.parametrize("arch", X86)
def test_fp16_is_an_emulation_with_fp32_sums(matrix: Matrix, arch: str, op: str) -> None:
    verdict = judge(matrix, arch, op, ("fp16", "fp16"), PLAIN, "fp32")
    assert verdict.level == "emulated"
    assert verdict.row is not None
    assert (verdict.row.computes, verdict.row.accumulate) == ("fp32", "fp32")


def test_the_fp16_instruction_exists_beside_the_emulation(matrix: Matrix) -> None:
    row = one(matrix, "x86-64-avx512_fp16", "fp16", path="avx512_fp16")
    assert (row.level, row.accumulate) == ("native", "fp16")


def test_measured_accumulators(matrix: Matrix) -> None:
    for a, bits in (("fp64", 52), ("fp32", 23), ("bf16", 23), ("fp16", 23)):
        row = one(matrix, MEASURED, a)
        assert row.accumulator is not None
        assert (row.accumulator.fraction_bits, row.accumulator.rounding) == (bits, "rne")
        assert row.evidence in ("probed", "measured")
    assert "flushed" in one(matrix, MEASURED, "bf16").note


def test_nothing_measured_here_passes_for_another_cpu(matrix: Matrix) -> None:
    for arch in set(EVERY) - {MEASURED}:
        for row in matrix.rows(arch):
            assert row.evidence in ("documented", "derived"), row.key
            assert row.accumulator is None, row.key


def test_tf32_stays_fp32(matrix: Matrix) -> None:
    assert {arch: one(matrix, arch, "tf32").level for arch in EVERY} == {arch: "unknown" if arch == "x86-64-amx" else "absent" for arch in EVERY}
    for switch in (switch for arch in EVERY for switch in matrix.switches(arch)):
        assert switch.default == "none"
        assert set(switch.computes.values()) == {"fp32"}
        assert next(iter(switch.computes)) == "ieee", "the first setting is the one a plan chooses"
    assert {"bf16", "tf32"} < set(next(switch for switch in matrix.switches(MEASURED) if switch.op == "matmul").computes)


@pytest.mark.parametrize("arch", X86)
def test_fp8_is_emulated_and_block_scales_are_refused(matrix: Matrix, arch: str) -> None:
    for pair in (("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"), ("fp8_e4m3", "fp8_e5m2")):
        assert judge(matrix, arch, "matmul", pair, ("tensor", "tensor"), "fp32").level == "emulated"
    assert judge(matrix, arch, "matmul", ("fp8_e4m3", "fp8_e4m3"), ("1x32", "1x32"), "fp32").level == "absent"
    assert judge(matrix, arch, "matmul", ("fp8_e4m3", "fp8_e4m3"), ("1x128", "128x128"), "fp32").level == "absent"
    assert judge(matrix, arch, "matmul", ("fp4_e2m1", "fp4_e2m1"), ("1x16", "1x16"), "fp32").level == "absent"


@pytest.mark.parametrize("arch", EVERY)
def test_overflow_gives_inf(matrix: Matrix, arch: str) -> None:
    overflow = matrix.overflow(arch)
    assert overflow is not None
    assert overflow.mode == "inf_nan"


def test_sums_between_ranks_are_made_in_the_narrow_format(matrix: Matrix) -> None:
    records = {(record.op, record.format): record for record in matrix.collectives(MEASURED)}
    for name in ("fp16", "bf16"):
        assert records["all_reduce_sum", name].accumulate == name
        assert records["all_reduce_avg", name].level == "emulated"
    assert records["all_reduce_sum", "fp8_e4m3"].level == "absent"
    assert records["move", "fp8_e4m3"].level == "absent"
