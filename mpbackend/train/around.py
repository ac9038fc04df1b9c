"""What a session enters around a forward and a backward pass: the backend's execution context, and observation on sampled steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from mpbackend.backend import Backend
    from mpbackend.planning import Plan
    from mpbackend.train.recording import Recording


class Around:
    """Makes the contexts of one session; None where there is nothing to enter, so that the hot path enters nothing.

    Args:
        backend: the backend.
        plan: the plan that it executes.
        recording: observes sampled steps, or None.
    """

    def __init__(self, backend: Backend, plan: Plan, recording: Recording | None) -> None:
        self._backend = backend
        self._plan = plan
        self._recording = recording
        self._executes = not isinstance(backend.execute(plan), nullcontext)

    def make(self, phase: Literal["forward", "backward"]) -> AbstractContextManager[object] | None:
        """Return what to enter around a pass: the execution context, and inside it the observer when this step is observed."""
        recording = self._recording if self._recording is not None and self._recording.observing else None
        if torch.is_inference_mode_enabled():  # there composite operators reach a dispatch mode whole, below autocast: observing would change the arithmetic
            recording = None
        if recording is None:
            return self._backend.execute(self._plan) if self._executes else None
        stack = ExitStack()
        if self._executes:
            stack.enter_context(self._backend.execute(self._plan))
        recording.enter(phase, stack)
        return stack
