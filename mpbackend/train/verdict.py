"""The verdict on a step under dynamic scaling: one read from the device, and a closer look only when a step is skipped."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from mpbackend.train.clipping import all_finite
from mpbackend.train.step import FORWARD_NONFINITE, GRADIENT_OVERFLOW, NORM_OVERFLOW

if TYPE_CHECKING:
    from mpbackend.backend import OverflowFlag


def read_norm(norm: torch.Tensor, overflow: OverflowFlag | None) -> float:
    """Read the gradient norm, and beside it the overflow register of a saturating device, in one transfer.

    Args:
        norm: scalar tensor.
        overflow: the device's register, or None where inf and NaN appear in the gradients.

    Returns:
        The norm; NaN when the register tells of an overflow. A step is skipped when it is not finite: the norm is inf or NaN when a gradient is.
    """
    if overflow is None:
        return float(norm.item())
    value, found = torch.stack([norm, overflow.found().to(norm.dtype)]).tolist()
    return math.nan if found else float(value)


def skip_reason(losses: list[torch.Tensor], gradients: list[torch.Tensor], *, told: bool) -> str:
    """Tell why a step is skipped; reads the device.

    Args:
        losses: the unscaled losses of the step. One that is not finite cannot be helped by a smaller scale.
        gradients: the scaled gradients.
        told: whether the verdict was told before (by an overflow register, or when unscaling by hand), so that finite gradients prove nothing now.
    """
    if not all_finite(losses):
        return FORWARD_NONFINITE
    return NORM_OVERFLOW if not told and all_finite(gradients) else GRADIENT_OVERFLOW
