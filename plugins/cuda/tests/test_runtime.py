"""What is checked before a plan runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpbackend.device import Device
from mpbackend.errors import BackendError
from mpbackend.matrix import load_matrix
from mpbackend.planning import Plan, plan_recipe
from mpbackend.recipe import parse_recipe
from mpbackend_cuda import transformer_engine
from mpbackend_cuda.implementations import implementations
from mpbackend_cuda.runtime import check_device, check_plan, prepare_engine
from plugins.cuda.tests.support.engine import Engine, Float8CurrentScaling

MATRIX = load_matrix()
H100 = Device(key="h100", arch="sm_90", name="NVIDIA H100 80GB HBM3", backend="cuda", type="cuda", versions={"cuda": "13.0"})


def plan_on(recipe: str, device: Device = H100) -> Plan:
    return plan_recipe(parse_recipe(recipe), device, MATRIX, implementations((9, 0), "13.0", ""))


@pytest.mark.usefixtures("engine")
def test_the_planned_gpu_is_there() -> None:
    check_device(H100)


@pytest.mark.usefixtures("engine")
def test_another_gpu_at_the_index_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L4")
    with pytest.raises(BackendError, match=r"cuda:0 as NVIDIA H100 80GB HBM3: torch has NVIDIA L4 of compute capability 8.9 there; export CUDA_DEVICE_ORDER"):
        check_device(H100)


@pytest.mark.usefixtures("engine")
def test_no_gpu_at_the_index_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BackendError, match="torch has 0 CUDA devices"):
        check_device(H100)


@pytest.mark.parametrize("recipe", ["fp32", "fp32-fast", "bf16", "fp16", "fp8", "fp8-delayed", "fp8-block"])
def test_a_plan_of_what_runs(recipe: str) -> None:
    check_plan(plan_on(recipe), implementations((9, 0), "13.0", ""))


def test_a_plan_of_what_does_not_run_is_refused_with_the_reason() -> None:
    plan = plan_on("fp8")
    with pytest.raises(BackendError, match="matmul in fp8_e4m3 x fp8_e4m3 is planned: no engine here"):
        check_plan(plan, implementations((9, 0), "13.0", "no engine here"))
    with pytest.raises(BackendError, match="this backend does not run it"):
        check_plan(plan, [])


def test_a_low_bit_plan_is_prepared(engine: Engine) -> None:
    plan = plan_on("fp8")
    prepared = prepare_engine(plan, None)
    assert type(prepared.lowered.recipe) is Float8CurrentScaling
    assert prepared.execution.recipe is prepared.lowered.recipe
    assert prepare_engine(plan, prepared.execution).execution is prepared.execution
    assert prepared.linear is engine.pytorch.Linear


@pytest.mark.usefixtures("engine")
def test_a_layout_that_the_gpu_lacks_is_refused_whatever_other_layouts_run() -> None:
    blackwell = Device(key="rtx5090", arch="sm_120", name="NVIDIA GeForce RTX 5090", backend="cuda", type="cuda", versions={"cuda": "13.0"})
    plan = plan_on("mxfp8", blackwell)
    with pytest.raises(BackendError, match=r"no mxfp8 product for every layout on compute capability 12\.0"):
        prepare_engine(plan, None)


def test_without_transformer_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "importing Transformer Engine failed: OSError: libcuda.so.1"
    monkeypatch.setattr(transformer_engine, "load", lambda: transformer_engine.Engine(None, None, reason))
    with pytest.raises(BackendError, match=reason):
        prepare_engine(plan_on("fp8"), None)


@pytest.mark.usefixtures("engine")
def test_another_present_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(BackendError, match=r"the present device is cuda:1, where Transformer Engine allocates; call torch.cuda.set_device\(0\) first"):
        prepare_engine(plan_on("fp8"), None)


def test_what_transformer_engine_says_about_the_gpu_counts(engine: Engine) -> None:
    module: Any = engine.pytorch
    module.is_fp8_available = lambda return_reason: (False, "CublasLt version 12.1.3.x or higher required")
    with pytest.raises(BackendError, match=r"Transformer Engine: CublasLt version 12\.1\.3\.x or higher required; plan bf16"):
        prepare_engine(plan_on("fp8"), None)
