"""A model parameter in 16 bits and the fp32 tensor that an optimizer updates in its place.

The optimizer holds the shadow instead of the parameter, so that its arithmetic and its state are fp32 whatever the optimizer is. What keeps the bits that
rounding the updated weight loses is the recipe's choice:

* ``fp32``: the shadow itself persists; the parameter is its rounding.
* ``kahan``: a compensation term in the parameter's format keeps ``shadow - parameter``, rounded (arXiv 2010.06192, algorithm 1; Kahan, CACM 8(1), 1965).
* ``stochastic``: nothing; the weight is rounded stochastically, right on average.
* ``none``: nothing; the weight is rounded to nearest.

Without an fp32 master the shadow is filled for a step only. In between it has the shape of the parameter and the memory of one number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpbackend.errors import SessionError
from mpbackend.roles import MasterKind

Round = Callable[[list[Tensor], list[Tensor]], None]
"""Rounds fp32 tensors into tensors of 16 bits."""


class Shadow:
    """One parameter and its fp32 tensor.

    Args:
        name: name of the parameter in the model, for messages and checkpoints.
        parameter: the parameter, 16 bits.
        original: its exact fp32 data where that is known; a master starts from it.
        master: what keeps the lost bits.
        sums: whether gradients are summed in fp32 as they arrive.
        rounding: rounds updated shadows into parameters; None for to nearest, ties to even.

    Attributes:
        tensor: what the optimizer holds.
        compensation: the Kahan term, or None.
    """

    __slots__ = ("_empty", "_hook", "_sums", "compensation", "name", "parameter", "persistent", "rounding", "tensor")

    def __init__(self, name: str, parameter: Tensor, original: Tensor | None, master: MasterKind, *, sums: bool, rounding: Round | None) -> None:
        data = parameter.detach()
        self.name = name
        self.parameter = parameter
        self.persistent = master == "fp32"
        self.compensation = torch.zeros_like(data) if master == "kahan" else None
        if self.compensation is not None and original is not None:
            self.compensation.copy_(original - data.float())
        # NaN: whoever reads a shadow between two steps sees that there is nothing; writing to it raises.
        self._empty = torch.full((), torch.nan, device=data.device).expand(data.shape)
        start = (data.float() if original is None else original) if self.persistent else self._empty
        self.tensor = nn.Parameter(start, requires_grad=True)
        self.rounding = rounding
        self._sums = sums
        self._hook: Any = None
        if sums:
            self._listen()

    def _listen(self) -> None:
        """Sum gradients in fp32 as they arrive. The hook stays on a frozen parameter, for the day that it takes gradients."""
        shadow, frozen = self.tensor, not self.parameter.requires_grad

        def collect(parameter: Tensor) -> None:
            add_gradient(parameter, shadow)

        if frozen:  # torch registers the hook only while the parameter takes gradients
            self.parameter.requires_grad_(True)
        self._hook = self.parameter.register_post_accumulate_grad_hook(collect)
        if frozen:
            self.parameter.requires_grad_(False)

    @property
    def source(self) -> Tensor:
        """The tensor whose ``grad`` holds the sum over micro-batches."""
        return self.tensor if self._sums else self.parameter

    def collect(self) -> None:
        """Add a gradient that arrived before the hook was there."""
        if self._sums and self.parameter.grad is not None:
            add_gradient(self.parameter, self.tensor)

    def release(self) -> None:
        """Free what one step needed."""
        if not self.persistent:
            self.tensor.data = self._empty
        if not self._sums:
            self.tensor.grad = None

    def restore(self, kept: Tensor) -> None:
        """Set the master or the compensation term to what a checkpoint holds; the parameter follows a master.

        Raises:
            SessionError: the recipe keeps neither.
        """
        target = self.tensor if self.persistent else self.compensation
        if target is None:
            raise SessionError(f"restoring {self.name}", found="its recipe keeps nothing beside the parameter")
        target.detach().copy_(kept)
        if self.persistent:
            write_back([self])

    def close(self) -> None:
        """Stop summing gradients."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._sums = False


@torch.no_grad()
def fill(shadows: Sequence[Shadow]) -> None:
    """Fill shadows for the optimizer, and their gradients where these are summed in 16 bits; few launches for many parameters."""
    empty = [shadow for shadow in shadows if not shadow.persistent]
    if empty:
        filled = widened([shadow.parameter for shadow in empty])
        terms = [shadow.compensation for shadow in empty if shadow.compensation is not None]
        if terms:
            torch._foreach_add_(filled, terms)
        for shadow, weights in zip(empty, filled, strict=True):
            shadow.tensor.data = weights
    low = [shadow for shadow in shadows if shadow.source is shadow.parameter and shadow.parameter.grad is not None]
    if low:
        for shadow, gradient in zip(low, widened([shadow.parameter.grad for shadow in low if shadow.parameter.grad is not None]), strict=True):
            shadow.tensor.grad = gradient


@torch.no_grad()
def write_back(shadows: Sequence[Shadow]) -> None:
    """Round updated shadows into their parameters and keep what the recipe keeps."""
    if not shadows:
        return
    parameters = [shadow.parameter for shadow in shadows]
    updated: list[Tensor] = [shadow.tensor for shadow in shadows]
    rounding = shadows[0].rounding
    if rounding is None:
        torch._foreach_copy_(parameters, updated)
    else:
        rounding(updated, parameters)
    terms = [shadow.compensation for shadow in shadows if shadow.compensation is not None]
    if terms:
        lost = widened(parameters)
        torch._foreach_sub_(lost, updated)
        torch._foreach_neg_(lost)
        torch._foreach_copy_(terms, lost)


def widened(tensors: list[Tensor]) -> list[Tensor]:
    """Return fp32 copies."""
    copies = [torch.empty_like(tensor, dtype=torch.float32, requires_grad=False) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def add_gradient(parameter: Tensor, shadow: Tensor) -> None:
    """Move the gradient of a 16-bit parameter into the fp32 sum of its shadow."""
    gradient = parameter.grad
    if gradient is not None:
        parameter.grad = None
        shadow.grad = gradient.detach().float() if shadow.grad is None else shadow.grad.add_(gradient.detach())
