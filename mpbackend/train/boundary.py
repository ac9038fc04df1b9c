"""The boundary of a step: one sweep over the gradients, one verdict, and the optimizers in the only order that is right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpbackend.errors import SessionError
from mpbackend.train import clipping, verdict
from mpbackend.train.blocks import scale_all, step_in_blocks, takes_blocks
from mpbackend.train.deferral import Deferral
from mpbackend.train.device_scale import DeviceScale
from mpbackend.train.gradients import Gradients, clip_groups, own_limits
from mpbackend.train.sources import Sources
from mpbackend.train.step import FORWARD_NONFINITE, NO_GRADIENTS, SKIP_REASONS, StepResult, Verdict

if TYPE_CHECKING:
    from mpbackend.backend import OverflowFlag
    from mpbackend.train.buffers import BufferGuard
    from mpbackend.train.distributed import Ranks
    from mpbackend.train.loss_scale import LossScale
    from mpbackend.train.schedule import Schedule
    from mpbackend.train.weights import WorkingWeights
    from mpbackend.train.window import Window

ONE = 1.0
"""The multiplier that leaves gradients alone."""


class Boundary:
    """Steps the optimizers, or skips the step and says why.

    The parameters are those that the optimizers hold at that moment, so a group that is added between two steps is unscaled, clipped and cleared like the
    others.

    Args:
        optimizers: one verdict for all of them.
        schedule: the schedulers, stepped after a taken step.
        loss_scale: the state of loss scaling.
        limits: how gradients are clipped.
        needs_norm: whether the norm is wanted although nothing is clipped or scaled.
        overflow: the device's overflow register, or None.
        guard: restores buffers on a skip, or None.
        weights: what stands between the parameters and the optimizers, or None.
        ranks: the ranks of the run, or None for one process.
        block: elements that an optimizer updates at once, see ``mpbackend.train.blocks``; 0 for all of them.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        loss_scale: LossScale | DeviceScale,
        *,
        limits: clipping.Limits,
        needs_norm: bool,
        overflow: OverflowFlag | None,
        guard: BufferGuard | None,
        weights: WorkingWeights | None = None,
        ranks: Ranks | None = None,
        block: int = 0,
    ) -> None:
        self._optimizers = optimizers
        self._schedule = schedule
        self._scale = loss_scale
        self._limits = limits
        self._needs_norm = needs_norm or limits.norm is not None or loss_scale.dynamic
        self._overflow = overflow
        self._guard = guard
        self._weights = weights
        self._ranks = ranks
        self._sharded = ranks is not None and ranks.sharded
        self._deferral = Deferral(optimizers, allowed=limits.value is None and weights is None and not self._sharded)
        self._sources = Sources(optimizers, weights, block=block, sharded=self._sharded, scaled=loss_scale.settings.mode != "none")
        self.sources = self._sources.tensors
        self._block = block
        self._turn = False
        self._plain = not self._needs_norm and loss_scale.settings.mode == "none" and limits.value is None and weights is None and ranks is None
        self.applied = 0
        self.unfed = set(range(len(optimizers)))

    def check_turn(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Refuse a step that the session did not make: the gradients may be scaled, and nothing was checked."""
        if not self._turn:
            name = type(optimizer).__name__
            raise SessionError(f"{name}.step()", found="the optimizer belongs to a live session", remedy="call session.step() instead")

    def check_fed(self) -> None:
        """Raise ``SessionError`` when steps were made and an optimizer never had a parameter with a gradient: it trained nothing."""
        if self.applied and self.unfed:
            names = ", ".join(f"optimizer {number} ({type(self._optimizers[number]).__name__})" for number in sorted(self.unfed))
            raise SessionError("training", found=f"no parameter of {names} ever got a gradient", remedy="build it from the model that the loss uses")

    def unscale(self, window: Window) -> list[torch.Tensor]:
        """Unscale the gradients and keep their norm, from which the verdict is taken later; returns the parameters."""
        sources = self.sources()
        if self._ranks is not None:
            self._ranks.settle(sources)
        gradients = self._sources.gradients()
        if gradients and window.unscaled_norm is None:
            window.unscaled_by = float(window.seen + 1 if window.average else 1)
            factor = 1.0 / (self._present_scale() * window.unscaled_by)
            window.unscaled_norm = gradients.norm() * factor
            gradients.multiply(factor)
        return sources

    def _present_scale(self) -> float | torch.Tensor:
        return self._scale.tensor if isinstance(self._scale, DeviceScale) else self._scale.value

    def apply(self, sources: list[torch.Tensor], window: Window, denominator: float | None, *, free: bool = True) -> StepResult:
        """Unscale, clip and step, or skip.

        Args:
            sources: as ``sources()`` returns them.
            window: the step in the making.
            denominator: what to divide the summed gradients by, or None.
            free: whether gradients may be dropped as soon as they were used.
        """
        self.applied += 1
        if self._plain and denominator is None and not window.average and not own_limits(self._optimizers):
            return self._step(sources, free=free)
        if self._ranks is not None:
            self._ranks.settle(sources)
        gradients = self._sources.gradients()
        if not gradients:
            return self._without_gradients(sources)
        by_hand = window.unscaled_norm
        divisor = 1.0
        if denominator is not None or (window.average and by_hand is None):
            divisor = self._divisor(window, denominator) / window.unscaled_by
        sweep = Sweep(1.0 / (divisor * self._present_scale() if by_hand is None else divisor))
        if self._needs_norm:
            present = gradients.norm() if sweep.idle else gradients.norm() * sweep.factor
            sweep.norm = present if by_hand is None else by_hand * sweep.factor
            if self._limits.norm is not None:
                sweep.multiplier = clipping.clip_coefficient(present, self._limits.norm, sweep.factor)
        if not self._scale.dynamic or sweep.norm is None:
            return self._take(gradients, sweep, sweep.norm, free=free)
        register = verdict.register_of(self._overflow, self._ranks)
        if isinstance(self._scale, DeviceScale) and not own_limits(self._optimizers) and self._deferral.possible():
            return self._defer(self._scale, verdict.found_overflow(sweep.norm, register), gradients, sweep, window)
        norm = verdict.read_norm(sweep.norm, register)
        return self._take(gradients, sweep, norm, free=free) if math.isfinite(norm) else self._skip(gradients, norm, window)

    def _step(self, sources: list[torch.Tensor], *, free: bool) -> StepResult:
        """Step where nothing is scaled, divided, clipped or judged: what ``apply`` would do, by the shortest way."""
        self._sources.check_formats()
        idle = self._idle() if self.unfed or len(self._optimizers) > 1 else ()
        for source in sources:
            if source.grad is not None:
                self._launch(ONE, free=free)
                return StepResult(True, "", None, 1.0, None, idle)
        return self._without_gradients(sources)

    def _without_gradients(self, sources: list[torch.Tensor]) -> StepResult:
        return StepResult(False, f"{NO_GRADIENTS}: 0 of {len(sources)} parameters have gradients", None, self._present_scale(), None, self._idle())

    def check_divisor(self, window: Window, denominator: float | None) -> None:
        """Raise ``SessionError`` for a denominator that does not divide; of several ranks, all find out together at the boundary."""
        if self._ranks is None and denominator is not None:
            window.divisor(denominator)

    def _divisor(self, window: Window, denominator: float | None) -> float:
        if self._ranks is None or denominator is None:
            return window.divisor(denominator)
        return self._ranks.total(denominator) / self._ranks.factor()

    def _take(self, gradients: Gradients, sweep: Sweep, norm: torch.Tensor | float | None, *, free: bool) -> StepResult:
        scale = self._present_scale()
        multiplier: torch.Tensor | float = ONE
        if self._limits.value is not None or own_limits(self._optimizers):
            gradients.multiply(sweep.factor)
            clip_groups(self._optimizers, self._limits, self._source, sharded=self._sharded)
        elif self._deferral.folds and not sweep.idle_multiplier and self._deferral.unwatched():
            self._deferral.fold(sweep.multiplier, None, gradients.device)
        elif self._sources.apart or self._weights is not None:
            multiplier = ONE if sweep.idle_multiplier else sweep.multiplier
        else:
            gradients.multiply(sweep.multiplier)
        idle = self._idle()
        gradients.release()
        self._launch(multiplier, free=free)
        if self._guard is not None:
            self._guard.close_window()
        if self._scale.dynamic:
            self._update(gradients, overflowed=False, helpless=False)
        return StepResult(True, "", norm, scale, False if isinstance(norm, float) else None, idle)

    def _source(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter if self._weights is None else self._weights.source(parameter)

    def _launch(self, multiplier: torch.Tensor | float, *, free: bool) -> None:
        """Step the optimizers, each of which multiplies its gradients first where that saves a pass over memory."""
        self._turn = True
        done = 0
        try:
            for optimizer in self._optimizers:
                if self._weights is not None:
                    self._weights.step(optimizer, multiplier)
                elif self._sources.large and takes_blocks(optimizer):
                    step_in_blocks(optimizer, self._block, multiplier, free=free and self._sources.apart)
                else:
                    if multiplier is not ONE:
                        scale_all(optimizer, multiplier)
                    optimizer.step()
                done += 1
        except BaseException as error:
            if done:
                error.add_note(f"mpbackend: {done} of {len(self._optimizers)} optimizers had made this step already; load a checkpoint to go on")
            raise
        finally:
            self._turn = False
            if self._deferral.folded:
                self._deferral.unfold()

    def _defer(self, scale: DeviceScale, found: torch.Tensor, gradients: Gradients, sweep: Sweep, window: Window) -> StepResult:
        """Launch fused optimizers that look at the verdict themselves."""
        self._deferral.fold(sweep.multiplier, found, gradients.device)
        idle = self._idle()
        self._launch(ONE, free=False)
        if self._guard is not None:
            self._guard.restore_where(found)
        finite, losses = torch.isfinite(torch.stack([loss.float().reshape(()) for loss in window.losses])).all(), window.losses
        if self._ranks is not None:  # a loss is this rank's own: all ranks give one reason, and keep one loss scale
            finite = ~self._ranks.agree_found(~finite)
            losses = [torch.where(finite, 0.0, float("nan"))]
        told = Verdict(found, scale.tensor, losses, helpable=window.penalized)
        scale.update(found, torch.zeros_like(found) if window.penalized else ~finite)
        self._schedule.defer(found, scale.streak_tensor)
        return StepResult(told, grad_norm=sweep.norm, idle=idle)

    def _skip(self, gradients: Gradients, norm: float, window: Window) -> StepResult:
        told = self._overflow is not None or window.unscaled_norm is not None
        reason = verdict.skip_reason(window.losses, gradients.tensors, told=told, helpable=window.penalized)
        if self._ranks is not None:
            reason = self._ranks.first_of(SKIP_REASONS, reason)
        if self._guard is not None:
            self._guard.restore()
        scale = self._present_scale()
        self._update(gradients, overflowed=True, helpless=reason == FORWARD_NONFINITE)
        return StepResult(False, reason, norm, scale, True, self._idle())

    def _update(self, gradients: Gradients, *, overflowed: bool, helpless: bool) -> None:
        if isinstance(self._scale, DeviceScale):
            self._scale.update(torch.tensor(overflowed, device=gradients.device), torch.tensor(helpless, device=gradients.device))
        else:
            self._scale.update(overflowed=overflowed, helpless=helpless)

    def _idle(self) -> tuple[str, ...]:
        """Return a line for each optimizer without a gradient, and remember which ones ever had one."""
        if not self.unfed and len(self._optimizers) == 1:
            return ()
        lines = []
        for number, optimizer in enumerate(self._optimizers):
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if any(self._source(parameter).grad is not None for parameter in held):
                self.unfed.discard(number)
            else:
                lines.append(f"optimizer {number} ({type(optimizer).__name__}): 0 of {len(held)} parameters have gradients")
        return tuple(lines)


class Sweep:
    """What one sweep does to the gradients.

    Args:
        factor: inverse of loss scale and divisor; a scalar tensor where the scale lives on the device.

    Attributes:
        multiplier: the factor, times the clipping coefficient where one norm is clipped.
        norm: norm of the unscaled gradients, or None.
    """

    __slots__ = ("factor", "multiplier", "norm")

    def __init__(self, factor: float | torch.Tensor) -> None:
        self.factor = factor
        self.multiplier = factor
        self.norm: torch.Tensor | None = None

    @property
    def idle(self) -> bool:
        """Whether the factor is 1."""
        return isinstance(self.factor, float) and self.factor == 1.0

    @property
    def idle_multiplier(self) -> bool:
        """Whether the multiplier is 1."""
        return isinstance(self.multiplier, float) and self.multiplier == 1.0
