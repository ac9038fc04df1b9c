"""The tensors whose gradients a step uses: looked up anew whenever the optimizers hold others, and checked before they are used."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpbackend.errors import SessionError
from mpbackend.train.clipping import unique_parameters
from mpbackend.train.deferral import shared
from mpbackend.train.gradients import Gradients

if TYPE_CHECKING:
    from mpbackend.train.weights import WorkingWeights


class Sources:
    """The parameters that the optimizers hold now, or what stands for them.

    Args:
        optimizers: the optimizers; groups may be added, removed and replaced between two steps.
        weights: what stands between the parameters and the optimizers, or None.
        block: elements that an optimizer updates at once; 0 for all of them.
        sharded: whether there are sharded ones among them.
        scaled: whether gradients are multiplied with a loss scale.

    Attributes:
        apart: whether each is held by one optimizer only.
        large: whether they are updated in blocks.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], weights: WorkingWeights | None, *, block: int, sharded: bool, scaled: bool) -> None:
        self._optimizers = optimizers
        self._weights = weights
        self._block = block
        self._sharded = sharded
        self._scaled = scaled
        self._held: list[torch.Tensor] = []
        self._ids: list[int] = []
        self._formats: list[torch.dtype] = []
        self._sources: list[torch.Tensor] = []
        self._look_up()

    def tensors(self, *, again: bool = False) -> list[torch.Tensor]:
        """Return the tensors, each once: the same list as long as the optimizers hold the same.

        Args:
            again: whether to look what they hold now; else what they held when it was last looked.
        """
        if not again:
            return self._sources
        ids = [id(tensor) for optimizer in self._optimizers for group in optimizer.param_groups for tensor in group["params"]]
        if ids != self._ids:
            self._look_up()
        return self._sources

    def _look_up(self) -> None:
        self._sources = unique_parameters(self._optimizers) if self._weights is None else self._weights.sources()
        self._held = [
            tensor for optimizer in self._optimizers for group in optimizer.param_groups for tensor in group["params"]
        ]  # keeps ids from being used again
        self._ids = [id(tensor) for tensor in self._held]
        self._formats = [source.dtype for source in self._sources]
        self.apart = not shared(self._optimizers)
        self.large = 0 < self._block < sum(source.numel() for source in self._sources)
        if self._scaled and any(getattr(source, "_backward_hooks", None) for source in self._sources):
            found = "a parameter has a gradient hook of its own, which sees gradients multiplied with the loss scale"
            warnings.warn(f"{found}; divide by session.loss_scale.value there, or work on session.unscale()", stacklevel=6)

    def check_formats(self) -> None:
        """Raise ``SessionError`` when a parameter was cast to another format since the session looked."""
        if [source.dtype for source in self._sources] != self._formats:
            source, wanted = next(pair for pair in zip(self._sources, self._formats, strict=True) if pair[0].dtype != pair[1])
            found = f"a parameter of shape {tuple(source.shape)} was cast from {wanted} to {source.dtype} in a live session"
            raise SessionError("step()", found=found, remedy="leave model.half(), .bfloat16() and .float() out: the recipe says the formats")

    def gradients(self) -> Gradients:
        """Return the gradients that are there; ``SessionError`` as ``check_formats`` raises."""
        self.check_formats()
        return Gradients([gradient for source in self._sources if (gradient := source.grad) is not None], sharded=self._sharded)
