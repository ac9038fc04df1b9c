"""Switches under the real torch_npu: set, read back, restored; what torch_npu would ignore is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpbackend
from mpbackend.backend import Switch
from mpbackend.device import Device
from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.train.fence import Fence, FenceRegistry
from mpbackend_ascend.backend import AscendBackend
from mpbackend_ascend.switches import read_attribute, switches, write_attribute

npu: Any = vars(torch).get("npu")

PUT_BACK = (("jit_compile", "True"), ("allow_internal_format", "enable"))
"""Settings that torch_npu silently undoes on a 950: it has neither compiled operators nor private layouts there."""


def switch(name: str) -> Switch:
    return next(item for item in switches() if item.name == name)


def test_names_are_those_of_the_matrix(target: mpbackend.Target, device: Device) -> None:
    declared = {item.name for item in target.plugins.matrix().switches(device.arch)}
    assert declared <= {item.name for item in AscendBackend().switches(device)}


@pytest.mark.parametrize("item", switches() if npu is not None else [], ids=lambda item: item.name)
def test_every_setting_reads_back_and_is_restored(item: Switch, arch: str) -> None:
    before = item.get()
    assert before in item.allowed
    for value in item.allowed:
        if arch == "ascend-950" and (item.name, value) in PUT_BACK:
            continue  # the next test
        with Fence([item], {item.name: value}, registry=FenceRegistry()):
            assert item.get() == value
        assert item.get() == before


@pytest.mark.parametrize(("name", "value"), PUT_BACK)
def test_what_torch_npu_puts_back_on_950_fails_loudly(name: str, value: str, arch: str) -> None:
    if arch != "ascend-950":
        pytest.skip("only the 950 refuses it")
    with pytest.raises(BackendError, match="reads back"), Fence([switch(name)], {name: value}, registry=FenceRegistry()):
        pass


def test_e3_unknown_attribute_fails_loudly() -> None:
    """torch_npu ignores the assignment and reads None; neither a switch nor the helper does."""
    npu.matmul.allow_tf32 = False
    assert npu.matmul.allow_tf32 is None, "what the vendor does with it"
    with pytest.raises(UnknownNameError, match=r"matmul\.allow_tf32"):
        write_attribute("matmul", "allow_tf32", False)
    with pytest.raises(UnknownNameError, match=r"conv\.cube_math_type"):
        read_attribute("conv", "cube_math_type")
    naive = Switch(
        name="matmul.allow_tf32",
        get=lambda: str(npu.matmul.allow_tf32),
        set=lambda value: setattr(npu.matmul, "allow_tf32", value == "True"),
        allowed=("False", "True"),
    )
    with pytest.raises(BackendError, match="reads back 'None'"), Fence([naive], {"matmul.allow_tf32": "False"}, registry=FenceRegistry()):
        pass
    with pytest.raises(UnknownNameError, match=r"matmul\.allow_tf32"):
        Fence(switches(), {"matmul.allow_tf32": "False"})


def test_e4_recipe_fp32_turns_hf32_off_and_restores_it(target: mpbackend.Target, arch: str) -> None:
    assert (npu.matmul.allow_hf32, npu.conv.allow_hf32) == (False, True), "torch_npu's defaults"
    model = nn.Linear(4, 4).to(target.device)
    if arch in ("ascend-910a", "ascend-310p"):
        pytest.skip("no setting gives fp32 on this device; the recipe is refused")
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32"):
        assert (npu.matmul.allow_hf32, npu.conv.allow_hf32) == (False, False)
    assert (npu.matmul.allow_hf32, npu.conv.allow_hf32) == (False, True)
    with target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32-fast"):
        assert (npu.matmul.allow_hf32, npu.conv.allow_hf32) == (True, True)
    assert (npu.matmul.allow_hf32, npu.conv.allow_hf32) == (False, True)


@pytest.mark.parametrize(("name", "value"), [("matmul.cube_math_type", "USE_FP16"), ("precision_mode", "allow_fp32_to_fp16")])
def test_what_overrides_fp32_products_stops_prepare(name: str, value: str, target: mpbackend.Target, arch: str) -> None:
    if arch in ("ascend-910a", "ascend-310p"):
        pytest.skip("recipe fp32 is refused on this device")
    model = nn.Linear(4, 4).to(target.device)
    plan = target.plan("fp32")
    if name in plan.switches:
        pytest.skip("the plan sets it back by itself")
    with Fence([switch(name)], {name: value}, registry=FenceRegistry()), pytest.raises(BackendError, match=name):
        target.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    assert npu.conv.allow_hf32 is True, "what the fence had set is restored"


def test_a_helper_that_changes_a_switch_is_reported(target: mpbackend.Target) -> None:
    fence = Fence(switches(), {"conv.allow_hf32": "False"}, registry=FenceRegistry())
    with fence:
        npu.conv.allow_hf32 = True
        assert fence.changed() == ("conv.allow_hf32",)
    assert npu.conv.allow_hf32 is True


def test_overflow_mode_only_reports(saturating: bool) -> None:
    item = switch("inf_nan_mode")
    assert item.get() == ("saturating" if saturating else "inf_nan")
    with pytest.raises(BackendError, match="INF_NAN_MODE_FORCE_DISABLE"):
        item.set("inf_nan" if saturating else "saturating")
