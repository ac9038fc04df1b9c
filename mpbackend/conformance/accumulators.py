"""Checks of the claim about sums: operands on which a register narrower than the claim loses more than the claim allows, at every K."""

from __future__ import annotations

import torch

from mpbackend.conformance.answer import Answer, fault, judged
from mpbackend.conformance.operands import losing, placed
from mpbackend.conformance.subject import Running, Subject
from mpbackend.conformance.tolerances import claim_for, distance_bound, gap_of

SHORT, LONG = 64, 16_384
"""The products of one tile, and of a sum that a narrow register cannot carry at all."""


def check_accumulate_short(subject: Subject) -> Answer:
    """Sums of 64 products keep the bits that the device's row claims."""
    return subject.each_format(lambda running, name: sums(subject, running, name, SHORT))


def check_accumulate_long(subject: Subject) -> Answer:
    """Sums of 16,384 products keep them too, where a register of 13 bits next to a claim of 24 is wrong by a hundred bounds and more."""
    return subject.each_format(lambda running, name: sums(subject, running, name, LONG))


def sums(subject: Subject, running: Running, name: str, k: int) -> Answer:
    """Return the answer about the sums of one format.

    Args:
        subject: the backend and device.
        running: the plan.
        name: format of the operands.
        k: products of a sum.
    """
    a, b = losing(k)
    claim = claim_for(subject, running.plan)
    exact, weight = (a @ b).diagonal(), (a.abs() @ b.abs()).diagonal()
    with running.forward():
        found = torch.matmul(placed(a, name, subject.place), placed(b, name, subject.place)).diagonal()
    gap = gap_of(found, exact, distance_bound(exact, weight, claim, k, name, fits=True))
    claimed = f"{claim.effective_bits + 1} bits, {claim.source or claim.register}"
    if gap > 1:
        return fault(f"sums of {k} products are {gap:.3g} bounds of the claimed {claimed} away from fp64", gap=gap, claim=claimed)
    return judged(gap, "the sum", claim=claimed)
