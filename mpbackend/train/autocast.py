"""Entering autocast and the backend's execution context, cheaply and from any thread.

One autocast object is kept per thread and depth: entering one object twice would leave autocast on after the inner exit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from mpbackend.errors import SessionError

ContextFactory = Callable[[], AbstractContextManager[object] | None]


class _Stack(threading.local):
    """The autocast objects of one thread, by depth, and the contexts that are open around them."""

    def __init__(self) -> None:
        self.objects: list[torch.autocast] = []
        self.open: list[AbstractContextManager[object] | None] = []


class ForwardContext:
    """The context of a forward pass: the backend's execution context, then autocast.

    Args:
        device_type: torch device type.
        dtype: autocast dtype, or None for fp32, which turns an outer autocast off.
        around: makes the context to enter around autocast for this pass; returns None when there is none.

    Attributes:
        used: set when a forward pass with gradients enters the context; cleared by the session.
    """

    def __init__(self, device_type: str, dtype: torch.dtype | None, around: ContextFactory) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self._around = around
        self._stack = _Stack()
        self.used = False

    def __enter__(self) -> None:
        stack = self._stack
        depth = len(stack.open)
        outer = self._around()
        if outer is not None:
            outer.__enter__()
        stack.open.append(outer)
        if depth == len(stack.objects):
            stack.objects.append(torch.autocast(self._device_type, dtype=self._dtype, enabled=self._dtype is not None))
        stack.objects[depth].__enter__()
        if torch.is_grad_enabled():
            self.used = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stack = self._stack
        outer = stack.open.pop()
        stack.objects[len(stack.open)].__exit__(kind, error, trace)
        if outer is not None:
            outer.__exit__(kind, error, trace)

    def check_left(self, asked: str) -> None:
        """Raise ``SessionError`` when this thread is inside an autocast, the session's or another."""
        if self._stack.open or torch.is_autocast_enabled(self._device_type):
            where = "session.autocast()" if self._stack.open else "torch.autocast"
            raise SessionError(asked, found=f"called inside {where}", remedy=f"leave the context before {asked}")
