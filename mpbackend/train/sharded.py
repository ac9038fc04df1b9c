"""Gradients of which each rank holds a part: their norm over all ranks, and the parts themselves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpbackend.errors import SessionError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a ``DTensor``; imports nothing, since there is none before its module is loaded."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@torch.no_grad()
def local(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the part of each tensor that this rank holds, sharing its memory; a tensor that is not sharded is returned as it is."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined] # only a DTensor gets there


@torch.no_grad()
def sharded_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm over all gradients and all their parts: that of the full tensors.

    Squares are summed over the dimensions of a mesh along which a tensor is sharded, never over those that hold replicas. One all-reduce is made for each
    distinct group of ranks. Every rank gives the same gradients in the same order; parts may be uneven or empty.

    Args:
        gradients: at least one tensor, sharded or not; one device.

    Returns:
        A scalar fp32 tensor (fp64 for fp64 gradients) on the device, equal on all ranks; no host synchronization. ``inf`` or NaN when a gradient is on any
        rank, or when a square overflows.

    Raises:
        SessionError: a gradient is ``Partial``: its parts have yet to be added.
    """
    dtype = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
    groups: dict[str, dist.ProcessGroup] = {}
    parts: dict[tuple[str, ...], list[torch.Tensor]] = {}
    keys: dict[Any, tuple[str, ...]] = {}
    for gradient, part in zip(gradients, local(gradients), strict=True):
        key: tuple[str, ...] = ()
        if is_sharded(gradient):
            layout = (gradient.device_mesh, gradient.placements)  # type: ignore[attr-defined] # a DTensor
            if layout not in keys:
                keys[layout] = sharding_groups(gradient, groups)  # type: ignore[arg-type] # a DTensor
            key = keys[layout]
        parts.setdefault(key, []).append(part)
    squares = {key: torch.stack(torch._foreach_norm(held, 2.0, dtype)).square().sum() for key, held in parts.items()}
    for name, group in groups.items():
        summed = [key for key in squares if name in key]
        total = torch.stack([squares[key] for key in summed])
        dist.all_reduce(total, group=group)
        squares |= dict(zip(summed, total.unbind(), strict=True))
    return torch.stack(list(squares.values())).sum().sqrt()


def sharding_groups(tensor: DTensor, groups: dict[str, dist.ProcessGroup]) -> tuple[str, ...]:
    """Return the names of the groups of ranks that hold different parts of a tensor, and enter the groups in ``groups``."""
    names = []
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_partial():
            found = f"a gradient of shape {tuple(tensor.shape)} is {placement} on dimension {dimension} of its mesh"
            raise SessionError("gradient norm", found=found, remedy="redistribute it before step(): its parts have yet to be added")
        if not placement.is_replicate() and tensor.device_mesh.size(dimension) > 1:
            group = tensor.device_mesh.get_group(dimension)
            groups.setdefault(group.group_name, group)
            names.append(group.group_name)
    return tuple(names)
