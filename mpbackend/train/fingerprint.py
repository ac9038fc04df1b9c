"""What data and weights are told by: a hash over their formats, shapes and values."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

SAMPLED = 1024
"""Elements of a tensor that tell a batch from another."""


def leaves_in(batch: Any) -> Iterator[Any]:
    """Yield whatever stands in a nesting of tuples, lists and mappings, in order."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves_in(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from leaves_in(value)
    else:
        yield batch


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a nesting of tuples, lists and mappings, in order."""
    return (leaf for leaf in leaves_in(batch) if isinstance(leaf, torch.Tensor))


def hash_tensor(digest: Any, tensor: torch.Tensor, limit: int | None = None) -> None:
    """Add a tensor to a hash: format, shape and bytes.

    Args:
        digest: a hashlib object.
        tensor: a tensor on any device; one that is not on the host is copied there. Of a sparse, nested or meta tensor only the description is hashed.
        limit: elements to hash at most; all of them when omitted.
    """
    digest.update(f"{tensor.dtype}{'' if tensor.is_nested else tuple(tensor.shape)}".encode())
    if not has_values(tensor):
        return
    flat = tensor.detach().reshape(-1)
    host = (flat if limit is None else flat[:limit]).cpu().contiguous()
    if host.numel():
        digest.update(ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()))


def has_values(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements can be read one after the other."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def batch_fingerprint(batch: object) -> str:
    """Return a hash that tells a batch from others, 16 hexadecimal digits: of about 1,024 elements of each tensor, spread evenly, and of text and numbers.

    Tensors that are not on the host are read from their device.
    """
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves_in(batch):
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{'' if leaf.is_nested else tuple(leaf.shape)}".encode())
            hash_tensor(digest, leaf.detach().reshape(-1)[:: max(1, leaf.numel() // SAMPLED)] if has_values(leaf) else leaf)
        else:
            digest.update(repr(leaf if isinstance(leaf, (str, bytes, int, float)) else type(leaf)).encode())
    return digest.hexdigest()
