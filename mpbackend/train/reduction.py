"""Summing gradients between ranks in the format and with the division that the plan says.

DDP divides before the sum and sums in the format of its gradients. Where the plan says the same, DDP is left alone; elsewhere a communication hook does what
the plan says. ``reduce_flat`` does it for tensors that no wrapper reduces, with the same arithmetic.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpbackend.formats import format_name

BUCKET_BYTES = 25 * 2**20
"""Bytes that are summed at once, as DDP's own default."""


@dataclass(frozen=True)
class Wire:
    """How one sum between ranks is carried out.

    Attributes:
        dtype: format on the wire.
        divide: whether the division by ``size`` comes ``before`` the sum or ``after`` it. Either is done in the gradient's own format, so that a value is
            rounded to the wire once; as DDP does it, it is a multiplication by 1/size.
        size: ranks that are averaged over.
        group: their process group; None for all.
    """

    dtype: torch.dtype
    divide: Literal["before", "after"]
    size: int
    group: dist.ProcessGroup | None = None

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return what goes on the wire; ``values`` are overwritten where they have its format already."""
        if self.divide == "before":
            values = values.mul_(1.0 / self.size) if values.dtype == self.dtype else values * (1.0 / self.size)
        return values.to(self.dtype)

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the mean that a sum on the wire gives to ``out`` and return it."""
        if wire.data_ptr() != out.data_ptr():
            out.copy_(wire)
        return out.mul_(1.0 / self.size) if self.divide == "after" else out


class Reducer:
    """What a DDP's communication hook does now. DDP takes one hook for its life, so a later session changes this object.

    Attributes:
        wire: the present session's.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire


def reduce_bucket(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with its classes, and those of this module are strings
    """Average one bucket of DDP's gradients as ``state``, a ``Reducer``, says: a communication hook of ``DistributedDataParallel``."""
    buffer, wire = bucket.buffer(), state.wire
    work = dist.all_reduce(wire.encode(buffer), group=wire.group, async_op=True)

    def decode(future: torch.futures.Future[Any]) -> torch.Tensor:
        mean: torch.Tensor = wire.decode(future.value()[0], buffer)
        return mean

    return work.get_future().then(decode)


def install(model: DistributedDataParallel, wire: Wire) -> str:
    """Make DDP average gradients over ``wire``, unless its user has a communication hook, which is left alone with a warning.

    Returns:
        Who reduces what, for the record.
    """
    hooks = getattr(model, "_comm_hooks", [])
    mine = next((state for _, state in hooks if isinstance(state, Reducer)), None)
    text = f"{format_name(wire.dtype)}, divide {wire.divide}"
    if mine is not None:
        mine.wire = wire
        return f"{text}: a communication hook of the session"
    if hooks:
        return leave_to_user(getattr(hooks[0][0], "__qualname__", "of the user"), text)
    native = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} <= {wire.dtype} and wire.divide == "before"
    try:
        if not native:
            model.register_comm_hook(Reducer(wire), reduce_bucket)
    except RuntimeError:  # a built-in hook leaves no trace in Python, but DDP takes no second one
        return leave_to_user("built into DDP", text)
    return f"{text}: DDP by itself" if native else f"{text}: a communication hook of the session"


def leave_to_user(hook: str, planned: str) -> str:
    """Warn that the user's communication hook reduces the gradients, not the plan; returns that for the record."""
    warnings.warn(f"DDP has a communication hook ({hook}), which is left alone: the plan's reduction ({planned}) is not carried out", stacklevel=6)
    return f"unknown: the user's communication hook ({hook})"


@torch.no_grad()
def reduce_flat(tensors: Sequence[torch.Tensor], wire: Wire) -> None:
    """Average tensors over the ranks in place, a bucket at a time; every rank gives the same shapes in the same order. No host synchronization.

    Args:
        tensors: dense tensors on one device.
        wire: how.
    """
    for bucket in buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        sent = wire.encode(flat)
        dist.all_reduce(sent, group=wire.group)
        means = wire.decode(sent, flat).split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(list(bucket), [mean.view_as(tensor) for mean, tensor in zip(means, bucket, strict=True)])


def buckets(tensors: Sequence[torch.Tensor], limit: int = BUCKET_BYTES) -> Iterator[list[torch.Tensor]]:
    """Yield runs of tensors of one format, at most ``limit`` bytes together; a larger tensor alone."""
    held: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if held and (tensor.dtype != held[0].dtype or size + tensor.nbytes > limit):
            yield held
            held, size = [], 0
        held.append(tensor)
        size += tensor.nbytes
    if held:
        yield held
