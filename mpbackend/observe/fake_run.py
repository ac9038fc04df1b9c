"""The process of an audit for a device that is not there: reads a request, defines the device, runs the workload without memory, writes the answer."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensor

from mpbackend.backend import Backend
from mpbackend.device import Device, device_from_matrix
from mpbackend.errors import BackendError, MpbackendError, describe
from mpbackend.observe.audit_document import AuditDocument
from mpbackend.observe.audit_run import audit_workload
from mpbackend.observe.audit_target import Answer, Request
from mpbackend.observe.audit_workload import find_build
from mpbackend.observe.fake_attention import route_attention
from mpbackend.observe.fake_device import AutocastPolicy, define_device, fake_tensors
from mpbackend.observe.stand_in import StandIn, runnable
from mpbackend.plugins import Plugins, load_plugins
from mpbackend.selection import plan as plan_for
from mpbackend.target import Target
from mpbackend.train import casting

KNOWN_TO_TORCH = "target"
"""Device type of a stand-in whose own type torch knows already, and so does not let a process define."""


def owner_of(device: Device, plugins: Plugins) -> Backend:
    """Return the backend that runs devices of this kind.

    Raises:
        BackendError: no installed plugin says that it does.
    """
    matrix = plugins.matrix()
    family = matrix.family_of(device.arch)
    for backend in plugins.backends.values():
        if family in getattr(backend, "families", ()):
            return backend
    raise BackendError(
        f"audit for {device.key}", found=f"no installed plugin says that it runs {family} devices", remedy="install it: its operator policy is needed"
    )


class Numbers:
    """Answers for reads of the device: finite, or infinite on the path of an overflow. 0 is no overflow for a register and for ``found_inf``.

    Attributes:
        overflow: whether the gradients of the step overflowed.
    """

    def __init__(self) -> None:
        self.overflow = False
        self._asked = 0

    def __call__(self, tensor: torch.Tensor) -> Any:
        """Return a number of the tensor's kind. On the path of an overflow the first question, whether the loss is finite, has another answer than the rest."""
        if tensor.dtype is torch.bool:
            self._asked += 1
            return not self.overflow or self._asked == 1
        if tensor.device.type == "cpu":
            return 1  # the count of an optimizer's steps
        return float("inf") if self.overflow else 0.0


def audit_here(request: Request) -> AuditDocument:
    """Audit in this process, whose device type the target becomes.

    Args:
        request: what is asked.
    """
    plugins = load_plugins()
    matrix = plugins.matrix()
    model = device_from_matrix(matrix, request.device)
    backend = owner_of(model, plugins)
    made = plan_for(request.recipe, model, plugins=plugins, on_unsupported=request.on_unsupported)
    kind = next(iter(backend.device_types), "")
    name = kind if kind and not known(kind) else KNOWN_TO_TORCH
    key = define_device(name)
    device = msgspec.structs.replace(model, backend=backend.name, type=name, index=0, kind="simulated", usable=True, cause="", remedy="")
    policy = backend.op_policy(model)
    banned: dict[str, None] = {}
    kernels = (AutocastPolicy(name, key, policy, banned.setdefault), route_attention(key))  # stand as long as these are held
    overflow = matrix.overflow(model.arch)
    stand_in = StandIn(device, key, policy, saturates=overflow is not None and overflow.mode == "saturating" and overflow.status_register is True)
    casting.Tensor = FakeTensor  # type: ignore[attr-defined] # what a parameter's data is here, where a session refuses classes of wrappers
    with fake_tensors():
        target = Target(stand_in, device, plugins)
        audit = audit_workload(
            find_build(request.workload),
            target,
            runnable(made, device),
            name=request.workload,
            basis="fake",
            answers=Numbers(),
            banned=banned,
        )
    del kernels
    return audit


def known(device_type: str) -> bool:
    """Tell whether torch has a device type of this name already."""
    try:
        torch.device(device_type)
    except RuntimeError:
        return False
    return True


def main() -> None:
    """Read a request, write an answer."""
    asked, answered = map(Path, sys.argv[1:3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            answer = Answer(audit=audit_here(msgspec.json.decode(asked.read_bytes(), type=Request)))
        except MpbackendError as error:
            answer = Answer(error=str(error))
        except Exception as error:  # noqa: BLE001 - whatever a workload raises is told to the process that asked
            answer = Answer(error=describe(error))
    answered.write_bytes(msgspec.json.encode(answer))
