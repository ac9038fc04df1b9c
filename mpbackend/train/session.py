"""The session: mixed-precision training in the only order that is right.

Between ``prepare`` and ``close`` the session owns autocast, loss scaling, accumulation, clipping, the optimizer and scheduler steps, and the record. The hot
path reads the device only where the plan says so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mpbackend.errors import SessionError
from mpbackend.observe.record import StepRow
from mpbackend.train import clipping, state, verdict
from mpbackend.train.around import Around
from mpbackend.train.autocast import ForwardContext
from mpbackend.train.buffers import BufferGuard
from mpbackend.train.data import DataWatch
from mpbackend.train.journal import Journal, Pending
from mpbackend.train.loss_scale import LossScale
from mpbackend.train.step import NO_GRADIENTS, StepResult

if TYPE_CHECKING:
    import os

    from mpbackend.backend import Backend
    from mpbackend.planning import Plan
    from mpbackend.train.recording import Recording

BatchT = TypeVar("BatchT")
Scheduler = torch.optim.lr_scheduler.LRScheduler
NOTHING = nullcontext()


class Session:
    """One training run under one plan. Made by ``Target.prepare``; use it as a context manager.

    Args:
        model: the model, already on the device.
        optimizers: the optimizers, one verdict for all.
        plan: a plan that an installed plugin runs.
        backend: that plugin's backend.
        autocast_dtype: dtype of autocast; None for fp32.
        clip_norm: largest gradient norm, or None.
        micro_batches: micro-batches a step.
        average: divide the summed gradients by the micro-batches seen.
        schedulers: stepped after every taken step.
        recording: writes the record, or None.
        resources: what to undo on close: fence, policy.

    Attributes:
        plan: the plan.
        conversion: one row per layer that the plan changes: layer, action, reason.
        steps: steps so far, skipped ones included.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        plan: Plan,
        backend: Backend,
        *,
        autocast_dtype: torch.dtype | None,
        clip_norm: float | None,
        average: bool,
        schedulers: Sequence[Scheduler],
        recording: Recording | None,
        conversion: Sequence[Mapping[str, str]],
        resources: ExitStack,
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self.schedulers = tuple(schedulers)
        self.plan = plan
        self.conversion = tuple(conversion)
        self.steps = 0
        self.loss_scale = LossScale(plan.effective.loss_scale)
        self._parameters = clipping.unique_parameters(optimizers)
        self._clip_norm = clip_norm
        self._average = average
        self._micro_batches = plan.micro_batches
        self._accumulating = [StepResult(False, f"accumulating {n}/{plan.micro_batches}", None, 1.0, None) for n in range(plan.micro_batches)]
        self._seen = 0
        self._backward_calls = 0
        self._unscaled = False
        self._losses: list[torch.Tensor] = []
        self._recording = recording
        self._needs_norm = clip_norm is not None or recording is not None or self.loss_scale.dynamic
        self._clock = backend.clock(plan.device)
        self._overflow = backend.overflow(plan.device)
        self._around = Around(backend, plan, recording)
        self._data = DataWatch()
        self._journal = Journal(self._clock)
        self._guard = BufferGuard(model) if self.loss_scale.dynamic else None
        self._window_open = False
        self._needs_autocast = autocast_dtype is not None
        self._forward = ForwardContext(plan.device.type, autocast_dtype, lambda: self._around.make("forward"))
        self._resources = resources
        self._closed = False

    def watch(self, loader: Iterable[BatchT]) -> Iterator[BatchT]:
        """Yield the batches of ``loader`` unchanged; count samples and tokens, and fingerprint the data."""
        return self._data.watch(loader)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass; usable from any thread, and nested."""
        if not self._window_open:
            self._open_window()
        return self._forward

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run the backward pass of a scalar loss, scaled as planned.

        Args:
            loss: scalar; a 16-bit loss is scaled in fp32.
            retain_graph: as in ``torch.Tensor.backward``.

        Raises:
            SessionError: the forward pass was not under ``autocast()``, the gradients were already unscaled, or the session is closed.
        """
        if self._needs_autocast and not self._window_open:
            found = f"the recipe computes in {self.plan.effective.compute.forward}, but no autocast() was entered"
            raise SessionError("backward()", found=found, remedy="compute the loss inside `with session.autocast():`")
        self._check_open("backward()")
        if self._unscaled:
            raise SessionError("backward()", found="the gradients of this step were already unscaled", remedy="call step() first")
        self._losses.append(loss.detach())
        self._backward_calls += 1
        scale = self.loss_scale.value
        if scale != 1.0:
            loss = (loss if loss.dtype in (torch.float32, torch.float64) else loss.float()) * scale
        if self._overflow is not None and self._seen == 0:
            self._overflow.clear()
        with self._around.make("backward") or NOTHING:
            loss.backward(retain_graph=retain_graph)

    def step(self, *, denominator: float | None = None) -> StepResult:
        """Finish a micro-batch; at the boundary unscale, clip and step the optimizers, or say why not.

        Args:
            denominator: divide the summed gradients by this global count, for example tokens over all micro-batches.

        Returns:
            What was done. Gradients are cleared after a taken or a skipped step.

        Raises:
            SessionError: called inside ``autocast()``, before ``backward()``, or after ``close()``.
        """
        self._check_open("step()")
        if self._forward.entered:
            raise SessionError("step()", found="called inside session.autocast()", remedy="leave the context before step()")
        if self._backward_calls == 0:
            raise SessionError("step()", found="no backward() since the last step", remedy="call session.backward(loss) first")
        self._seen += 1
        if self._seen < self._micro_batches:
            return self._accumulating[self._seen]
        return self._boundary(denominator)

    def flush(self, *, denominator: float | None = None) -> StepResult | None:
        """Close a partial group of micro-batches; None when no micro-batch is open."""
        return self._boundary(denominator) if self._seen else None

    def unscale(self) -> list[torch.Tensor]:
        """Unscale the gradients now, for one's own clipping, and return the parameters; ``step`` will not unscale again."""
        if not self._unscaled:
            gradients = self._gradients()
            if gradients and self.loss_scale.value != 1.0:
                torch._foreach_mul_(gradients, 1.0 / self.loss_scale.value)
            self._unscaled = True
        return self._parameters

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _boundary(self, denominator: float | None) -> StepResult:
        scale = self.loss_scale.value
        gradients = self._gradients()
        if not gradients:
            return self._finish(StepResult(False, f"{NO_GRADIENTS}: 0 of {len(self._parameters)} parameters have gradients", None, scale, None))
        divisor = denominator if denominator is not None else (self._seen if self._average else 1)
        if not 0 < divisor < math.inf:
            raise SessionError(f"step(denominator={denominator!r})", found="not a finite number above 0", remedy="give the count that the loss sums over")
        factor = 1.0 / (divisor if self._unscaled else divisor * scale)
        multiplier: torch.Tensor | float = factor
        norm: torch.Tensor | float | None = None
        if self._needs_norm:
            norm = clipping.total_norm(gradients) if factor == 1.0 else clipping.total_norm(gradients) * factor
            if self._clip_norm is not None:
                multiplier = clipping.clip_coefficient(norm, self._clip_norm, factor)
            if self.loss_scale.dynamic:
                norm = verdict.read_norm(norm, self._overflow)
                if not math.isfinite(norm):
                    return self._skip(gradients, norm)
        if isinstance(multiplier, torch.Tensor) or multiplier != 1.0:
            torch._foreach_mul_(gradients, multiplier)
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        if self._guard is not None:
            self._guard.close_window()
        self.loss_scale.update(overflowed=False)
        return self._finish(StepResult(True, "", norm, scale, False if isinstance(norm, float) else None))

    def _skip(self, gradients: list[torch.Tensor], norm: float) -> StepResult:
        reason = verdict.skip_reason(self._losses, gradients, register=self._overflow is not None)
        if self._guard is not None:
            self._guard.restore()
        scale = self.loss_scale.value
        self.loss_scale.update(overflowed=True)
        return self._finish(StepResult(False, reason, norm, scale, True))

    def _finish(self, result: StepResult) -> StepResult:
        self.steps += 1
        samples, tokens = self._data.take()
        if self._recording is not None:
            self._recording.finish_step(self.model, self.optimizers, stepped=result.stepped)
        for parameter in self._parameters:
            parameter.grad = None
        row = Pending.of(self.steps, self._losses, result, self.optimizers[0].param_groups[0]["lr"], self._clock.mark(), samples, tokens)
        due = self._journal.add(row)
        self._losses = []
        self._seen = self._backward_calls = 0
        self._unscaled = self._window_open = False
        if due or (self._recording is not None and (self.steps == 1 or result.nonfinite)):
            self.write_record()
        return result

    def _check_open(self, asked: str) -> None:
        if self._closed:
            raise SessionError(asked, found="the session is closed", remedy="prepare a new one")

    def _open_window(self) -> None:
        self._check_open("autocast()")
        self._window_open = True
        if self._guard is not None:
            self._guard.open_window()

    def log(self, **metrics: float) -> None:
        """Add metrics to the row of the step that is being built (before ``step``) by name."""
        self._journal.metrics.setdefault(self.steps + 1, {}).update(metrics)

    def drain(self) -> Iterator[StepRow]:
        """Yield a row of plain numbers for every finished step that was not drained yet; reads the device once."""
        self.write_record()
        return self._journal.drain()

    def write_record(self) -> None:
        """Read the pending rows in one transfer and, when recording, write them."""
        rows = self._journal.read()
        if self._recording is not None:
            self._recording.write(rows, self._data.fingerprint)

    def account(self) -> str:
        """Return the five classes, asked and observed, as a table.

        Raises:
            SessionError: nothing was observed: no record was asked for, or no step was made.
        """
        if self._recording is not None and self.steps:
            return self._recording.account()
        raise SessionError("account()", found="no step was observed", remedy="prepare with record=..., then make one step")

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Save model, optimizers, schedulers, loss scale, counters and random state; see ``mpbackend.train.state``."""
        if self._seen:
            raise SessionError("save()", found=f"{self._seen} of {self._micro_batches} micro-batches are open", remedy="call flush() first")
        state.save(self, path, extra or {})

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Restore what ``save`` wrote; returns ``extra``. See ``mpbackend.train.state``."""
        return state.load(self, path)

    def close(self) -> None:
        """Write what is pending and undo what ``prepare`` set; may be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self._resources.close()
        finally:
            self.write_record()
            if self._recording is not None:
                self._recording.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and self._seen:
            warnings.warn(f"{self._seen} of {self._micro_batches} micro-batches are open and dropped; call session.flush() first", stacklevel=2)
        self.close()
