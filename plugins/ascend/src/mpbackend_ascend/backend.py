"""The Ascend backend. torch and torch_npu are imported inside the methods that need them, so that listing and planning work without either."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from mpbackend.backend import Clock, Collectives, Implementation, MemoryMeter, OverflowFlag, PolicyKind, Switch
from mpbackend.device import Device
from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.matrix import load_matrix
from mpbackend_ascend import discovery, environment, software
from mpbackend_ascend.implementations import implementations

if TYPE_CHECKING:
    import torch

    from mpbackend.planning import Plan

HCCL = "hccl"
SUMMED = frozenset({"native", "library"})
"""Levels of the matrix's collectives that mean a sum on the wire in that format."""

ASKED = (*software.HOMES, software.AUTOLOAD, software.TRANSFER, software.VISIBLE, "LD_LIBRARY_PATH", "INF_NAN_MODE_ENABLE", "INF_NAN_MODE_FORCE_DISABLE")
"""Variables that a discovery depends on."""


class AscendBackend:
    """NPUs through torch_npu: what the Cube multiplies by itself, and on an Ascend 950 linear layers in 8-bit formats."""

    name = discovery.BACKEND
    device_types: Sequence[str] = (discovery.DEVICE_TYPE,)
    families: Sequence[str] = ("ascend",)
    autocast_key = "AutocastPrivateUse1"

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], list[Device]] = {}

    def discover(self) -> Iterable[Device]:
        """Return the NPUs; empty where there is neither an NPU nor torch_npu. Asks once for each setting of the variables that matter."""
        asked = (*(os.environ.get(name) for name in ASKED), software.TORCH_NPU in sys.modules, software.TRANSFER_MODULE in sys.modules)
        if asked not in self._found:
            self._found[asked] = discovery.find_devices(os.environ, sys.modules)
        return list(self._found[asked])

    def address(self, text: str) -> Device:
        """Return an NPU by its index, or the first usable one with a device key.

        Raises:
            UnknownNameError: there is none.
        """
        devices = list(self.discover())
        matching = [device for device in devices if text in (str(device.index), device.key)]
        if not matching:
            names = dict.fromkeys(name for device in devices for name in (str(device.index), device.key))
            raise UnknownNameError("device of backend ascend", text, names, remedy="`mpbackend doctor` lists the devices, and why there are none")
        return next((device for device in matching if device.usable), matching[0])

    def implements(self, device: Device) -> Sequence[Implementation]:
        """Return what runs on the device's architecture and what does not, with reasons."""
        return implementations(device.arch)

    def environment(self, device: Device) -> Mapping[str, str]:
        """Return the versions of torch_npu, CANN, driver and this plugin, who answers for the device, and the variables that are set."""
        return environment.environment(device.versions)

    def switches(self, device: Device) -> Sequence[Switch]:
        """Return torch_npu's global settings."""
        from mpbackend_ascend.switches import switches

        return switches()

    def execute(self, plan: Plan) -> AbstractContextManager[None]:
        """Return a context that does nothing: torch_npu computes what is planned by itself, or converted layers do."""
        return nullcontext()

    def op_policy(self, device: Device) -> Mapping[str, PolicyKind]:
        """Return torch_npu's autocast policy."""
        from mpbackend_ascend.op_policy import POLICY

        return POLICY

    def overflow(self, device: Device) -> OverflowFlag | None:
        """Return the status register where this process's devices saturate, None where inf and NaN appear in the gradients.

        torch_npu tells: 910A, 310P and 310B always do, Atlas A2 and A3 when the environment says so, a 950 never.
        """
        import torch

        from mpbackend_ascend.overflow import StatusRegister
        from mpbackend_ascend.switches import SATURATING, overflow_mode

        return StatusRegister(torch.device(device.type, device.index)) if overflow_mode() == SATURATING else None

    def convert(self, model: torch.nn.Module, plan: Plan) -> Sequence[Mapping[str, str]]:
        """Replace linear layers by quantized ones where the plan is low-bit; return a row for each layer.

        Raises:
            BackendError: the plan computes in a format or with scales that torch_npu does not multiply on this device, or in fp32 while a setting of
                torch_npu overrides that.
        """
        runs = {(row.op, row.a, row.b): row.level for row in self.implements(plan.device) if row.level is not None}
        for decision in plan.decisions:
            if decision.role.startswith("compute.") and runs.get((decision.op, *decision.pair)) is None:
                found = f"{decision.op} in {' x '.join(decision.pair)} is planned, and this backend does not run it"
                raise BackendError(f"{plan.granted} on {plan.device.key}", found=found, remedy="`mpbackend plan` shows what runs")
        if FORMATS[plan.effective.compute.forward].storage == "fp32":
            from mpbackend_ascend.switches import check_overrides

            check_overrides(plan.device.arch)
        from mpbackend_ascend.lowbit import convert

        return convert(model, plan)

    def product(self, device: Device, format: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:  # noqa: A002 - the name in the contract
        """Return what multiplies fp64 matrices that hold values of a format as this device does, for probes.

        Raises:
            UnknownNameError: there is no such product.
        """
        import torch

        from mpbackend_ascend.product import product

        return product(torch.device(device.type, device.index), device.arch, format)

    def expected_failures(self, device: Device) -> Mapping[str, str]:
        """Return the conformance checks that fail here, to the reason."""
        return {"switch_refuses_nonsense": "torch_npu stores precision_mode unchecked; the fence sets allowed settings only"}

    def memory(self, device: Device) -> MemoryMeter:
        """Return the meter of torch_npu's allocator."""
        from mpbackend_ascend.meters import AllocatorMeter

        return AllocatorMeter(device.index)

    def clock(self, device: Device) -> Clock:
        """Return a clock of device events."""
        from mpbackend_ascend.meters import EventClock

        return EventClock(device.index)

    def collectives(self, device: Device) -> Collectives:
        """Return HCCL and the formats that it sums on the device's architecture, from the capability matrix."""
        matrix = load_matrix(discovery.matrix_files())
        records = matrix.collectives(device.arch) if device.arch in matrix.archs else []
        return Collectives(name=HCCL, reduces=tuple(record.format for record in records if record.op == "all_reduce_sum" and record.level in SUMMED))
