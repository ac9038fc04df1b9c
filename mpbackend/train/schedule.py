"""The schedulers of a session: stepped after every taken step, and by nobody else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpbackend.errors import SessionError
from mpbackend.train.host_copy import HostCopy

Scheduler = torch.optim.lr_scheduler.LRScheduler

CHECKED_EVERY = 128
"""Steps between looks at a verdict that stays on the device and that no scheduler waits for."""


class Schedule:
    """Steps schedulers once for each taken step, as soon as the host knows that it was taken.

    Args:
        schedulers: the schedulers.

    Attributes:
        streak: skipped steps in a row, as far as the host has heard from the device.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = tuple(schedulers)
        self.streak = 0
        self._counts = list(map(progress, self.schedulers))
        self._coming: HostCopy | None = None
        self._deferred = 0

    def step(self) -> None:
        """Step every scheduler for a step that was taken.

        Raises:
            SessionError: somebody else stepped one.
        """
        if not self.schedulers:
            return
        self.check()
        try:
            for scheduler in self.schedulers:
                scheduler.step()
        finally:
            self.adopt()

    def check(self) -> None:
        """Raise ``SessionError`` when somebody else stepped a scheduler: the learning rate would run ahead."""
        for scheduler, count in zip(self.schedulers, self._counts, strict=True):
            if progress(scheduler) != count:
                found = "it was stepped outside the session, which steps it after every taken step"
                raise SessionError(f"{type(scheduler).__name__}.step()", found=found, remedy="leave the call out, or do not give the scheduler to prepare()")

    def adopt(self) -> None:
        """Take the present counts for the session's own: after a step, and after loading."""
        self._counts = list(map(progress, self.schedulers))

    def defer(self, found: torch.Tensor, streak: torch.Tensor) -> None:
        """Remember a verdict that is on the device: it is on its way when a scheduler needs it before the next launch, else looked at now and then.

        Args:
            found: scalar bool tensor; whether the step was skipped.
            streak: scalar tensor; skipped steps in a row.
        """
        self._deferred += 1
        if self.schedulers or self._deferred % CHECKED_EVERY == 0:
            self._coming = HostCopy([found, streak])

    def settle(self) -> None:
        """Take the verdict that is on its way, before the next launch: nothing that was queued since is waited for."""
        if self._coming is None:
            return
        found, streak = self._coming.read()
        self._coming = None
        self.streak = int(streak)
        if not found:
            self.step()


def progress(scheduler: Scheduler) -> tuple[object, ...]:
    """Return how far a scheduler is, those that it is made of included."""
    inner = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "_step_count", None), getattr(scheduler, "last_epoch", None), *map(progress, inner)
