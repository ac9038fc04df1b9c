"""The entry point: the hooks of this plugin. Imports neither torch nor anything that does."""

from __future__ import annotations

from collections.abc import Iterable

from mpbackend.backend import Backend
from mpbackend.hookspecs import hookimpl
from mpbackend_emulator.backend import EmulatorBackend


@hookimpl
def mpbackend_backends() -> Iterable[Backend]:
    """Return the emulator."""
    return [EmulatorBackend()]
