"""What the matrix of NVIDIA GPUs says about the cases that are easiest to get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpbackend.capability import Peak, Row
from mpbackend.errors import UnknownNameError
from mpbackend.granting import judge
from mpbackend.matrix import Matrix, cited_records, load_matrix
from tests.matrices.rules import MATRICES, shipped

FACTS = 322
ROOT = Path(__file__).resolve().parents[2]
REFERENCE = next((path for base in (ROOT, ROOT.parent) if (path := base / "shared" / "facts" / "nvidia.json").is_file()), None)
needs_reference = pytest.mark.skipif(REFERENCE is None, reason="the collected facts are not beside this checkout")

OLD = ("sm_60", "sm_70", "sm_75")
AMPERE_ON = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
BLACKWELL = ("sm_100", "sm_103", "sm_120", "sm_121")
EVERY = (*OLD, *AMPERE_ON)
E4M3, E5M2 = "fp8_e4m3", "fp8_e5m2"
PLAIN = ("none", "none")
TENSOR = ("tensor", "tensor")

FORMATS = {
    "f16": "fp16",
    "bf16": "bf16",
    "tf32": "tf32",
    "f32": "fp32",
    "f64": "fp64",
    "s8": "int8",
    "s4": "int4",
    "s32": "int32",
    "e4m3": E4M3,
    "e5m2": E5M2,
    "e2m1": "fp4_e2m1",
    "e2m3": "fp6_e2m3",
    "e3m2": "fp6_e3m2",
    "-": "none",
}
LAYOUTS = {None: "none", "VEC32 ue8m0": "mx_1x32", "VEC16 ue4m3": "nv_1x16"}


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load_matrix([MATRICES / "nvidia.toml"])


def one(matrix: Matrix, arch: str, a: str, b: str = "", **fields: str) -> Row:
    """Return the only row of an architecture with these fields, a plain matmul unless they say otherwise."""
    rows = matrix.rows(arch, **{"op": "matmul", "a": a, "b": b or a, "scaling": "none", **fields})
    assert len(rows) == 1, [row.key for row in rows]
    return rows[0]


def peak(matrix: Matrix, device: str, name: str, accumulate: str = "fp32", unit: str = "matrix", sparsity: str = "dense") -> Peak:
    """Return the only peak of a device with these values."""
    found = [p for p in matrix.peaks(device) if (p.format, p.accumulate, p.unit, p.sparsity) == (name, accumulate, unit, sparsity)]
    assert len(found) == 1, found
    return found[0]


def test_every_collected_fact_is_used_or_dropped() -> None:
    collection = shipped()
    used = {fact for _, document in collection.files for record in cited_records(document) for fact in record.facts}
    left_out = {entry.fact for entry in collection.dropped.dropped}
    assert {fact for fact in used | left_out if fact.startswith("nvidia/")} == {f"nvidia/{index}" for index in range(FACTS)}
    assert dict(next(document for _, document in collection.files if document.family == "nvidia").facts) == {"nvidia": FACTS}


# Names


@pytest.mark.parametrize(
    ("reported", "device"),
    [
        ("Tesla P100-SXM2-16GB", "p100"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA GB10", "gb10"),
    ],
)
def test_an_exact_name_means_one_model(matrix: Matrix, reported: str, device: str) -> None:
    model, arch = matrix.identify(reported)
    assert model is not None
    assert arch is not None
    assert (model.key, arch.key) == (device, matrix.device(device).arch)


@pytest.mark.parametrize(
    ("reported", "capability", "arch"),
    [
        ("NVIDIA A100-SXM-64GB", "8.0", "sm_80"),
        ("NVIDIA A30", "8.0", "sm_80"),
        ("NVIDIA A10G", "8.6", "sm_86"),
        ("NVIDIA GeForce RTX 3090 Ti", "8.6", "sm_86"),
        ("NVIDIA L40G", "8.9", "sm_89"),
        ("NVIDIA H100 NVL", "9.0", "sm_90"),
        ("NVIDIA H100", "9.0", "sm_90"),
        ("NVIDIA H20-3e", "9.0", "sm_90"),
        ("nvidia h100 80gb hbm3", "9.0", "sm_90"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", "sm_120"),
        ("NVIDIA B300", "10.3", "sm_103"),
    ],
)
def test_a_near_name_gives_the_architecture_and_no_model(matrix: Matrix, reported: str, capability: str, arch: str) -> None:
    model, found = matrix.identify(reported, capability)
    assert model is None
    assert found is not None
    assert found.key == arch
    assert matrix.identify(reported) == (None, None)


def test_an_unknown_gpu_is_no_a100(matrix: Matrix) -> None:
    assert matrix.identify("NVIDIA A999") == (None, None)
    assert matrix.identify("NVIDIA A999", "11.0") == (None, None)
    with pytest.raises(UnknownNameError):
        matrix.device("a999")


@pytest.mark.parametrize("key", ["a10g", "h100-nvl", "v100-pcie"])
def test_a_guess_is_refused(matrix: Matrix, key: str) -> None:
    with pytest.raises(UnknownNameError, match="refused"):
        matrix.device(key)


def test_architectures_are_compute_capabilities(matrix: Matrix) -> None:
    assert {key: arch.identifiers for key, arch in matrix.archs.items()} == {key: (f"{key[3:-1]}.{key[-1]}",) for key in EVERY}
    assert matrix.device("h100-sxm").key == "h100"


# Accumulators


@pytest.mark.parametrize(
    ("arch", "a", "path", "accumulate", "step", "bits"),
    [
        ("sm_70", "fp16", "mma.sync", "fp32", 4, 23),
        ("sm_75", "fp16", "mma.sync", "fp32", 8, 24),
        ("sm_80", "bf16", "mma.sync", "fp32", 8, 24),
        ("sm_80", "tf32", "mma.sync", "fp32", 4, 24),
        ("sm_89", "fp16", "mma.sync", "fp32", 8, 24),
        ("sm_90", "bf16", "wgmma", "fp32", 16, 25),
        ("sm_90", "tf32", "wgmma", "fp32", 8, 25),
        ("sm_100", "fp16", "tcgen05", "fp32", 16, 25),
        ("sm_89", E4M3, "mma.sync", "fp32", 16, 13),
        ("sm_89", E5M2, "mma.sync", "fp16", 16, 13),
        ("sm_90", E4M3, "wgmma", "fp32", 32, 13),
        ("sm_90", E5M2, "wgmma", "fp32", 32, 13),
        ("sm_100", E4M3, "tcgen05", "fp32", 32, 25),
        ("sm_120", E4M3, "mma.sync", "fp32", 32, 25),
    ],
)
def test_the_unit_truncates_to_this_many_bits(matrix: Matrix, arch: str, a: str, path: str, accumulate: str, step: int, bits: int) -> None:
    row = one(matrix, arch, a, path=path, accumulate=accumulate)
    assert row.level == "native"
    assert row.accumulator is not None
    assert (row.accumulator.products_per_step, row.accumulator.fraction_bits) == (step, bits)
    assert row.accumulator.rounding == "rz"
    assert row.accumulator.promotion_interval == "none"


@pytest.mark.parametrize(("arch", "path"), [("sm_89", "mma.sync"), ("sm_90", "wgmma")])
def test_every_fp8_pair_of_ada_and_hopper_keeps_13_bits(matrix: Matrix, arch: str, path: str) -> None:
    rows = [row for row in matrix.rows(arch, op="matmul", path=path) if row.a.startswith("fp8") and row.level == "native"]
    assert {(row.a, row.b, row.accumulate) for row in rows} == {(a, b, c) for a in (E4M3, E5M2) for b in (E4M3, E5M2) for c in ("fp16", "fp32")}
    assert {row.accumulator.fraction_bits for row in rows if row.accumulator is not None} == {13}


@pytest.mark.parametrize("arch", EVERY[1:])
def test_fp16_sums_round_to_nearest_and_their_width_is_not_identified(matrix: Matrix, arch: str) -> None:
    for row in matrix.rows(arch, op="matmul", a="fp16", accumulate="fp16"):
        if row.path == "cublaslt" or row.accumulator is None:
            continue
        assert row.accumulator.fraction_bits == "unknown"
        assert row.accumulator.output_rounding == ("unknown" if arch in ("sm_103", "sm_121") else "rne")


@pytest.mark.parametrize("arch", ["sm_103", "sm_121"])
def test_an_unmeasured_chip_inherits_no_numerics(matrix: Matrix, arch: str) -> None:
    for row in matrix.rows(arch, op="matmul"):
        if row.accumulator is not None and row.a in ("fp16", "bf16", "tf32", E4M3, E5M2, "fp6_e2m3", "fp6_e3m2", "fp4_e2m1"):
            assert row.accumulator.fraction_bits == "unknown" or row.level == "emulated", row.key
            assert row.accumulator.products_per_step == "unknown" or row.level == "emulated", row.key


def test_fp8_of_mma_sync_is_not_the_fp8_unit(matrix: Matrix) -> None:
    for arch in ("sm_90", "sm_100"):
        row = one(matrix, arch, E4M3, path="mma.sync", accumulate="fp32")
        assert (row.level, row.computes) == ("emulated", "fp16")
        assert row.accumulator is not None
        assert (row.accumulator.products_per_step, row.accumulator.output_rounding) == (16, "rne")
    assert one(matrix, "sm_89", E4M3, path="mma.sync", accumulate="fp32").level == "native"


def test_libraries_differ_in_what_they_promote(matrix: Matrix) -> None:
    intervals = {path: one(matrix, "sm_90", E4M3, path=path).accumulator for path in ("cutlass", "triton")}
    assert {path: found.promotion_interval if found else None for path, found in intervals.items()} == {"cutlass": 128, "triton": "none"}
    row = one(matrix, "sm_90", E4M3, path="cublaslt", scaling="tensor")
    assert row.accumulator is None
    assert "FAST_ACCUM" in row.note


@pytest.mark.parametrize("arch", EVERY)
def test_plain_fp32_is_one_rounded_fma_a_product(matrix: Matrix, arch: str) -> None:
    row = one(matrix, arch, "fp32", path="simt")
    assert row.level == "native"
    assert row.accumulator is not None
    assert (row.accumulator.products_per_step, row.accumulator.fraction_bits, row.accumulator.rounding) == (1, 23, "rne")


@pytest.mark.parametrize("arch", ["sm_100", "sm_120"])
def test_fp4_sums_keep_35_bits(matrix: Matrix, arch: str) -> None:
    path = "tcgen05" if arch == "sm_100" else "mma.sync"
    row = one(matrix, arch, "fp4_e2m1", scaling="nv_1x16", path=path)
    assert row.accumulator is not None
    assert (row.accumulator.products_per_step, row.accumulator.fraction_bits) == (64, 35)


# Support


@pytest.mark.parametrize("arch", OLD)
@pytest.mark.parametrize("op", ["matmul", "conv"])
def test_bf16_before_ampere_is_emulated(matrix: Matrix, arch: str, op: str) -> None:
    verdict = judge(matrix, arch, op, ("bf16", "bf16"), PLAIN, "fp32")
    assert verdict.level == "emulated"
    assert verdict.row is not None
    assert verdict.row.computes == "fp32"
    assert one(matrix, arch, "bf16", path="none").level == "absent"


@pytest.mark.parametrize("arch", OLD)
@pytest.mark.parametrize("op", ["matmul", "conv"])
def test_tf32_before_ampere_is_absent(matrix: Matrix, arch: str, op: str) -> None:
    assert judge(matrix, arch, op, ("tf32", "tf32"), PLAIN, "fp32").level == "absent"


@pytest.mark.parametrize("op", ["matmul", "conv"])
@pytest.mark.parametrize("name", ["fp16", "bf16", "tf32", "fp32"])
@pytest.mark.parametrize("arch", AMPERE_ON)
def test_training_formats_are_native_from_ampere_on(matrix: Matrix, arch: str, op: str, name: str) -> None:
    verdict = judge(matrix, arch, op, (name, name), PLAIN, "fp32")
    assert verdict.level == "native"
    assert verdict.row is not None
    assert verdict.row.accumulate == "fp32"


@pytest.mark.parametrize("op", ["matmul", "conv"])
@pytest.mark.parametrize("name", ["fp16", "fp32"])
@pytest.mark.parametrize("arch", OLD)
def test_old_gpus_compute_fp16_and_fp32_with_fp32_sums(matrix: Matrix, arch: str, op: str, name: str) -> None:
    verdict = judge(matrix, arch, op, (name, name), PLAIN, "fp32")
    assert verdict.level == "native"
    assert verdict.row is not None
    assert verdict.row.accumulate == "fp32"
    assert verdict.row.path == ("simt" if arch == "sm_60" or name == "fp32" else "mma.sync")


@pytest.mark.parametrize("arch", EVERY)
def test_fp8_starts_with_ada(matrix: Matrix, arch: str) -> None:
    level = judge(matrix, arch, "matmul", (E4M3, E4M3), TENSOR, "fp32").level
    assert level == ("native" if arch in AMPERE_ON[2:] else "absent")


def test_the_row_that_decides_about_fp8_on_hopper(matrix: Matrix) -> None:
    verdict = judge(matrix, matrix.device("h100").arch, "matmul", (E4M3, E4M3), TENSOR, "fp32")
    assert verdict.row is not None
    assert verdict.row.key == ("sm_90", "matmul", E4M3, E4M3, "none", "wgmma", "fp32")
    assert verdict.row.accumulator is not None
    assert verdict.row.accumulator.fraction_bits == 13


@pytest.mark.parametrize("arch", AMPERE_ON[2:])
@pytest.mark.parametrize("pair", [(E4M3, E5M2), (E5M2, E4M3)])
def test_gradient_pairs_of_fp8_are_native(matrix: Matrix, arch: str, pair: tuple[str, str]) -> None:
    assert judge(matrix, arch, "matmul", pair, TENSOR, "fp32").level == "native"


@pytest.mark.parametrize("arch", AMPERE_ON[2:])
def test_the_unit_takes_e5m2_twice_but_the_library_does_not(matrix: Matrix, arch: str) -> None:
    assert "native" in {row.level for row in matrix.rows(arch, op="matmul", a=E5M2, b=E5M2, scaling="none", accumulate="fp32")}
    assert judge(matrix, arch, "matmul", (E5M2, E5M2), TENSOR, "fp32").level == "absent"


@pytest.mark.parametrize("arch", EVERY)
@pytest.mark.parametrize(("a", "granularity"), [(E4M3, "1x32"), ("fp4_e2m1", "1x16")])
def test_block_scaling_starts_with_blackwell(matrix: Matrix, arch: str, a: str, granularity: str) -> None:
    level = judge(matrix, arch, "matmul", (a, a), (granularity, granularity), "fp32").level
    assert level == ("native" if arch in BLACKWELL else "absent")


@pytest.mark.parametrize("arch", AMPERE_ON[2:])
def test_fp32_block_scales_are_hoppers(matrix: Matrix, arch: str) -> None:
    level = judge(matrix, arch, "matmul", (E4M3, E4M3), ("1x128", "128x128"), "fp32").level
    assert level == ("native" if arch == "sm_90" else "absent")
    assert all(row.level == "absent" for row in matrix.rows("sm_90", scaling="block_128x128"))


def test_mxfp4_has_two_kinds_and_no_library(matrix: Matrix) -> None:
    for arch in BLACKWELL:
        rows = matrix.rows(arch, op="matmul", a="fp4_e2m1", scaling="mx_1x32")
        assert sorted(row.level for row in rows) == ["absent", "native", "native"]
        assert {row.align.k for row in rows if row.align is not None} == {32, 128}


def test_no_bf16_with_narrow_sums(matrix: Matrix) -> None:
    assert {row.accumulate for arch in EVERY for row in matrix.rows(arch, a="bf16")} <= {"fp32", "none"}
    assert not [row for arch in EVERY for row in matrix.rows(arch, scaling="mx_1x32") if row.accumulate == "fp16"]


def test_int4_ends_with_ada(matrix: Matrix) -> None:
    assert {arch: one(matrix, arch, "int4", path="mma.sync").level for arch in ("sm_75", "sm_89", "sm_90", "sm_121")} == {
        "sm_75": "native",
        "sm_89": "native",
        "sm_90": "emulated",
        "sm_121": "emulated",
    }
    assert one(matrix, "sm_90", "int4", path="mma.sync").computes == "int8"


def test_int8_by_architecture(matrix: Matrix) -> None:
    assert one(matrix, "sm_60", "int8", path="none").level == "absent"
    assert one(matrix, "sm_70", "int8", path="simt").level == "native"
    assert one(matrix, "sm_75", "int8", path="mma.sync").level == "native"
    assert one(matrix, "sm_100", "int8", path="tcgen05").level == "native"
    assert one(matrix, "sm_103", "int8", path="tcgen05").level == "absent"
    assert one(matrix, "sm_103", "int8", path="mma.sync").level == "native"


def test_a_double_precision_opcode_is_no_rate(matrix: Matrix) -> None:
    for arch in AMPERE_ON:
        row = one(matrix, arch, "fp64", path="mma.sync")
        assert row.level == "native"
        assert "rate" in row.note
    assert peak(matrix, "b300", "fp64", "fp64", "vector").tera_per_s < 2
    assert peak(matrix, "rtx3090", "fp64", "fp64", "vector").tera_per_s < 1


def test_bf16x9_is_fp32_from_bf16_on_two_architectures(matrix: Matrix) -> None:
    rows = [row for row in matrix.rows() if row.path == "cublaslt_emulated_16bfx9"]
    assert {(row.arch, row.a, row.level, row.computes) for row in rows} == {(arch, "fp32", "emulated", "bf16") for arch in ("sm_100", "sm_103")}


def test_convolution_of_fp8(matrix: Matrix) -> None:
    row = one(matrix, "sm_90", E4M3, op="conv", path="cudnn")
    assert (row.level, row.since["cudnn"]) == ("library", "8.6")
    assert one(matrix, "sm_90", E4M3, op="conv", path="torch_cudnn").level == "absent"
    assert one(matrix, "sm_90", E5M2, op="conv", path="cudnn").level == "unknown"
    assert matrix.rows("sm_89", op="conv", a=E4M3) == []


def test_derived_convolution_says_so(matrix: Matrix) -> None:
    for arch in EVERY:
        for row in matrix.rows(arch, op="conv", level="native"):
            assert row.evidence == "derived"
            assert "inference" in row.note


def test_hif8_is_refused_rather_than_unknown(matrix: Matrix) -> None:
    assert {judge(matrix, arch, "matmul", ("hif8", "hif8"), TENSOR, "fp32").level for arch in EVERY} == {"absent"}


# Rates


def test_l40_is_half_of_l40s(matrix: Matrix) -> None:
    for name in ("fp16", "bf16"):
        assert peak(matrix, "l40", name).tera_per_s == pytest.approx(peak(matrix, "l40s", name).tera_per_s / 2, rel=0.001)
    assert not [p for p in matrix.peaks("l40") if p.format.startswith("fp8")]


@pytest.mark.parametrize("device", ["rtx3090", "rtx4090", "rtx5090"])
def test_fp32_sums_halve_the_rate_of_geforce(matrix: Matrix, device: str) -> None:
    assert peak(matrix, device, "fp16").tera_per_s == pytest.approx(peak(matrix, device, "fp16", "fp16").tera_per_s / 2, rel=0.001)


@pytest.mark.parametrize(
    ("device", "name", "accumulate", "unit", "rate"),
    [
        ("p100", "fp16", "fp16", "vector", 21.2),
        ("v100", "fp16", "fp32", "matrix", 125),
        ("t4", "int4", "int32", "matrix", 260),
        ("a100", "fp16", "fp16", "matrix", 312),
        ("a100", "fp64", "fp64", "matrix", 19.5),
        ("a100", "fp64", "fp64", "vector", 9.7),
        ("l4", "fp8_e5m2", "fp32", "matrix", 242),
        ("h100", "bf16", "fp32", "matrix", 989.5),
        ("h100-pcie", "bf16", "fp32", "matrix", 756.5),
        ("h20", "bf16", "fp32", "matrix", 148),
        ("b200", "bf16", "fp32", "matrix", 2250),
        ("gb200", "bf16", "fp32", "matrix", 2500),
        ("b300", "int8", "int32", "matrix", 153.5),
        ("gb300", "fp4_e2m1", "fp32", "matrix", 15000),
        ("rtx-pro-6000", "bf16", "fp32", "matrix", 503.8),
    ],
)
def test_dense_rates(matrix: Matrix, device: str, name: str, accumulate: str, unit: str, rate: float) -> None:
    found = peak(matrix, device, name, accumulate, unit)
    assert found.tera_per_s == rate
    assert found.scaling == ("nv_1x16" if name == "fp4_e2m1" else "none")


def test_what_no_sheet_states_has_no_rate(matrix: Matrix) -> None:
    assert {p.format for p in matrix.peaks("h800")} == {"fp16", "bf16", "fp32", "fp64"}
    assert {p.format for p in matrix.peaks("gb10")} == {"fp4_e2m1"}
    assert (peak(matrix, "gb10", "fp4_e2m1").basis, peak(matrix, "gb10", "fp4_e2m1").evidence) == ("derived", "derived")
    assert peak(matrix, "gb10", "fp4_e2m1", sparsity="2:4").tera_per_s == 2 * peak(matrix, "gb10", "fp4_e2m1").tera_per_s
    assert len(matrix.device("gb10").conflict) > 1


def test_sparse_rates_never_pass_for_dense(matrix: Matrix) -> None:
    assert {(p.device, p.format) for device in matrix.devices for p in matrix.peaks(device) if p.sparsity != "dense"} == {
        ("b300", "fp4_e2m1"),
        ("gb10", "fp4_e2m1"),
    }


def test_disputed_int8_of_blackwell_ultra(matrix: Matrix) -> None:
    assert peak(matrix, "b300", "int8", "int32").conflict
    assert peak(matrix, "gb300", "int8", "int32").conflict


def test_memory_is_that_of_the_device(matrix: Matrix) -> None:
    assert matrix.device("h100").memory_bytes == (80_000_000_000,)
    assert matrix.device("a100").memory_bytes == (40_000_000_000, 80_000_000_000)
    assert matrix.device("a100").bandwidth_bytes_per_s == (1_555_000_000_000, 2_039_000_000_000)
    assert matrix.device("l4").bandwidth_bytes_per_s == (300_000_000_000,)
    assert matrix.device("rtx5090").bandwidth_bytes_per_s == (1_792_000_000_000,)
    assert all(model.memory_bytes and model.bandwidth_bytes_per_s for model in matrix.devices.values())


# Switches, overflow, collectives


@pytest.mark.parametrize("arch", EVERY)
def test_convolution_runs_tf32_by_default_and_matmul_does_not(matrix: Matrix, arch: str) -> None:
    switches = {switch.name: switch for switch in matrix.switches(arch)}
    computed = {name: switches[name].computes[switches[name].default] for name in ("matmul.fp32_precision", "conv.fp32_precision", "rnn.fp32_precision")}
    default = "tf32" if arch in AMPERE_ON else "fp32"
    assert computed == {"matmul.fp32_precision": "fp32", "conv.fp32_precision": default, "rnn.fp32_precision": default}
    assert switches["conv.fp32_precision"].computes["ieee"] == "fp32"


def test_reduced_precision_reductions_are_on_by_default(matrix: Matrix) -> None:
    switches = {switch.name: switch for switch in matrix.switches("sm_90")}
    for name in ("fp16", "bf16"):
        switch = switches[f"matmul.reduced_precision_reduction_{name}"]
        assert (switch.default, switch.computes) == ("true", {"false": "fp32", "true": name})
    assert switches["matmul.fp16_accumulation"].default == "false"
    assert "matmul.fp16_accumulation" not in {switch.name for switch in matrix.switches("sm_60")}


@pytest.mark.parametrize("arch", EVERY)
def test_overflow_gives_inf_and_sets_no_register(matrix: Matrix, arch: str) -> None:
    overflow = matrix.overflow(arch)
    assert overflow is not None
    assert (overflow.mode, overflow.status_register) == ("inf_nan", False)


@pytest.mark.parametrize("arch", EVERY)
def test_sums_between_ranks(matrix: Matrix, arch: str) -> None:
    sums = {record.format: record for record in matrix.collectives(arch) if record.op == "all_reduce_sum"}
    assert {sums[name].level for name in ("fp32", "fp16", "bf16")} == {"native"}
    assert {sums[name].accumulate for name in ("fp16", "bf16")} == {"unknown"}
    assert {sums[name].level for name in (E4M3, E5M2)} == {"native" if arch in AMPERE_ON[3:] else "absent"}


# Against the collected facts


def facts() -> list[dict[str, Any]]:
    assert REFERENCE is not None
    collected: list[dict[str, Any]] = json.loads(REFERENCE.read_text(encoding="utf-8"))
    return collected


@needs_reference
def test_every_matmul_fact_has_its_row(matrix: Matrix) -> None:
    for index, fact in enumerate(facts()):
        if fact["op"] != "matmul":
            continue
        a, b, accumulate = FORMATS[fact["a_dtype"]], FORMATS[fact["b_dtype"]], FORMATS[fact["accumulate_dtype"]]
        rows = matrix.rows(fact["sm"], op="matmul", a=a, b=b, scaling=LAYOUTS[fact["block_scale"]], accumulate=accumulate)
        for path in fact["path"].split("+"):
            row = next(row for row in rows if row.path in (path, f"{path}_mxf4") and f"nvidia/{index}" in row.facts)
            expected = {(True, path): "native", (False, "simt"): "native", (False, "none"): "absent", (False, "mma.sync"): "emulated"}
            assert row.level == expected[fact["native"], path], (index, row.key)
            assert set(row.out) == ({FORMATS[name] for name in fact["out_dtypes"]} if row.level != "absent" else set()), (index, row.key)


@needs_reference
def test_sourced_numerics_are_copied_and_unsourced_ones_are_not(matrix: Matrix) -> None:
    cited = {fact: row for row in matrix.rows() if row.op == "matmul" and row.level in ("native", "emulated") for fact in row.facts}
    for index, fact in enumerate(facts()):
        numerics = fact.get("numerics")
        if fact["op"] != "matmul" or not numerics or "F_fraction_bits" not in numerics:
            continue
        accumulator = cited[f"nvidia/{index}"].accumulator
        assert accumulator is not None
        if fact["numerics_evidence"].startswith("UNSOURCED"):
            assert (accumulator.products_per_step, accumulator.fraction_bits) == ("unknown", "unknown"), index
        elif "L_products_per_step" in numerics:
            assert accumulator.products_per_step == numerics["L_products_per_step"], index
            assert accumulator.fraction_bits in (numerics["F_fraction_bits"], "unknown"), index
            assert (accumulator.fraction_bits == "unknown") == (fact["a_dtype"] == fact["accumulate_dtype"] == "f16"), index


@needs_reference
def test_replayed_facts_are_replayed_rows(matrix: Matrix) -> None:
    for index, fact in enumerate(facts()):
        evidence = fact.get("numerics_evidence") or ""
        if evidence.startswith(("literature only", "UNSOURCED")):
            kinds = {
                row.evidence
                for row in matrix.rows()
                if row.op == "matmul" and row.level == "native" and f"nvidia/{index}" in row.facts and row.path != "triton"
            }
            assert "replayed" not in kinds, index


@needs_reference
def test_rates_are_those_of_the_facts(matrix: Matrix) -> None:
    for index, fact in enumerate(facts()):
        if fact["op"] != "peak_throughput":
            continue
        stated = {float(rate) for rate in fact["peak_tflops_dense"].values()}
        records = [p for device in matrix.devices for p in matrix.peaks(device) if f"nvidia/{index}" in p.facts and p.sparsity == "dense"]
        assert {p.tera_per_s for p in records} == stated, index
        assert len({p.device for p in records}) == 1
