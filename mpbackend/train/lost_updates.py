"""Lost updates: weights in 16 bits that did not move although their gradient was not zero.

A number below half a spacing of a weight vanishes when it is added to it. Sampled on few elements and few steps, counted on the device, read with the record.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ELEMENTS = 1 << 16
"""Leading elements of each parameter that are compared."""


class Held(NamedTuple):
    """What is compared of one parameter."""

    parameter: Tensor
    before: Tensor
    moving: Tensor


class LostUpdates:
    """Counts lost updates over one step, of one or several optimizers.

    Call ``open`` before the optimizer and ``close`` after it, for whatever part of the parameters it updates at once.
    """

    def __init__(self) -> None:
        self._held: list[Held] = []
        self._lost: list[Tensor] = []
        self._considered: list[Tensor] = []

    @torch.no_grad()
    def open(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Remember a 16-bit parameter and where its gradient is not zero."""
        if gradient is not None and parameter.element_size() == 2:
            self._held.append(Held(parameter, leading(parameter).clone(), leading(gradient) != 0))

    @torch.no_grad()
    def close(self) -> None:
        """Compare what was remembered with the parameters as they are now, bit for bit."""
        for parameter, before, moving in self._held:
            same = leading(parameter).view(torch.int16) == before.view(torch.int16)
            self._lost.append((same & moving).sum())
            self._considered.append(moving.sum())
        self._held.clear()

    def drop(self) -> None:
        """Forget parameters whose step failed."""
        self._held.clear()

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Return the number of lost updates and of updates considered since the last call, as int64 scalars on the device; None where nothing was counted."""
        if not self._lost:
            return None
        counted = torch.stack(self._lost).sum(), torch.stack(self._considered).sum()
        self._lost, self._considered = [], []
        return counted


def leading(tensor: Tensor) -> Tensor:
    """Return the first elements of a tensor, flat."""
    return tensor.detach().reshape(-1)[:ELEMENTS]
