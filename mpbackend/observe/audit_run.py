"""Running a workload under a plan and auditing one step of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from mpbackend.observe.audit import SavedActivations
from mpbackend.observe.audit_document import AuditDocument, Basis, MemoryRow, OpRow
from mpbackend.observe.audit_fallback import leaves_to_host
from mpbackend.observe.audit_modules import ModulePaths
from mpbackend.observe.audit_observer import Auditor
from mpbackend.observe.audit_outcome import Ran, kept_error, noted, told_warnings
from mpbackend.observe.audit_step import StepWatch, own_step, session_step, watch_session
from mpbackend.observe.audit_summary import cast_rows, fallback_rows, op_rows, product_rows, request_rows, unaligned_notes
from mpbackend.observe.audit_workload import Build, Workload, build_workload
from mpbackend.observe.fake_device import fake_tensors
from mpbackend.observe.ledger import Mfu, ledger, mfu, optimizer_key, rate_per_s
from mpbackend.observe.portability import look_at_banned, look_at_model, look_at_passes
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
    ran = Ran()
    activations: dict[str, dict[str, int]] = {}
    if fp32:
        with noted(ran, "its activations in fp32 were not counted"):
            activations["fp32"] = fp32_activations(build, target)
    workload = build_workload(build, target.device)
    optimizer = workload.optimizer or torch.optim.AdamW(workload.model.parameters())
    paths = ModulePaths(workload.model)
    dtype = autocast_dtype(plan)
    leaves = leaves_to_host(target.device) if basis == "live" else None
    autocast = "" if dtype is None else plan.effective.compute.forward
    auditor = Auditor(paths, leaves_device=leaves, strict=strict, autocast=autocast, answers=answers, repairs=basis == "fake")
    look_at_model(auditor, workload.model, target.device, dtype, fake=basis == "fake")
    watch = StepWatch(auditor, paths, workload.model, values=basis == "live")
    if workload.step is not None:
        with kept_error(auditor, ran):
            own_step(workload, watch, auditor, optimizer)
    else:
        with told_warnings(ran), target.prepare(workload.model, optimizer, plan=plan) as session:
            converted = sum(row.get("action") in ("converted", "padded") for row in session.conversion)
            if converted:
                ran.notes.append(f"the activations of {converted} converted layers were not predicted")
            elif basis == "live" and plan.effective.params == "fp32":
                with noted(ran, "its activations were not predicted"):
                    activations["predicted"] = predicted_activations(build, target.device, dtype)
            watch_session(session, watch)
            with kept_error(auditor, ran, session):
                session_step(session, workload, auditor, target.device)
            watch.observing = False
            if answers is not None and session.loss_scale.dynamic and not ran.failed:
                ran.overflow = overflow_path(session, workload, answers, paths, target.device)
            if steps and not ran.failed:
                ran.seconds = timed_steps(session, workload, steps)
    watch.tell()
    look_at_passes(auditor, plan)
    look_at_banned(auditor, banned or {}, plan)
    made = Made(name or getattr(build, "__qualname__", "workload"), workload, optimizer, basis)
    return document(made, ran, auditor, plan, target, ledger_of(made, watch, plan, activations), watch.classes)


class Made(NamedTuple):
    """What was run: name, workload, its optimizer, and how."""

    name: str
    workload: Workload
    optimizer: torch.optim.Optimizer
    basis: Basis

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.workload.model.parameters())


def ledger_of(made: Made, watch: StepWatch, plan: Plan, activations: Mapping[str, Mapping[str, int]]) -> tuple[MemoryRow, ...]:
    """Return the ledger of a step; predictions where its optimizer is modeled and a session ran it."""
    known = key_of(made.optimizer) if made.workload.step is None else None
    return ledger(watch.classes, plan.effective, made.parameters, known, activations)


def document(
    made: Made, ran: Ran, auditor: Auditor, plan: Plan, target: Target, memory: tuple[MemoryRow, ...], classes: Mapping[str, Mapping[str, int]]
) -> AuditDocument:
    """Return the document of an audit.

    Args:
        made: what was run.
        ran: what the run gave.
        auditor: what was seen.
        plan: the plan.
        target: the target.
        memory: the ledger.
        classes: bytes of the five classes by format.
    """
    seen = auditor.summary()
    matrix = target.plugins.matrix()
    ops = op_rows(auditor, plan)
    products = product_rows(auditor, plan, matrix, seen.flops)
    rate = Mfu(None, f"the device is {plan.device.kind}: its time is that of this machine")
    if plan.device.kind == "hardware":
        rate = mfu(flops_by_compute(ops), accumulate_of(plan), ran.seconds, matrix, plan.device.key)
    return AuditDocument(
        workload=made.name,
        device=plan.device.key,
        recipe=plan.recipe,
        granted=plan.granted,
        kind=plan.device.kind,
        basis=made.basis,
        torch=str(torch.__version__),
        parameters=made.parameters,
        flops=seen.flops,
        effective=seen.effective,
        shares=seen.shares,
        uncounted=seen.uncounted,
        ops=ops,
        products=products,
        casts=cast_rows(auditor),
        fallbacks=fallback_rows(auditor),
        requests=tuple(request_rows(plan, seen, classes)),
        memory=memory,
        findings=tuple(auditor.findings),
        tokens=made.workload.tokens,
        seconds=ran.seconds,
        tokens_per_s=rate_per_s(made.workload.tokens, ran.seconds),
        mfu=rate.share,
        mfu_basis=rate.basis,
        overflow=ran.overflow,
        notes=(*ran.notes, *unaligned_notes(products, plan, matrix)),
    )


def overflow_path(session: Session, workload: Workload, answers: Answers, paths: ModulePaths, device: torch.device) -> str:
    """Run one step whose gradients overflow and return in words what it does."""
    auditor = Auditor(paths, answers=answers, repairs=True)
    watch_session(session, StepWatch(auditor, paths, workload.model, values=False))
    before = session.loss_scale.value
    answers.overflow = True
    try:
        result = session_step(session, workload, auditor, device)
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


def predicted_activations(build: Build, device: torch.device, dtype: torch.dtype | None) -> dict[str, int]:
    """Return what a forward pass keeps for backward, by format, counted on tensors without memory.

    To be called while the session is live whose step is predicted: its operator policy stands then.

    Args:
        build: makes the workload.
        device: where.
        dtype: format of autocast; None for fp32.
    """
    with fake_tensors():
        workload = build_workload(build, device)
        saved = SavedActivations([*workload.model.parameters(), *workload.model.buffers()])
        with saved, torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = workload.loss()
        del loss
    return saved.bytes


def key_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the key of an optimizer's memory; None for one that is not modeled."""
    first = optimizer.param_groups[0]
    return optimizer_key(type(optimizer).__name__, momentum=bool(first.get("momentum")), amsgrad=bool(first.get("amsgrad")))


def flops_by_compute(ops: Iterable[OpRow]) -> dict[str, int]:
    """Return the FLOPs of forward and backward by the format that was computed in."""
    found: dict[str, int] = {}
    for row in ops:
        if row.flops and row.phase != "optimizer":
            found[row.compute] = found.get(row.compute, 0) + row.flops
    return found


def accumulate_of(plan: Plan) -> str:
    """Return the format of the accumulator that was granted for the forward products."""
    return next((decision.granted for decision in plan.decisions if decision.role == "accumulate.forward"), plan.effective.accumulate.forward)
