"""The backend as the session sees it."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import pytest
import torch

from mpbackend.decisions import Decision
from mpbackend.device import Device
from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.planning import Plan
from mpbackend.recipe import parse_recipe
from mpbackend_cpu.backend import GLOO_SUMS, CpuBackend

RANKS = 2


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend()


@pytest.fixture
def device(backend: CpuBackend) -> Device:
    (device,) = backend.discover()
    return device


def make_plan(device: Device, recipe: str, pair: tuple[str, str]) -> Plan:
    decision = Decision(role="compute.forward", op="matmul", asked=recipe, granted=pair[0], level="native", reason="", pair=pair)
    return Plan(recipe=recipe, recipe_hash="", granted=recipe, effective=parse_recipe(recipe), device=device, decisions=(decision,))


def test_addresses(backend: CpuBackend, device: Device) -> None:
    assert backend.address("0") == device
    assert backend.address(device.key) == device
    for text in ("1", "", "h100", "00"):
        with pytest.raises(UnknownNameError, match=f"unknown device of backend cpu '{text}'"):
            backend.address(text)


def test_environment_names_what_changes_the_arithmetic(backend: CpuBackend, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    found = backend.environment(device)
    assert found["torch"] == torch.__version__
    assert found["threads"] == str(torch.get_num_threads())
    assert found["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert "MKL_CBWR" not in found
    assert "MKL-DNN" in found["build"]
    assert "mpbackend-cpu" in found


def test_environment_without_a_usable_torch_asks_torch_nothing(backend: CpuBackend, device: Device) -> None:
    without = Device(key=device.key, arch=device.arch, name=device.name, usable=False, cause="torch is not installed")
    assert not {"build", "threads"} & set(backend.environment(without))


def test_inf_and_nan_show_an_overflow(backend: CpuBackend, device: Device) -> None:
    assert backend.overflow(device) is None
    assert torch.isinf(torch.full((1,), 60000.0, dtype=torch.float16) * 2).item()


@pytest.mark.parametrize("pair", [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_no_layer_is_changed(backend: CpuBackend, device: Device, pair: tuple[str, str]) -> None:
    model = torch.nn.Linear(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert backend.convert(model, make_plan(device, pair[0], pair)) == []
    assert type(model) is torch.nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_plan_that_does_not_run_here_is_refused_before_training(backend: CpuBackend, device: Device) -> None:
    with pytest.raises(BackendError, match="matmul in hif8 x hif8 is planned, and this backend does not run it"):
        backend.convert(torch.nn.Linear(2, 2), make_plan(device, "hif8", ("hif8", "hif8")))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed")
def test_gloo_sums_every_format_that_is_claimed(backend: CpuBackend, device: Device) -> None:
    collectives = backend.collectives(device)
    assert (collectives.name, collectives.reduces) == ("gloo", GLOO_SUMS)
    tensors = {name: [torch.full((5,), rank + 1).to(dtype_of(name)) for rank in range(RANKS)] for name in GLOO_SUMS}
    distributed: Any = torch.distributed  # its collectives are not annotated
    store = distributed.HashStore()
    failures: list[BaseException] = []

    def reduce(rank: int) -> None:
        try:
            group = distributed.ProcessGroupGloo(store, rank, RANKS, datetime.timedelta(seconds=30))
            for name in GLOO_SUMS:
                group.allreduce([tensors[name][rank]]).wait()
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for name, ranks in tensors.items():
        for tensor in ranks:
            assert tensor.tolist() == [3] * 5, name


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, str(FORMATS[name].torch_dtype))
    assert isinstance(dtype, torch.dtype)
    return dtype
