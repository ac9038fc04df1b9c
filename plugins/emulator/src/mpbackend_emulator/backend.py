"""The emulator: any device of the matrices on CPU tensors. torch is imported inside the methods that need it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mpbackend.backend import Clock, Collectives, Implementation, MemoryMeter, OverflowFlag, PolicyKind, Switch
from mpbackend.device import Device
from mpbackend.errors import BackendError
from mpbackend.matrix import Matrix
from mpbackend.plugins import load_plugins
from mpbackend_emulator.implementations import implementations
from mpbackend_emulator.notes import notes
from mpbackend_emulator.settings import emulated_switches
from mpbackend_emulator.unit import Unit

if TYPE_CHECKING:
    import torch

    from mpbackend.planning import Plan
    from mpbackend_cpu.backend import CpuBackend
    from mpbackend_emulator.products import Products

BACKEND = "emu"
DISTRIBUTION = "mpbackend-emulator"
HOST = "host."


class EmulatorBackend:
    """Devices that are not here: their matrix arithmetic, switches and overflow on CPU tensors."""

    name = BACKEND
    device_types: Sequence[str] = ()
    autocast_key = "AutocastCPU"
    update_block = 1 << 20

    def __init__(self) -> None:
        self._matrix: Matrix | None = None
        self._products: dict[str, Products] = {}

    @property
    def matrix(self) -> Matrix:
        """The facts about every device, those of installed plugins included."""
        if self._matrix is None:
            self._matrix = load_plugins().matrix()
        return self._matrix

    def unit(self, device: Device) -> Unit:
        """Return the matrix unit of a device."""
        return Unit(self.matrix, device.key, device.arch)

    def products(self, device: Device) -> Products:
        """Return the products of a device: the same object at every call, since the overflow register lives in it."""
        from mpbackend_emulator.products import Products

        if device.key not in self._products:
            self._products[device.key] = Products(self.unit(device))
        return self._products[device.key]

    def discover(self) -> Iterable[Device]:
        """Return nothing: an emulated device is named, ``emu:h100``, and never found."""
        return []

    def address(self, text: str) -> Device:
        """Return a device of the matrices by its key.

        Raises:
            UnknownNameError: no matrix declares the key, or it is ambiguous.
        """
        from mpbackend_cpu.discovery import torch_state

        model = self.matrix.device(text)
        versions, cause, remedy = torch_state()
        return Device(
            key=model.key,
            arch=model.arch,
            name=f"{model.name}, emulated",
            backend=BACKEND,
            type="cpu",
            kind="emulated",
            versions=versions,
            usable=not cause,
            cause=cause,
            remedy=remedy,
        )

    def implements(self, device: Device) -> Sequence[Implementation]:
        """Return what the device computes and there is an arithmetic for, then the rest with reasons."""
        return implementations(self.unit(device))

    def notes(self, plan: Plan) -> Sequence[str]:
        """Return how the planned products are summed, and what is left to the host."""
        return notes(self.unit(plan.device), plan)

    def environment(self, device: Device) -> Mapping[str, str]:
        """Return the version of this plugin, the engine of the products, and the host's environment."""
        from mpbackend.numerics.matmul import best_engine

        host, processor = self._host()
        found = {DISTRIBUTION: importlib.metadata.version(DISTRIBUTION), "engine": best_engine(), "host": f"{processor.name} ({processor.arch})"}
        return {**host.environment(processor), **found}

    def switches(self, device: Device) -> Sequence[Switch]:
        """Return the device's switches, and those of the host with ``host.`` in front, which a plan leaves as they are."""
        from mpbackend.train.switches import DETERMINISTIC
        from mpbackend_cpu.switches import switches

        host = [
            Switch(name=f"{HOST}{switch.name}", get=switch.get, set=switch.set, allowed=switch.allowed, meaning=switch.meaning)
            for switch in switches()
            if switch.name != DETERMINISTIC.name
        ]
        return [*emulated_switches(self.matrix.switches(device.arch)), *host, DETERMINISTIC]

    def execute(self, plan: Plan) -> AbstractContextManager[None]:
        """Return a context in which products have the device's arithmetic."""
        from mpbackend_emulator.dispatch import EmulatedProducts

        return EmulatedProducts(self.products(plan.device))

    def op_policy(self, device: Device) -> Mapping[str, PolicyKind]:
        """Return what autocast does here, which is the CPU's policy."""
        host, processor = self._host()
        return host.op_policy(processor)

    def overflow(self, device: Device) -> OverflowFlag | None:
        """Return the status register of a device that saturates, None where inf and NaN appear in the gradients."""
        from mpbackend_emulator.saturation import StatusRegister

        products = self.products(device)
        return StatusRegister(products) if products.unit.saturates else None

    def convert(self, model: torch.nn.Module, plan: Plan) -> Sequence[Mapping[str, str]]:
        """Make the linear layers low-bit where the plan is, and return a row for each; else change nothing and return no row.

        Raises:
            BackendError: the plan computes in a format that is not emulated, no layer can be converted, or the layers are already those of an earlier recipe
                and the plan is not low-bit.
        """
        runs = {(row.op, row.a, row.b) for row in self.implements(plan.device) if row.level is not None}
        for decision in plan.decisions:
            if decision.role.startswith("compute.") and (decision.op, *decision.pair) not in runs:
                found = f"{decision.op} in {' x '.join(decision.pair)} is planned, and it is not emulated"
                raise BackendError(f"{plan.granted} on {plan.device.key}", found=found, remedy="`mpbackend plan` shows what runs")
        from mpbackend_emulator.lowbit import convert

        return convert(model, plan, self.products(plan.device).unit)

    def product(self, device: Device, format: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:  # noqa: A002 - the name in the contract
        """Return what multiplies fp64 matrices that hold values of a format as this device does, for probes.

        Raises:
            UnknownNameError: there is no such product.
        """
        from mpbackend_emulator.probing import product

        return product(self.unit(device), format)

    def memory(self, device: Device) -> MemoryMeter:
        """Return the meter of this process's resident set; the device's memory is not emulated."""
        return self._host()[0].memory(device)

    def clock(self, device: Device) -> Clock:
        """Return the host's clock; the device's speed is not emulated."""
        return self._host()[0].clock(device)

    def collectives(self, device: Device) -> Collectives:
        """Return gloo and the formats it sums; the device's collectives are not emulated."""
        return self._host()[0].collectives(device)

    def _host(self) -> tuple[CpuBackend, Device]:
        """Return the backend of the host and its processor."""
        from mpbackend_cpu.backend import CpuBackend
        from mpbackend_cpu.discovery import find_device

        return CpuBackend(), find_device()
