"""One matrix product of an NPU for probes, which take it for a black box."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mpbackend.errors import UnknownNameError
from mpbackend.train.fence import Fence
from mpbackend_ascend.implementations import CONVERTING, HF32, implementations
from mpbackend_ascend.switches import switches

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def product(device: torch.device, arch: str, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what multiplies fp64 matrices that hold values of a format on an NPU; see ``mpbackend.backend.Backend``.

    Args:
        device: the NPU.
        arch: its architecture key.
        name: the format; the device's hf32 is multiplied in tensors of fp32, under its setting.

    Raises:
        UnknownNameError: torch_npu has no such product on this architecture.
    """
    runs = [row.a for row in implementations(arch) if row.op == "matmul" and row.a == row.b and row.scaling == "none" and row.level is not None]
    if name not in runs:
        raise UnknownNameError(f"format of products on {arch}", name, dict.fromkeys(runs))
    dtype = DTYPES.get(name, torch.float32)

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        left, right = a.to(dtype).to(device), b.to(dtype).to(device)
        with settings(arch, name):
            return torch.mm(left, right).cpu().double()

    return multiply


def settings(arch: str, name: str) -> AbstractContextManager[object]:
    """Return a context in which torch_npu computes fp32 tensors in the format that is meant; nothing is set where there is no choice."""
    if DTYPES.get(name, torch.float32) is not torch.float32 or arch in CONVERTING or arch not in HF32:
        return nullcontext()
    return Fence(switches(), {"matmul.allow_hf32": str(name != "fp32")}, backend="ascend", owner=f"a product of {name}")
