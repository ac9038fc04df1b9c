"""Working weights without a session, for tests of what stands between parameters and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mpbackend.recipe import parse_recipe
from mpbackend.train.weights import WorkingWeights, make_weights

RECIPES = (
    "bf16-master",
    "fp16-master",
    "bf16-kahan",
    "bf16-sr",
    "bf16-params",
    "bf16-master:grads=bf16",
    "bf16-master:optimizer=bf16",
    "bf16-kahan:grads=fp32",
    "bf16-sr:optimizer=bf16",
    "bf16:params=bf16",
    "fp16-master:master=kahan,grads=fp16",
    "fp32:optimizer=bf16",
)
"""Presets, and mixtures of roles."""


@contextmanager
def working(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: str, seed: int | None = 0) -> Iterator[WorkingWeights]:
    """Yield the working weights of a recipe, closed afterwards."""
    weights = make_weights(model, [optimizer], parse_recipe(recipe), seed=seed)
    assert weights is not None
    try:
        yield weights
    finally:
        weights.close()


def clear(weights: WorkingWeights) -> None:
    """Clear gradients as the session does."""
    for source in weights.sources():
        source.grad = None


def train(model: nn.Module, optimizer: torch.optim.Optimizer, weights: WorkingWeights, steps: int, start: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Make steps on seeded batches of 8 features under autocast in ``dtype``, numbered from ``start``."""
    for number in range(start, start + steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = model(x).float().square().mean()
        loss.backward()
        weights.sources()
        weights.step(optimizer)
        clear(weights)


def ones(count: int = 4096) -> nn.Linear:
    """Return a layer whose weights are all one."""
    layer = nn.Linear(count, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def descend(layer: nn.Linear, optimizer: torch.optim.Optimizer, weights: WorkingWeights, steps: int) -> Tensor:
    """Take steps along a gradient of one; return the weights in fp32."""
    for _ in range(steps):
        layer.weight.sum().backward()
        weights.sources()
        weights.step(optimizer)
        clear(weights)
    return layer.weight.detach().float()
