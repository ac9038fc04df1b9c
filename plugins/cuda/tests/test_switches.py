"""The switches do what torch does, on a build without CUDA too, and a fence puts them back."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mpbackend.errors import BackendError
from mpbackend.matrix import load_matrix
from mpbackend.train.fence import Fence, FenceRegistry
from mpbackend_cuda.switches import switches

CUDNN: Any = torch.backends.cudnn
MATMUL: Any = torch.backends.cuda.matmul
"""Objects with properties that type checkers do not see."""

BY_NAME = {switch.name: switch for switch in switches()}
START = {
    "matmul.fp32_precision": "none",
    "conv.fp32_precision": "tf32",
    "rnn.fp32_precision": "tf32",
    "matmul.reduced_precision_reduction_fp16": "true",
    "matmul.reduced_precision_reduction_bf16": "true",
    "matmul.fp16_accumulation": "false",
    "sdp.math_reduction_16bit": "false",
    "deterministic": "default",
    "cudnn.deterministic": "false",
    "cudnn.benchmark": "false",
    "te.tf32": "absent",
}


def settings() -> dict[str, str]:
    return {switch.name: switch.get() for switch in switches()}


@pytest.fixture(autouse=True)
def as_torch_starts() -> Iterator[None]:
    yield
    assert settings() == START, "a test left a switch behind"


def test_names_and_start() -> None:
    assert settings() == START
    assert all(switch.meaning for switch in switches())


def test_every_switch_of_the_matrix_is_there_with_its_settings() -> None:
    matrix = load_matrix()
    declared = [switch for arch in matrix.archs if matrix.family_of(arch) == "nvidia" for switch in matrix.switches(arch)]
    assert {switch.name for switch in declared} <= set(BY_NAME)
    for switch in declared:
        assert {switch.default, *switch.computes} <= set(BY_NAME[switch.name].allowed), switch.name
        assert switch.default == START[switch.name]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, switch in BY_NAME.items() for value in switch.allowed if name != "te.tf32"])
def test_every_allowed_setting_is_taken_read_back_and_restored(name: str, value: str) -> None:
    with Fence(switches(), {name: value}, backend="cuda", registry=FenceRegistry()) as fence:
        assert settings() == START | {name: value}
    assert fence.report()[name] == {"before": START[name], "set": value, "read_back": value, "after": value}


def test_the_settings_are_those_of_torch() -> None:
    wanted = {
        "matmul.fp32_precision": "tf32",
        "conv.fp32_precision": "ieee",
        "matmul.reduced_precision_reduction_bf16": "false_no_split_k",
        "matmul.fp16_accumulation": "true",
        "sdp.math_reduction_16bit": "true",
        "deterministic": "error",
        "cudnn.benchmark": "true",
    }
    with Fence(switches(), wanted, registry=FenceRegistry()):
        assert MATMUL.fp32_precision == "tf32"
        assert CUDNN.conv.fp32_precision == "ieee"
        assert not MATMUL.allow_bf16_reduced_precision_reduction
        assert not MATMUL.allow_bf16_reduced_precision_reduction_split_k
        assert MATMUL.allow_fp16_reduced_precision_reduction
        assert MATMUL.allow_fp16_accumulation
        assert torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.benchmark
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            MATMUL.allow_tf32  # noqa: B018 - why the switches never read it


def test_forbidding_reduction_and_forbidding_to_split_are_two_settings() -> None:
    with Fence(switches(), {"matmul.reduced_precision_reduction_fp16": "false"}, registry=FenceRegistry()):
        assert (MATMUL.allow_fp16_reduced_precision_reduction, MATMUL.allow_fp16_reduced_precision_reduction_split_k) == (False, True)


def test_a_setting_from_before_is_put_back() -> None:
    MATMUL.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        with Fence(switches(), {"matmul.reduced_precision_reduction_bf16": "true"}, registry=FenceRegistry()):
            assert MATMUL.allow_bf16_reduced_precision_reduction
        assert BY_NAME["matmul.reduced_precision_reduction_bf16"].get() == "false_no_split_k"
    finally:
        MATMUL.allow_bf16_reduced_precision_reduction = True


def test_torch_takes_no_other_precision() -> None:
    with pytest.raises(RuntimeError, match="precision"):
        BY_NAME["matmul.fp32_precision"].set("bf16")


def test_transformer_engine_computes_fp32_in_tf32_and_cannot_be_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", types.ModuleType("transformer_engine.pytorch"))
    assert settings()["te.tf32"] == "tf32"
    with pytest.raises(BackendError, match="has no setting for it"):
        Fence(switches(), {"te.tf32": "absent"}, registry=FenceRegistry()).enter()
    with Fence(switches(), {"te.tf32": "tf32"}, registry=FenceRegistry()) as fence:
        assert fence.report()["te.tf32"]["read_back"] == "tf32"
    monkeypatch.undo()


def test_a_torch_without_the_switch_for_splitting_does_not_offer_it() -> None:
    from mpbackend_cuda.switches import reduction

    old = types.SimpleNamespace(allow_fp16_reduced_precision_reduction=True)
    switch = reduction("fp16", old)
    assert switch.allowed == ("false", "true")
    switch.set("false")
    assert (old.allow_fp16_reduced_precision_reduction, switch.get()) == (False, "false")
