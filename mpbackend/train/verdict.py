"""The verdict on a step under dynamic scaling: at most one read from the device, and a closer look only when a step is skipped."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from mpbackend.train.clipping import all_finite
from mpbackend.train.step import FORWARD_NONFINITE, GRADIENT_OVERFLOW, NORM_OVERFLOW

if TYPE_CHECKING:
    from mpbackend.backend import OverflowFlag
    from mpbackend.train.distributed import Ranks


def register_of(overflow: OverflowFlag | None, ranks: Ranks | None) -> torch.Tensor | None:
    """Return what the overflow registers of all ranks tell, a scalar bool tensor; None where inf and NaN appear in the gradients. Reads nothing.

    Every rank has a register of its own, and a gradient that was reduced from a saturated one looks healthy on all of them.
    """
    if overflow is None:
        return None
    found = overflow.found()
    return found if ranks is None else ranks.agree_found(found)


def found_overflow(norm: torch.Tensor, register: torch.Tensor | None) -> torch.Tensor:
    """Return whether the step must be skipped, a scalar bool tensor: the norm is inf or NaN when a gradient is. Reads nothing."""
    found = ~torch.isfinite(norm)
    return found if register is None else found | register.to(torch.bool).reshape(())


def read_norm(norm: torch.Tensor, register: torch.Tensor | None) -> float:
    """Read the gradient norm, and beside it the overflow register of a saturating device, in one transfer.

    Args:
        norm: scalar tensor.
        register: what the registers tell, or None.

    Returns:
        The norm; NaN when a register tells of an overflow. A step is skipped when it is not finite.
    """
    if register is None:
        return float(norm.item())
    value, found = torch.stack([norm, register.to(norm.dtype).reshape(())]).tolist()
    return math.nan if found else float(value)


def skip_reason(losses: list[torch.Tensor], gradients: list[torch.Tensor], *, told: bool, helpable: bool) -> str:
    """Tell why a step is skipped; reads the device.

    Args:
        losses: the unscaled losses of the step. One that is not finite cannot be helped by a smaller scale.
        gradients: the scaled gradients.
        told: whether the verdict was told before (by an overflow register, or when unscaling by hand), so that finite gradients prove nothing now.
        helpable: whether the losses hold gradients that were taken under the scale, so that a smaller one may help.
    """
    if not all_finite(losses):
        return GRADIENT_OVERFLOW if helpable else FORWARD_NONFINITE
    return NORM_OVERFLOW if not told and all_finite(gradients) else GRADIENT_OVERFLOW
