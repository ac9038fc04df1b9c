"""What the plugin says it runs, against the capability matrix."""

from __future__ import annotations

import pytest

from mpbackend.formats import FORMATS
from mpbackend.granting import judge
from mpbackend.matrix import Matrix, load_matrix
from mpbackend_ascend.discovery import matrix_files
from mpbackend_ascend.implementations import HF32, implementations

ARCHS = ("ascend-910a", "ascend-310p", "ascend-310b", "ascend-a2", "ascend-a3", "ascend-950")
GRANULARITY = {"none": ("none", "none"), "tensor_channel_token": ("tensor", "tensor"), "block_128x128": ("128x128", "128x128"), "mx_1x32": ("1x32", "1x32")}


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load_matrix(matrix_files())


@pytest.mark.parametrize("arch", [*ARCHS, "unknown"])
def test_every_refusal_has_a_reason_and_every_row_one_key(arch: str) -> None:
    rows = implementations(arch)
    assert all(row.reason for row in rows if row.level is None)
    assert len({(row.op, row.a, row.b, row.scaling) for row in rows}) == len(rows)
    floats = {name for name, spec in FORMATS.items() if spec.kind == "float"}
    for op in ("matmul", "conv"):
        assert floats <= {row.a for row in rows if row.op == op}


@pytest.mark.parametrize("arch", ARCHS)
def test_what_runs_is_in_the_matrix(arch: str, matrix: Matrix) -> None:
    for row in implementations(arch):
        if row.level is None:
            continue
        verdict = judge(matrix, arch, row.op, (row.a, row.b), GRANULARITY[row.scaling], "fp32")
        known = {"native": {"native", "library", "unknown"}, "converted": {"converted"}, "unknown": {"unknown", "native"}}[row.level]
        assert verdict.level in known, (row.op, row.a, row.b, row.scaling, verdict.reason)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_the_matrix_exposes_as_plain_runs(arch: str, matrix: Matrix) -> None:
    runs = {(row.op, row.a) for row in implementations(arch) if row.level is not None}
    for op in ("matmul", "conv"):
        for name in ("fp32", "bf16", "fp16", HF32.get(arch, "fp32")):
            verdict = judge(matrix, arch, op, (name, name), ("none", "none"), "fp32")
            assert ((op, name) in runs) == (verdict.level not in ("absent",)), (op, name, verdict.reason)


@pytest.mark.parametrize("arch", ["ascend-910a", "ascend-310p"])
def test_case_61_fp32_is_converted_on_the_first_910(arch: str) -> None:
    rows = {(row.op, row.a): row for row in implementations(arch)}
    for op in ("matmul", "conv"):
        assert rows[op, "fp32"].level == "converted"
        assert "no setting gives fp32" in rows[op, "fp32"].reason
        assert rows[op, "bf16"].level is None
        assert "would only warn" in rows[op, "bf16"].reason


@pytest.mark.parametrize(
    ("op", "name", "word"),
    [
        ("matmul", "fp8_e4m3", "only the Ascend 950"),
        ("matmul", "fp4_e2m1", "no quantized training product"),
        ("conv", "hif8", "no convolution"),
        ("matmul", "tf32", "no product"),
    ],
)
def test_reasons(op: str, name: str, word: str) -> None:
    (row,) = [row for row in implementations("ascend-a2") if (row.op, row.a, row.b) == (op, name, name)]
    assert word in row.reason
