"""The switches do what torch does, and a fence puts them back."""

from __future__ import annotations

import pytest
import torch

from mpbackend.errors import BackendError
from mpbackend.matrix import load_matrix
from mpbackend.train.fence import Fence, FenceRegistry
from mpbackend_cpu.switches import SUBNORMAL, switches

BY_NAME = {switch.name: switch for switch in switches()}
START = {
    "matmul.fp32_precision": "none",
    "conv.fp32_precision": "none",
    "rnn.fp32_precision": "none",
    "flush_denormal": "false",
    "deterministic": "default",
    "mkldnn.enabled": "true",
}


def settings() -> dict[str, str]:
    return {switch.name: switch.get() for switch in switches()}


def test_names_and_start() -> None:
    assert settings() == START
    assert all(switch.meaning for switch in switches())


def test_every_switch_of_the_matrix_is_there_with_its_settings() -> None:
    matrix = load_matrix()
    declared = [switch for arch in matrix.archs if matrix.family_of(arch) == "cpu" for switch in matrix.switches(arch)]
    assert declared
    for switch in declared:
        assert {switch.default, *switch.computes} <= set(BY_NAME[switch.name].allowed), switch.name


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, switch in BY_NAME.items() for value in switch.allowed])
def test_every_allowed_setting_is_taken_read_back_and_restored(name: str, value: str) -> None:
    with Fence(switches(), {name: value}, backend="cpu", registry=FenceRegistry()) as fence:
        assert settings() == START | {name: value}
    assert settings() == START
    assert fence.report()[name] == {"before": START[name], "set": value, "read_back": value, "after": value}


def test_the_settings_are_those_of_torch() -> None:
    wanted = {"matmul.fp32_precision": "ieee", "conv.fp32_precision": "bf16", "deterministic": "warn", "mkldnn.enabled": "false"}
    with Fence(switches(), wanted, registry=FenceRegistry()):
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"  # type: ignore[attr-defined] # a property that type checkers do not see
        assert torch.backends.mkldnn.conv.fp32_precision == "bf16"  # type: ignore[attr-defined] # a property that type checkers do not see
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.mkldnn.enabled
    assert not torch.are_deterministic_algorithms_enabled()


def test_flushing_is_what_arithmetic_shows() -> None:
    tiny = torch.tensor([SUBNORMAL])
    assert tiny.item() != 0
    with Fence(switches(), {"flush_denormal": "true"}, registry=FenceRegistry()):
        assert (tiny * 1).item() == 0
    assert (tiny * 1).item() == SUBNORMAL


def test_torch_takes_no_other_precision() -> None:
    with pytest.raises(RuntimeError, match="Unknown precision"):
        BY_NAME["matmul.fp32_precision"].set("fp16")


def test_a_setting_that_another_one_overrules_is_an_error() -> None:
    torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined] # a property that type checkers do not see
    try:
        assert BY_NAME["conv.fp32_precision"].get() == "ieee", "what is in effect, inherited"
        with pytest.raises(BackendError, match=r"conv.fp32_precision = 'none': it reads back 'ieee'"):
            Fence(switches(), {"conv.fp32_precision": "none"}, registry=FenceRegistry()).enter()
    finally:
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined] # a property that type checkers do not see
        for name in ("matmul", "conv", "rnn"):
            BY_NAME[f"{name}.fp32_precision"].set("none")
    assert settings() == START
