"""Bringing a few numbers from the device to the host without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpbackend.train.step import read_scalars


class HostCopy:
    """Values on their way to the host.

    On a device with streams they are copied into page-locked memory, and an event tells when they are there: asking for them later waits for what was queued
    before the copy, not for what was queued since.

    Args:
        tensors: scalar tensors of one device, whose values fp32 holds.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._event: Any = None
        device = tensors[0].device
        if device.type == "cpu":
            return
        stacked = torch.stack([tensor.to(torch.float32).reshape(()) for tensor in self._tensors])
        self._host = torch.empty(len(tensors), pin_memory=True)
        self._host.copy_(stacked, non_blocking=True)
        self._event = torch.get_device_module(device.type).Event()
        self._event.record()

    @property
    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[float]:
        """Return the values; waits until they are there."""
        if self._event is None:
            return read_scalars(self._tensors)
        self._event.synchronize()
        values: list[float] = self._host.tolist()
        return values
