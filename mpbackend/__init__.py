"""mpbackend: one mixed-precision training recipe on several vendors' accelerators, planned with reasons and compared honestly.

Importing this package loads neither torch nor a vendor package; names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "BackendError": "errors",
    "DocumentError": "errors",
    "MpbackendError": "errors",
    "PlanError": "errors",
    "SessionError": "errors",
    "UnknownNameError": "errors",
    "Comparison": "comparison.verdict",
    "Device": "device",
    "Plan": "planning",
    "Recipe": "recipe",
    "Recorder": "train.recorder",
    "RunRecord": "observe.record",
    "Session": "train.session",
    "StepResult": "train.step",
    "Target": "target",
    "compare": "comparison.verdict",
    "hookimpl": "hookspecs",
    "load_matrix": "matrix",
    "load_plugins": "plugins",
    "load_record": "observe.record",
    "parse_format": "formats",
    "parse_recipe": "recipe",
    "plan": "selection",
    "select": "target",
}

__all__ = [
    "BackendError",
    "Comparison",
    "Device",
    "DocumentError",
    "MpbackendError",
    "Plan",
    "PlanError",
    "Recipe",
    "Recorder",
    "RunRecord",
    "Session",
    "SessionError",
    "StepResult",
    "Target",
    "UnknownNameError",
    "__version__",
    "compare",
    "hookimpl",
    "load_matrix",
    "load_plugins",
    "load_record",
    "parse_format",
    "parse_recipe",
    "plan",
    "select",
]

if TYPE_CHECKING:
    from mpbackend.comparison.verdict import Comparison, compare
    from mpbackend.device import Device
    from mpbackend.errors import BackendError, DocumentError, MpbackendError, PlanError, SessionError, UnknownNameError
    from mpbackend.formats import parse_format
    from mpbackend.hookspecs import hookimpl
    from mpbackend.matrix import load_matrix
    from mpbackend.observe.record import RunRecord, load_record
    from mpbackend.planning import Plan
    from mpbackend.plugins import load_plugins
    from mpbackend.recipe import Recipe, parse_recipe
    from mpbackend.selection import plan
    from mpbackend.target import Target, select
    from mpbackend.train.recorder import Recorder
    from mpbackend.train.session import Session
    from mpbackend.train.step import StepResult


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'mpbackend' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"mpbackend.{_EXPORTS[name]}"), name)
    except (ImportError, OSError, RuntimeError) as error:  # importing torch raises any of them, for example for a package that extends it and is broken
        errors = importlib.import_module("mpbackend.errors")
        if isinstance(error, errors.MpbackendError):
            raise
        raise errors.BackendError(f"mpbackend.{name}", found=errors.describe(error), remedy="`mpbackend doctor` gives the cause") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
