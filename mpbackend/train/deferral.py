"""Fused optimizers that unscale, clip and judge by themselves: one pass over the gradients less, and no verdict for the host to wait for.

torch's fused optimizers read two attributes when they step: ``grad_scale``, which they divide gradients by, and ``found_inf``, which leaves everything as it
is when it is 1 (torch.optim.Adam, AdamW, SGD and Adagrad; ``torch.amp.GradScaler`` uses the same).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpbackend.roles import LossScaling
from mpbackend.train.device_scale import DeviceScale
from mpbackend.train.loss_scale import LossScale
from mpbackend.train.step_hooks import is_watched


class Deferral:
    """What fused optimizers can take over.

    Args:
        optimizers: all of them must be fused, and no parameter may stand in two: the first would unscale it for the second.
        allowed: whether the session has nothing to do between unscaling and the optimizer.

    Attributes:
        folds: whether the optimizers can unscale and clip.
        folded: whether they have been told to.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], *, allowed: bool) -> None:
        self._optimizers = optimizers
        self.folds = allowed and folding(optimizers)
        self.folded = False
        self._blank = [optimizer for optimizer in optimizers if starts_blank(optimizer)]

    def possible(self) -> bool:
        """Whether the optimizers can judge this step.

        Not while somebody's step hooks would take a skipped step for a taken one, and not while a momentum is missing: torch makes it without values in the
        optimizer's first step and, told to skip, leaves it so.
        """
        return self.folds and self.unwatched() and all(has_momenta(optimizer) for optimizer in self._blank)

    def unwatched(self) -> bool:
        """Tell whether nobody else has step hooks: those are to see unscaled gradients, and a step only where one is taken."""
        return not any(is_watched(optimizer) for optimizer in self._optimizers)

    def fold(self, multiplier: torch.Tensor | float, found: torch.Tensor | None, device: torch.device) -> None:
        """Tell the optimizers what to multiply gradients with, and whether to skip.

        Args:
            multiplier: inverse of what they divide by. A power of two is inverted without rounding; any other gets one rounding of fp32.
            found: scalar bool tensor; None takes the step.
            device: where the gradients are.
        """
        self.folded = True
        scale = multiplier.reciprocal().float() if isinstance(multiplier, torch.Tensor) else torch.tensor(1.0 / multiplier, device=device)
        for optimizer in self._optimizers:
            optimizer.grad_scale = scale  # type: ignore[attr-defined] # torch reads it with getattr
            if found is not None:
                optimizer.found_inf = found.float()  # type: ignore[attr-defined] # as above

    def unfold(self) -> None:
        """Take back what ``fold`` said."""
        self.folded = False
        for optimizer in self._optimizers:
            for name in ("grad_scale", "found_inf"):
                if hasattr(optimizer, name):
                    delattr(optimizer, name)


def folding(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Tell whether every optimizer takes a scale and a verdict, and no parameter stands in two."""
    return all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers) and not shared(optimizers)


def shared(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Tell whether a parameter stands in two optimizers, or twice in one."""
    held = [id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]
    return len(set(held)) != len(held)


def choose_scale(settings: LossScaling, optimizers: Sequence[torch.optim.Optimizer], *, on_device: bool) -> LossScale | DeviceScale:
    """Return the state of loss scaling: on the device where that is possible and every optimizer can judge a step by itself, else on the host."""
    scale = LossScale(settings)
    if not on_device or not scale.dynamic or not folding(optimizers):
        return scale
    return DeviceScale(scale, optimizers[0].param_groups[0]["params"][0].device)


def starts_blank(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the optimizer makes a momentum from the first gradient that it sees."""
    return isinstance(optimizer, torch.optim.SGD) and any(group["momentum"] for group in optimizer.param_groups)


def has_momenta(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether every parameter that has a gradient has its momentum."""
    return all(
        parameter.grad is None or (parameter in optimizer.state and optimizer.state[parameter].get("momentum_buffer") is not None)
        for group in optimizer.param_groups
        if group["momentum"]
        for parameter in group["params"]
    )
