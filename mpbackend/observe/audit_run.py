"""Running a workload under a plan and auditing one step of it."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch

from mpbackend.errors import MpbackendError, describe
from mpbackend.observe.audit import SavedActivations
from mpbackend.observe.audit_document import AuditDocument, Basis
from mpbackend.observe.audit_fallback import leaves_to_host
from mpbackend.observe.audit_modules import ModulePaths
from mpbackend.observe.audit_observer import Auditor
from mpbackend.observe.audit_summary import cast_rows, fallback_rows, op_rows, product_rows, request_rows
from mpbackend.observe.audit_workload import Build, Workload, build_workload
from mpbackend.observe.classes import observed_classes
from mpbackend.observe.ledger import ledger, mfu, optimizer_key, rate_per_s
from mpbackend.observe.portability import look_at_banned, look_at_graph, look_at_model, look_at_passes
from mpbackend.planning import Plan
from mpbackend.target import Target, autocast_dtype
from mpbackend.train.session import Session


class Answers(Protocol):
    """Gives numbers where a step reads the device and tensors have no memory.

    Attributes:
        overflow: whether the gradients of the step are to have overflowed.
    """

    overflow: bool

    def __call__(self, tensor: torch.Tensor) -> Any:
        """Return the number that the read of a scalar gives."""


class StepWatch:
    """Stands where a session's recording stands, and shows one step to an auditor.

    Args:
        auditor: sees the operations.
        paths: follows the modules.
        held: parameters and buffers, which are no activations.

    Attributes:
        observing: whether the present step is shown.
        classes: bytes of the five classes by format, read before gradients were cleared.
    """

    open = False
    segment = 0

    def __init__(self, auditor: Auditor, paths: ModulePaths, held: list[torch.Tensor]) -> None:
        self._auditor = auditor
        self._paths = paths
        self._activations = SavedActivations(held)
        self.observing = True
        self.classes: dict[str, dict[str, int]] = {}
        self.session: Session | None = None

    def enter(self, phase: Literal["forward", "backward"], stack: ExitStack) -> None:
        """Observe a pass."""
        if phase == "forward":
            stack.enter_context(self._activations)
        stack.enter_context(self._paths.watch())
        stack.enter_context(self._auditor)

    def finish_step(self, model: torch.nn.Module, optimizers: Any, *, stepped: bool) -> None:
        """Read what the step holds."""
        if self.observing and self.session is not None:
            weights = self.session.weights
            self.classes = observed_classes(model, optimizers, self._activations.bytes, state=() if weights is None else weights.held())

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


def audit_workload(
    build: Build,
    target: Target,
    plan: Plan,
    *,
    name: str = "",
    steps: int = 0,
    strict: bool = False,
    basis: Basis = "live",
    answers: Answers | None = None,
    fp32: bool = True,
    banned: Mapping[str, object] | None = None,
) -> AuditDocument:
    """Make a workload on a target, run one step of it under a plan and return what was seen.

    Args:
        build: makes the workload on a device.
        target: where.
        plan: a plan for the target that runs.
        name: of the workload, for the reader.
        steps: steps to time after the audited one, without the audit; 0 times nothing.
        strict: raise at the first operation that the device leaves to the host.
        basis: ``fake`` when tensors have no memory.
        answers: numbers for reads of the device that have none.
        fp32: run one more forward pass, to compare its activations with those of fp32.
        banned: filled, while the step runs, with the operators that the target refuses under autocast.

    Raises:
        BackendError: strict, and the device left an operation to the host.
        PlanError: the plan does not run.
    """
    activations = {} if not fp32 else {"fp32": fp32_activations(build, target)}
    workload = build_workload(build, target.device)
    optimizer = workload.optimizer or torch.optim.AdamW(workload.model.parameters())
    paths = ModulePaths(workload.model)
    autocast = "" if autocast_dtype(plan) is None else plan.effective.compute.forward
    leaves = leaves_to_host(target.device) if basis == "live" else None
    auditor = Auditor(paths, leaves_device=leaves, strict=strict, autocast=autocast, answers=answers, repairs=basis == "fake")
    look_at_model(auditor, workload.model, target.device, autocast_dtype(plan), fake=basis == "fake")
    watch = StepWatch(auditor, paths, [*workload.model.parameters(), *workload.model.buffers()])
    notes: list[str] = []
    seconds = 0.0
    overflow = ""
    with warnings.catch_warnings(), target.prepare(workload.model, optimizer, plan=plan) as session:
        watch_session(session, watch)
        try:
            one_step(session, workload, auditor, target.device)
        except MpbackendError:
            raise
        except Exception as error:  # noqa: BLE001 - a model may fail in any way; what was seen until then says why
            notes.append(f"the step failed: {describe(error)}")
            auditor.find("step-failed", "the audited step", describe(error), "see the other findings; they come first")
            session._window.reset()
        watch.observing = False
        if answers is not None and session.loss_scale.dynamic and not notes:
            overflow = overflow_path(session, workload, answers, paths, target.device)
        if steps and not notes:
            seconds = timed_steps(session, workload, steps)
    look_at_passes(auditor, plan)
    look_at_banned(auditor, banned or {}, plan)
    seen = auditor.summary()
    parameters = sum(parameter.numel() for parameter in workload.model.parameters())
    rate = mfu(flops_by_compute(auditor, plan), accumulate_of(plan), seconds, target.plugins.matrix(), plan.device.key)
    return AuditDocument(
        workload=name or getattr(build, "__qualname__", "workload"),
        device=plan.device.key,
        recipe=plan.recipe,
        granted=plan.granted,
        basis=basis,
        torch=str(torch.__version__),
        parameters=parameters,
        flops=seen.flops,
        effective=seen.effective,
        shares=seen.shares,
        uncounted=seen.uncounted,
        ops=op_rows(auditor, plan),
        products=product_rows(auditor, target.plugins.matrix(), plan.device.arch, seen.flops),
        casts=cast_rows(auditor),
        fallbacks=fallback_rows(auditor),
        requests=tuple(request_rows(plan, seen, watch.classes)),
        memory=ledger(watch.classes, plan.effective, parameters, key_of(optimizer), activations),
        findings=tuple(auditor.findings),
        tokens=workload.tokens,
        seconds=seconds,
        tokens_per_s=rate_per_s(workload.tokens, seconds),
        mfu=rate.share,
        mfu_basis=rate.basis,
        overflow=overflow,
        notes=tuple(notes),
    )


def one_step(session: Session, workload: Workload, auditor: Auditor, device: torch.device) -> Any:
    """Run one step, shown to the auditor; returns its result."""
    with auditor.timing():
        with session.autocast():
            loss = workload.loss()
        look_at_graph(auditor, loss, device)
        session.backward(loss)
        with auditor, auditor.phase("optimizer"):
            return session.step()


def overflow_path(session: Session, workload: Workload, answers: Answers, paths: ModulePaths, device: torch.device) -> str:
    """Run one step whose gradients overflow and return in words what it does."""
    auditor = Auditor(paths, answers=answers, repairs=True)
    watch_session(session, StepWatch(auditor, paths, [*workload.model.parameters()]))
    before = session.loss_scale.value
    answers.overflow = True
    try:
        result = one_step(session, workload, auditor, device)
    finally:
        answers.overflow = False
    if result.verdict is not None:
        return "decided on the device: the fused optimizer reads the verdict itself, and the host waits for nothing"
    calls = sum(count for (phase, *_), (count, _) in auditor.rows.items() if phase == "optimizer")
    done = "stepped" if result.stepped else f"skipped, {result.reason}"
    return f"{done}; loss scale {before:g} -> {session.loss_scale.value:g}; {calls} operations after the backward pass, the optimizer's not among them"


def timed_steps(session: Session, workload: Workload, steps: int) -> float:
    """Return the median seconds of some steps, without any audit, by the device's clock."""
    marks = [session._clock.mark()]
    for _ in range(steps):
        with session.autocast():
            loss = workload.loss()
        session.backward(loss)
        session.step()
        marks.append(session._clock.mark())
    return statistics.median(session._clock.elapsed_ms(start, end) for start, end in pairwise(marks)) / 1e3


def fp32_activations(build: Build, target: Target) -> dict[str, int]:
    """Return what a forward pass of the workload keeps for backward under the recipe fp32, by format, on a workload made for that."""
    workload = build_workload(build, target.device)
    saved = SavedActivations([*workload.model.parameters(), *workload.model.buffers()])
    with saved:
        loss = workload.loss()
    del loss
    return saved.bytes


def key_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the key of an optimizer's memory; None for one that is not modeled."""
    first = optimizer.param_groups[0]
    return optimizer_key(type(optimizer).__name__, momentum=bool(first.get("momentum")), amsgrad=bool(first.get("amsgrad")))


def flops_by_compute(auditor: Auditor, plan: Plan) -> Mapping[str, int]:
    """Return the FLOPs of forward and backward by the format that was computed in."""
    found: dict[str, int] = {}
    for row in op_rows(auditor, plan):
        if row.flops and row.phase != "optimizer":
            found[row.compute] = found.get(row.compute, 0) + row.flops
    return found


def accumulate_of(plan: Plan) -> str:
    """Return the format of the accumulator that was granted for the forward products."""
    return next((decision.granted for decision in plan.decisions if decision.role == "accumulate.forward"), plan.effective.accumulate.forward)
