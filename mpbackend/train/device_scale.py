"""Loss scaling on the device: the state machine of ``LossScale`` in tensor arithmetic, for sessions whose verdict the host does not wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mpbackend.roles import LossScaling
from mpbackend.train.loss_scale import COUNTS, LossScale, checked_state


class DeviceScale:
    """The twin of ``LossScale`` whose state are scalar tensors; dynamic scaling only.

    Every attribute of ``LossScale`` is there, and reading one reads the device.

    Args:
        start: the state to begin with.
        device: where the state lives.

    Attributes:
        settings: the recipe's loss scaling.
        tensor: the present scale, a scalar fp32 tensor. A new one after each update: who holds the old one keeps its value.
    """

    dynamic = True

    def __init__(self, start: LossScale, device: torch.device) -> None:
        self.settings: LossScaling = start.settings
        self._device = device
        self._set(start.state_dict())

    def _set(self, state: Mapping[str, Any]) -> None:
        self.tensor = torch.tensor(float(state["value"]), device=self._device)
        self._counts = {name: torch.tensor(int(state[name]), dtype=torch.int64, device=self._device) for name in COUNTS}
        self._started = torch.tensor(bool(state["started"]), device=self._device)

    @torch.no_grad()
    def update(self, found: torch.Tensor, helpless: torch.Tensor) -> None:
        """Take the verdict of one step; reads nothing.

        Args:
            found: scalar bool tensor; whether the step was skipped.
            helpless: scalar bool tensor; whether the loss itself was not finite.
        """
        settings, counts, where = self.settings, self._counts, torch.where
        ok = ~found
        against = found & (self._started | helpless | (self.tensor <= settings.min))
        counts["streak"] = where(ok, 0, counts["streak"] + against)
        counts["skips"] = counts["skips"] + (found & self._started)
        counts["startup_skips"] = counts["startup_skips"] + (found & ~self._started)
        self._started = self._started | ok
        overflows = counts["overflows"] + found
        back = found & (overflows >= settings.hysteresis)
        steps = where(ok, counts["growth_steps"] + 1, 0)
        grow = ok & (steps >= settings.interval)
        counts["growth_steps"] = where(grow, 0, steps)
        counts["overflows"] = where(back | grow, 0, overflows)
        factor = where(back, settings.backoff, where(grow, settings.growth, 1.0))
        self.tensor = torch.clamp(self.tensor * factor, settings.min, settings.max)

    @property
    def streak_tensor(self) -> torch.Tensor:
        """The streak, a scalar int64 tensor."""
        return self._counts["streak"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as ``LossScale.state_dict`` does; reads the device."""
        started, *counts = torch.stack([self._started.long(), *self._counts.values()]).tolist()
        return {"mode": "dynamic", "value": float(self.tensor.item()), "started": bool(started), **dict(zip(COUNTS, counts, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; see ``LossScale.load_state_dict``."""
        self._set(checked_state(state, self.settings))

    def __getattr__(self, name: str) -> Any:
        """Read one entry of the state from the device."""
        if name == "value" or name == "started" or name in COUNTS:
            return self.state_dict()[name]
        raise AttributeError(name)
