"""The rows of a session: kept as device tensors while training, read in one batch when they are flushed."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpbackend.observe.record import StepRow, to_number

if TYPE_CHECKING:
    from mpbackend.backend import Clock
    from mpbackend.train.step import StepResult

FLUSH_STEPS = 50
FLUSH_SECONDS = 5.0
KEPT_ROWS = 4096
"""Rows kept for ``drain()``; older ones are dropped when nobody drains."""


class Pending(NamedTuple):
    """A row whose tensors have not been read."""

    step: int
    losses: list[torch.Tensor]
    grad_norm: torch.Tensor | float | None
    scale: float
    stepped: bool
    reason: str
    lr: float | torch.Tensor
    mark: Any
    samples: int
    tokens: int

    @classmethod
    def of(cls, step: int, losses: list[torch.Tensor], result: StepResult, lr: float | torch.Tensor, mark: Any, samples: int, tokens: int) -> Pending:
        """Return the row of a finished step."""
        return cls(step, losses, result.grad_norm, result.loss_scale, result.stepped, result.reason, lr, mark, samples, tokens)


class Journal:
    """Pending and finished rows.

    Args:
        clock: the device's clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: list[Pending] = []
        self._ready: deque[StepRow] = deque(maxlen=KEPT_ROWS)
        self._last_mark: Any = None
        self._flushed_at = time.monotonic()
        self.metrics: dict[int, dict[str, float]] = {}

    def add(self, row: Pending) -> bool:
        """Keep a row; True when it is time to flush. No synchronization."""
        self._pending.append(row)
        return len(self._pending) >= FLUSH_STEPS or time.monotonic() - self._flushed_at >= FLUSH_SECONDS

    def read(self) -> list[StepRow]:
        """Read every pending row from the device in one batch and return them; they also wait for ``drain``."""
        pending, self._pending = self._pending, []
        self._flushed_at = time.monotonic()
        if not pending:
            return []
        values = iter(read_scalars([tensor for row in pending for tensor in tensors_of(row)]))
        rows = [self._finish(row, values) for row in pending]
        self._ready.extend(rows)
        return rows

    def _finish(self, row: Pending, values: Iterator[float]) -> StepRow:
        losses = [next(values) for _ in row.losses]
        norm = next(values) if isinstance(row.grad_norm, torch.Tensor) else row.grad_norm
        lr = next(values) if isinstance(row.lr, torch.Tensor) else row.lr
        loss = sum(losses) / len(losses) if losses else None
        ms = None if self._last_mark is None else self._clock.elapsed_ms(self._last_mark, row.mark)
        self._last_mark = row.mark
        nonfinite = any(value is not None and not math.isfinite(value) for value in (loss, norm))
        return StepRow(
            step=row.step,
            loss=None if loss is None else to_number(loss),
            grad_norm=None if norm is None else to_number(norm),
            scale=row.scale,
            stepped=row.stepped,
            reason=row.reason,
            nonfinite=nonfinite,
            lr=to_number(lr),
            ms=None if ms is None else to_number(ms),
            samples=row.samples,
            tokens=row.tokens,
            metrics={name: to_number(value) for name, value in self.metrics.pop(row.step, {}).items()},
        )

    def drain(self) -> Iterator[StepRow]:
        """Yield the finished rows that were not drained yet, oldest first."""
        while self._ready:
            yield self._ready.popleft()


def tensors_of(row: Pending) -> Iterator[torch.Tensor]:
    """Yield the unread tensors of a row in the order in which ``Journal`` reads them back."""
    yield from row.losses
    for value in (row.grad_norm, row.lr):
        if isinstance(value, torch.Tensor):
            yield value


def read_scalars(tensors: list[torch.Tensor]) -> list[float]:
    """Read scalar tensors with one transfer."""
    if not tensors:
        return []
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    values: list[float] = torch.stack([tensor.detach().to(dtype).reshape(()) for tensor in tensors]).tolist()
    return values
