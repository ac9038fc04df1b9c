"""One sweep over the gradients: norm, unscaling and clipping.

The norm is always that of the unscaled gradients. Unscaling and clipping are one multiplication; with a power-of-two scale the result is bit-equal to
unscaling first and ``torch.nn.utils.clip_grad_norm_`` afterwards, because multiplying the coefficient by a power of two rounds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from mpbackend.errors import SessionError

EPS = 1e-6
"""Added to the norm before dividing, as ``torch.nn.utils.clip_grad_norm_`` does."""


def unique_parameters(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the parameters of every optimizer, each once, in order."""
    found: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.setdefault(id(parameter), parameter)
    return list(found.values())


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm over all gradients.

    Args:
        gradients: at least one dense tensor; any shapes, one device.

    Returns:
        A scalar fp32 tensor (fp64 for fp64 gradients) on the device; no synchronization. ``inf`` or NaN when a gradient is, or when a square overflows.
    """
    dtype = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
    norms = torch._foreach_norm(gradients, 2.0, dtype)
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


def clip_coefficient(norm: torch.Tensor, clip_norm: float, factor: float | torch.Tensor) -> torch.Tensor:
    """Return the factor that unscales and clips at once: ``factor * min(1, clip_norm / (norm + 1e-6))``.

    Args:
        norm: norm of the unscaled gradients, scalar tensor.
        clip_norm: largest norm to keep, > 0.
        factor: inverse of the loss scale times the averaging divisor; a number, or a scalar tensor where the scale lives on the device.
    """
    coefficient = torch.clamp(clip_norm / (norm + EPS), max=1.0)
    return coefficient if isinstance(factor, float) and factor == 1.0 else coefficient * factor


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether every element is finite; reads the device."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


class Limits(NamedTuple):
    """How gradients are clipped: to an L2 norm, or each element to an absolute value; None for neither."""

    norm: float | None = None
    value: float | None = None


def limits_of(group: Mapping[str, Any]) -> Limits | None:
    """Return the limits that a parameter group brings in ``clip_norm`` and ``clip_value``; None when it brings neither.

    Raises:
        SessionError: one is no finite number above 0, or both are there.
    """
    if "clip_norm" not in group and "clip_value" not in group:
        return None
    return check_limits(group.get("clip_norm"), group.get("clip_value"))


def check_limits(clip_norm: float | None, clip_value: float | None) -> Limits:
    """Return limits, checked; ``SessionError`` unless each is None or a finite number > 0, and at most one is given."""
    for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if limit is not None and not 0 < limit < float("inf"):
            raise SessionError(f"{name} = {limit!r}", found="not a finite number above 0", remedy="leave it out for no clipping")
    if clip_norm is not None and clip_value is not None:
        raise SessionError("clip_norm and clip_value", found="both are given, and their order would matter", remedy="give one of them")
    return Limits(clip_norm, clip_value)
