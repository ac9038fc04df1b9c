"""What the matrix of Ascend NPUs says about the cases that are easiest to get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpbackend.capability import OverflowMode, Row
from mpbackend.errors import UnknownNameError
from mpbackend.formats import parse_format
from mpbackend.matrix import Matrix, cited_records, load_matrix
from tests.matrices.rules import MATRICES, shipped

FACTS = 457
ROOT = Path(__file__).resolve().parents[2]
REFERENCE = next((path for base in (ROOT, ROOT.parent) if (path := base / "shared" / "facts" / "ascend.json").is_file()), None)
needs_reference = pytest.mark.skipif(REFERENCE is None, reason="the collected facts are not beside this checkout")

OLD = ("ascend-910a", "ascend-310p", "ascend-310b")
A2_A3 = ("ascend-a2", "ascend-a3")
NEW = (*A2_A3, "ascend-950")
EVERY = (*OLD, *NEW)
FP8 = ("fp8_e4m3", "fp8_e5m2")


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load_matrix([MATRICES / "ascend.toml"])


def one(matrix: Matrix, arch: str, a: str, **fields: str) -> Row:
    """Return the only row of an architecture with these fields, both operands in ``a``."""
    rows = matrix.rows(arch, **{"op": "matmul", "a": a, "b": a, **fields})
    assert len(rows) == 1, [row.key for row in rows]
    return rows[0]


def levels(matrix: Matrix, arch: str, **fields: str) -> set[str]:
    """Return the levels of every row of an architecture with these fields."""
    return {row.level for row in matrix.rows(arch, **fields)}


def test_every_collected_fact_is_used_or_dropped() -> None:
    collection = shipped()
    used = {fact for _, document in collection.files for record in cited_records(document) for fact in record.facts}
    left_out = {entry.fact for entry in collection.dropped.dropped}
    assert {fact for fact in used | left_out if fact.startswith("ascend/")} == {f"ascend/{index}" for index in range(FACTS)}
    assert dict(next(document for _, document in collection.files if document.family == "ascend").facts) == {"ascend": FACTS}


# Names


@pytest.mark.parametrize(
    ("reported", "device", "arch"),
    [
        ("Ascend910B", "ascend-910a", "ascend-910a"),
        ("Ascend910A", "ascend-910a", "ascend-910a"),
        ("Ascend910B2", "ascend-910b2", "ascend-a2"),
        ("Ascend910B2C", "ascend-910b2c", "ascend-a2"),
        ("Ascend910B4-1", "ascend-910b4-1", "ascend-a2"),
        ("Ascend310B4", "ascend-310b", "ascend-310b"),
        ("Ascend310P3", "ascend-310p", "ascend-310p"),
        ("Ascend910_9392", "ascend-910c", "ascend-a3"),
        ("Ascend950PR_9599", "ascend-950pr", "ascend-950"),
        ("Ascend950DT_95A1", "ascend-950dt", "ascend-950"),
        ("Ascend950PR_0000", None, "ascend-950"),
        ("Ascend777", None, None),
        ("Ascend910_9599", None, None),
        ("Ascend350_354f", None, None),
        ("Ascend910B5", None, None),
        ("Ascend310", None, None),
        ("ascend910b2", None, None),
    ],
)
def test_a_reported_name_means_one_chip_or_stays_unknown(matrix: Matrix, reported: str, device: str | None, arch: str | None) -> None:
    model, found = matrix.identify(reported)
    assert (model.key if model else None, found.key if found else None) == (device, arch)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("ascend-910b", ["Ascend910B is the old 910A family", "ascend-910a", "ascend-910b1", "ascend-910b4"]),
        ("Ascend-910B", ["Ascend910B is the old 910A family"]),
        ("ascend-910", ["ascend-910a", "ascend-910c"]),
        ("ascend-310", ["ascend-310p", "ascend-310b"]),
        ("ascend-a2", ["ascend-910b3"]),
    ],
)
def test_a_key_that_would_be_a_guess_is_refused(matrix: Matrix, key: str, says: list[str]) -> None:
    with pytest.raises(UnknownNameError) as caught:
        matrix.device(key)
    assert all(text in str(caught.value) for text in says)


def test_generation_names_lead_to_the_chip(matrix: Matrix) -> None:
    assert matrix.device("ascend-a3").key == "ascend-910c"
    assert matrix.device("ascend-a5").key == "ascend-950"


def test_soc_numbers_are_not_ordered_by_age(matrix: Matrix) -> None:
    codes = {name: code for device in matrix.devices.values() for name, code in device.codes.items()}
    assert codes["Ascend910B"] == 104
    assert codes["Ascend910B1"] == 220
    assert codes["Ascend310B1"] == 240 > codes["Ascend910B4-1"]
    assert codes["Ascend910_9391"] == 250
    assert {code for name, code in codes.items() if name.startswith("Ascend950")} == {260}


# Matrix products


@pytest.mark.parametrize("arch", ["ascend-910a", "ascend-310p"])
@pytest.mark.parametrize("op", ["matmul", "conv"])
def test_fp32_is_fp16_inside_on_910a_and_310p(matrix: Matrix, arch: str, op: str) -> None:
    row = one(matrix, arch, "fp32", op=op, path="torch_npu")
    assert (row.level, row.computes) == ("converted", "fp16")
    assert "native" not in levels(matrix, arch, op=op, a="fp32", b="fp32")


def test_fp32_through_the_operators_is_fp16_too_on_910a(matrix: Matrix) -> None:
    for path in ("aclnn_matmul", "aclnn_batch_matmul"):
        row = one(matrix, "ascend-910a", "fp32", path=path)
        assert (row.level, row.computes, row.accumulate) == ("converted", "fp16", "unknown")


@pytest.mark.parametrize("arch", ["ascend-910a", "ascend-310p"])
def test_bf16_is_rejected_below_a2(matrix: Matrix, arch: str) -> None:
    row = one(matrix, arch, "bf16", path="aclnn_matmul")
    assert row.level == "absent"
    assert "aclnnMatmul" in matrix.citation(row, arch)
    assert levels(matrix, arch, op="matmul", a="bf16") == levels(matrix, arch, op="conv", a="bf16") == {"absent"}


@pytest.mark.parametrize("arch", ["ascend-910a", "ascend-310p", *NEW])
def test_fp16_is_native_where_the_operator_takes_it(matrix: Matrix, arch: str) -> None:
    assert one(matrix, arch, "fp16", path="aclnn_matmul").level == "native"
    assert one(matrix, arch, "fp16", path="mmad", accumulate="fp32").level == "native"


@pytest.mark.parametrize("arch", EVERY)
def test_fp16_sums_exist_only_on_910a_and_310p(matrix: Matrix, arch: str) -> None:
    expected = "native" if arch in ("ascend-910a", "ascend-310p") else "absent"
    assert one(matrix, arch, "fp16", path="mmad", accumulate="fp16").level == expected
    paths = [row.path for row in matrix.rows(arch, accumulate="fp16") if row.level != "absent"]
    assert paths == (["mmad"] if expected == "native" else [])


@pytest.mark.parametrize("arch", ["ascend-910a", "ascend-310p"])
def test_the_sum_of_an_operator_stays_unknown_where_the_cube_has_two(matrix: Matrix, arch: str) -> None:
    assert one(matrix, arch, "fp16", path="aclnn_matmul").accumulate == "unknown"


@pytest.mark.parametrize("arch", NEW)
def test_bf16_and_fp32_are_native_from_a2_on(matrix: Matrix, arch: str) -> None:
    for name in ("bf16", "fp32"):
        for path in ("mmad", "aclnn_matmul", "aclnn_batch_matmul"):
            row = one(matrix, arch, name, path=path)
            assert (row.level, row.accumulate) == ("native", "fp32")
    assert one(matrix, arch, "fp32", path="torch_npu").level == "native"
    assert one(matrix, arch, "bf16", op="conv", path="aclnn_convolution").level == "native"


def test_an_inferred_sum_is_not_called_documented(matrix: Matrix) -> None:
    assert one(matrix, "ascend-a2", "bf16", path="mmad").evidence == "documented"
    assert one(matrix, "ascend-a2", "bf16", path="aclnn_matmul").evidence == "derived"
    assert one(matrix, "ascend-950", "bf16", path="aclnn_mm").evidence == "documented"


def test_no_bit_level_accumulator_is_claimed(matrix: Matrix) -> None:
    assert [row.key for row in matrix.rows() if row.accumulator is not None] == []


@pytest.mark.parametrize("arch", A2_A3)
@pytest.mark.parametrize("a", FP8)
@pytest.mark.parametrize("b", FP8)
def test_fp8_is_absent_on_a2_and_a3(matrix: Matrix, arch: str, a: str, b: str) -> None:
    for scaling, unit in (("none", "mmad"), ("mx_1x32", "mmad_mx")):
        for path in (unit, "aclnn_quant_matmul_v5"):
            assert [row.level for row in matrix.rows(arch, op="matmul", a=a, b=b, scaling=scaling, path=path)] == ["absent"]


@pytest.mark.parametrize("arch", A2_A3)
def test_software_fp8_is_not_a_capability_of_the_cube(matrix: Matrix, arch: str) -> None:
    row = one(matrix, arch, "fp8_e4m3", path="catlass")
    assert (row.level, row.computes, row.scaling) == ("emulated", "fp16", "tensor")


@pytest.mark.parametrize("arch", OLD)
def test_fp8_and_hif8_are_absent_below_a2(matrix: Matrix, arch: str) -> None:
    for name in (*FP8, "hif8"):
        assert levels(matrix, arch, a=name, b=name) == {"absent"}


@pytest.mark.parametrize("a", FP8)
@pytest.mark.parametrize("b", FP8)
def test_950_takes_every_fp8_pair(matrix: Matrix, a: str, b: str) -> None:
    for path, scaling in (
        ("mmad", "none"),
        ("mmad_mx", "mx_1x32"),
        ("aclnn_quant_matmul_v5", "tensor_channel_token"),
        ("aclnn_quant_matmul_v5", "block_1x128_128x128"),
        ("aclnn_quant_matmul_v5", "block_128x128"),
        ("aclnn_quant_matmul_v5", "mx_1x32"),
    ):
        row = one(matrix, "ascend-950", a, b=b, path=path, scaling=scaling)
        assert (row.level, row.accumulate) == ("native", "fp32")


def test_950_takes_hif8_but_no_pair_of_it_with_fp8(matrix: Matrix) -> None:
    assert one(matrix, "ascend-950", "hif8", path="mmad").level == "native"
    assert one(matrix, "ascend-950", "hif8", path="aclnn_quant_matmul_v5", scaling="tensor_channel_token").level == "native"
    for name in FP8:
        assert levels(matrix, "ascend-950", a="hif8", b=name, path="mmad") == levels(matrix, "ascend-950", a=name, b="hif8", path="mmad") == {"absent"}


def test_950_takes_mx_fp4_but_its_operator_only_e2m1(matrix: Matrix) -> None:
    for name, level in (("fp4_e2m1", "native"), ("fp4_e1m2", "absent")):
        assert one(matrix, "ascend-950", name, path="mmad_mx").level == "native"
        assert one(matrix, "ascend-950", name, path="aclnn_quant_matmul_v5").level == level


@pytest.mark.parametrize("arch", EVERY)
def test_formats_of_another_vendor_are_absent_not_unknown(matrix: Matrix, arch: str) -> None:
    assert levels(matrix, arch, op="matmul", a="tf32") == levels(matrix, arch, op="conv", a="tf32") == {"absent"}
    assert levels(matrix, arch, op="matmul", a="fp4_e2m1", b="fp4_e2m1", scaling="nv_1x16") == {"absent"}


@pytest.mark.parametrize("arch", EVERY)
def test_int4_left_the_cube_on_950(matrix: Matrix, arch: str) -> None:
    expected = "native" if arch not in ("ascend-910a", "ascend-950") else "absent"
    assert one(matrix, arch, "int4", path="mmad").level == expected


def test_int4_is_converted_by_the_operator_of_950(matrix: Matrix) -> None:
    rows = matrix.rows("ascend-950", a="int4", b="int4", path="aclnn_quant_matmul_v5")
    assert {(row.level, row.computes) for row in rows} == {("converted", "int8")}
    assert len(rows) == 2


@pytest.mark.parametrize("arch", EVERY)
def test_sparse_products_exist_on_a2_and_a3_only(matrix: Matrix, arch: str) -> None:
    assert one(matrix, arch, "int8", op="sparse_matmul").level == ("native" if arch in A2_A3 else "absent")


# HF32, convolution and switches


@pytest.mark.parametrize(("arch", "name"), [("ascend-a2", "hf32_e8m11"), ("ascend-a3", "hf32_e8m11"), ("ascend-950", "hf32_e8m10")])
def test_hf32_has_another_width_on_950(matrix: Matrix, arch: str, name: str) -> None:
    assert {row.a for row in matrix.rows(arch) if row.a.startswith("hf32")} == {name}
    assert one(matrix, arch, name, path="mmad").level == one(matrix, arch, name, path="aclnn_matmul").level == "native"
    assert one(matrix, arch, name, op="conv", path="aclnn_convolution").level == "native"


def test_the_width_of_hf32_on_950_is_disputed(matrix: Matrix) -> None:
    claims = one(matrix, "ascend-950", "hf32_e8m10", path="mmad").conflict
    assert [claim.source for claim in claims] == ["hiascend-atc-allow-hf32"]
    assert "11" in claims[0].claim


@pytest.mark.parametrize(("arch", "hf32"), [("ascend-a2", "hf32_e8m11"), ("ascend-a3", "hf32_e8m11"), ("ascend-950", "hf32_e8m10")])
def test_a_plain_convolution_is_hf32_and_a_plain_product_is_not(matrix: Matrix, arch: str, hf32: str) -> None:
    switches = {switch.name: switch for switch in matrix.switches(arch)}
    conv, product = switches["conv.allow_hf32"], switches["matmul.allow_hf32"]
    assert (conv.op, conv.default, conv.computes) == ("conv", "True", {"True": hf32, "False": "fp32"})
    assert (product.op, product.default, product.computes) == ("matmul", "False", {"False": "fp32", "True": hf32})


def test_no_switch_gives_fp32_on_910a(matrix: Matrix) -> None:
    assert {computes for switch in matrix.switches("ascend-910a") for computes in switch.computes.values()} == {"fp16"}
    assert matrix.switches("ascend-310b") == []


@pytest.mark.parametrize("arch", A2_A3)
def test_true_fp32_convolution_is_disputed_on_a2_and_a3(matrix: Matrix, arch: str) -> None:
    row = one(matrix, arch, "fp32", op="conv", path="aclnn_convolution")
    assert row.level == "unknown"
    assert sorted(claim.source for claim in row.conflict) == ["aclnn-conv:433-441", "nn-cube-util"]


def test_true_fp32_convolution_is_native_on_950(matrix: Matrix) -> None:
    assert one(matrix, "ascend-950", "fp32", op="conv", path="aclnn_convolution").level == "native"


def test_convolution_on_910a_leaves_the_operator_that_rejects_it(matrix: Matrix) -> None:
    assert levels(matrix, "ascend-910a", op="conv", path="aclnn_convolution") == {"absent"}
    assert one(matrix, "ascend-910a", "fp16", op="conv", path="torch_npu").level == "library"


def test_hif8_and_e4m3_convolutions_are_on_950_only(matrix: Matrix) -> None:
    for name in ("hif8", "fp8_e4m3"):
        found = {row.arch for row in matrix.rows(op="conv", a=name) if row.level != "absent"}
        assert found == {"ascend-950"}


# Where sources disagree or say nothing


@pytest.mark.parametrize("path", ["mmad", "ascendc_matmul"])
def test_bf16_on_310b_is_disputed(matrix: Matrix, path: str) -> None:
    row = one(matrix, "ascend-310b", "bf16", path=path)
    assert row.level == "unknown"
    assert len(row.conflict) >= 2


def test_what_the_framework_runs_on_310b_is_unknown(matrix: Matrix) -> None:
    for name in ("fp16", "bf16", "fp32"):
        assert one(matrix, "ascend-310b", name, path="torch_npu").level == "unknown"
    for path in ("aclnn_matmul", "aclnn_mm", "aclnn_batch_matmul"):
        assert levels(matrix, "ascend-310b", path=path) == {"absent"}


def test_a_bf16_result_on_310p_is_a_claim_and_not_a_capability(matrix: Matrix) -> None:
    row = one(matrix, "ascend-310p", "fp16", path="ascendc_matmul")
    assert "bf16" not in row.out
    assert any("bf16" in claim.claim for claim in row.conflict)


def test_no_e5m2_result_is_written(matrix: Matrix) -> None:
    assert [row.key for row in matrix.rows() if "fp8_e5m2" in row.out] == []
    assert "fp8_e4m3" in one(matrix, "ascend-950", "fp32", op="output_conversion").out


# Overflow and communication


@pytest.mark.parametrize(
    ("arch", "mode", "switch", "register"),
    [
        ("ascend-910a", "saturating", "", True),
        ("ascend-310p", "saturating", "", True),
        ("ascend-310b", "saturating", "", True),
        ("ascend-a2", "inf_nan", "INF_NAN_MODE_FORCE_DISABLE=1", True),
        ("ascend-a3", "inf_nan", "INF_NAN_MODE_FORCE_DISABLE=1", True),
        ("ascend-950", "inf_nan", "", "unknown"),
    ],
)
def test_overflow_mode(matrix: Matrix, arch: str, mode: OverflowMode, switch: str, register: bool | str) -> None:
    record = matrix.overflow(arch)
    assert record is not None
    assert (record.mode, record.switch, record.status_register) == (mode, switch, register)


def collective(matrix: Matrix, arch: str, op: str) -> dict[str, str]:
    """Return format to level of a collective operation."""
    return {record.format: record.level for record in matrix.collectives(arch) if record.op == op}


def test_bf16_is_not_summed_below_a2(matrix: Matrix) -> None:
    for arch in ("ascend-910a", "ascend-310p"):
        assert collective(matrix, arch, "all_reduce_sum")["bf16"] == "absent"
        assert collective(matrix, arch, "move")["bf16"] == "absent"
    for arch in NEW:
        assert collective(matrix, arch, "all_reduce_sum")["bf16"] == "library"


def test_fp8_is_moved_on_950_and_summed_nowhere(matrix: Matrix) -> None:
    for name in (*FP8, "hif8", "e8m0"):
        assert collective(matrix, "ascend-950", "move")[name] == "library"
        assert collective(matrix, "ascend-950", "all_reduce_sum")[name] == "absent"
    for arch in A2_A3:
        assert {collective(matrix, arch, op)[name] for op in ("move", "all_reduce_sum") for name in FP8} == {"absent"}


def test_the_average_is_a_sum_and_a_division(matrix: Matrix) -> None:
    for arch in NEW:
        assert collective(matrix, arch, "all_reduce_avg") == {"bf16": "emulated", "fp16": "emulated", "fp32": "emulated"}


def test_int64_sums_on_a3_are_disputed(matrix: Matrix) -> None:
    assert collective(matrix, "ascend-a3", "all_reduce_sum")["int64"] == "unknown"
    assert collective(matrix, "ascend-a2", "all_reduce_sum")["int64"] == "library"


def test_the_precision_of_a_collective_sum_is_unknown(matrix: Matrix) -> None:
    assert {record.accumulate for arch in EVERY for record in matrix.collectives(arch)} == {"unknown"}


# Rates


def rate(matrix: Matrix, device: str, variant: str, name: str, basis: str = "derived") -> float:
    """Return the one peak of a variant in a format with plain operands."""
    peaks = [p for p in matrix.peaks(device) if (p.variant, p.format, p.scaling, p.basis) == (variant, name, "none", basis)]
    assert len(peaks) == 1
    return peaks[0].tera_per_s


@pytest.mark.parametrize(
    ("device", "variant", "hf32", "slowdown"),
    [
        ("ascend-910b3", "Ascend910B3", "hf32_e8m11", 4),
        ("ascend-910c", "Ascend910_9392", "hf32_e8m11", 4),
        ("ascend-950pr", "Ascend950PR_9599", "hf32_e8m10", 16),
        ("ascend-950dt", "Ascend950DT_9581", "hf32_e8m10", 16),
    ],
)
def test_fp32_costs_four_times_fp16_and_sixteen_times_on_950(matrix: Matrix, device: str, variant: str, hf32: str, slowdown: int) -> None:
    fp16 = rate(matrix, device, variant, "fp16")
    assert rate(matrix, device, variant, "fp32") == pytest.approx(fp16 / slowdown, rel=5e-3)  # figures are rounded to 0.1
    assert rate(matrix, device, variant, hf32) == pytest.approx(fp16 / 2, rel=5e-3)  # figures are rounded to 0.1


def test_a_derived_peak_is_not_called_the_vendors(matrix: Matrix) -> None:
    assert rate(matrix, "ascend-910b2", "Ascend910B2", "fp16") == 353.9
    assert rate(matrix, "ascend-910b2", "Ascend910B2", "fp16", "vendor") == 353.0
    for peak in (peak for device in matrix.devices for peak in matrix.peaks(device)):
        assert (peak.basis == "derived") == (peak.evidence == "derived")


def test_peaks_name_their_variant(matrix: Matrix) -> None:
    assert [peak for device in matrix.devices for peak in matrix.peaks(device) if not peak.variant] == []
    assert matrix.peaks("ascend-950") == []


def test_the_contested_950_column_is_no_peak(matrix: Matrix) -> None:
    peaks = matrix.peaks("ascend-950pr")
    assert not {426.0, 757.0, 1514.0} & {peak.tera_per_s for peak in peaks}
    assert any("426" in claim.claim for peak in peaks for claim in peak.conflict)


def test_memory_of_the_variants(matrix: Matrix) -> None:
    gib = 1 << 30
    assert matrix.device("ascend-910b3").memory_bytes == (64 * gib,)
    assert matrix.device("ascend-910b4").memory_bytes == (32 * gib,)
    assert matrix.device("ascend-910b2c").memory_bytes == ()
    assert matrix.device("ascend-910c").conflict
    assert [key for key, device in matrix.devices.items() if device.bandwidth_bytes_per_s] == ["ascend-910b2", "ascend-950dt", "ascend-950pr"]


# Against the collected facts

ARCH_OF = {"910A": "ascend-910a", "310P": "ascend-310p", "310B": "ascend-310b", "910B": "ascend-a2", "910C": "ascend-a3", "950": "ascend-950"}
LEVEL_OF = {"native": ("native", "library"), "unsupported": ("absent",), "emulated": ("emulated",), "conflict": ("unknown",), "unknown": ("unknown",)}
MERGED = "ascend/116"  # one more result type of a row that is otherwise undisputed; it stands there as a conflict


@pytest.fixture(scope="module")
def facts() -> list[dict[str, Any]]:
    assert REFERENCE is not None
    loaded: list[dict[str, Any]] = json.loads(REFERENCE.read_text(encoding="utf-8"))
    return loaded


def canonical(name: str | None, arch: str) -> str:
    """Return a format of the facts by its canonical name."""
    if name is None or name == "unsourced":
        return "none" if name is None else "unknown"
    return parse_format({"hf32": "hf32_e8m10" if arch == "ascend-950" else "hf32_e8m11"}.get(name, name)).name


@needs_reference
def test_rows_say_what_the_facts_say(matrix: Matrix, facts: list[dict[str, Any]]) -> None:
    assert len(facts) == FACTS
    citing: dict[str, list[Row]] = {}
    for row in matrix.rows():
        for name in row.facts:
            citing.setdefault(name, []).append(row)
    checked = 0
    for index, fact in enumerate(facts):
        rows = citing.get(f"ascend/{index}", [])
        by_switch = fact["op"] == "torch_npu_default_fp32_conv" and fact["status"] == "converted_to_hf32"
        if not rows or by_switch or f"ascend/{index}" == MERGED:
            continue
        arch = ARCH_OF[fact["soc"]]
        assert {row.arch for row in rows} == {arch}, index
        if fact["a_dtype"] != "any":
            a, b = canonical(fact["a_dtype"], arch), canonical(fact["b_dtype"] or fact["a_dtype"], arch)
            out = tuple(canonical(name, arch) for name in fact["out_dtypes"])
            rows = [row for row in rows if (row.a, row.b, row.accumulate, row.out) == (a, b, canonical(fact["accumulate_dtype"], arch), out)]
        allowed = ("converted",) if fact["status"].startswith("converted") else LEVEL_OF[fact["status"]]
        assert any(row.level in allowed for row in rows), index
        checked += 1
    assert checked > 300


@needs_reference
def test_peaks_and_codes_are_those_of_the_facts(matrix: Matrix, facts: list[dict[str, Any]]) -> None:
    codes = {name: code for device in matrix.devices.values() for name, code in device.codes.items()}
    peaks = [peak for device in matrix.devices for peak in matrix.peaks(device)]
    for index, fact in enumerate(facts):
        if fact["op"] == "torch_npu_soc_version":
            stated = fact["spec"]["torch_npu_soc_version"]
            assert {name: code for name, code in stated.items() if not name.endswith("*")}.items() <= codes.items()
        elif fact["status"] == "derived":
            mine = {peak.tera_per_s for peak in peaks if f"ascend/{index}" in peak.facts}
            assert mine == set(fact["spec"]["peak_tera_ops"].values()), index
