"""The boundary of a step: one sweep over the gradients, one verdict, and the optimizers in the only order that is right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpbackend.errors import SessionError
from mpbackend.train import clipping, verdict
from mpbackend.train.step import NO_GRADIENTS, StepResult

if TYPE_CHECKING:
    from mpbackend.backend import OverflowFlag
    from mpbackend.train.buffers import BufferGuard
    from mpbackend.train.loss_scale import LossScale
    from mpbackend.train.window import Window

Scheduler = torch.optim.lr_scheduler.LRScheduler


class Boundary:
    """Steps the optimizers, or skips the step and says why.

    The parameters are those that the optimizers hold at that moment, so a group that is added between two steps is unscaled, clipped and cleared like the
    others.

    Args:
        optimizers: one verdict for all of them.
        schedulers: stepped after a taken step.
        loss_scale: the state of loss scaling.
        clip_norm: largest gradient norm, or None.
        needs_norm: whether the norm is wanted although nothing is clipped or scaled.
        overflow: the device's overflow register, or None.
        guard: restores buffers on a skip, or None.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Scheduler],
        loss_scale: LossScale,
        *,
        clip_norm: float | None,
        needs_norm: bool,
        overflow: OverflowFlag | None,
        guard: BufferGuard | None,
    ) -> None:
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._scale = loss_scale
        self._clip_norm = clip_norm
        self._needs_norm = needs_norm or clip_norm is not None or loss_scale.dynamic
        self._overflow = overflow
        self._guard = guard
        self._turn = False

    def check_turn(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Refuse a step that the session did not make: the gradients may be scaled, and nothing was checked."""
        if not self._turn:
            name = type(optimizer).__name__
            raise SessionError(f"{name}.step()", found="the optimizer belongs to a live session", remedy="call session.step() instead")

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that the optimizers hold now, each once."""
        return clipping.unique_parameters(self._optimizers)

    def unscale(self, window: Window) -> list[torch.Tensor]:
        """Unscale the gradients and keep their norm, from which the verdict is taken later; returns the parameters."""
        parameters = self.parameters()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients and window.unscaled_norm is None:
            factor = 1.0 / (self._scale.value * (window.seen + 1 if window.average else 1))
            window.unscaled_norm = clipping.total_norm(gradients) * factor
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
        return parameters

    def apply(self, parameters: list[torch.Tensor], window: Window, denominator: float | None) -> StepResult:
        """Unscale, clip and step, or skip.

        Args:
            parameters: as ``parameters()`` returns them.
            window: the step in the making.
            denominator: what to divide the summed gradients by, or None.
        """
        scale = self._scale.value
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return StepResult(False, f"{NO_GRADIENTS}: 0 of {len(parameters)} parameters have gradients", None, scale, None)
        by_hand = window.unscaled_norm
        divisor = window.divisor(denominator) if by_hand is None or denominator is not None else 1.0
        factor = 1.0 / (divisor * scale if by_hand is None else divisor)
        multiplier: torch.Tensor | float = factor
        norm: torch.Tensor | float | None = by_hand
        if self._needs_norm:
            present = clipping.total_norm(gradients) if factor == 1.0 else clipping.total_norm(gradients) * factor
            norm = present if by_hand is None else by_hand
            if self._clip_norm is not None:
                multiplier = clipping.clip_coefficient(present, self._clip_norm, factor)
            if self._scale.dynamic:
                norm = verdict.read_norm(norm, self._overflow)
                if not math.isfinite(norm):
                    return self._skip(gradients, norm, window)
        if isinstance(multiplier, torch.Tensor) or multiplier != 1.0:
            torch._foreach_mul_(gradients, multiplier)
        self._turn = True
        try:
            for optimizer in self._optimizers:
                optimizer.step()
        finally:
            self._turn = False
        for scheduler in self._schedulers:
            scheduler.step()
        if self._guard is not None:
            self._guard.close_window()
        self._scale.update(overflowed=False)
        return StepResult(True, "", norm, scale, False if isinstance(norm, float) else None)

    def _skip(self, gradients: list[torch.Tensor], norm: float, window: Window) -> StepResult:
        told = self._overflow is not None or window.unscaled_norm is not None
        reason = verdict.skip_reason(window.losses, gradients, told=told)
        if self._guard is not None:
            self._guard.restore()
        scale = self._scale.value
        self._scale.update(overflowed=True)
        return StepResult(False, reason, norm, scale, True)
