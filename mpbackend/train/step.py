"""What one call of ``Session.step`` did, and the verdict on it, which may still be on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

FORWARD_NONFINITE = "forward_nonfinite"
GRADIENT_OVERFLOW = "gradient_overflow"
NORM_OVERFLOW = "norm_overflow"
NO_GRADIENTS = "no gradients"
SKIP_REASONS = (FORWARD_NONFINITE, GRADIENT_OVERFLOW, NORM_OVERFLOW)
"""Why a step is skipped, what is hardest to cure first."""


class Verdict:
    """Whether a step was skipped, decided on the device and read when somebody asks.

    Args:
        found: scalar tensor; not 0 when the step was skipped.
        scale: scalar tensor; the loss scale that the step used.
        losses: the unscaled losses of the step.
        helpable: whether a smaller scale may cure a loss that is not finite: it holds a gradient that was taken under the scale.
    """

    def __init__(self, found: torch.Tensor, scale: torch.Tensor, losses: Sequence[torch.Tensor], *, helpable: bool = False) -> None:
        self._tensors = [found, scale, *losses]
        self._helpable = helpable
        self._read: tuple[bool, float, str] | None = None

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors to read the verdict from, for readers that read several at once; empty when it was read."""
        return self._tensors

    def settle(self, values: Sequence[float]) -> None:
        """Take the values of ``tensors``, read together with others."""
        found, scale, *losses = values
        cause = GRADIENT_OVERFLOW if self._helpable or all(map(math.isfinite, losses)) else FORWARD_NONFINITE
        self._read = (not found, scale, cause if found else "")
        self._tensors = []

    def read(self) -> tuple[bool, float, str]:
        """Return whether the optimizer stepped, the loss scale, and the reason why not; reads the device the first time."""
        if self._read is None:
            self.settle(read_scalars(self._tensors))
        if self._read is None:
            raise AssertionError("a settled verdict has values")
        return self._read


class StepResult:
    """The outcome of one call.

    Under dynamic loss scaling with fused optimizers the device decides, and ``stepped``, ``reason``, ``loss_scale`` and ``nonfinite`` read it when they are
    first asked for; under everything else they are known on the host.

    Args:
        stepped: whether the optimizer stepped, or the verdict that knows.
        reason: as the attribute; ignored beside a verdict.
        grad_norm: as the attribute.
        loss_scale: as the attribute; ignored beside a verdict.
        nonfinite: as the attribute; ignored beside a verdict.
        idle: as the attribute.

    Attributes:
        stepped: whether the optimizer stepped; a plain bool.
        reason: why it did not: ``accumulating 1/4``, ``forward_nonfinite`` (the loss itself; the scale backs off, but no scale helps), ``gradient_overflow``,
            ``norm_overflow`` (every gradient is finite, the norm is not; a deferred verdict calls that ``gradient_overflow`` too) or ``no gradients``; empty
            when it stepped.
        grad_norm: L2 norm of the unscaled gradients before clipping: a number when the session had to read it, else a scalar tensor on the device, None when
            nothing needed it.
        loss_scale: the scale that this step used.
        nonfinite: whether inf or NaN was found; None when the host does not know.
        idle: one line for each optimizer none of whose parameters had a gradient.
    """

    __slots__ = ("_loss_scale", "_nonfinite", "_reason", "_stepped", "grad_norm", "idle", "verdict")

    def __init__(
        self,
        stepped: bool | Verdict,
        reason: str = "",
        grad_norm: float | torch.Tensor | None = None,
        loss_scale: float | torch.Tensor = 1.0,
        nonfinite: bool | None = None,
        idle: tuple[str, ...] = (),
    ) -> None:
        self.verdict = stepped if isinstance(stepped, Verdict) else None
        self._stepped = stepped is True
        self._reason = reason
        self.grad_norm = grad_norm
        self._loss_scale = loss_scale
        self._nonfinite = nonfinite
        self.idle = idle

    @property
    def stepped(self) -> bool:
        """Whether the optimizer stepped."""
        return self._stepped if self.verdict is None else self.verdict.read()[0]

    @property
    def loss_scale(self) -> float:
        """The scale that this step used."""
        return float(self._loss_scale) if self.verdict is None else self.verdict.read()[1]

    @property
    def reason(self) -> str:
        """Why it did not step; empty when it did."""
        return self._reason if self.verdict is None else self.verdict.read()[2]

    @property
    def nonfinite(self) -> bool | None:
        """Whether inf or NaN was found; None when the host does not know."""
        return self._nonfinite if self.verdict is None else not self.stepped

    def __bool__(self) -> bool:
        """Whether the optimizer stepped."""
        return self.stepped

    def __repr__(self) -> str:
        """Show what is known without reading the device."""
        if (self.verdict is not None and self.verdict.tensors) or isinstance(self._loss_scale, torch.Tensor):
            return "StepResult(the device decides; ask for .stepped)"
        return f"StepResult(stepped={self.stepped}, reason={self.reason!r}, loss_scale={self.loss_scale:g}, nonfinite={self.nonfinite}, idle={self.idle})"


def stack_scalars(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return scalar tensors of one device as one vector, in fp64 when one of them is, else in fp32; at least one."""
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    return torch.stack([tensor.detach().to(dtype).reshape(()) for tensor in tensors])


def read_scalars(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Read scalar tensors of one device with one transfer, which waits for it."""
    values: list[float] = stack_scalars(tensors).tolist() if tensors else []
    return values
