"""A device: what is planned for, whether it stands in this machine or only in a matrix."""

from __future__ import annotations

from typing import Literal

import msgspec

from mpbackend.matrix import Matrix

Kind = Literal["hardware", "emulated", "simulated"]


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device, found by a backend or taken from a matrix.

    Attributes:
        key: device key of the matrices (``h100``), or the architecture's key when the exact name is not in a matrix.
        arch: architecture key; ``unknown`` when the matrices do not know it.
        name: the name that the runtime reports, or the model's name.
        backend: name of the backend that found it; empty for a device that only stands in a matrix.
        type: torch device type; empty for a device that only stands in a matrix.
        index: index among the backend's devices.
        kind: ``hardware``, ``emulated`` or ``simulated``; results of the latter two are never shown as hardware.
        versions: software name to version.
        memory_bytes: memory of this device, or None when not known.
        usable: whether a session can run on it now.
        cause: why it is not usable; empty when it is.
        remedy: what to do about that.
    """

    key: str
    arch: str
    name: str
    backend: str = ""
    type: str = ""
    index: int = 0
    kind: Kind = "hardware"
    versions: dict[str, str] = {}
    memory_bytes: int | None = None
    usable: bool = True
    cause: str = ""
    remedy: str = ""

    @property
    def address(self) -> str:
        """What ``select`` takes to get this device: ``backend:index``, ``backend:key`` where it is emulated; the key for a device without a backend."""
        return f"{self.backend}:{self.key if self.kind == 'emulated' else self.index}" if self.backend else self.key


def device_from_matrix(matrix: Matrix, key: str) -> Device:
    """Return the device that a matrix declares under ``key``, for planning without the hardware.

    Raises:
        UnknownNameError: no matrix declares the key, or it is ambiguous.
    """
    model = matrix.device(key)
    memory = model.memory_bytes[0] if len(model.memory_bytes) == 1 else None
    return Device(
        key=model.key,
        arch=model.arch,
        name=model.name,
        memory_bytes=memory,
        usable=False,
        cause="planned from the matrix; no such device was found here",
        remedy="`mpbackend doctor` says what is installed",
    )
