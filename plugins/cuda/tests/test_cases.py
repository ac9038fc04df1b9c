"""The cases of selecting, planning and fencing that concern NVIDIA GPUs, by their numbers."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from mpbackend.cli.main import main
from mpbackend.device import Device
from mpbackend.errors import BackendError, PlanError, SessionError
from mpbackend.matrix import load_matrix
from mpbackend.planning import Plan, plan_recipe
from mpbackend.plugins import load_plugins
from mpbackend.recipe import parse_recipe
from mpbackend.selection import select_device
from mpbackend.target import Target
from mpbackend.train.fence import Fence, FenceRegistry
from mpbackend_cuda import torch_build
from mpbackend_cuda.backend import CudaBackend
from mpbackend_cuda.discovery import find_devices
from mpbackend_cuda.switches import switches
from plugins.cuda.tests.conftest import Machine, gpu

MATRIX = load_matrix()
GPUS = {
    "p100": ("Tesla P100-SXM2-16GB", "6.0"),
    "v100": ("Tesla V100-SXM2-16GB", "7.0"),
    "t4": ("Tesla T4", "7.5"),
    "a100": ("NVIDIA A100-SXM4-80GB", "8.0"),
    "h100": ("NVIDIA H100 80GB HBM3", "9.0"),
}


@pytest.fixture
def found(machine: Machine) -> Callable[[str], Device]:
    """Find a GPU on a machine that has it."""

    def find(key: str) -> Device:
        machine(gpu(0, *GPUS[key]))
        (device,) = find_devices()
        assert (device.key, device.usable) == (key, True)
        return device

    return find


def plan_on(device: Device, recipe: str, nearest: bool = False) -> Plan:
    return plan_recipe(parse_recipe(recipe), device, MATRIX, CudaBackend().implements(device), on_unsupported="nearest" if nearest else "error")


def test_case_12_a_model_on_another_device_is_refused(found: Callable[[str], Device]) -> None:
    target = Target(CudaBackend(), found("h100"), load_plugins())
    model = torch.nn.Linear(2, 2)
    with pytest.raises(SessionError, match=r"parameter weight is on cpu; model\.to\('cuda:0'"):
        target.prepare(model, torch.optim.SGD(model.parameters()), "bf16")


@pytest.mark.parametrize(("key", "recipe", "nearest"), [("a100", "fp8", "bf16"), ("t4", "fp8", "fp16"), ("a100", "mxfp8", "bf16"), ("h100", "nvfp4", "bf16")])
def test_case_14_what_the_device_lacks_is_decided_in_the_plan(key: str, recipe: str, nearest: str, found: Callable[[str], Device]) -> None:
    device = found(key)
    with pytest.raises(PlanError, match=f"nearest: {nearest}") as refused:
        plan_on(device, recipe)
    assert "is absent" in str(refused.value) or "is emulated" in str(refused.value)
    plan = plan_on(device, recipe, nearest=True)
    decision = plan.decision("compute.forward", "matmul")
    assert (decision.granted, plan.runnable) == (nearest, True)
    assert "was refused" in decision.reason


@pytest.mark.parametrize("key", ["p100", "v100", "t4"])
def test_case_35_emulated_bf16_is_not_bf16(key: str, found: Callable[[str], Device]) -> None:
    device = found(key)
    with pytest.raises(PlanError, match="matmul in bf16 is emulated"):
        plan_on(device, "bf16")
    plan = plan_on(device, "bf16", nearest=True)
    decision = plan.decision("compute.forward", "matmul")
    assert (decision.granted, plan.effective.loss_scale.mode, plan.runnable) == ("fp16", "dynamic", True)
    assert "bf16 was refused: matmul in bf16 is emulated" in decision.reason


def test_case_36_listing_and_planning_initialize_no_device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize() -> None:
        raise AssertionError("a device was initialized")

    monkeypatch.setattr(torch.cuda, "_lazy_init", initialize)
    monkeypatch.setattr(torch.cuda, "init", initialize)
    machine(gpu(0), gpu(1))
    for command in (["devices", "--format", "json"], ["doctor"], ["plan", "bf16", "--device", "h100"], ["recipes"]):
        result = CliRunner().invoke(main, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    devices = json.loads(CliRunner().invoke(main, ["devices", "--format", "json"]).stdout)
    assert [device["key"] for device in devices if device["backend"] == "cuda"] == ["h100", "h100"]
    assert not torch.cuda.is_initialized()


def test_case_36_and_import_no_torch(machine: Machine) -> None:
    machine(gpu(0))
    program = "import sys, mpbackend\nfrom mpbackend_cuda.discovery import find_devices\nassert find_devices()\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(("recipe", "value"), [("fp32", "ieee"), ("fp32-fast", "tf32")])
def test_case_38_both_families_of_operators_are_set(recipe: str, value: str, found: Callable[[str], Device]) -> None:
    plan = plan_on(found("h100"), recipe)
    names = [f"{op}.fp32_precision" for op in ("matmul", "conv", "rnn")]
    assert {name: plan.switches[name] for name in names} == dict.fromkeys(names, value)
    with Fence(switches(), plan.switches, registry=FenceRegistry()) as fence:
        backends = torch.backends
        assert (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision) == (value,) * 3  # type: ignore[attr-defined] # properties that type checkers do not see
    assert fence.report()["conv.fp32_precision"]["before"] == "tf32", "what torch starts with"


@pytest.mark.parametrize(("recipe", "name"), [("bf16", "bf16"), ("fp16", "fp16")])
def test_case_39_sums_in_fp32_turn_reduced_precision_off(recipe: str, name: str, found: Callable[[str], Device]) -> None:
    plan = plan_on(found("h100"), recipe)
    assert plan.decision("accumulate.forward").granted.startswith("fp32")
    assert plan.switches[f"matmul.reduced_precision_reduction_{name}"] == "false"
    assert plan.switches["matmul.fp16_accumulation"] == "false"
    with Fence(switches(), plan.switches, registry=FenceRegistry()):
        assert not getattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction")
    assert getattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction")


def distribution(folder: Path, name: str, module: str) -> None:
    """Install a package that registers itself with torch and does not stand there."""
    info = folder / f"{name}-2.13.0.post1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.13.0.post1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{module} = {module}:_autoload\n", encoding="utf-8")


@pytest.mark.usefixtures("unimported")
def test_case_49_a_broken_entry_point_of_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(gpu(0))
    monkeypatch.syspath_prepend(str(tmp_path))
    distribution(tmp_path, "acme-torch", "acme_torch")
    (device,) = find_devices()
    assert (device.key, device.usable) == ("h100", False)
    assert "`import torch` fails" in device.cause
    assert "acme-torch 2.13.0.post1" in device.cause
    assert device.remedy.startswith("export TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert find_devices()[0].usable


@pytest.mark.parametrize("how", ["imported", "variable"])
def test_case_51_an_npu_is_not_taken_for_a_gpu(how: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(gpu(0))
    if how == "imported":
        monkeypatch.setitem(sys.modules, torch_build.TRANSFER_MODULE, types.ModuleType(torch_build.TRANSFER_MODULE))
    else:
        monkeypatch.setenv("TORCH_TRANSFER_TO_NPU", "1")
        assert find_devices()[0].usable, "without torch_npu the variable does nothing"
        monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    (device,) = find_devices()
    assert not device.usable
    assert "torch.cuda answers for an Ascend NPU here" in device.cause
    assert "npu:0" in device.remedy
    plugins = load_plugins()
    with pytest.raises(BackendError, match=r"torch\.cuda answers for an Ascend NPU here"):
        select_device("cuda:0", plugins, {})


def test_case_51_without_a_gpu_no_gpu_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, torch_build.TRANSFER_MODULE, types.ModuleType(torch_build.TRANSFER_MODULE))
    monkeypatch.setattr(torch_build, "read_build", lambda: torch_build.TorchBuild("2.13.0+cpu", "", ""))
    assert find_devices() == []


@pytest.mark.usefixtures("unimported")
def test_case_63_torch_npu_beside_a_cuda_build(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(gpu(0))
    monkeypatch.syspath_prepend(str(tmp_path))
    distribution(tmp_path, "torch_npu", "torch_npu")
    (tmp_path / "torch_npu.py").write_text("raise SystemExit('imported to find out')\n", encoding="utf-8")
    (device,) = find_devices()
    assert not device.usable
    for named in ("torch_npu 2.13.0.post1", "the CUDA build torch 2.13.0+cu130"):
        assert named in device.cause
    assert device.remedy == "export TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use the GPU, or uninstall torch_npu"
    assert importlib.metadata.version("torch_npu") == "2.13.0.post1"
    assert "torch_npu" not in sys.modules
