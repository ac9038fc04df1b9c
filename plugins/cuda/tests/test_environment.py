"""What the record says about software and variables."""

from __future__ import annotations

import importlib.metadata
import types
from typing import Any

import pytest
import torch

from mpbackend.device import Device
from mpbackend_cuda import environment

USABLE = Device(key="h100", arch="sm_90", name="NVIDIA H100 80GB HBM3", backend="cuda", type="cuda", index=1, versions={"driver": "580.65.06", "cuda": "13.0"})
UNUSABLE = Device(key="gpu", arch="unknown", name="NVIDIA GPU", usable=False, cause="no driver")


def test_variables_that_change_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_VISIBLE_DEVICES": "1", "NVTE_BACKWARD_OVERRIDE": "dequantized"}
    for name, value in {**wanted, "CUDA_HOME": "elsewhere"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", raising=False)
    found = environment.describe(UNUSABLE)
    assert {name: found[name] for name in wanted} == wanted
    assert not {"CUDA_HOME", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"} & set(found)
    assert found["mpbackend-cuda"] == importlib.metadata.version("mpbackend-cuda")


def test_an_unusable_device_loads_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> dict[str, str]:
        raise AssertionError

    monkeypatch.setattr(environment, "libraries", fail)
    assert "cudnn" not in environment.describe(UNUSABLE)


def test_versions_of_a_usable_device(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.20.2" if name == "transformer-engine" else real(name))
    answers: dict[tuple[Any, str], Any] = {
        (torch.backends.cudnn, "version"): lambda: 91400,
        (torch.cuda, "get_device_capability"): lambda index: (9, index - 1),
        (torch.cuda, "get_device_properties"): lambda index: types.SimpleNamespace(multi_processor_count=132),
        (torch.cuda.nccl, "version"): lambda: (2, 29, 3),
    }
    for (owner, name), answer in answers.items():
        monkeypatch.setattr(owner, name, answer)
    found = environment.describe(USABLE)
    expected = {
        "driver": "580.65.06",
        "cuda": "13.0",
        "cudnn": "91400",
        "capability": "9.0",
        "multiprocessors": "132",
        "nccl": "2.29.3",
        "transformer-engine": "2.20.2",
    }
    assert {name: found[name] for name in expected} == expected
    assert found["blas"].startswith("Cublas")


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build with CUDA can tell all of it")
def test_what_torch_cannot_tell_is_left_out() -> None:
    assert set(environment.libraries(0)) == {"blas"}
