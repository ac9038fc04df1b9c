"""The gradients of one step, whole or sharded: their norm, and one multiplication of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from mpbackend.errors import SessionError
from mpbackend.train import clipping
from mpbackend.train.sharded import local as local_parts
from mpbackend.train.sharded import sharded_norm

SourceOf = Callable[[torch.Tensor], torch.Tensor]
"""Parameter of an optimizer to the tensor whose gradient it gets."""


class Gradients:
    """The gradients of one step.

    Args:
        gradients: dense tensors; any shapes, one device.
        sharded: whether there are sharded ones among them.

    Attributes:
        tensors: what this rank holds of them, sharing their memory.
        device: where they are.
    """

    __slots__ = ("_sharded", "_whole", "device", "tensors")

    def __init__(self, gradients: list[torch.Tensor], *, sharded: bool = False) -> None:
        self._whole = gradients
        self._sharded = sharded
        self.tensors = local(self._whole) if sharded else self._whole
        self.device = gradients[0].device if gradients else torch.device("cpu")

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._whole)

    def release(self) -> None:
        """Hold them no longer, so that dropping a gradient frees it."""
        self._whole, self.tensors = [], []

    def norm(self) -> torch.Tensor:
        """Return the L2 norm over all of them, all ranks included; see ``mpbackend.train.clipping.total_norm``.

        Raises:
            SessionError: one is sparse.
        """
        if any(gradient.layout is not torch.strided for gradient in self._whole):
            raise SessionError("step()", found="a sparse gradient", remedy="use sparse=False: sparse gradients have no norm here")
        return sharded_norm(self._whole) if self._sharded else clipping.total_norm(self._whole)

    def multiply(self, factor: torch.Tensor | float) -> None:
        """Multiply every element in place; 1.0 touches nothing."""
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            torch._foreach_mul_(self.tensors, factor)

    def clip(self, limits: clipping.Limits) -> None:
        """Clip unscaled gradients in place, each element or all of them to one norm; NaN stays."""
        if limits.value is not None:
            torch._foreach_clamp_min_(self.tensors, -limits.value)
            torch._foreach_clamp_max_(self.tensors, limits.value)
        if limits.norm is not None:
            self.multiply(clipping.clip_coefficient(self.norm(), limits.norm, 1.0))


def local(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what this rank holds of each gradient; empty shards are left out."""
    return [part for part in local_parts(gradients) if part.numel()]


def own_limits(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Tell whether a parameter group brings limits of its own; ``SessionError`` when they are no limits."""
    return any(clipping.limits_of(group) is not None for optimizer in optimizers for group in optimizer.param_groups)


def clip_groups(optimizers: Iterable[torch.optim.Optimizer], limits: clipping.Limits, source_of: SourceOf, *, sharded: bool) -> None:
    """Clip unscaled gradients by parameter group: a group with limits of its own by those and its own norm, all others together by ``limits``.

    Args:
        optimizers: their groups may hold ``clip_norm`` or ``clip_value``.
        limits: of the groups that bring none.
        source_of: see ``SourceOf``.
        sharded: whether there are sharded gradients.
    """
    rest: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            held = {id(source): source.grad for source in map(source_of, group["params"]) if source.grad is not None}
            own = clipping.limits_of(group)
            if own is None:
                rest |= held
            elif held:
                Gradients(list(held.values()), sharded=sharded).clip(own)
    if rest:
        Gradients(list(rest.values()), sharded=sharded).clip(limits)
