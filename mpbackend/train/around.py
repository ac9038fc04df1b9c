"""What a session enters around a forward and a backward pass: the backend's execution context, and observation on sampled steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from mpbackend.backend import Backend
    from mpbackend.planning import Plan
    from mpbackend.train.diagnosis import Diagnosis
    from mpbackend.train.distributed import Ranks
    from mpbackend.train.recording import Recording
    from mpbackend.train.window import Window


class Around:
    """Makes the contexts of one session; None where there is nothing to enter, so that the hot path enters nothing.

    Args:
        backend: the backend.
        plan: the plan that it executes.
        recording: observes sampled steps, or None.
        ranks: the ranks of the run, or None for one process.
    """

    def __init__(self, backend: Backend, plan: Plan, recording: Recording | None, ranks: Ranks | None = None) -> None:
        self._backend = backend
        self._plan = plan
        self._recording = recording
        self._ranks = ranks
        self._plain = ranks is None and isinstance(backend.execute(plan), nullcontext)
        self._executes = not isinstance(backend.execute(plan), nullcontext)

    def make(
        self, phase: Literal["forward", "backward"], diagnosis: Diagnosis | None = None, window: Window | None = None
    ) -> AbstractContextManager[object] | None:
        """Return what to enter around a pass: the execution context, and inside it what observes or watches this step.

        Args:
            phase: which pass.
            diagnosis: watches the pass, or None.
            window: the step that a forward pass belongs to: of several ranks, only the last micro-batch reduces its gradients.
        """
        if self._plain and diagnosis is None and (self._recording is None or not self._recording.observing):
            return None
        recording = self._recording if self._recording is not None and self._recording.observing else None
        if torch.is_inference_mode_enabled():  # there composite operators reach a dispatch mode whole, below autocast: observing would change the arithmetic
            recording = None
        ranks = self._ranks if window is not None and torch.is_grad_enabled() else None
        if recording is None and diagnosis is None and ranks is None:
            return self._backend.execute(self._plan) if self._executes else None
        stack = ExitStack()
        if self._executes:
            stack.enter_context(self._backend.execute(self._plan))
        if ranks is not None and window is not None and (held := ranks.no_sync(window.last)) is not None:
            stack.enter_context(held)
        if recording is not None:
            recording.enter(phase, stack)
        if diagnosis is not None:
            stack.enter_context(diagnosis.watch(phase))
        return stack
