"""Which operations a device leaves to the host: those that reach its fallback kernel because it has none of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
"""Keys whose kernels are made of other operations, which are then looked at by themselves."""

THROUGH_OUT = "CompositeExplicitAutogradNonFunctional"
"""Key of kernels that call the overload with ``out=`` of the same operation (torch's structured kernels), below what a dispatch mode sees."""

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
        name = func.name()
        if any(has_kernel(name, made) for made in (key, *COMPOSITE)):
            return False
        return not (has_kernel(name, THROUGH_OUT) and any(has_kernel(other, key) for other in with_out(name)))

    return leaves


def has_kernel(name: str, key: str) -> bool:
    """Tell whether an operator has a kernel under a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def with_out(name: str) -> list[str]:
    """Return the overloads with ``out=`` that stand for an overload: ``aten::pow.Tensor_Scalar_out`` for ``aten::pow.Tensor_Scalar`` or its in-place form."""
    base, _, overload = name.partition(".")
    base = base.removesuffix("_")
    known = getattr(torch.ops.aten, base.removeprefix("aten::"), None)
    overloads = [] if known is None else known.overloads()
    return [f"{base}.{out}" for out in (f"{overload}_out", "out") if out in overloads]
