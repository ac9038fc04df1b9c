"""A deliberately wrong backend: the processor's, with one fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpbackend.backend import Backend
from mpbackend.device import Device
from mpbackend.plugins import Plugins, load_plugins
from mpbackend.selection import select_device

Tamper = Callable[[str, tuple[Any, ...], Any], Any]
"""From the name of an operator, its arguments and its result, to the result of a wrong device."""

MISSING = object()
"""Stands for a member that the wrong backend lacks."""


class Tampering(TorchDispatchMode):
    """Changes the results of operators while it is entered."""

    def __init__(self, tamper: Tamper) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it unannotated
        self.tamper = tamper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return self.tamper(func._schema.name.partition("::")[2], args, out)


class Wrong:
    """A backend with a fault.

    Args:
        backend: the right one.
        members: what replaces its members; ``MISSING`` takes one away.
        tamper: what its operators give.
    """

    def __init__(self, backend: Backend, members: Mapping[str, Any] | None = None, tamper: Tamper | None = None) -> None:
        self._right = backend
        self._members = dict(members or {})
        self._tamper = tamper

    def __getattr__(self, name: str) -> Any:
        found = self._members[name] if name in self._members else getattr(self._right, name)
        if found is MISSING:
            raise AttributeError(name)
        if name == "execute" and self._tamper is not None:
            return self._execute
        return found

    @contextmanager
    def _execute(self, plan: Any) -> Iterator[None]:
        tamper = self._tamper
        assert tamper is not None
        with self._right.execute(plan), Tampering(tamper):
            yield


def processor() -> tuple[Backend, Device, Plugins]:
    """Return the right backend, its device and the plugins."""
    plugins = load_plugins()
    chosen = select_device("cpu", plugins, {})
    return chosen.backend, chosen.device, plugins


def is_plain(value: object) -> bool:
    """Tell whether a value is a floating-point tensor and no subclass of one."""
    return type(value) is torch.Tensor and value.is_floating_point()


def changing(names: Sequence[str], change: Callable[[torch.Tensor], torch.Tensor]) -> Tamper:
    """Return what changes every floating-point result of some operators, of all when none is named."""

    def tamper(name: str, args: tuple[Any, ...], out: Any) -> Any:
        if names and name not in names:
            return out
        if isinstance(out, tuple):
            return tuple(change(value) if is_plain(value) else value for value in out)
        return change(out) if is_plain(out) else out

    return tamper
