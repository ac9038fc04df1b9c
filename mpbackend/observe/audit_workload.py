"""What an audit runs: a model, its loss and its optimizer, made by a function of the user's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpbackend.errors import BackendError, DocumentError, MpbackendError, UnknownNameError, describe

FORM = "package.module:function"


@dataclass(frozen=True)
class Workload:
    """One training step.

    Attributes:
        model: the model, on the device that was given.
        loss: runs one forward pass and returns the scalar loss.
        optimizer: updates the model; AdamW with its defaults when omitted.
        tokens: tokens of a step, for the rate; 0 when that means nothing here.
        step: a whole training step of a loop of one's own, run as it is instead of a session's: its autocast, its scaler and its ``optimizer``. The plan then
            says what is asked, and not what is done.
    """

    model: torch.nn.Module
    loss: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer | None = None
    tokens: int = 0
    step: Callable[[], object] | None = None


Build = Callable[[torch.device], "Workload | tuple[torch.nn.Module, Callable[[], torch.Tensor]]"]
"""Makes the workload on a device; a pair stands for a workload with the defaults."""


def find_build(spec: str) -> Build:
    """Import the function that a command line names, the working directory included in the search.

    Args:
        spec: ``package.module:function``, or a file ``path.py:function``.

    Raises:
        DocumentError: not of that form.
        UnknownNameError: the module has no such function.
        BackendError: the module cannot be imported.
    """
    name, colon, function = spec.rpartition(":")
    if not colon or not name or not function.isidentifier():
        raise DocumentError(f"workload {spec!r}", found="not a module and a function", allowed=[FORM, "file.py:function"])
    place = Path(name)
    if place.suffix == ".py":
        folder, name = str(place.parent.resolve()), place.stem
    else:
        folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise BackendError(f"workload {spec!r}", found=describe(error), remedy=f"write it as {FORM}, importable from here") from error
    build: Build | None = getattr(module, function, None)
    if not callable(build):
        raise UnknownNameError(f"function of {name}", function, [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")])
    return build


def build_workload(build: Build, device: torch.device) -> Workload:
    """Make the workload on a device.

    Raises:
        DocumentError: it returns something else.
        BackendError: it raises.
    """
    asked = f"{getattr(build, '__qualname__', 'the workload')}({device})"
    try:
        made: Any = build(device)
    except MpbackendError:
        raise
    except Exception as error:
        raise BackendError(asked, found=describe(error)) from error
    if isinstance(made, tuple) and len(made) == 2:
        made = Workload(*made)
    if not isinstance(made, Workload) or not isinstance(made.model, torch.nn.Module) or not callable(made.loss):
        raise DocumentError(asked, found=f"a {type(made).__name__}", allowed=["(model, loss)", "mpbackend.observe.audit_workload.Workload(...)"])
    return made
