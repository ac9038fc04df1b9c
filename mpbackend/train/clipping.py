"""One sweep over the gradients: norm, unscaling and clipping.

The norm is always that of the unscaled gradients. Unscaling and clipping are one multiplication; with a power-of-two scale the result is bit-equal to
unscaling first and ``torch.nn.utils.clip_grad_norm_`` afterwards, because multiplying the coefficient by a power of two rounds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def clip_coefficient(norm: torch.Tensor, clip_norm: float, factor: float) -> torch.Tensor:
    """Return the factor that unscales and clips at once: ``factor * min(1, clip_norm / (norm + 1e-6))``.

    Args:
        norm: norm of the unscaled gradients, scalar tensor.
        clip_norm: largest norm to keep, > 0.
        factor: inverse of the loss scale times the averaging divisor.
    """
    coefficient = torch.clamp(clip_norm / (norm + EPS), max=1.0)
    return coefficient if factor == 1.0 else coefficient * factor


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether every element is finite; reads the device."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def check_clip_norm(clip_norm: float | None) -> None:
    """Check a clipping norm; ``SessionError`` unless it is None or a finite number > 0."""
    if clip_norm is not None and not 0 < clip_norm < float("inf"):
        raise SessionError(f"clip_norm = {clip_norm!r}", found="not a finite number above 0", remedy="leave it out for no clipping")
