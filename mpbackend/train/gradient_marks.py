"""Noticing gradients that somebody else made, changed or cleared between the session's own calls.

While the loss is scaled, so are the gradients: whoever clips, adds or logs them then works with numbers that are off by the scale. The marks are version
counters, which torch moves when a tensor is written; comparing them reads nothing from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mpbackend.errors import SessionError

Mark = tuple[int, int] | None
UNSCALED = (0, 0)
"""The mark of a gradient that may be changed."""


class GradientMarks:
    """Marks of the gradients as the session left them.

    Args:
        model: names parameters in messages.
        scaled: whether gradients are multiplied with a loss scale.
        single: whether a step has one micro-batch. Without a scale nothing is marked then: a gradient that is cleared is missing from the step's own result.
    """

    def __init__(self, model: torch.nn.Module, *, scaled: bool, single: bool) -> None:
        self._model = model
        self._scaled = scaled
        self._idle = single and not scaled
        self._marks: list[Mark] | None = None
        self._marked: Sequence[torch.Tensor] = ()

    def forget(self) -> None:
        """Forget the marks: a new step begins, or the gradients were handed over."""
        self._marks = None

    def check_clean(self, sources: Sequence[torch.Tensor]) -> None:
        """Raise ``SessionError`` when a gradient is there before the first backward pass of a step: it would be taken for this step's."""
        for source in sources:
            if source.grad is not None:
                found = f"{self._name(source)} had a gradient before the first backward() of this step: another session or a plain backward() made it"
                remedy = "set requires_grad_(False) on a model that is only trained against, or optimizer.zero_grad() first"
                raise SessionError("backward()", found=found, remedy=remedy)

    def take(self, sources: Sequence[torch.Tensor]) -> None:
        """Mark the gradients as they are."""
        if self._idle:
            return
        self._marked = sources
        if not self._scaled:
            self._marks = [None if source.grad is None else UNSCALED for source in sources]
            return
        self._marks = [None if (gradient := source.grad) is None else (id(gradient), gradient._version) for source in sources]

    def check(self, asked: str, sources: Sequence[torch.Tensor], drop: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Compare gradients with their marks.

        Args:
            asked: what the session was asked to do.
            sources: the tensors whose gradients were marked.
            drop: drops the gradients of the step; called before an error, so that the next step starts clean.

        Raises:
            SessionError: one was cleared since it was marked or, while they are scaled, changed.
        """
        if self._marks is None or sources is not self._marked:
            return
        for source, mark in zip(sources, self._marks, strict=True):
            gradient = source.grad
            if gradient is None and mark is not None:
                found, remedy = "was cleared in the middle of a step", "leave zero_grad() out: step() clears gradients after the step"
            elif gradient is not None and self._scaled and mark != (id(gradient), gradient._version):
                found = "was changed while it was multiplied with the loss scale"
                remedy = "clip with prepare(clip_norm=...), or call session.unscale() before touching gradients"
            else:
                continue
            drop(sources)
            raise SessionError(asked, found=f"the gradient of {self._name(source)} {found}; the step is dropped", remedy=remedy)

    def _name(self, source: torch.Tensor) -> str:
        named = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return f"parameter {named[id(source)]}" if id(source) in named else f"a parameter of shape {tuple(source.shape)}"
