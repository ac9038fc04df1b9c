"""The session: mixed-precision training in the only order that is right.

Between ``prepare`` and ``close`` the session owns autocast, loss scaling, accumulation, clipping, the optimizer and scheduler steps, and the record. The hot
path reads the device only where the plan says so.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from mpbackend.errors import SessionError
from mpbackend.train import state
from mpbackend.train.around import Around
from mpbackend.train.autocast import ForwardContext
from mpbackend.train.backward import Backward
from mpbackend.train.boundary import Boundary
from mpbackend.train.buffers import BufferGuard
from mpbackend.train.checks import check_unscalable
from mpbackend.train.clipping import Limits
from mpbackend.train.deferral import choose_scale
from mpbackend.train.gradient_marks import GradientMarks
from mpbackend.train.journal import learning_rate, notes_on
from mpbackend.train.patience import Patience
from mpbackend.train.penalty import unscaled_gradients
from mpbackend.train.schedule import Schedule, Scheduler
from mpbackend.train.session_record import SessionRecord
from mpbackend.train.step import StepResult
from mpbackend.train.window import Window

if TYPE_CHECKING:
    import os

    from mpbackend.backend import Backend
    from mpbackend.planning import Plan
    from mpbackend.train.distributed import Ranks
    from mpbackend.train.recording import Recording
    from mpbackend.train.weights import WorkingWeights


class Session(SessionRecord):
    """One training run under one plan. Made by ``Target.prepare``; use it as a context manager.

    Args:
        model: the model, already on the device.
        optimizers: the optimizers, one verdict for all.
        plan: a plan that an installed plugin runs.
        backend: that plugin's backend.
        autocast_dtype: dtype of autocast; None for fp32.
        limits: how gradients are clipped.
        average: divide the summed gradients by the micro-batches seen.
        schedulers: stepped after every taken step.
        recording: writes the record, or None.
        conversion: one row per layer that the plan changes: layer, action, reason.
        resources: what to undo on close: fence, policy.
        weights: what stands between the parameters and the optimizers, or None.
        ranks: the ranks of the run, or None; ``recorded`` tells whether one of them writes a record, so that all need the norm.
        stateful: the user's own objects to save and load with the session.

    Attributes:
        plan: the plan.
        loss_scale: the state of loss scaling.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        plan: Plan,
        backend: Backend,
        *,
        autocast_dtype: torch.dtype | None,
        limits: Limits,
        average: bool,
        schedulers: Sequence[Scheduler],
        recording: Recording | None,
        conversion: Sequence[Mapping[str, str]],
        resources: ExitStack,
        weights: WorkingWeights | None = None,
        ranks: Ranks | None = None,
        recorded: bool = False,
        stateful: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, optimizers, backend.clock(plan.device), recording)
        self.schedulers = tuple(schedulers)
        self.plan = plan
        self.conversion = tuple(conversion)
        self.weights = weights
        self.ranks = ranks
        self.stateful = dict(stateful or {})
        on_device = weights is None and not (ranks is not None and ranks.sharded)
        self.loss_scale = choose_scale(plan.effective.loss_scale, self.optimizers, on_device=on_device)
        self._window = Window(plan.micro_batches, average=average)
        overflow = backend.overflow(plan.device)
        self._around = Around(backend, plan, recording, ranks)
        self._guard = BufferGuard(model) if self.loss_scale.dynamic else None
        self._schedule = Schedule(self.schedulers)
        self._end = Boundary(
            self.optimizers,
            self._schedule,
            self.loss_scale,
            limits=limits,
            needs_norm=recorded,
            overflow=overflow,
            guard=self._guard,
            weights=weights,
            ranks=ranks,
            block=getattr(backend, "update_block", 0),
        )
        self._marks = GradientMarks(model, scaled=self.loss_scale.settings.mode != "none", single=plan.micro_batches == 1)
        self._patience = Patience(model, plan.effective.loss_scale.patience)
        self._backward = Backward(plan.device.type, self.loss_scale, overflow, self._around, self._patience, self.count)
        self._guarding = False
        self._needs_autocast = autocast_dtype is not None or (ranks is not None and plan.micro_batches > 1)
        self._forward = ForwardContext(plan.device.type, autocast_dtype, lambda: self._around.make("forward", self._patience.diagnosis, self._window))
        for optimizer in self.optimizers:
            resources.callback(optimizer.register_step_pre_hook(self._end.check_turn).remove)
        self._release = weakref.finalize(self, resources.close)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass; usable from any thread, and nested. Under fp32 it turns an outer autocast off."""
        self._check_open("autocast()")
        if self._guard is not None and not self._guarding and torch.is_grad_enabled():
            self._guarding = True
            self._guard.open_window()
        return self._forward

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run the backward pass of a scalar loss, scaled as planned. An autocast that is open is closed meanwhile, and counted in the record.

        Args:
            loss: scalar; a 16-bit loss is scaled in fp32.
            retain_graph: as in ``torch.Tensor.backward``.

        Raises:
            SessionError: the forward pass was not under ``autocast()``, the loss is no scalar, has no graph or is elsewhere, somebody else touched the
                gradients, they were already unscaled, or the session is closed.
        """
        self._check_open("backward()")
        if self._needs_autocast and not self._forward.used:
            found = f"the recipe computes in {self.plan.effective.compute.forward}, but autocast() was not entered for this micro-batch"
            raise SessionError("backward()", found=found, remedy="compute the loss inside `with session.autocast():`")
        window, first = self._window, self._window.empty
        sources = self._end.sources(again=first)
        if first:
            self._marks.check_clean(sources)
        else:
            self._marks.check("backward()", sources, self._drop)
        self._backward.run(window.add(loss, self.plan.device), lambda: self._drop(sources), retain_graph=retain_graph, first=first)
        if self.ranks is not None:
            self.ranks.went_backward()
        self._marks.take(sources)

    def grad(
        self,
        outputs: torch.Tensor | Sequence[torch.Tensor],
        inputs: torch.Tensor | Sequence[torch.Tensor],
        *,
        create_graph: bool = True,
        allow_unused: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Return gradients to build a loss from, for example a gradient penalty: taken under the loss scale and divided by it.

        Args:
            outputs: tensors of any shape; the gradient is that of their sum.
            inputs: what to differentiate by.
            create_graph: whether the gradients can be part of a loss.
            allow_unused: zeros for inputs that the outputs do not depend on, instead of an error.
        """
        self._check_open("grad()")
        self._window.penalized = self.loss_scale.dynamic
        return unscaled_gradients(outputs, inputs, self._backward.scale, create_graph=create_graph, allow_unused=allow_unused)

    def step(self, closure: object = None, *, denominator: float | None = None) -> StepResult:
        """Finish a micro-batch; at the boundary unscale, clip and step the optimizers, or say why not.

        Args:
            closure: refused: it would run backward behind the session's back.
            denominator: divide the summed gradients by this count, for example tokens over all micro-batches; of several ranks each gives its own.

        Returns:
            What was done. Gradients are cleared after a taken or a skipped step.

        Raises:
            SessionError: called inside an autocast, before ``backward()``, with a closure or a bad denominator, after ``close()``, or when steps were skipped
                in a row without a chance to recover; names where the first non-finite value came from.
        """
        self._check_open("step()")
        if closure is not None:
            raise SessionError("step(closure)", found="a closure, which runs backward several times", remedy="call session.backward(loss), then session.step()")
        self._forward.check_left("step()")
        window = self._window
        self._end.check_divisor(window, denominator)
        window.finish_micro_batch()
        self._forward.used = False
        if window.seen < window.micro_batches:
            return StepResult(False, f"accumulating {window.seen}/{window.micro_batches}", None, self._backward.scale, None)
        return self._close_window(denominator)

    def flush(self, *, denominator: float | None = None) -> StepResult | None:
        """Close a partial group of micro-batches; None when none is open."""
        self._check_open("flush()")
        self._forward.check_left("flush()")
        self._end.check_divisor(self._window, denominator)
        if self._window.open:
            self._window.finish_micro_batch()
            self._forward.used = False
        return self._close_window(denominator) if self._window.seen else None

    def unscale(self) -> list[torch.Tensor]:
        """Unscale the gradients now, for one's own clipping, and return what holds them: parameters or their masters; ``step`` will not unscale again.

        The verdict on overflow is taken from the gradients as they are now: clipping an infinity away does not hide it.

        Raises:
            SessionError: the last micro-batch of the step has had no ``backward()`` yet.
        """
        self._check_open("unscale()")
        self._window.check_last("unscale()")
        check_unscalable(self.plan)
        self._marks.check("unscale()", self._end.sources(), self._drop)
        self._marks.forget()
        return self._end.unscale(self._window)

    def _close_window(self, denominator: float | None) -> StepResult:
        sources = self._end.sources()
        self._marks.check("step()", sources, self._drop)
        try:
            self._schedule.settle()
            lr = learning_rate(self.optimizers)
            free = self._recording is None or not self._recording.observing
            result = self.finish_step(self._end.apply(sources, self._window, denominator, free=free), self._window, lr)
            if self.schedulers and result.verdict is None and result.stepped:
                self._schedule.step()
        finally:  # whatever an optimizer or a scheduler raises, no gradient is used twice
            self._drop(sources)
        self._patience.check(self.loss_scale, self._schedule, result)
        return result

    def _drop(self, sources: Sequence[torch.Tensor]) -> None:
        for source in sources:
            source.grad = None
        if self.ranks is not None:
            self.ranks.drop()
        self._window.reset()
        self._marks.forget()
        self._guarding = False

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Save everything the next step depends on; see ``mpbackend.train.state``."""
        self._check_boundary("save()")
        self._schedule.settle()
        state.save(self, path, extra or {})

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Restore what ``save`` wrote; returns ``extra``. With a record, only before the first step. See ``mpbackend.train.state``."""
        self._check_boundary("load()")
        if self._recording is not None and self.steps:
            raise SessionError("load()", found=f"{self.steps} steps are in the record", remedy="load before the first step, or prepare with a new record")
        self._guarding = False
        self._schedule.settle()  # what is still to come belongs to the run that is left
        extra = state.load(self, path)
        self._schedule.adopt()
        return extra

    def _check_boundary(self, asked: str) -> None:
        self._check_open(asked)
        if not self._window.empty:
            raise SessionError(asked, found=f"{self._window.open_text} open", remedy="call flush() first")

    def close(self) -> None:
        """Write what is pending and undo what ``prepare`` set; may be called twice."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last:  # from the last to the first, whatever one of them raises
            if self._recording is not None:
                last.callback(self._recording.close)
            last.callback(self.write_record)
            last.callback(self._release)
            last.callback(self._schedule.settle)

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
        self._end.check_fed()
