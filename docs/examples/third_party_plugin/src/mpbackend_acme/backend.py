"""The backend of the Acme X1. Its products are computed on the CPU, so every device says that it is emulated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from typing import TYPE_CHECKING

from mpbackend.backend import Clock, Collectives, Implementation, MemoryMeter, OverflowFlag, PolicyKind, Switch
from mpbackend.device import Device
from mpbackend.errors import UnknownNameError
from mpbackend_cpu.backend import CpuBackend

if TYPE_CHECKING:
    import torch

    from mpbackend.planning import Plan

KEY = "acme-x1"
ARCH = "acme-1"
RUNS = {("matmul", "bf16"), ("matmul", "fp32"), ("conv", "bf16"), ("conv", "fp32")}


class AcmeBackend:
    """Answers for the Acme X1.

    A real plugin would ask its driver in ``discover`` (in a subprocess, with a time limit) and drive its device in the methods below it. This one hands them
    to the CPU's backend.
    """

    name = "acme"
    device_types: Sequence[str] = ()
    autocast_key = "AutocastCPU"

    def __init__(self) -> None:
        self._cpu = CpuBackend()

    @property
    def _host(self) -> Device:
        return next(iter(self._cpu.discover()))

    def discover(self) -> Iterable[Device]:
        """Return the one device: usable when the CPU is."""
        host = self._host
        return [
            Device(
                key=KEY,
                arch=ARCH,
                name="Acme X1",
                backend=self.name,
                type=host.type,
                kind="emulated",
                versions={"mpbackend-acme": version("mpbackend-acme"), **host.versions},
                memory_bytes=host.memory_bytes,
                usable=host.usable,
                cause=host.cause,
                remedy=host.remedy,
            )
        ]

    def address(self, text: str) -> Device:
        """Return the device that ``acme:0`` or ``acme:acme-x1`` names.

        Raises:
            UnknownNameError: there is no such device.
        """
        if text not in ("0", KEY):
            raise UnknownNameError("device", f"{self.name}:{text}", ["0", KEY], remedy="`mpbackend devices` lists the devices")
        return next(iter(self.discover()))

    def implements(self, device: Device) -> Sequence[Implementation]:
        """Return what runs here: products and convolutions in bf16 and fp32."""
        return [Implementation(op=op, a=name, b=name, path="aten", level="native") for op, name in sorted(RUNS)]

    def environment(self, device: Device) -> Mapping[str, str]:
        """Return what changes the arithmetic: that of the CPU."""
        return self._cpu.environment(self._host)

    def switches(self, device: Device) -> Sequence[Switch]:
        """Return the global precision switches; the plan sets those that ``acme.toml`` declares."""
        return self._cpu.switches(self._host)

    def execute(self, plan: Plan) -> AbstractContextManager[None]:
        """Return the context of forward and backward."""
        return self._cpu.execute(plan)

    def op_policy(self, device: Device) -> Mapping[str, PolicyKind]:
        """Return what autocast does with each operator."""
        return self._cpu.op_policy(self._host)

    def overflow(self, device: Device) -> OverflowFlag | None:
        """Return None: the Acme X1 overflows to inf, which the gradients show."""
        return None

    def convert(self, model: torch.nn.Module, plan: Plan) -> Sequence[Mapping[str, str]]:
        """Change nothing: bf16 and fp32 need no other modules."""
        return ()

    def memory(self, device: Device) -> MemoryMeter:
        """Return the meter of the memory in use."""
        return self._cpu.memory(self._host)

    def clock(self, device: Device) -> Clock:
        """Return the clock."""
        return self._cpu.clock(self._host)

    def collectives(self, device: Device) -> Collectives:
        """Return the library that sums gradients between ranks."""
        return self._cpu.collectives(self._host)
