"""Loss scaling: one state machine for every device.

The scale is a power of two and so is its inverse: multiplying by either rounds nothing except at the ends of a format's range. The session reads one verdict
a step, so the scale is a plain number on the host; where the verdict stays on the device, ``mpbackend.train.device_scale`` runs the same machine there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpbackend.errors import DocumentError
from mpbackend.roles import LossScaling, power_of_two

COUNTS = ("growth_steps", "overflows", "streak", "startup_skips", "skips")
"""Counters of the state; the first two have always been saved."""


class LossScale:
    """The scale of the loss, when it changes, and how often it did not help.

    Dynamic scaling after Micikevicius et al., Mixed Precision Training (2018), section 3.2: halve on overflow and skip the step, double after a run of
    steps without one.

    Args:
        settings: the recipe's loss scaling.

    Attributes:
        value: the present scale, a power of two within ``settings.min`` and ``settings.max``; 1.0 when the mode is ``none``.
        growth_steps: steps since the last change or overflow.
        overflows: overflows counted towards the hysteresis.
        started: whether a step was ever taken. Skips before that are the search for a first scale.
        streak: skipped steps in a row that count against ``settings.patience``: of the search for a first scale only those that a smaller scale cannot cure.
        startup_skips: steps skipped in the search.
        skips: steps skipped since.
    """

    def __init__(self, settings: LossScaling) -> None:
        self.settings = settings
        self.value = 1.0 if settings.mode == "none" else settings.init
        self.growth_steps = 0
        self.overflows = 0
        self.started = False
        self.streak = 0
        self.startup_skips = 0
        self.skips = 0

    @property
    def dynamic(self) -> bool:
        """Whether overflow changes the scale."""
        return self.settings.mode == "dynamic"

    def update(self, *, overflowed: bool, helpless: bool = False) -> None:
        """Take the verdict of one step; does nothing unless the mode is dynamic.

        Args:
            overflowed: whether the step was skipped.
            helpless: whether the loss itself was not finite, so that no scale would have helped.
        """
        if not self.dynamic:
            return
        settings = self.settings
        if overflowed:
            self._count_skip(helpless=helpless)
            self.growth_steps = 0
            self.overflows += 1
            if self.overflows >= settings.hysteresis:
                self.value = max(self.value * settings.backoff, settings.min)
                self.overflows = 0
            return
        self.started = True
        self.streak = 0
        self.growth_steps += 1
        if self.growth_steps >= settings.interval:
            self.value = min(self.value * settings.growth, settings.max)
            self.growth_steps = 0
            self.overflows = 0

    def _count_skip(self, *, helpless: bool) -> None:
        if self.started or helpless or self.value <= self.settings.min:
            self.streak += 1
        if self.started:
            self.skips += 1
        else:
            self.startup_skips += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain numbers, the same on every vendor."""
        return {"mode": self.settings.mode, "value": self.value, "started": self.started, **{name: getattr(self, name) for name in COUNTS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Raises:
            DocumentError: a value is missing, of another mode, or not a power of two within the bounds.
        """
        checked = checked_state(state, self.settings)
        self.value, self.started = checked["value"], checked["started"]
        for name in COUNTS:
            setattr(self, name, checked[name])


def checked_state(state: Mapping[str, Any], settings: LossScaling) -> dict[str, Any]:
    """Return a saved state with every entry, checked; see ``LossScale.load_state_dict``. Counters that older states lack are 0."""
    missing = [name for name in ("mode", "value", *COUNTS[:2]) if name not in state]
    if missing:
        raise DocumentError("loss scale state", found=f"{missing[0]!r} is missing")
    mode, value = state["mode"], state["value"]
    if mode != settings.mode:
        raise DocumentError("loss scale state", found=f"mode {mode!r}, the session's is {settings.mode!r}", remedy="load it with the same recipe")
    if mode != "none":
        bounds = f"{settings.min!r}..{settings.max!r}"
        if not isinstance(value, float) or not settings.min <= value <= settings.max:
            raise DocumentError("loss scale state", found=f"value {value!r} is not within {bounds}", remedy="load it with the same recipe")
        if not power_of_two(value):
            raise DocumentError("loss scale state", found=f"value {value!r} is not a power of two")
    counts = {name: state.get(name, 0) for name in COUNTS}
    wrong = next((name for name, count in counts.items() if not isinstance(count, int) or count < 0), None)
    if wrong is not None:
        raise DocumentError("loss scale state", found=f"{wrong} = {counts[wrong]!r} is no count")
    return {"value": float(value), "started": bool(state.get("started", True)), **counts}
