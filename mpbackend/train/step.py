"""What one call of ``Session.step`` did."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

FORWARD_NONFINITE = "forward_nonfinite"
GRADIENT_OVERFLOW = "gradient_overflow"
NORM_OVERFLOW = "norm_overflow"
NO_GRADIENTS = "no gradients"


class StepResult(NamedTuple):
    """The outcome of one call.

    Attributes:
        stepped: whether the optimizer stepped; a plain bool.
        reason: why it did not: ``accumulating 1/4``, ``forward_nonfinite`` (the loss itself; the scale backs off, but no scale helps), ``gradient_overflow``,
            ``norm_overflow`` (every gradient is finite, the norm is not) or ``no gradients``; empty when it stepped.
        grad_norm: L2 norm of the unscaled gradients before clipping: a number when the session had to read it, else a scalar tensor on the device, None when
            nothing needed it.
        loss_scale: the scale that this step used.
        nonfinite: whether inf or NaN was found; None when the host does not know.
    """

    stepped: bool
    reason: str
    grad_norm: float | torch.Tensor | None
    loss_scale: float
    nonfinite: bool | None

    def __bool__(self) -> bool:
        """Whether the optimizer stepped."""
        return self.stepped
