"""Derived distances from fp64: the bound of a product, element by element, from what the device's row claims about its sums.

``numerics.tolerance`` bounds the register by the weight of the operands. The rounding of the result is bounded here by the result itself, which is far
smaller where signs cancel: only so does a narrow register show under a 16-bit result.
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from mpbackend.conformance.subject import Subject
from mpbackend.decisions import Decision
from mpbackend.errors import UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.numerics.accumulate import REGISTERS, arithmetic_for
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.tolerance import product_bound, roundoff, tiny
from mpbackend.planning import Plan
from mpbackend.recipe import FAST

FP32 = roundoff(FORMATS["fp32"].mantissa_bits, "rne")
"""Unit roundoff of fp32: 2^-24."""

ELEMENTARY = 8 * FP32
"""Relative error allowed to one call of exp, log, sqrt or a division in fp32: 4 ulp.

Vendors state 1 to 2 ulp for their own (CUDA C++ Programming Guide, Mathematical Functions); SLEEF, which torch uses on CPUs, 1.0 to 3.5 ulp."""


def claim_for(subject: Subject, plan: Plan, op: str = "matmul") -> Arithmetic:
    """Return how the device claims to multiply under a plan: by its row, else the format of the sums that the backend names, in an order of its own.

    Args:
        subject: the backend and device.
        plan: what is run.
        op: ``matmul`` or ``conv``.

    Returns:
        The arithmetic, whose output is the register: see ``distance_bound`` for the rounding of the result.
    """
    decision = plan.decision("compute.forward", op)
    wanted = plan.effective.accumulate.forward
    register = "fp32" if wanted == FAST else wanted
    try:
        return arithmetic_for(subject.matrix, subject.device.arch, *decision.pair, accumulate=register)
    except UnknownNameError:
        return nominal(subject, decision)


def nominal(subject: Subject, decision: Decision) -> Arithmetic:
    """Return the arithmetic of a product that no row describes, from the format of the sums that the backend's implementation names."""
    rows = [row for row in subject.backend.implements(subject.device) if (row.op, row.a, row.b) == (decision.op, *decision.pair) and row.level is not None]
    named = next((row.accumulate for row in rows if row.accumulate in REGISTERS), "fp32")
    return msgspec.convert({"a": decision.pair[0], "b": decision.pair[1], "model": "host", "register": named, "output": named}, Arithmetic)


def distance_bound(exact: Tensor, weight: Tensor, claim: Arithmetic, k: int, stored: str, *, extra: int = 0, fits: bool = False) -> Tensor:
    """Return how far each element of a product may lie from the exact one.

    Args:
        exact: the exact product in fp64, any shape.
        weight: its weight, the product of the magnitudes of the operands, same shape.
        claim: the unit; its sums are in ``claim.register``.
        k: products of one sum.
        stored: format of the tensors: of both operands and of the result.
        extra: roundings of further additions in the format of the register, such as that of a bias or of a split of K.
        fits: whether the operands are values of the unit's format, where that is narrower than ``stored``.

    Returns:
        fp64 distances, shape of ``exact``. The error of the sums is ``product_bound``; the rounding of the result adds half a unit in its last place.
    """
    distance = sum_distance(weight, claim, k, stored, fits=fits)
    distance = distance + extra * roundoff(FORMATS[claim.register].mantissa_bits, "rne") * (weight + distance)
    return rounded(exact, distance, stored)


def sum_distance(weight: Tensor, claim: Arithmetic, k: int, stored: str, *, fits: bool = False) -> Tensor:
    """Return how far the sum of each element may lie from the exact one before the result is rounded; see ``distance_bound``."""
    converted = not fits and FORMATS[claim.a].mantissa_bits < FORMATS[stored].mantissa_bits
    inner = product_bound(msgspec.structs.replace(claim, output=register_of(claim)), k, converted=converted)
    return inner.relative * weight + inner.absolute


def register_of(claim: Arithmetic) -> str:
    """Return the format of the last sum: the outer one where there is promotion."""
    return claim.register if claim.promotion_interval is None else claim.promoted


def rounded(exact: Tensor, distance: Tensor, output: str, times: int = 1) -> Tensor:
    """Return a distance that also covers roundings of the result to a format.

    Args:
        exact: the exact result.
        distance: how far the result lies from it before it is rounded.
        output: the format.
        times: how often it is rounded.
    """
    bits = FORMATS[output].mantissa_bits
    for _ in range(times):
        distance = distance + roundoff(bits, "rne") * (exact.abs() + distance) + tiny(output, bits)
    return distance


def gap_of(found: Tensor, exact: Tensor, distance: Tensor) -> float:
    """Return the largest distance of a result from the exact one, in multiples of what is allowed.

    Args:
        found: the result, any device and format.
        exact: fp64, on the host.
        distance: fp64, what is allowed for each element.

    Returns:
        A number from 0; infinity for a result of another shape, or with elements that are not finite.
    """
    values = found.detach().cpu().double()
    if values.shape != exact.shape or not torch.isfinite(values).all():
        return math.inf
    apart = (values - exact).abs()
    ratio = torch.where(apart == 0, 0.0, apart / distance)
    return float(ratio.max()) if ratio.numel() else 0.0
