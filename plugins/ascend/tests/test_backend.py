"""The backend as the session sees it, without torch_npu."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from mpbackend.decisions import Decision
from mpbackend.device import Device
from mpbackend.errors import BackendError, PlanError, UnknownNameError
from mpbackend.planning import Plan
from mpbackend.plugins import Plugins
from mpbackend.recipe import parse_recipe
from mpbackend.selection import plan, select_device
from mpbackend_ascend import discovery
from mpbackend_ascend.backend import AscendBackend
from mpbackend_ascend.overflow import StatusRegister


def make_device(arch: str, key: str = "", index: int = 0, **fields: Any) -> Device:
    return Device(key=key or arch, arch=arch, name=f"name of {arch}", backend="ascend", type="npu", index=index, **fields)


A2 = make_device("ascend-a2", "ascend-910b1")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> AscendBackend:
    """A backend that finds two devices, the first unusable."""
    found = [make_device("ascend-a2", "ascend-910b1", 0, usable=False, cause="why"), make_device("ascend-a2", "ascend-910b1", 1)]
    monkeypatch.setattr(discovery, "find_devices", lambda environ, modules: list(found))
    return AscendBackend()


def plugins(backend: AscendBackend) -> Plugins:
    return Plugins(backends={"ascend": backend})


def test_addresses(backend: AscendBackend) -> None:
    assert backend.address("0").index == 0
    assert backend.address("ascend-910b1").index == 1, "the first usable one of that key"
    with pytest.raises(UnknownNameError, match=r"device of backend ascend '2'.*doctor"):
        backend.address("2")


def test_select_takes_name_type_and_key(backend: AscendBackend) -> None:
    for spec in ("npu", "ascend", "npu:1", "ascend:ascend-910b1"):
        assert select_device(spec, plugins(backend)).device.index == 1
    with pytest.raises(BackendError, match="why"):
        select_device("npu:0", plugins(backend))


def test_select_without_an_npu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "find_devices", lambda environ, modules: [])
    with pytest.raises(BackendError, match="found no device here"):
        select_device("npu", plugins(AscendBackend()))


def test_discovery_asks_once_for_each_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def find(environ: Mapping[str, str], modules: object) -> list[Device]:
        asked.append(environ.get("ASCEND_RT_VISIBLE_DEVICES", ""))
        return []

    monkeypatch.setattr(discovery, "find_devices", find)
    backend = AscendBackend()
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    assert list(backend.discover()) == list(backend.discover()) == []
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    backend.discover()
    assert asked == ["", "1"]


@pytest.mark.parametrize(
    ("arch", "bf16", "int64"),
    [("ascend-910a", False, True), ("ascend-310p", False, False), ("ascend-a2", True, True), ("ascend-a3", True, False), ("ascend-950", True, True)],
)
def test_collectives_are_those_of_the_matrix(arch: str, bf16: bool, int64: bool) -> None:
    found = AscendBackend().collectives(make_device(arch))
    assert found.name == "hccl"
    assert {"fp32", "fp16"} <= set(found.reduces)
    assert ("bf16" in found.reduces, "int64" in found.reduces) == (bf16, int64)
    assert not {"fp8_e4m3", "fp8_e5m2", "hif8"} & set(found.reduces), "HCCL reduces no 8-bit float"


def test_collectives_of_an_unknown_architecture() -> None:
    assert AscendBackend().collectives(make_device("unknown")).reduces == ()


def test_execution_needs_no_context() -> None:
    made = Plan(recipe="bf16", recipe_hash="", granted="bf16", effective=parse_recipe("bf16"), device=A2)
    assert isinstance(AscendBackend().execute(made), nullcontext)


def test_environment_names_what_changes_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INF_NAN_MODE_FORCE_DISABLE", "1")
    monkeypatch.setenv("HCCL_DETERMINISTIC", "true")
    monkeypatch.delenv("ACL_PRECISION_MODE", raising=False)
    found = AscendBackend().environment(make_device("ascend-a2", versions={"cann": "8.5.0", "torch_npu": "2.13.0"}))
    assert found["cann"] == "8.5.0"
    assert (found["INF_NAN_MODE_FORCE_DISABLE"], found["HCCL_DETERMINISTIC"]) == ("1", "true")
    assert "ACL_PRECISION_MODE" not in found
    assert "mpbackend-ascend" in found


def test_register_where_the_process_saturates(library: Any) -> None:
    device = Device(key="ascend-910a", arch="ascend-910a", name="x", backend="ascend", type="cpu")
    assert AscendBackend().overflow(device) is None
    library._C.inf_nan = False
    assert isinstance(AscendBackend().overflow(device), StatusRegister)


def make_plan(recipe: str, pair: tuple[str, str], device: Device = A2) -> Plan:
    decision = Decision(role="compute.forward", op="matmul", asked=recipe, granted=pair[0], level="native", reason="", pair=pair)
    return Plan(recipe=recipe, recipe_hash="", granted=recipe, effective=parse_recipe(recipe), device=device, decisions=(decision,))


def test_convert_leaves_a_model_that_is_not_low_bit() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    assert AscendBackend().convert(model, make_plan("bf16", ("bf16", "bf16"))) == []
    assert type(model[0]) is nn.Linear


def test_convert_refuses_fp32_that_is_overridden(library: Any) -> None:
    model = nn.Linear(16, 16)
    assert AscendBackend().convert(model, make_plan("fp32", ("fp32", "fp32"))) == []
    library._C.values["CUBE_MATH_TYPE"] = b"2"
    with pytest.raises(BackendError, match="USE_FP16 overrides the plan"):
        AscendBackend().convert(model, make_plan("fp32", ("fp32", "fp32")))
    assert AscendBackend().convert(model, make_plan("bf16", ("bf16", "bf16"))) == []


def test_convert_refuses_what_does_not_run_there() -> None:
    with pytest.raises(BackendError, match="fp8_e4m3 x fp8_e4m3 is planned, and this backend does not run it"):
        AscendBackend().convert(nn.Linear(16, 16), make_plan("fp8", ("fp8_e4m3", "fp8_e4m3")))


@pytest.mark.parametrize(("recipe", "word"), [("bf16", "aclnnMatmul"), ("fp32", "computed in fp16"), ("fp8", "aclnnQuantMatmulV5")])
def test_case_14_61_the_first_910_refuses_in_the_plan(recipe: str, word: str, backend: AscendBackend) -> None:
    with pytest.raises(PlanError, match=word):
        plan(recipe, make_device("ascend-910a"), plugins=plugins(backend))


def test_case_14_nearest_gives_fp16_with_scaling_and_says_why(backend: AscendBackend) -> None:
    made = plan("bf16", make_device("ascend-910a"), plugins=plugins(backend), on_unsupported="nearest")
    assert made.granted.startswith("bf16:compute=fp16")
    assert made.effective.loss_scale.mode == "dynamic"
    assert "bf16 was refused" in made.decision("compute.forward", "matmul").reason
    assert made.runnable
    assert made.decision("loss_scale.mode").reason.startswith("an overflow is seen by the status register")


def test_case_62_fp32_on_a2_turns_hf32_off_in_both_operations(backend: AscendBackend) -> None:
    made = plan("fp32", A2, plugins=plugins(backend))
    assert (made.switches["conv.allow_hf32"], made.switches["matmul.allow_hf32"]) == ("False", "False")
    assert made.runnable
    fast = plan("fp32-fast", A2, plugins=plugins(backend))
    assert (fast.switches["conv.allow_hf32"], fast.switches["matmul.allow_hf32"]) == ("True", "True")
    assert fast.effective.compute.forward == "hf32_e8m11"


@pytest.mark.parametrize("recipe", ["fp8", "fp8-delayed", "mxfp8", "hif8"])
def test_low_bit_runs_on_950_only(recipe: str, backend: AscendBackend) -> None:
    assert plan(recipe, make_device("ascend-950"), plugins=plugins(backend)).runnable
    for arch in ("ascend-910a", "ascend-310p", "ascend-a2", "ascend-a3"):
        with pytest.raises(PlanError, match="absent"):
            plan(recipe, make_device(arch), plugins=plugins(backend))


def test_meters_read_torch_npus_allocator_and_events(npu: Any) -> None:
    device = make_device("ascend-a2", index=1)
    meter = AscendBackend().memory(device)
    reading = meter.read()
    assert (reading.allocated, reading.peak) == (7, 9)
    meter.reset_peak()
    assert meter.read().peak == 7
    clock = AscendBackend().clock(device)
    start, end = clock.mark(), clock.mark()
    assert (start.timed, start.stream) == (True, "stream of 1")
    assert clock.elapsed_ms(start, end) == 1.5


def test_torch_without_torch_npu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(torch), "npu", raising=False)
    with pytest.raises(BackendError, match="torch has not loaded torch_npu"):
        AscendBackend().switches(A2)
