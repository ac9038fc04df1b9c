"""The session: mixed-precision training in the only order that is right.

Between ``prepare`` and ``close`` the session owns autocast, loss scaling, accumulation, clipping, the optimizer and scheduler steps, and the record. The hot
path reads the device only where the plan says so.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mpbackend.errors import SessionError
from mpbackend.observe.record import StepRow
from mpbackend.train import state
from mpbackend.train.around import Around
from mpbackend.train.autocast import ForwardContext
from mpbackend.train.boundary import Boundary, Scheduler
from mpbackend.train.buffers import BufferGuard
from mpbackend.train.data import DataWatch
from mpbackend.train.journal import Journal, LearningRate, Pending, learning_rate, notes_on
from mpbackend.train.loss_scale import LossScale
from mpbackend.train.step import StepResult
from mpbackend.train.window import Window

if TYPE_CHECKING:
    import os

    from mpbackend.backend import Backend
    from mpbackend.planning import Plan
    from mpbackend.train.recording import Recording

BatchT = TypeVar("BatchT")
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
        segment: how often the run was resumed.
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
        self.segment = 0
        self.loss_scale = LossScale(plan.effective.loss_scale)
        self._window = Window(plan.micro_batches, average=average)
        self._recording = recording
        self._clock = backend.clock(plan.device)
        self._overflow = backend.overflow(plan.device)
        self._around = Around(backend, plan, recording)
        self._data = DataWatch()
        self._journal = Journal(self._clock)
        self._guard = BufferGuard(model) if self.loss_scale.dynamic else None
        self._end = Boundary(
            self.optimizers,
            self.schedulers,
            self.loss_scale,
            clip_norm=clip_norm,
            needs_norm=recording is not None,
            overflow=self._overflow,
            guard=self._guard,
        )
        self._guarding = False
        self._needs_autocast = autocast_dtype is not None
        self._forward = ForwardContext(plan.device.type, autocast_dtype, lambda: self._around.make("forward"))
        for optimizer in self.optimizers:
            resources.callback(optimizer.register_step_pre_hook(self._end.check_turn).remove)
        self._release = weakref.finalize(self, resources.close)
        self._closed = False

    def watch(self, loader: Iterable[BatchT]) -> Iterator[BatchT]:
        """Yield the batches of ``loader`` unchanged; count samples and tokens, and fingerprint the data."""
        return self._data.watch(loader)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass; usable from any thread, and nested. Under fp32 it turns an outer autocast off."""
        self._check_open("autocast()")
        if self._guard is not None and not self._guarding and torch.is_grad_enabled():
            self._guarding = True
            self._guard.open_window()
        return self._forward

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run the backward pass of a scalar loss, scaled as planned.

        Args:
            loss: scalar; a 16-bit loss is scaled in fp32.
            retain_graph: as in ``torch.Tensor.backward``.

        Raises:
            SessionError: the forward pass was not under ``autocast()``, the loss is no scalar or elsewhere, the gradients were already unscaled, or the
                session is closed.
        """
        self._check_open("backward()")
        if self._needs_autocast and not self._forward.used:
            found = f"the recipe computes in {self.plan.effective.compute.forward}, but autocast() was not entered for this micro-batch"
            raise SessionError("backward()", found=found, remedy="compute the loss inside `with session.autocast():`")
        first = self._window.empty
        loss = self._window.add(loss, self.plan.device)
        scale = self.loss_scale.value
        if scale != 1.0:
            loss = (loss if loss.dtype in (torch.float32, torch.float64) else loss.float()) * scale
        if self._overflow is not None and first:
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
            SessionError: called inside an autocast, before ``backward()``, with a bad denominator, or after ``close()``.
        """
        self._check_open("step()")
        if self._forward.entered or torch.is_autocast_enabled(self.plan.device.type):
            where = "session.autocast()" if self._forward.entered else "torch.autocast"
            raise SessionError("step()", found=f"called inside {where}", remedy="leave the context before step()")
        window = self._window
        window.divisor(denominator)
        window.finish_micro_batch()
        self._forward.used = False
        if window.seen < window.micro_batches:
            return StepResult(False, f"accumulating {window.seen}/{window.micro_batches}", None, self.loss_scale.value, None)
        return self._close_window(denominator)

    def flush(self, *, denominator: float | None = None) -> StepResult | None:
        """Close a partial group of micro-batches; None when none is open."""
        self._check_open("flush()")
        self._window.divisor(denominator)
        if self._window.open:
            self._window.finish_micro_batch()
        return self._close_window(denominator) if self._window.seen else None

    def unscale(self) -> list[torch.Tensor]:
        """Unscale the gradients now, for one's own clipping, and return the parameters; ``step`` will not unscale again.

        The verdict on overflow is taken from the gradients as they are now: clipping an infinity away does not hide it.

        Raises:
            SessionError: the last micro-batch of the step has had no ``backward()`` yet.
        """
        self._check_open("unscale()")
        window = self._window
        if not window.open or not window.last:
            found = f"micro-batch {window.seen + 1} of {window.micro_batches}" + ("" if window.open else " without a backward()")
            raise SessionError("unscale()", found=found, remedy="call it after the backward() of the last micro-batch, before step()")
        return self._end.unscale(window)

    def _close_window(self, denominator: float | None) -> StepResult:
        parameters = self._end.parameters()
        lr = learning_rate(self.optimizers)
        try:
            return self._finish(self._end.apply(parameters, self._window, denominator), lr)
        finally:  # whatever an optimizer or a scheduler raises, no gradient is used twice
            for parameter in parameters:
                parameter.grad = None
            self._window.reset()
            self._guarding = False

    def _finish(self, result: StepResult, lr: LearningRate) -> StepResult:
        self.steps += 1
        samples, tokens = self._data.take()
        if self._recording is not None:
            self._recording.finish_step(self.model, self.optimizers, stepped=result.stepped)
        due = self._journal.add(Pending.of(self.steps, self._window, result, lr, self._clock.mark(), samples, tokens))
        if due or (self._recording is not None and (self.steps == 1 or result.nonfinite)):
            self.write_record()
        return result

    def _check_open(self, asked: str) -> None:
        if self._closed:
            raise SessionError(asked, found="the session is closed", remedy="prepare a new one")

    def log(self, **metrics: float) -> None:
        """Add metrics by name to the row of the step that is being built; a tensor is read at once. ``SessionError`` when one is no number."""
        self._journal.log(self.steps + 1, metrics)

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
        self._check_boundary("save()")
        state.save(self, path, extra or {})

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Restore what ``save`` wrote; returns ``extra``. With a record, only before the first step. See ``mpbackend.train.state``."""
        self._check_boundary("load()")
        if self._recording is not None and self.steps:
            raise SessionError("load()", found=f"{self.steps} steps are in the record", remedy="load before the first step, or prepare with a new record")
        self._guarding = False
        return state.load(self, path)

    def resume(self, *, steps: int, segment: int) -> None:
        """Count on from a checkpoint, in a new segment of the record."""
        self.steps, self.segment = steps, segment
        if self._recording is not None:
            self._recording.resume(segment, self.model)

    def _check_boundary(self, asked: str) -> None:
        self._check_open(asked)
        if not self._window.empty:
            raise SessionError(asked, found=f"{self._window.open_text} open", remedy="call flush() first")

    def close(self) -> None:
        """Write what is pending and undo what ``prepare`` set; may be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self._release()
        finally:
            with closing(self._recording) if self._recording is not None else NOTHING:
                self.write_record()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            with notes_on(error):
                self.close()
            return
        if not self._window.empty:
            warnings.warn(f"{self._window.open_text} open and dropped; call session.flush() first", stacklevel=2)
        self.close()
