"""One optimizer step in the making: the micro-batches seen, their losses, and whether the gradients are still scaled."""

from __future__ import annotations

import math

import torch

from mpbackend.device import Device
from mpbackend.errors import SessionError


class Window:
    """What happened since the last optimizer step.

    Args:
        micro_batches: micro-batches a step.
        average: divide the summed gradients by the micro-batches seen.

    Attributes:
        losses: the unscaled losses, one for each backward pass.
        seen: micro-batches that ``step`` finished.
        open: backward passes since ``step`` was last called.
        unscaled_norm: norm of the gradients when they were unscaled by hand, else None.
        unscaled_by: what they were divided by then, besides the loss scale.
        penalized: whether a loss holds gradients that were taken under the loss scale.
    """

    def __init__(self, micro_batches: int, *, average: bool) -> None:
        self.micro_batches = micro_batches
        self.average = average
        self.reset()

    def reset(self) -> None:
        """Start again, after a step that was taken or skipped."""
        self.losses: list[torch.Tensor] = []
        self.seen = 0
        self.open = 0
        self.unscaled_norm: torch.Tensor | None = None
        self.unscaled_by = 1.0
        self.penalized = False

    @property
    def empty(self) -> bool:
        """Whether nothing was added since the last step."""
        return not self.losses

    @property
    def last(self) -> bool:
        """Whether the micro-batch that is open is the last of the step."""
        return self.seen + 1 >= self.micro_batches

    @property
    def open_text(self) -> str:
        """How many micro-batches are open, in words."""
        count = self.seen + bool(self.open)
        return f"{count} of {self.micro_batches} micro-batches {'is' if count == 1 else 'are'}"

    def add(self, loss: object, device: Device) -> torch.Tensor:
        """Add the loss of one backward pass and return it.

        Raises:
            SessionError: it is not a tensor of one element, has no graph, is on another device than the plan is for, or the gradients were already unscaled.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise SessionError("backward()", found=found, remedy="give a loss of one element, for example its mean")
        if loss.device.type != device.type:
            found = f"the loss is on {loss.device}, the plan is for {device.address}"
            raise SessionError("backward()", found=found, remedy="move the model and the batches to target.device")
        if not loss.requires_grad:
            found = "the loss has no graph: it was detached, or computed under no_grad or from frozen parameters"
            raise SessionError("backward()", found=found, remedy="compute it with gradients enabled, from parameters that require them")
        if self.unscaled_norm is not None:
            raise SessionError("backward()", found="the gradients of this step were already unscaled", remedy="call step() first")
        self.losses.append(loss.detach().clone())
        self.open += 1
        return loss

    def finish_micro_batch(self) -> None:
        """Count the open micro-batch.

        Raises:
            SessionError: it had no backward pass.
        """
        if not self.open:
            raise SessionError("step()", found="no backward() since the last step()", remedy="call session.backward(loss) first")
        self.seen += 1
        self.open = 0

    def check_last(self, asked: str) -> None:
        """Raise ``SessionError`` unless the last micro-batch has had its backward pass and the step is still to come."""
        if not self.open or not self.last:
            found = f"micro-batch {self.seen + 1} of {self.micro_batches}" + ("" if self.open else " without a backward()")
            raise SessionError(asked, found=found, remedy="call it after the backward() of the last micro-batch, before step()")

    def divisor(self, denominator: float | None) -> float:
        """Return what the summed gradients are divided by.

        Raises:
            SessionError: the denominator is not a number that divides without overflow.
        """
        if denominator is None:
            return float(max(self.seen, 1)) if self.average else 1.0
        if not 0 < denominator < math.inf or not math.isfinite(1.0 / denominator):
            raise SessionError(f"step(denominator={denominator!r})", found="not a usable number above 0", remedy="give the count that the loss sums over")
        return float(denominator)
