"""When skipping steps has become hopeless: an error that names where the first non-finite value came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpbackend.errors import SessionError
from mpbackend.train.diagnosis import Diagnosis
from mpbackend.train.loss_scale import LossScale

if TYPE_CHECKING:
    from mpbackend.train.device_scale import DeviceScale
    from mpbackend.train.schedule import Schedule
    from mpbackend.train.step import StepResult


class Patience:
    """Counts skipped steps in a row, and has the last of them watched.

    Args:
        model: the model, for names.
        limit: skipped steps in a row that are an error.

    Attributes:
        diagnosis: watches the step that is being made; None while there is no reason to.
    """

    def __init__(self, model: torch.nn.Module, limit: int) -> None:
        self._model = model
        self._limit = limit
        self.diagnosis: Diagnosis | None = None

    def check(self, scale: LossScale | DeviceScale, schedule: Schedule, result: StepResult) -> None:
        """Look at the streak after a step. Where the state lives on the device, only what has come to the host, and once the end is near, all of it.

        Raises:
            SessionError: the streak has reached the limit.
        """
        watched = self.diagnosis
        streak = scale.streak if isinstance(scale, LossScale) or watched is not None else schedule.streak
        schedule.streak = streak
        if streak >= self._limit and (watched is not None or self._limit == 1):
            self.diagnosis = None
            where = (watched.finding if watched is not None else "") or "not found: the step that was watched looked healthy"
            found = f"{streak} steps in a row were skipped, the last for {result.reason}, at loss scale {result.loss_scale:g}; first non-finite value: {where}"
            raise SessionError("step()", found=found, remedy="mend the model or the data there; loss_scale.patience=N waits for N steps")
        self.diagnosis = Diagnosis(self._model) if streak >= max(self._limit - 1, 1) else None
