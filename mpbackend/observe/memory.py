"""Bytes that tensors hold, by format: what a run is measured by, and ``mpbackend.footprint`` predicts."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mpbackend.errors import UnknownNameError
from mpbackend.formats import parse_format


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the canonical format of a dtype; torch's own name (``bool``, ``complex64``) where it is no number format."""
    try:
        return parse_format(dtype).name
    except UnknownNameError:
        return str(dtype).removeprefix("torch.")


def dtypes(values: Iterable[Any]) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the tensors among ``values``; of a list of tensors each dtype once."""
    found: list[torch.dtype] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value.dtype)
        elif isinstance(value, (list, tuple)) and value and not isinstance(value[0], int):
            found.extend(dict.fromkeys(tensor.dtype for tensor in nested_tensors(value)))
    return tuple(found)


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Return ``elements * bytes per element`` by format, each tensor object counted once; formats in alphabetical order."""
    unique = {id(tensor): tensor for tensor in tensors}
    sizes: dict[str, int] = {}
    for tensor in unique.values():
        name = dtype_name(tensor.dtype)
        sizes[name] = sizes.get(name, 0) + tensor.numel() * tensor.element_size()
    return dict(sorted(sizes.items()))


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors that an optimizer keeps for its parameters, those in lists and dictionaries too.

    Counters are left out: what is called ``step``, and 0-dimensional tensors unless the parameter is one.
    """
    for parameter, state in optimizer.state.items():
        for tensor in nested_tensors({name: value for name, value in state.items() if name != "step"}):
            if tensor.dim() > 0 or parameter.dim() == 0:
                yield tensor


def nested_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``: a tensor, or mappings, lists and tuples of such."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from nested_tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nested_tensors(item)
