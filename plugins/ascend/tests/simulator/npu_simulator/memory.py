"""CPU tensors over the bytes of simulated device tensors. The stand-in runtime allocates device memory on the host, so nothing is copied."""

from __future__ import annotations

import ctypes

import torch

DEVICE = "npu"


def on_device(value: object) -> bool:
    """Tell whether a value is a tensor of the simulated device."""
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the same bytes as a strided device tensor."""
    storage = tensor.untyped_storage()
    count = storage.nbytes()
    if count == 0 or storage.data_ptr() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    raw = torch.frombuffer((ctypes.c_uint8 * count).from_address(storage.data_ptr()), dtype=torch.uint8)
    with torch.no_grad():
        view = torch.empty(0, dtype=tensor.dtype).set_(raw.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        view = torch._conj(view)
    return torch._neg_view(view) if tensor.is_neg() else view


def upload(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a new device tensor with the bytes, sizes and strides of a CPU tensor."""
    plain = source.resolve_conj().resolve_neg()
    made = torch.empty_strided(plain.size(), plain.stride(), dtype=plain.dtype, device=device)
    if plain.numel():
        alias(made).copy_(plain)
    return made


def assign(target: torch.Tensor, source: torch.Tensor) -> None:
    """Give a device tensor the sizes and values of a CPU tensor, as an ``out=`` argument that the kernel resized."""
    if target.size() != source.size():
        target.resize_(source.size())
        alias(target).copy_(source)
