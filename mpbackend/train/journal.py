"""The rows of a session: kept as device tensors while training, read in one batch when they are flushed."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpbackend.errors import MpbackendError, SessionError
from mpbackend.observe.record import StepRow, to_number
from mpbackend.train.step import StepResult, stack_scalars

if TYPE_CHECKING:
    from mpbackend.backend import Clock
    from mpbackend.train.window import Window

FLUSH_STEPS = 50
FLUSH_SECONDS = 5.0
KEPT_ROWS = 4096
"""Rows kept for ``drain()``, read or not; older ones are dropped when nobody drains or records."""

PACKED_ROWS = 64
"""Rows whose tensors are put into one while nobody reads them, so that thousands of small ones do not pile up."""

UNREAD = torch.empty(0)
"""Stands for a tensor whose value is in a pack."""

LearningRate = float | torch.Tensor | None


class Pending(NamedTuple):
    """A row whose tensors have not been read."""

    step: int
    losses: Sequence[torch.Tensor]
    grad_norm: torch.Tensor | float | None
    outcome: StepResult
    lr: LearningRate
    mark: Any
    samples: int
    tokens: int
    micro_batches: int

    @classmethod
    def of(cls, step: int, window: Window, result: StepResult, lr: LearningRate, mark: Any, samples: int, tokens: int) -> Pending:
        """Return the row of a finished step."""
        return cls(step, window.losses, result.grad_norm, result, lr, mark, samples, tokens, window.seen)


def learning_rate(optimizers: Sequence[torch.optim.Optimizer]) -> LearningRate:
    """Return the learning rate of the first parameter group as it is now; None for an optimizer without one."""
    lr = optimizers[0].param_groups[0].get("lr")
    return lr.detach().clone() if isinstance(lr, torch.Tensor) else lr


@contextmanager
def notes_on(error: BaseException) -> Iterator[None]:
    """Add an error of the record to the user's own as a note, so that it does not hide it."""
    try:
        yield
    except MpbackendError as second:
        error.add_note(str(second))


class Pack(NamedTuple):
    """Rows whose values stand in one tensor on the device, in the order of ``tensors_of``."""

    rows: list[Pending]
    values: torch.Tensor


class Journal:
    """Pending and finished rows.

    Args:
        clock: the device's clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: list[Pending] = []
        self._packs: deque[Pack] = deque(maxlen=KEPT_ROWS // PACKED_ROWS)
        self._ready: deque[StepRow] = deque(maxlen=KEPT_ROWS)
        self._last_mark: Any = None
        self._warned = False
        self._flushed_at = time.monotonic()
        self.metrics: dict[int, dict[str, float]] = {}

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Keep metrics for the row of a step.

        Raises:
            SessionError: a value is not one number.
        """
        for name, value in metrics.items():
            try:
                number = float(value)  # type: ignore[arg-type] # whatever float() takes
            except (TypeError, ValueError, RuntimeError) as error:
                raise SessionError(f"log({name}={value!r:.40})", found="not a number", remedy="log plain numbers or scalar tensors") from error
            self.metrics.setdefault(step, {})[name] = number

    def add(self, row: Pending) -> bool:
        """Keep a row; True when it is time to flush. No synchronization."""
        self._pending.append(row)
        count = len(self._pending)
        if count % PACKED_ROWS == 0:
            self._pack()
        return count >= FLUSH_STEPS or time.monotonic() - self._flushed_at >= FLUSH_SECONDS

    def _pack(self) -> None:
        """Put the values of the pending rows into one tensor; rows whose verdict somebody may still read stay as they are, the last of them."""
        if any(row.outcome.verdict is not None for row in self._pending):
            del self._pending[:-KEPT_ROWS]
            return
        tensors = [tensor for row in self._pending for tensor in tensors_of(row)]
        values = stack_scalars(tensors) if tensors else torch.empty(0)
        rows = [
            row._replace(
                losses=(UNREAD,) * len(row.losses),
                grad_norm=UNREAD if isinstance(row.grad_norm, torch.Tensor) else row.grad_norm,
                lr=UNREAD if isinstance(row.lr, torch.Tensor) else row.lr,
            )
            for row in self._pending
        ]
        self._packs.append(Pack(rows, values))
        self._pending = []

    def read(self) -> list[StepRow]:
        """Read every pending row from the device in one batch and return them; they also wait for ``drain``."""
        packs, pending = list(self._packs), self._pending
        self._packs.clear()
        self._pending = []
        self._flushed_at = time.monotonic()
        if not pending and not packs:
            return []
        tensors = [tensor for row in pending for tensor in tensors_of(row)]
        parts = [pack.values for pack in packs if pack.values.numel()] + ([stack_scalars(tensors)] if tensors else [])
        values = iter(torch.cat([part.double() for part in parts] if len({part.dtype for part in parts}) > 1 else parts).tolist() if parts else [])
        rows = [self._finish(row, values) for row in (*(row for pack in packs for row in pack.rows), *pending)]
        self._ready.extend(rows)
        taken = next((row.step for row in rows if row.nonfinite and row.stepped), None)
        if taken is not None and not self._warned:
            self._warned = True
            found = f"step {taken} was taken although its loss or gradient norm is inf or NaN"
            warnings.warn(f"{found}: only dynamic loss scaling skips a step, and only for its gradients; the weights may be lost", stacklevel=3)
        return rows

    def _finish(self, row: Pending, values: Iterator[float]) -> StepRow:
        losses = [next(values) for _ in row.losses]
        norm = next(values) if isinstance(row.grad_norm, torch.Tensor) else row.grad_norm
        lr = next(values) if isinstance(row.lr, torch.Tensor) else row.lr
        loss = sum(losses) / max(row.micro_batches, 1) if losses else None
        verdict = row.outcome.verdict
        if verdict is not None and verdict.tensors:
            verdict.settle([next(values) for _ in verdict.tensors])
        ms = None if self._last_mark is None else self._clock.elapsed_ms(self._last_mark, row.mark)
        self._last_mark = row.mark
        nonfinite = any(value is not None and not math.isfinite(value) for value in (loss, norm))
        return StepRow(
            step=row.step,
            loss=None if loss is None else to_number(loss),
            grad_norm=None if norm is None else to_number(norm),
            scale=row.outcome.loss_scale,
            stepped=row.outcome.stepped,
            reason=row.outcome.reason,
            nonfinite=nonfinite,
            lr=None if lr is None else to_number(lr),
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
    if row.outcome.verdict is not None:
        yield from row.outcome.verdict.tensors
