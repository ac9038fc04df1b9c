"""One step, shown to an auditor: of a session, or of a loop that is the user's own."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpbackend.observe.audit import SavedActivations
from mpbackend.observe.audit_modules import ModulePaths
from mpbackend.observe.audit_observer import Auditor
from mpbackend.observe.audit_workload import Workload
from mpbackend.observe.classes import observed_classes
from mpbackend.observe.portability import look_at_graph
from mpbackend.train.diagnosis import Diagnosis
from mpbackend.train.session import Session


class StepWatch:
    """Stands where a session's recording stands, and shows one step to an auditor.

    Args:
        auditor: sees the operations.
        paths: follows the modules.
        model: the model.
        values: look for the first value that is not finite; tensors need memory for that.

    Attributes:
        observing: whether the present step is shown.
        classes: bytes of the five classes by format, read before gradients were cleared.
    """

    open = False
    segment = 0

    def __init__(self, auditor: Auditor, paths: ModulePaths, model: torch.nn.Module, *, values: bool) -> None:
        self._auditor = auditor
        self._paths = paths
        self._activations = SavedActivations([*model.parameters(), *model.buffers()])
        self._diagnosis = Diagnosis(model) if values else None
        self.observing = True
        self.classes: dict[str, dict[str, int]] = {}
        self.session: Session | None = None

    def enter(self, phase: Literal["forward", "backward"], stack: ExitStack) -> None:
        """Observe a pass."""
        if phase == "forward":
            stack.enter_context(self._activations)
        stack.enter_context(self._paths.watch())
        if self._diagnosis is not None and phase == "forward":
            stack.enter_context(self._diagnosis.watch(phase))  # below the auditor, which is not to see what it reads
        stack.enter_context(self._auditor)

    def finish_step(self, model: torch.nn.Module, optimizers: Any, *, stepped: bool) -> None:
        """Read what the step holds."""
        if self.observing:
            weights = None if self.session is None else self.session.weights
            self.classes = observed_classes(model, optimizers, self._activations.bytes, state=() if weights is None else weights.held())

    def tell(self) -> None:
        """Keep the first value that was not finite as a finding."""
        if self._diagnosis is not None and self._diagnosis.finding:
            remedy = "compute there in fp32, or use the operation that torch has for it"
            self._auditor.find("nonfinite", "the first value that is not finite", self._diagnosis.finding, remedy)

    def write(self, *_: object) -> None:
        """Write nothing: an audit has no record."""

    def close(self) -> None:
        """Hold nothing that would have to be closed."""


def watch_session(session: Session, watch: StepWatch) -> None:
    """Put a watch where the session's recording stands; the session was prepared without one."""
    watch.session = session
    stand_in: Any = watch
    session._recording = stand_in
    session._around._recording = stand_in


def session_step(session: Session, workload: Workload, auditor: Auditor, device: torch.device) -> Any:
    """Run one step of a session, shown to the auditor; returns its result."""
    with auditor.timing():
        with session.autocast():
            loss = workload.loss()
        look_at_graph(auditor, loss, device)
        session.backward(loss)
        with auditor, auditor.phase("optimizer"):
            return session.step()


def own_step(workload: Workload, watch: StepWatch, auditor: Auditor, optimizer: torch.optim.Optimizer) -> None:
    """Run one step of a loop of the user's own, shown to the auditor; what optimizers do is told apart by hooks on all of them."""
    step = workload.step or nullcontext
    phases = ExitStack()

    def enter(*_: object) -> None:
        watch.finish_step(workload.model, [optimizer], stepped=True)  # gradients are still there
        phases.enter_context(auditor.phase("optimizer"))

    def leave(*_: object) -> None:
        phases.close()
        gradients = watch.classes.get("gradients", {})
        watch.finish_step(workload.model, [optimizer], stepped=True)
        watch.classes["gradients"] = gradients

    hooks = (register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave))
    try:
        with ExitStack() as stack, auditor.timing():
            watch.enter("forward", stack)
            step()
    finally:
        for hook in hooks:
            hook.remove()
