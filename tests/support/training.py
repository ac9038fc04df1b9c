"""A small model with a BatchNorm and its data, for tests of training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpbackend.train.session import Session

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Two linears around a BatchNorm: parameters, float and integer buffers, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 4)."""
        out: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return out


def make_net(seed: int = 0) -> Net:
    """Return the model with seeded weights."""
    torch.manual_seed(seed)
    return Net()


def make_batches(count: int, seed: int = 1) -> list[Batch]:
    """Return ``count`` seeded batches of 6 rows."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)) for _ in range(count)]


Prepare = Callable[..., Session]
"""``prepare(model, optimizer, recipe, **options)``."""
