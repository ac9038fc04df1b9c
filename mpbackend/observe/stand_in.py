"""A backend for a device that is not there: what a session asks of one, answered so that tensors without memory can be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
import torch

from mpbackend.backend import Clock, Collectives, Implementation, MemoryMeter, MemoryReading, OverflowFlag, PolicyKind, Switch
from mpbackend.device import Device
from mpbackend.errors import BackendError
from mpbackend.lowbit import is_low_bit_recipe
from mpbackend.planning import Plan

NO_MEMORY = "tensors without memory"


class StandIn:
    """Stands for the backend of a device that is not there.

    Args:
        device: the device, of the type that this process defined.
        autocast_key: name of its autocast key.
        policy: its operator policy.
        saturates: whether the device saturates on overflow and has a register that tells.
    """

    families: Sequence[str] = ()

    def __init__(self, device: Device, autocast_key: str, policy: Mapping[str, PolicyKind], *, saturates: bool) -> None:
        self.name = device.backend
        self.device_types: Sequence[str] = (device.type,)
        self.autocast_key = autocast_key
        self._device = device
        self._policy = dict(policy)
        self._saturates = saturates

    def discover(self) -> Sequence[Device]:
        """Return the device."""
        return [self._device]

    def address(self, text: str) -> Device:
        """Return the device, whatever it is called."""
        return self._device

    def implements(self, device: Device) -> Sequence[Implementation]:
        """Return nothing: the plan was made before."""
        return []

    def environment(self, device: Device) -> Mapping[str, str]:
        """Return nothing: no software of the device is here."""
        return {}

    def switches(self, device: Device) -> Sequence[Switch]:
        """Return nothing: no software of the device is here."""
        return []

    def execute(self, plan: Plan) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def op_policy(self, device: Device) -> Mapping[str, PolicyKind]:
        """Return the device's operator policy."""
        return self._policy

    def overflow(self, device: Device) -> OverflowFlag | None:
        """Return a register that is read like the device's own, where it has one."""
        return Register(torch.device(device.type, device.index)) if self._saturates else None

    def convert(self, model: torch.nn.Module, plan: Plan) -> Sequence[Mapping[str, str]]:
        """Convert nothing.

        Raises:
            BackendError: the plan is low-bit, and its layers are those of the device's own library.
        """
        if is_low_bit_recipe(plan.effective):
            found = "its layers are those of the device's library, which is not here"
            raise BackendError(f"{plan.granted} without hardware", found=found, remedy="audit a 16-bit recipe, or on `emu:` and the device's key")
        return []

    def memory(self, device: Device) -> MemoryMeter:
        """Return a meter that reads nothing."""
        return NoMemory()

    def clock(self, device: Device) -> Clock:
        """Return a clock that stands."""
        return NoTime()

    def collectives(self, device: Device) -> Collectives:
        """Return that nothing is reduced."""
        return Collectives(name="none", reduces=())


class Register:
    """Is read like an overflow register; its tensor has no memory, so the audit answers for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def clear(self) -> None:
        """Reset nothing."""

    def found(self) -> torch.Tensor:
        """Return a scalar bool tensor without memory."""
        return torch.zeros((), dtype=torch.bool, device=self._device)


class NoMemory:
    """Reads no memory."""

    def reset_peak(self) -> None:
        """Reset nothing."""

    def read(self) -> MemoryReading:
        """Return that nothing can be told."""
        return MemoryReading(allocated=None, peak=None, basis=NO_MEMORY)


class NoTime:
    """A clock that stands."""

    def mark(self) -> float:
        """Return no time."""
        return 0.0

    def elapsed_ms(self, start: float, end: float) -> float:
        """Return no time."""
        return 0.0


def runnable(plan: Plan, device: Device) -> Plan:
    """Return a plan for a device as one that runs on its stand-in; the switches of its software are not here to be set."""
    return msgspec.structs.replace(plan, device=device, runnable=True, blockers=(), switches={})
