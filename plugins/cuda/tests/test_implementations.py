"""What runs, by compute capability; against the matrix, and through a plan."""

from __future__ import annotations

import pytest

from mpbackend.backend import Implementation
from mpbackend.formats import FORMATS
from mpbackend.granting import EXPOSING, judge
from mpbackend.lowbit import low_bit
from mpbackend.matrix import load_matrix
from mpbackend.recipe import PRESETS
from mpbackend_cuda.implementations import OPS, SCHEMES, implementations, refusal
from mpbackend_cuda.te_recipes import scheme_of

MATRIX = load_matrix()
ARCHS = {key: arch.identifiers[0] for key, arch in MATRIX.archs.items() if MATRIX.family_of(key) == "nvidia"}
MISSING = "Transformer Engine is not installed"


def capability(arch: str) -> tuple[int, int]:
    major, minor = ARCHS[arch].split(".")
    return int(major), int(minor)


def found(rows: list[Implementation], op: str, a: str, scaling: str = "none") -> list[Implementation]:
    return [row for row in rows if (row.op, row.a, row.scaling) == (op, a, scaling)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16"])
def test_plain_formats_run_where_the_matrix_grants_them(arch: str, name: str) -> None:
    rows = implementations(capability(arch), "13.0", "")
    for op in OPS:
        (row,) = found(rows, op, name)
        level = judge(MATRIX, arch, op, (name, name), ("none", "none"), "fp32").level
        assert (row.level in EXPOSING) == (level in EXPOSING), (op, level)
        assert row.level is not None or row.reason


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("preset", ["fp8", "fp8-block", "mxfp8", "nvfp4"])
def test_scale_layouts_run_only_where_the_matrix_grants_them(arch: str, preset: str) -> None:
    recipe = PRESETS[preset]
    scaling = scheme_of(low_bit(recipe))
    rows = implementations(capability(arch), "13.0", "")
    runs = {(row.a, row.b) for row in rows if row.scaling == scaling and row.op == "matmul" and row.level is not None}
    pair = (recipe.compute.forward, recipe.compute.forward)
    level = judge(MATRIX, arch, "matmul", pair, (recipe.scaling.inputs, recipe.scaling.weights), "fp32").level
    if pair in runs:
        assert level in EXPOSING, f"{scaling} on {arch} is {level}"
    assert runs in (set(), set(SCHEMES[scaling].pairs))


@pytest.mark.parametrize(
    ("scaling", "runs"),
    [
        ("tensor", {"sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"}),
        ("block_1x128_128x128", {"sm_90"}),
        ("mx_1x32", {"sm_100", "sm_103"}),
        ("nv_1x16", {"sm_100", "sm_103", "sm_120", "sm_121"}),
    ],
)
def test_the_table_of_transformer_engine(scaling: str, runs: set[str]) -> None:
    assert {arch for arch in ARCHS if not refusal(scaling, capability(arch), "13.0")} == runs


def test_an_old_cuda_lacks_block_scales() -> None:
    assert refusal("block_1x128", (9, 0), "12.8") == "Transformer Engine needs CUDA 12.9 for block_1x128 scales; torch was built with 12.8"
    assert refusal("block_1x128", (9, 0), "12.9") == refusal("block_1x128", (9, 0), "") == ""


def test_without_transformer_engine_the_reason_is_its_own() -> None:
    rows = implementations((9, 0), "13.0", MISSING)
    assert {(row.level, row.reason) for row in found(rows, "matmul", "fp8_e4m3", "tensor")} == {(None, MISSING)}
    assert {row.level for row in found(rows, "matmul", "bf16")} == {"library"}
    old = implementations((7, 5), "13.0", MISSING)
    assert "needs compute capability 8.9" in found(old, "matmul", "fp8_e4m3", "tensor")[0].reason, "what the hardware lacks comes first"


def test_a_convolution_is_not_converted() -> None:
    rows = implementations((10, 0), "13.0", "")
    assert {row.level for row in rows if row.op == "conv" and FORMATS[row.a].is_low_bit} == {None}


def test_every_format_has_a_row_and_every_refusal_a_reason() -> None:
    rows = implementations((9, 0), "13.0", "")
    for op in OPS:
        assert {row.a for row in rows if row.op == op} >= {name for name, spec in FORMATS.items() if spec.kind == "float"}
    assert all(row.reason for row in rows if row.level is None)
    assert len({(row.op, row.a, row.b, row.scaling) for row in rows}) == len(rows)
    assert all(row.path in MATRIX.paths for row in rows)
