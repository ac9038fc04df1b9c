"""Which operations a device leaves to the host: those that reach its fallback kernel because it has none of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
"""Keys whose kernels are made of other operations, which are then looked at by themselves."""

AUTOGRAD = "Autograd"


def backend_key(device: torch.device) -> str:
    """Return the name of the dispatch key of a device's kernels: that of its autograd key without ``Autograd``."""
    keys = torch._C._dispatch_keys(torch.empty(0, device=device))
    known = torch._C.DispatchKey
    names = [name for name in dir(known) if name.startswith(AUTOGRAD) and name != AUTOGRAD and hasattr(known, name.removeprefix(AUTOGRAD))]
    return next(name.removeprefix(AUTOGRAD) for name in names if keys.has(getattr(known, name)) and keys.has(getattr(known, name.removeprefix(AUTOGRAD))))


def leaves_to_host(device: torch.device) -> Callable[[Any], bool] | None:
    """Return what tells of an ``OpOverload`` whether a device leaves it to the host; None for the host itself, and for a device without a fallback kernel.

    Args:
        device: a usable device.
    """
    if device.type == "cpu":
        return None
    key = backend_key(device)
    if not torch._C._dispatch_has_backend_fallback(getattr(torch._C.DispatchKey, key)):
        return None

    @functools.cache
    def leaves(func: Any) -> bool:
        if not isinstance(func, torch._ops.OpOverload):
            return False
        return not any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), name) for name in (key, *COMPOSITE))

    return leaves
