"""torch's module for the NPU. torch_npu adds it when torch loads it; nothing here imports torch_npu where it is not installed."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from mpbackend.errors import BackendError


def npu() -> Any:
    """Return ``torch.npu``.

    Raises:
        BackendError: torch has not loaded torch_npu.
    """
    module = vars(torch).get("npu")
    if module is None:
        raise BackendError("torch.npu", found="torch has not loaded torch_npu", remedy="`mpbackend doctor` gives the cause")
    return module


def torch_npu() -> Any:
    """Return the module ``torch_npu``, which ``npu`` belongs to."""
    npu()
    return importlib.import_module("torch_npu")
