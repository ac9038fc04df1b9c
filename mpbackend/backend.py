"""The contract of a backend: what a plugin tells about one kind of device, and what it does there.

A backend is about numerics only. It does not launch processes, bring kernels, or fall back between implementations that give other numbers. Nothing here
imports torch; a backend imports it inside the methods that need it, so that listing and planning work without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec

from mpbackend.capability import Level
from mpbackend.device import Device

if TYPE_CHECKING:
    import torch

    from mpbackend.planning import Plan

PolicyKind = Literal["lower", "fp32", "promote", "banned"]


class Implementation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A combination that a plugin can run, or cannot and says why.

    Attributes:
        op: ``matmul``, ``conv``, ...
        a: format of the first operand.
        b: format of the second operand.
        scaling: scale layout of the vocabulary.
        accumulate: format of the sum.
        path: what runs it, from the vocabulary.
        level: how it runs; None when it cannot.
        reason: why it cannot, or what a reader must know.
    """

    op: str
    a: str
    b: str
    scaling: str = "none"
    accumulate: str = "fp32"
    path: str
    level: Level | None = None
    reason: str = ""


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """A global precision switch of the backend's software.

    Attributes:
        name: as the matrices' switch tables spell it.
        get: returns the present setting.
        set: takes a setting.
        allowed: the settings it takes, as strings.
        meaning: one line.
    """

    name: str
    get: Callable[[], str]
    set: Callable[[str], None]
    allowed: tuple[str, ...]
    meaning: str = ""


class Collectives(msgspec.Struct, frozen=True, kw_only=True):
    """The collective library: its torch.distributed name, and the formats it sums."""

    name: str
    reduces: tuple[str, ...]


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the device: allocated now, and the peak since the last reset; None when the backend cannot tell."""

    allocated: int | None
    peak: int | None
    basis: str


class OverflowFlag(Protocol):
    """A device register that remembers an overflow, for devices on which inf and NaN never appear."""

    def clear(self) -> None:
        """Reset the register before a backward pass."""

    def found(self) -> torch.Tensor:
        """Return a scalar bool tensor on the device: whether an overflow happened since ``clear``. Makes no synchronization."""
        ...


class MemoryMeter(Protocol):
    """Reads the memory of one device."""

    def reset_peak(self) -> None:
        """Start a new peak."""

    def read(self) -> MemoryReading:
        """Return the present reading; may synchronize."""
        ...


class Clock(Protocol):
    """Measures device time without draining the queue on the hot path."""

    def mark(self) -> Any:
        """Return a mark at the present point of the device's queue; no synchronization."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two marks; may synchronize, so it is called only when a record is flushed."""
        ...


@runtime_checkable
class Backend(Protocol):
    """One kind of device.

    A backend may also have ``update_block``: elements of the parameters that an optimizer updates at once. It helps where operators stream memory that a cache
    would hold, as on a CPU; without it an optimizer updates all of them at once.

    It may have ``notes(plan) -> Sequence[str]``: sentences about what a plan does on it that no decision says, such as what an emulator leaves to the host.
    They stand in the plan and the record. It is asked when a plan is made, and imports no torch.

    It may have ``families``: the ``family`` of the matrix files whose devices it runs, so that one that is not here can be audited under its operator policy.

    And it may have ``product(device, format) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]``, for probes. What it returns multiplies fp64 matrices
    (M, K) and (K, N) in main memory, which hold values of the format, as the device multiplies tensors of that format, and gives the result in fp64 there.
    It raises ``UnknownNameError`` for a format that it does not multiply.

    And ``expected_failures(device) -> Mapping[str, str]``: conformance checks that it is known to fail, to the reason. One that passes is a failure then.

    Attributes:
        name: what ``select`` calls it: ``cpu``, ``emu``.
        device_types: torch device types it answers for; each also works as a name in ``select``.
        autocast_key: dispatch key of its autocast kernels, for example ``AutocastCPU``.
    """

    name: str
    device_types: Sequence[str]
    autocast_key: str

    def discover(self) -> Iterable[Device]:
        """Return the devices of this machine, usable or not, best first.

        Makes no device context and does not import torch in this process; slow vendor probes run in a subprocess with a time limit. Raises nothing: what
        goes wrong becomes a ``Device`` with ``usable=False``, a cause and a remedy.
        """

    def address(self, text: str) -> Device:
        """Return the device that the part of a spec after the colon names: digits or a device key.

        Raises:
            UnknownNameError: this backend has no such device.
        """
        ...

    def implements(self, device: Device) -> Sequence[Implementation]:
        """Return what this backend can run on ``device``; does not import torch."""
        ...

    def environment(self, device: Device) -> Mapping[str, str]:
        """Return the versions and variables that change the arithmetic, for the record."""
        ...

    def switches(self, device: Device) -> Sequence[Switch]:
        """Return every global precision switch; may import torch."""
        ...

    def execute(self, plan: Plan) -> AbstractContextManager[None]:
        """Return a context, entered around forward *and* backward, in which the plan's formats are what runs. Re-entered every micro-batch."""
        ...

    def op_policy(self, device: Device) -> Mapping[str, PolicyKind]:
        """Return the autocast policy of the installed torch for this backend: op to what autocast does with it."""
        ...

    def overflow(self, device: Device) -> OverflowFlag | None:
        """Return the device's overflow register, or None where inf and NaN appear in the gradients."""
        ...

    def convert(self, model: torch.nn.Module, plan: Plan) -> Sequence[Mapping[str, str]]:
        """Change ``model`` in place where the plan needs other modules; return a row per layer: layer, action (converted, padded, skipped), reason."""
        ...

    def memory(self, device: Device) -> MemoryMeter:
        """Return the memory meter of ``device``."""
        ...

    def clock(self, device: Device) -> Clock:
        """Return the clock of ``device``."""
        ...

    def collectives(self, device: Device) -> Collectives:
        """Return the collective library that torch.distributed uses there."""
        ...


MEMBERS: tuple[str, ...] = (
    "name",
    "device_types",
    "autocast_key",
    "discover",
    "address",
    "implements",
    "environment",
    "switches",
    "execute",
    "op_policy",
    "overflow",
    "convert",
    "memory",
    "clock",
    "collectives",
)
"""What an object must have to be a backend; checked when a plugin is loaded, so that a missing method is named then and not in the middle of a run."""
