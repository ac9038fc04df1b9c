"""Versions and variables that change the arithmetic on a GPU, for the record."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from mpbackend.device import Device

DISTRIBUTION = "mpbackend-cuda"
ENGINE_DISTRIBUTIONS = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")

VARIABLES = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "DISABLE_ADDMM_CUDA_LT",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_V8_API_DISABLED",
    "TORCH_LINALG_PREFER_CUSOLVER",
)
"""Variables of torch and of NVIDIA's libraries that choose devices, formats, algorithms or the order of sums."""

ENGINE_PREFIX = "NVTE_"
"""Variables of Transformer Engine; many are the defaults of its recipes, read when it is imported."""


def describe(device: Device) -> Mapping[str, str]:
    """Return versions and the variables that are set. Libraries are asked only where the device is usable, since that loads them."""
    found = {DISTRIBUTION: importlib.metadata.version(DISTRIBUTION), **device.versions}
    for name in ENGINE_DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if device.usable:
        found |= libraries(device.index)
    variables = (name for name in os.environ if name in VARIABLES or name.startswith(ENGINE_PREFIX))
    return found | {name: os.environ[name] for name in sorted(variables)}


def libraries(index: int) -> dict[str, str]:
    """Return what torch tells about its libraries and the GPU; what it cannot tell is left out."""
    import torch

    questions: dict[str, Callable[[], object]] = {
        "cudnn": torch.backends.cudnn.version,
        "nccl": lambda: ".".join(str(part) for part in torch.cuda.nccl.version()),
        "capability": lambda: ".".join(str(part) for part in torch.cuda.get_device_capability(index)),
        "multiprocessors": lambda: torch.cuda.get_device_properties(index).multi_processor_count,
        "blas": lambda: str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2],
    }
    answers: dict[str, str] = {}
    for name, ask in questions.items():
        try:
            answer = ask()
        except (AssertionError, AttributeError, RuntimeError):  # a build without the library, or without CUDA
            continue
        if answer is not None:
            answers[name] = str(answer)
    return answers
