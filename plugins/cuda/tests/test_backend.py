"""The backend as the core sees it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from mpbackend.device import Device
from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.matrix import load_matrix
from mpbackend.planning import Plan, plan_recipe
from mpbackend.recipe import parse_recipe
from mpbackend_cuda import transformer_engine
from mpbackend_cuda.backend import COMMON_SUMS, CudaBackend
from mpbackend_cuda.te_layers import LowBitLinear
from plugins.cuda.tests.conftest import Machine, gpu
from plugins.cuda.tests.support.engine import Engine

MATRIX = load_matrix()
H100 = Device(key="h100", arch="sm_90", name="NVIDIA H100 80GB HBM3", backend="cuda", type="cuda", versions={"driver": "580.65.06", "cuda": "13.0"})


@pytest.fixture
def backend() -> CudaBackend:
    return CudaBackend()


def plan_on(backend: CudaBackend, recipe: str, micro_batches: int = 1) -> Plan:
    return plan_recipe(parse_recipe(recipe), H100, MATRIX, backend.implements(H100), micro_batches=micro_batches)


def test_devices_and_addresses(backend: CudaBackend, machine: Machine) -> None:
    machine(gpu(0), gpu(1))
    assert [device.address for device in backend.discover()] == ["cuda:0", "cuda:1"]
    assert backend.address("1").index == 1
    assert backend.address("h100").index == 0
    with pytest.raises(UnknownNameError):
        backend.address("2")


def test_what_runs_depends_on_the_engine(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "installed", lambda: "no engine here")
    plan = plan_on(backend, "fp8")
    assert not plan.runnable
    assert "compute.forward (matmul) in fp8_e4m3: no engine here" in plan.blockers
    assert plan_on(backend, "bf16").runnable
    monkeypatch.setattr(transformer_engine, "installed", lambda: "")
    assert plan_on(backend, "fp8").runnable


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16"])
def test_what_torch_runs_by_itself_needs_no_context_and_no_other_layer(recipe: str, backend: CudaBackend, engine: Engine) -> None:
    plan = plan_on(backend, recipe)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    assert backend.convert(model, plan) == []
    assert type(model[0]) is torch.nn.Linear
    assert isinstance(backend.execute(plan), nullcontext)


def test_a_low_bit_plan_is_executed_by_its_converted_layers(backend: CudaBackend, engine: Engine) -> None:
    plan = plan_on(backend, "fp8", micro_batches=2)
    with pytest.raises(BackendError, match="no model was converted for this plan"):
        backend.execute(plan)
    model: Any = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 3))
    rows = backend.convert(model, plan)
    assert [row["action"] for row in rows] == ["converted", "skipped"]
    assert isinstance(model[0], LowBitLinear)
    assert model[0].keeps_weight
    with backend.execute(plan):
        model(torch.randn(4, 16))
    assert [call.low_bit for call in engine.calls] == [True]


def test_two_models_of_one_plan_share_its_execution(backend: CudaBackend, engine: Engine) -> None:
    plan = plan_on(backend, "fp8")
    models: list[Any] = [torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(2)]
    for model in models:
        backend.convert(model, plan)
    with backend.execute(plan):
        for model in models:
            model(torch.randn(16, 16))
    assert [call.low_bit for call in engine.calls] == [True, True]


def test_a_model_of_an_earlier_plan_is_made_anew(backend: CudaBackend, engine: Engine) -> None:
    """Its layers would else wait for the earlier plan's context, and compute in bf16 without a word."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(16, 16))
    for recipe in ("fp8", "fp8-delayed", "fp8"):
        plan = plan_on(backend, recipe)
        backend.convert(model, plan)
        with backend.execute(plan):
            model(torch.randn(16, 16))
        assert engine.calls[-1].low_bit
    backend.convert(model, plan_on(backend, "bf16"))
    assert type(model[0]) is torch.nn.Linear


def test_inf_and_nan_show_an_overflow(backend: CudaBackend) -> None:
    assert backend.overflow(H100) is None
    overflow = MATRIX.overflow("sm_90")
    assert overflow is not None
    assert overflow.mode == "inf_nan"


def test_collectives_are_those_of_the_matrix_that_torch_hands_on(backend: CudaBackend) -> None:
    found = backend.collectives(H100)
    assert found.name == "nccl"
    assert set(found.reduces) == {"fp64", "fp32", "fp16", "bf16", "int8", "uint8", "int32", "int64", "fp8_e4m3", "fp8_e5m2"}
    old = backend.collectives(Device(key="a100", arch="sm_80", name=""))
    assert set(old.reduces) == set(COMMON_SUMS)
    assert backend.collectives(Device(key="sm_110", arch="unknown", name="")).reduces == COMMON_SUMS


def test_what_the_core_asks_for(backend: CudaBackend) -> None:
    assert len(backend.op_policy(H100)) == 119
    assert {switch.name for switch in backend.switches(H100)} >= {"matmul.fp32_precision", "conv.fp32_precision"}
    assert backend.memory(H100).__class__.__name__ == "AllocatorMeter"
    assert backend.clock(H100).__class__.__name__ == "EventClock"
    assert "mpbackend-cuda" in backend.environment(Device(key="gpu", arch="unknown", name="", usable=False))
