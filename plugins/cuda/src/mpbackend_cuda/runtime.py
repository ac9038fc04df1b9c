"""What must hold before a plan runs: the GPU is the planned one, every product is one that this backend runs, and Transformer Engine is what it should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpbackend.backend import Implementation
from mpbackend.device import Device
from mpbackend.errors import BackendError
from mpbackend.lowbit import LowBit, low_bit
from mpbackend.planning import Plan
from mpbackend_cuda import transformer_engine
from mpbackend_cuda.discovery import capability
from mpbackend_cuda.execution import EngineExecution
from mpbackend_cuda.implementations import SCHEMES, refusal
from mpbackend_cuda.te_recipes import Lowered, lower, scheme_of

BY_PLAN = "`mpbackend plan` shows what runs"


class Prepared(NamedTuple):
    """What converting a model takes."""

    low: LowBit
    lowered: Lowered
    linear: Any
    execution: EngineExecution


def check_plan(plan: Plan, implementations: Sequence[Implementation]) -> None:
    """Check that this backend runs every product of a plan.

    Raises:
        BackendError: it does not; gives the reason.
    """
    for decision in plan.decisions:
        if not decision.role.startswith("compute."):
            continue
        matching = [row for row in implementations if (row.op, row.a, row.b) == (decision.op, *decision.pair)]
        if not any(row.level is not None for row in matching):
            reason = matching[0].reason if matching else "this backend does not run it"
            found = f"{decision.op} in {' x '.join(decision.pair)} is planned: {reason}"
            raise BackendError(f"{plan.granted} on {plan.device.key}", found=found, remedy=BY_PLAN)


def check_device(device: Device) -> None:
    """Check that torch has the planned GPU at the device's index.

    Raises:
        BackendError: it has no device there, or one of another compute capability.
    """
    count = torch.cuda.device_count()
    if device.index >= count:
        raise BackendError(f"device cuda:{device.index}", found=f"torch has {count} CUDA devices", remedy="`mpbackend doctor` gives the cause")
    found = torch.cuda.get_device_capability(device.index)
    if found != capability(device):
        name = torch.cuda.get_device_name(device.index)
        text = f"torch has {name} of compute capability {'.'.join(map(str, found))} there"
        raise BackendError(f"cuda:{device.index} as {device.name}", found=text, remedy="export CUDA_DEVICE_ORDER=PCI_BUS_ID, and plan again")


def prepare_engine(plan: Plan, execution: EngineExecution | None) -> Prepared:
    """Return what converting a model for a low-bit plan takes.

    Args:
        plan: a low-bit plan.
        execution: the execution of this plan, when a model was converted for it before.

    Raises:
        BackendError: Transformer Engine cannot be imported, lacks the recipe on this GPU, or would work on another GPU.
    """
    low = low_bit(plan.effective)
    scheme = scheme_of(low)
    asked = f"{plan.granted} on {plan.device.key}"
    if reason := refusal(scheme, capability(plan.device), plan.device.versions.get("cuda", "")):
        raise BackendError(asked, found=reason, remedy=BY_PLAN)
    engine = transformer_engine.load()
    if engine.reason:
        raise BackendError(asked, found=engine.reason, remedy="install Transformer Engine for this torch, or plan bf16")
    present = torch.cuda.current_device()
    if present != plan.device.index:
        found = f"the present device is cuda:{present}, where Transformer Engine allocates"
        raise BackendError(f"{asked}, cuda:{plan.device.index}", found=found, remedy=f"call torch.cuda.set_device({plan.device.index}) first")
    if reason := transformer_engine.unavailable(engine, SCHEMES[scheme].check):
        raise BackendError(asked, found=f"Transformer Engine: {reason}", remedy="plan bf16")
    lowered = lower(low, engine.recipes)
    if execution is None:
        execution = EngineExecution(engine.pytorch.autocast, lowered.recipe, delayed=low.mode == "delayed")
    return Prepared(low, lowered, engine.pytorch.Linear, execution)
