"""What runs, how, and why the rest does not."""

from __future__ import annotations

import pytest

from mpbackend.backend import Implementation
from mpbackend.documents import load_vocabulary
from mpbackend.formats import FORMATS
from mpbackend.matrix import load_matrix
from mpbackend_cpu.discovery import ARM_ARCH, X86_ARCHS
from mpbackend_cpu.implementations import FP8, OPS, implementations

ARCHS = [key for key, _ in X86_ARCHS] + [ARM_ARCH, "unknown"]


def rows(arch: str, op: str, name: str, *features: str) -> list[Implementation]:
    return [row for row in implementations(arch, frozenset(features)) if (row.op, row.a, row.b) == (op, name, name)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", OPS)
def test_every_float_format_is_spoken_about(arch: str, op: str) -> None:
    vocabulary = load_vocabulary()
    found = implementations(arch, frozenset())
    for name, spec in FORMATS.items():
        if spec.kind == "float":
            assert rows(arch, op, name), name
    assert {row.a for row in found if row.level is not None} == {"fp32", "fp64", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}
    assert all(row.reason for row in found if row.level is None)
    assert all(row.path in vocabulary.path and row.scaling in vocabulary.scaling and row.op in vocabulary.op for row in found)
    keys = [(row.op, row.a, row.b, row.scaling, row.path) for row in found]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("arch", "features", "level", "path"),
    [
        ("x86-64", (), "emulated", "aten"),
        ("x86-64-avx512", (), "emulated", "onednn"),
        ("x86-64-avx512_bf16", (), "native", "onednn"),
        ("x86-64-avx512_fp16", (), "native", "onednn"),
        ("x86-64-amx", (), "native", "onednn"),
        ("aarch64", (), "emulated", "aten"),
        ("aarch64", ("bf16",), "native", "onednn"),
        ("unknown", ("bf16",), "emulated", "aten"),
    ],
)
def test_bf16(arch: str, features: tuple[str, ...], level: str, path: str) -> None:
    for op in OPS:
        (row,) = rows(arch, op, "bf16", *features)
        assert (row.level, row.path, row.accumulate) == (level, path, "fp32")


@pytest.mark.parametrize("arch", ARCHS)
def test_fp16_is_emulated_everywhere(arch: str) -> None:
    for op in OPS:
        assert [row.level for row in rows(arch, op, "fp16")] == ["emulated"]


@pytest.mark.parametrize("arch", [key for key, _ in X86_ARCHS])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["fp32", "fp64", "bf16", "fp16"])
def test_the_levels_are_those_of_the_matrix(arch: str, op: str, name: str) -> None:
    layers = load_vocabulary().path
    (declared,) = [row for row in load_matrix().rows(arch, op=op, a=name, b=name) if layers[row.path].layer == "framework"]
    (row,) = rows(arch, op, name)
    assert (row.level, row.accumulate) == (declared.level, declared.accumulate)
    if name != "fp16":
        assert row.path == declared.path, "fp16 does not take the path that torch would"


def test_reasons_tell_formats_apart() -> None:
    reasons = {row.a: row.reason for row in implementations("x86-64", frozenset()) if row.level is None and row.op == "matmul"}
    assert "tf32" in reasons["tf32"]
    assert "fp8_e4m3" in reasons["hif8"]
    assert reasons["hf32_e8m10"] not in (reasons["tf32"], reasons["hif8"])
    conv = {(row.a, row.b): row for row in implementations("x86-64", frozenset()) if row.op == "conv"}
    for pair in (("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"), ("fp8_e4m3", "fp8_e5m2")):
        assert conv[pair].level is None


@pytest.mark.parametrize(("torchao", "level"), [("", "emulated"), ("torchao is not installed", None)])
def test_fp8_runs_by_plain_torch_and_by_torchao_where_it_is_installed(torchao: str, level: str | None) -> None:
    found = [row for row in implementations("x86-64", frozenset(), torchao) if row.op == "matmul" and row.a in FP8]
    assert {(row.a, row.b, row.scaling, row.path) for row in found} == {
        (a, b, scaling, path) for a in FP8 for b in FP8 for scaling in ("tensor", "row") for path in ("aten", "torchao")
    }
    assert {row.level for row in found if row.path == "aten"} == {"emulated"}
    assert {(row.level, row.reason) for row in found if row.path == "torchao"} == {(level, torchao)}


@pytest.mark.parametrize("arch", [key for key, _ in X86_ARCHS])
def test_the_fp8_products_are_those_of_the_matrix(arch: str) -> None:
    matrix = load_matrix()
    for row in implementations(arch, frozenset()):
        declared = [found for found in matrix.rows(arch, op=row.op, a=row.a, b=row.b) if (found.scaling, found.path) == (row.scaling, row.path)]
        if row.a in FP8 and row.level is not None and row.path == "aten":
            assert [found.level for found in declared] == [row.level]
