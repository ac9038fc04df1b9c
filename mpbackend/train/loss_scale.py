"""Loss scaling: one state machine for every device.

The scale is a power of two and so is its inverse: multiplying by either rounds nothing except at the ends of a format's range. The session reads one verdict
a step, so the scale is a plain number on the host; no vendor's scaler object is used.
"""

from __future__ import annotations

from typing import Any

from mpbackend.errors import DocumentError
from mpbackend.roles import LossScaling, power_of_two


class LossScale:
    """The scale of the loss, and when it changes.

    Dynamic scaling after Micikevicius et al., Mixed Precision Training (2018), section 3.2: halve on overflow and skip the step, double after a run of
    steps without one.

    Args:
        settings: the recipe's loss scaling.

    Attributes:
        value: the present scale, a power of two within ``settings.min`` and ``settings.max``; 1.0 when the mode is ``none``.
        growth_steps: steps since the last change or overflow.
        overflows: overflows counted towards the hysteresis.
    """

    def __init__(self, settings: LossScaling) -> None:
        self.settings = settings
        self.value = 1.0 if settings.mode == "none" else settings.init
        self.growth_steps = 0
        self.overflows = 0

    @property
    def dynamic(self) -> bool:
        """Whether overflow changes the scale."""
        return self.settings.mode == "dynamic"

    def update(self, *, overflowed: bool) -> None:
        """Take the verdict of one step; does nothing unless the mode is dynamic."""
        if not self.dynamic:
            return
        settings = self.settings
        if overflowed:
            self.growth_steps = 0
            self.overflows += 1
            if self.overflows >= settings.hysteresis:
                self.value = max(self.value * settings.backoff, settings.min)
                self.overflows = 0
            return
        self.growth_steps += 1
        if self.growth_steps >= settings.interval:
            self.value = min(self.value * settings.growth, settings.max)
            self.growth_steps = 0
            self.overflows = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain numbers, the same on every vendor."""
        return {"mode": self.settings.mode, "value": self.value, "growth_steps": self.growth_steps, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state.

        Raises:
            DocumentError: a value is missing, of another mode, or not a power of two within the bounds.
        """
        try:
            mode, value, growth_steps, overflows = (state[name] for name in ("mode", "value", "growth_steps", "overflows"))
        except KeyError as error:
            raise DocumentError("loss scale state", found=f"{error} is missing") from error
        if mode != self.settings.mode:
            raise DocumentError("loss scale state", found=f"mode {mode!r}, the session's is {self.settings.mode!r}", remedy="load it with the same recipe")
        if mode != "none":
            bounds = f"{self.settings.min!r}..{self.settings.max!r}"
            if not isinstance(value, float) or not self.settings.min <= value <= self.settings.max:
                raise DocumentError("loss scale state", found=f"value {value!r} is not within {bounds}", remedy="load it with the same recipe")
            if not power_of_two(value):
                raise DocumentError("loss scale state", found=f"value {value!r} is not a power of two")
        self.value, self.growth_steps, self.overflows = float(value), int(growth_steps), int(overflows)
