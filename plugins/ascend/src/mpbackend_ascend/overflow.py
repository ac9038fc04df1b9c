"""The overflow register of a saturating device, on which inf and NaN never appear in a gradient.

The register belongs to the process, not to a stream or a tensor: an overflow of anything that runs between ``clear`` and ``found`` counts, evaluation in
another thread included. Ranks must agree on a skip, so the verdict is the largest over the ranks where torch.distributed is initialized.
"""

from __future__ import annotations

from typing import Protocol

import torch

from mpbackend_ascend.npu import torch_npu

STATUS_ELEMENTS = 8
"""Elements of the status tensor; the first tells, the rest are the vendor's."""


class Register(Protocol):
    """Reads and clears the register; each takes a status tensor of 8 elements on the device and makes no synchronization."""

    def npu_get_float_status(self, status: torch.Tensor) -> torch.Tensor:
        """Return the status: its first element is not 0 after an overflow."""
        ...

    def npu_clear_float_status(self, status: torch.Tensor) -> torch.Tensor:
        """Clear the register."""
        ...


class StatusRegister:
    """The register of one device.

    Args:
        device: the device.
        register: what reads and clears it; torch_npu when omitted.
    """

    def __init__(self, device: torch.device, register: Register | None = None) -> None:
        self._register: Register = torch_npu() if register is None else register
        self._zeros = torch.zeros(STATUS_ELEMENTS, dtype=torch.float32, device=device)

    def clear(self) -> None:
        """Reset the register; queued on the device, no synchronization."""
        self._register.npu_clear_float_status(self._zeros.clone())

    def found(self) -> torch.Tensor:
        """Return a scalar bool tensor on the device: whether an overflow happened since ``clear``, on any rank. Makes no synchronization with the host."""
        status = self._register.npu_get_float_status(self._zeros.clone())
        return agree(status[0] != 0)


def agree(verdict: torch.Tensor) -> torch.Tensor:
    """Return whether any rank's verdict is true; the verdict itself without torch.distributed.

    Args:
        verdict: scalar bool tensor.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return verdict
    shared = verdict.to(torch.int32)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return shared != 0
