"""Running a low-bit plan: Transformer Engine's autocast around forward passes, and nothing around backward ones.

A session enters the same context around both passes. So the context only arms, and the first converted layer that runs while it is armed opens Transformer
Engine's region, which stays open until the last context is left: a backward pass runs no layer and so opens none, unless a checkpointed forward is computed
again, which then runs as it first did. That happens on a thread of autograd's own, so a context arms every thread whose autocast is on. Transformer Engine has
one region for the process anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from mpbackend.errors import SessionError

WINDOW = ("scaling_fwd", "scaling_bwd")
"""Where a layer of Transformer Engine keeps the state of delayed scaling: ``fp8_meta[...]`` with ``scale`` and ``amax_history``."""
TENSORS = ("scale", "amax_history")


class _Depth(threading.local):
    """How many contexts a thread is in."""

    value = 0


class EngineExecution:
    """The execution of one low-bit plan.

    Args:
        autocast: ``transformer_engine.pytorch.autocast``.
        recipe: the recipe object.
        delayed: whether the recipe scales by a window of earlier steps.
    """

    def __init__(self, autocast: Callable[..., AbstractContextManager[Any]], recipe: Any, *, delayed: bool) -> None:
        self.recipe = recipe
        self.delayed = delayed
        self._autocast = autocast
        self._depth = _Depth()
        self._lock = threading.RLock()
        self._armed = 0
        self._region: AbstractContextManager[Any] | None = None
        self._kept: dict[int, tuple[torch.nn.Module, Mapping[str, torch.Tensor]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineExecution:
        """Return itself: a copy of a model runs under the same plan."""
        return self

    def context(self) -> AbstractContextManager[None]:
        """Return the context that a session enters around a forward or a backward pass."""
        return _Armed(self)

    def arm(self) -> None:
        """Begin a context."""
        self._depth.value += 1
        with self._lock:
            self._armed += 1

    def disarm(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End a context; the last one closes the region."""
        self._depth.value -= 1
        with self._lock:
            self._armed -= 1
            if self._armed == 0 and self._region is not None:
                region, self._region = self._region, None
                try:
                    region.__exit__(kind, error, trace)
                finally:
                    self._restore()

    def enter(self) -> bool:
        """Open the region, unless it is open; return False where this thread is in no context and has no autocast, so that the layer is a plain one.

        Raises:
            SessionError: this thread is in a context and autocast is off, so that what is not converted would not run in bf16 as planned.
        """
        if not torch.is_autocast_enabled("cuda"):
            if self._depth.value == 0:
                return False
            remedy = "run the model inside `with session.autocast():`"
            raise SessionError("a low-bit forward pass", found="autocast is off, and the plan runs everything else in bf16", remedy=remedy)
        with self._lock:
            if self._armed == 0:
                return False
            if self._region is None:
                region = self._autocast(enabled=True, recipe=self.recipe, amax_reduction_group=reduction_group(self.recipe))
                region.__enter__()
                self._region = region
            return True

    def keep_window(self, layer: torch.nn.Module) -> None:
        """Keep the window of a layer that evaluates, to put it back when the region closes: evaluation writes no window."""
        if self.delayed:
            with self._lock:
                self._kept.setdefault(id(layer), (layer, read_window(layer)))

    def _restore(self) -> None:
        kept, self._kept = self._kept, {}
        for layer, window in kept.values():
            if window:
                write_window(layer, window)
            else:
                clear_window(layer)


class _Armed(AbstractContextManager[None]):
    """Arms an execution while it is entered."""

    def __init__(self, execution: EngineExecution) -> None:
        self._execution = execution

    def __enter__(self) -> None:
        self._execution.arm()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._execution.disarm(kind, error, trace)


def reduction_group(recipe: Any) -> Any:
    """Return the ranks over which delayed scaling takes the largest amax: all of them; None without torch.distributed, or where each keeps its own."""
    distributed: Any = torch.distributed
    if not getattr(recipe, "reduce_amax", False) or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD


def windows(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer's window themselves, by name; none before its first low-bit forward pass."""
    meta: Mapping[str, Any] = getattr(layer, "fp8_meta", {})
    found = {f"{name}.{part}": getattr(meta.get(name), part, None) for name in WINDOW for part in TENSORS}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def read_window(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of a layer's window."""
    return {name: value.detach().clone() for name, value in windows(layer).items()}


def write_window(layer: torch.nn.Module, window: Mapping[str, torch.Tensor]) -> None:
    """Copy a window into the tensors of a layer.

    Raises:
        SessionError: the layer has no such tensor, or one of another shape.
    """
    present = windows(layer)
    for name, value in window.items():
        if name not in present or present[name].shape != value.shape:
            found = f"{tuple(present[name].shape)}" if name in present else "nothing"
            raise SessionError(
                f"the window of delayed scaling: {name} of shape {tuple(value.shape)}", found=f"the layer has {found}", remedy="keep scaling.history"
            )
        with torch.no_grad():
            present[name].copy_(value)


def clear_window(layer: torch.nn.Module) -> None:
    """Put a layer's window back to its start: no amax seen, scale 1."""
    for name, value in windows(layer).items():
        with torch.no_grad():
            value.fill_(1.0 if name.endswith(".scale") else 0.0)
