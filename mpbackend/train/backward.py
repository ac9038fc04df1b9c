"""The backward pass of one loss: scaled, outside autocast, and with nothing left of it when it fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from mpbackend.errors import SessionError
from mpbackend.train.device_scale import DeviceScale
from mpbackend.train.loss_scale import LossScale

if TYPE_CHECKING:
    from mpbackend.backend import OverflowFlag
    from mpbackend.train.around import Around
    from mpbackend.train.patience import Patience

NOTHING = nullcontext()
INSIDE = "backward_inside_autocast"
"""Counter of backward passes that were asked for inside an autocast."""


class Backward:
    """Runs backward passes.

    Args:
        device_type: torch device type.
        loss_scale: the state of loss scaling.
        overflow: the device's overflow register, cleared before the first pass of a step; or None.
        around: makes the contexts to enter.
        patience: says whether the step is watched.
        count: counts an event by name.
    """

    def __init__(
        self,
        device_type: str,
        loss_scale: LossScale | DeviceScale,
        overflow: OverflowFlag | None,
        around: Around,
        patience: Patience,
        count: Callable[[str], None],
    ) -> None:
        self._device_type = device_type
        self._scale = loss_scale
        self._plain = loss_scale.settings.mode == "none"
        self._overflow = overflow
        self._around = around
        self._patience = patience
        self._count = count

    @property
    def scale(self) -> float | torch.Tensor:
        """The present loss scale; a scalar tensor where it lives on the device."""
        return self._scale.tensor if isinstance(self._scale, DeviceScale) else self._scale.value

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale; a 16-bit loss is scaled in fp32, where it cannot overflow.

        Raises:
            SessionError: under static scaling, a loss in a format that does not hold the scale.
        """
        scale = self.scale
        if isinstance(scale, float) and scale == 1.0:
            return loss
        if isinstance(scale, float) and not self._scale.dynamic and scale > torch.finfo(loss.dtype).max:
            found = f"the loss is {loss.dtype}, and its gradient is the loss scale {scale:g}, which that format does not hold"
            raise SessionError("backward()", found=found, remedy="compute the loss in fp32: loss_fn(output.float(), target)")
        return (loss if loss.dtype in (torch.float32, torch.float64) else loss.float()) * scale

    def run(self, loss: torch.Tensor, drop: Callable[[], None], *, retain_graph: bool, first: bool) -> None:
        """Run one backward pass.

        Args:
            loss: scalar.
            drop: drops every gradient of the step; called when the pass fails: a part of the gradients is there then and a part is not.
            retain_graph: as in ``torch.Tensor.backward``.
            first: whether it is the first of the step.
        """
        if self._overflow is not None and first:
            self._overflow.clear()
        inside = torch.is_autocast_enabled(self._device_type)
        if inside:
            self._count(INSIDE)
        around = self._around.make("backward", self._patience.diagnosis)
        try:
            if around is None and not inside:
                (loss if self._plain else self.scaled(loss)).backward(retain_graph=retain_graph)
            else:
                with torch.autocast(self._device_type, enabled=False) if inside else NOTHING, around or NOTHING:
                    self.scaled(loss).backward(retain_graph=retain_graph)
        except BaseException as error:
            drop()
            error.add_note("mpbackend: backward() did not finish; the gradients of this step were dropped, those of its earlier micro-batches included")
            raise
