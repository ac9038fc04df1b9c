"""The entry point: torch calls ``autoload`` when it is imported, as it does torch_npu's own."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

QUEUE = "TASK_QUEUE_ENABLE"

libraries: list[Any] = []
"""What keeps the kernels registered; filled once."""


def autoload() -> None:
    """Load torch_npu over the stand-in libraries and install the kernels, once.

    Raises:
        RuntimeError: torch_npu's task queue is on: an operator's error would arrive late, and results after it would be garbage.
    """
    if libraries:
        return
    if os.environ.get(QUEUE) != "0":
        raise RuntimeError(f"{QUEUE} must be 0 for the simulated device")
    torch_npu: Any = importlib.import_module("torch_npu")
    npu: Any = vars(torch)["npu"]
    if not known(torch_npu):
        return
    # torch_npu keeps the compile mode per thread on some devices: autograd's threads would take the route of compiled operators, which is not simulated.
    npu.set_compile_mode(jit_compile=False)
    from npu_simulator import kernels, quantized

    libraries.append(torch.library.Library("aten", "IMPL"))
    kernels.install(libraries[-1], saturating=saturating(torch_npu))
    libraries.append(torch.library.Library("npu", "IMPL"))
    quantized.install(libraries[-1])


def known(torch_npu: Any) -> bool:
    """Tell whether torch_npu knows the SoC; it loads without, and refuses it in use."""
    try:
        torch_npu._C._npu_get_soc_version()
    except RuntimeError:
        return False
    return True


def saturating(torch_npu: Any) -> bool:
    """Tell whether the device saturates; False where torch_npu refuses the device or the environment, which it says again when it is used."""
    try:
        return not torch_npu._C._npu_is_support_inf_nan()
    except RuntimeError:
        return False
