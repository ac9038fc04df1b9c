"""Checks that an overflow shows: as inf and NaN in the results, or in the register of a device that saturates."""

from __future__ import annotations

import math

import torch

from mpbackend.conformance.answer import Answer, fault, fine, skip
from mpbackend.conformance.operands import normal, placed
from mpbackend.conformance.subject import Subject
from mpbackend.formats import FORMATS
from mpbackend.planning import Plan

SIDE = 16


def half(subject: Subject) -> Plan | Answer:
    """Return a plan whose range is small enough to overflow, or a skip."""
    plan = subject.plan("fp16")
    return skip(plan) if isinstance(plan, str) else plan


def overflowing(subject: Subject, plan: Plan, left: float, right: float) -> tuple[torch.Tensor, bool | None]:
    """Return a product of constant matrices under a plan, and what the register says; None where there is none.

    Args:
        subject: the backend and device.
        plan: the plan.
        left: every element of the left operand.
        right: every element of the right one.
    """
    flag = subject.backend.overflow(subject.device)
    a, b = (torch.full((SIDE, SIDE), value, dtype=torch.float16).to(subject.place) for value in (left, right))
    with subject.running(plan) as running:
        if flag is not None:
            flag.clear()
        with running.forward():
            found = a @ b
        return found.cpu(), None if flag is None else bool(flag.found())


def check_overflow_shows(subject: Subject) -> Answer:
    """A product beyond the range of fp16 gives inf, or the largest value and a set register; one inside the range gives neither."""
    plan = half(subject)
    if isinstance(plan, Answer):
        return plan
    for left, right, over in ((256.0, 15.0, False), (256.0, 32.0, True), (-256.0, 32.0, True), (1.0, 1.0, False)):
        found, flagged = overflowing(subject, plan, left, right)
        exact = left * right * SIDE
        if not over:
            if flagged or not bool((found.double() == exact).all()):
                return fault(f"{SIDE} products of {left:g} and {right:g} give {found[0, 0].item():g}, register {flagged}: no overflow, and not {exact:g}")
            continue
        infinite = bool((found == math.copysign(math.inf, exact)).all())
        if flagged is None and not infinite:
            return fault(f"{SIDE} products of {left:g} and {right:g} give {found[0, 0].item():g}, and no register tells of the overflow")
        if flagged is False:
            return fault(f"{SIDE} products of {left:g} and {right:g} overflow, and the register does not tell")
    return fine(seen_by="inf and NaN" if subject.backend.overflow(subject.device) is None else "a status register")


def check_nan_shows(subject: Subject) -> Answer:
    """A NaN made of finite operands by an operator, inf - inf, shows in the result or in the register."""
    plan = half(subject)
    if isinstance(plan, Answer):
        return plan
    flag = subject.backend.overflow(subject.device)
    large = torch.full((SIDE,), FORMATS["fp16"].max, dtype=torch.float16).to(subject.place)
    with subject.running(plan) as running:
        if flag is not None:
            flag.clear()
        with running.backward():
            difference = large * 2 - large * 2
        shown = bool(difference.isnan().all()) if flag is None else bool(flag.found())
    return fine() if shown else fault(f"it becomes {difference[0].item():g}, and no register tells")


def check_overflow_is_forgotten(subject: Subject) -> Answer:
    """A register that was cleared is clear, whatever overflowed before, and stays clear through an ordinary forward and backward pass."""
    plan = half(subject)
    if isinstance(plan, Answer):
        return plan
    flag = subject.backend.overflow(subject.device)
    if flag is None:
        return skip("inf and NaN show an overflow here; there is no register")
    overflowing(subject, plan, 256.0, 32.0)
    if not bool(flag.found()):
        return fault("the register forgets an overflow before it is cleared")
    flag.clear()
    if bool(flag.found()):
        return fault("clear() leaves the register set")
    a, b = (placed(normal((SIDE, SIDE), "fp16", case), "fp16", subject.place, grad=True) for case in (1, 2))
    with subject.running(plan) as running:
        with running.forward():
            out = a @ b
        with running.backward():
            out.backward(torch.ones_like(out))
    return fault("an ordinary pass sets the register") if bool(flag.found()) else fine()
