"""The model inside wrappers that only add a prefix to names: data-parallel and compiled ones. So a checkpoint loads with and without them."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def layers_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the prefix that each wrapper adds, outermost first, with what is inside it."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            prefix, model = "module.", model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            prefix, model = "_orig_mod.", inner
        else:
            return
        yield prefix, model


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside wrappers."""
    for _, inner in layers_of(model):
        model = inner
    return model


def prefix_of(model: torch.nn.Module) -> str:
    """Return what wrappers put before the names of a model's parameters."""
    return "".join(prefix for prefix, _ in layers_of(model))
