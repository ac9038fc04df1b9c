"""torch_npu's settings over a fake that ignores what it does not know, as torch_npu does."""

from __future__ import annotations

from typing import Any

import pytest

from mpbackend.backend import Switch
from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.matrix import load_matrix
from mpbackend.train.fence import Fence, FenceRegistry
from mpbackend_ascend.discovery import matrix_files
from mpbackend_ascend.switches import SETTINGS, check_overrides, read_attribute, switches, write_attribute


def by_name(name: str) -> Switch:
    return next(item for item in switches() if item.name == name)


def fence(name: str, value: str) -> Fence:
    return Fence(switches(), {name: value}, registry=FenceRegistry())


def test_every_setting_reads_back_and_is_restored(library: Any) -> None:
    for item in switches():
        before = item.get()
        assert before in item.allowed, item.name
        for value in item.allowed:
            with fence(item.name, value):
                assert item.get() == value
            assert item.get() == before


def test_names_are_those_of_the_matrix(library: Any) -> None:
    matrix = load_matrix(matrix_files())
    declared = {switch.name: set(switch.computes) for arch in matrix.archs for switch in matrix.switches(arch)}
    mine = {item.name: set(item.allowed) for item in switches()}
    assert declared
    assert all(settings <= mine[name] for name, settings in declared.items())


def test_defaults_are_torch_npus(npu: Any) -> None:
    assert {item.name: item.get() for item in switches()} == {
        "matmul.allow_hf32": "False",
        "conv.allow_hf32": "True",
        "matmul.cube_math_type": "None",
        "precision_mode": "default",
        "allow_internal_format": "default",
        "jit_compile": "False",
        "inf_nan_mode": "inf_nan",
        "deterministic": "default",
    }


def test_cube_math_type_is_written_by_number_and_unset(library: Any) -> None:
    item = by_name("matmul.cube_math_type")
    item.set("USE_HF32")
    assert library._C.values["CUBE_MATH_TYPE"] == b"3"
    item.set("None")
    assert library._C.values["CUBE_MATH_TYPE"] == b""
    assert item.get() == "None"


@pytest.mark.parametrize("name", ["allow_tf32", "alow_hf32", ""])
def test_e3_unknown_attribute_is_an_error(name: str, npu: Any) -> None:
    setattr(npu.matmul, name, False)
    assert getattr(npu.matmul, name) is None, "what torch_npu does"
    with pytest.raises(UnknownNameError, match="torch_npu ignores a value"):
        read_attribute("matmul", name)
    with pytest.raises(UnknownNameError):
        write_attribute("matmul", name, False)
    with pytest.raises(UnknownNameError):
        Fence(switches(), {f"matmul.{name}": "False"})


def test_known_attributes_are_the_ones_that_are_read(npu: Any) -> None:
    for owner, names in SETTINGS.items():
        for name in names:
            assert read_attribute(owner, name) == getattr(getattr(npu, owner), name)


def test_a_value_that_is_ignored_is_an_error(npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(npu.conv), "__setattr__", lambda self, name, value: None)
    with pytest.raises(BackendError, match="reads back True"):
        write_attribute("conv", "allow_hf32", False)
    with pytest.raises(BackendError, match=r"conv\.allow_hf32"), fence("conv.allow_hf32", "False"):
        pass


def test_overflow_mode_only_reports(library: Any) -> None:
    item = by_name("inf_nan_mode")
    assert item.allowed == ("inf_nan",)
    item.set("inf_nan")
    with pytest.raises(BackendError, match="INF_NAN_MODE_FORCE_DISABLE=1"):
        item.set("saturating")
    library._C.inf_nan = False
    assert by_name("inf_nan_mode").get() == "saturating"


def test_environment_that_torch_npu_refuses(library: Any) -> None:
    library._C.inf_nan = RuntimeError("INF_NAN_MODE_ENABLE is 0\n[ERROR] 2026")
    with pytest.raises(BackendError, match="the overflow mode: INF_NAN_MODE_ENABLE is 0; unset"):
        switches()


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("matmul.cube_math_type", "USE_FP16", "cube_math_type = USE_FP16 overrides the plan"),
        ("matmul.cube_math_type", "USE_HF32", "cube_math_type = USE_HF32"),
        ("precision_mode", "allow_fp32_to_fp16", "computes them in fp16"),
    ],
)
def test_what_overrides_the_plan_for_fp32_is_an_error(name: str, value: str, word: str, library: Any) -> None:
    check_overrides("ascend-a2")
    with fence(name, value), pytest.raises(BackendError, match=word):
        check_overrides("ascend-a2")
    with fence("matmul.cube_math_type", "KEEP_DTYPE"), fence("precision_mode", "must_keep_origin_dtype"):
        check_overrides("ascend-a2")
    with fence("precision_mode", "allow_fp32_to_fp16"):
        check_overrides("ascend-910a")
