"""Two loss curves step by step: where they part, and how far apart they are in units of a derived tolerance.

The unit of a step is ``|loss| * (d1 + d2)`` of its larger loss, where ``d`` of a run is the relative bound of one product in the format that it granted, its
operands rounded to that format and its sum to the accumulator: ``product_bound`` with one product, so to first order twice the unit roundoff of the format. By
the triangle inequality two runs whose loss was one such product would lie within one unit of each other. A model chains many products, and a unit is no bound
for that: it is the yardstick by which a gap of rounding and a gap of something else are told apart in the first steps. Afterwards the gap says little. Training
is chaotic: any two arithmetics part exponentially until the gap is that of two seeds, so equal quality is decided by ``statistics`` and not by the curve.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from mpbackend.comparison.departures import granted
from mpbackend.comparison.runs import ComparedRun, average, number
from mpbackend.formats import FORMATS
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.tolerance import product_bound
from mpbackend.observe.record import StepRow

CUSTOM = 0.02
"""A mean relative loss gap below which two vendors' runs are often called equal; a custom of pull requests, derived from nothing, and shown as that."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """The curves of one pair of runs.

    Attributes:
        names: the two runs.
        seed: their seed, None where it is unknown or differs.
        steps: steps that both runs have.
        compared: steps at which both losses are finite.
        identical: whether every step of both runs has the same loss, gradient norm and scale and was taken or skipped alike, and both have the same steps.
        first_gap: relative gap of the first compared step.
        last_gap: of the last one.
        mean_gap: mean over the compared steps of ``|candidate - baseline| / |baseline|``.
        worst_gap: the largest one.
        worst_step: where it is.
        parted_step: first step at which the losses differ at all; None where they do not.
        unit: relative tolerance unit, ``d1 + d2``; None where a format is not known.
        unit_source: the formats that the unit is derived from.
        first_units: gap of the first compared step in units.
        diverged_step: first step whose gap exceeds one unit; None where none does.
        nonfinite: steps at which one loss is finite and the other is not.
        norm_gap: mean relative gap of the gradient norms of taken steps; None where no step has both.
        worst_norm_gap: the largest one.
        worst_norm_step: where it is.
    """

    names: tuple[str, str]
    seed: int | None
    steps: int
    compared: int
    identical: bool
    first_gap: float | None = None
    last_gap: float | None = None
    mean_gap: float | None = None
    worst_gap: float | None = None
    worst_step: int | None = None
    parted_step: int | None = None
    unit: float | None = None
    unit_source: str = ""
    first_units: float | None = None
    diverged_step: int | None = None
    nonfinite: int = 0
    norm_gap: float | None = None
    worst_norm_gap: float | None = None
    worst_norm_step: int | None = None


class Gap(NamedTuple):
    """The losses, or the gradient norms, of a step that both runs have."""

    step: int
    baseline: float
    candidate: float


def compare_curves(one: ComparedRun, other: ComparedRun) -> Curve:
    """Return how the loss curves of two runs lie to each other, step by step, by the numbers of the steps."""
    common = list(shared_rows(one, other))
    identical = bool(common) and len(common) == len(one.rows) == len(other.rows) and all(alike(*pair) for pair in common)
    losses = [Gap(a.step, number(a.loss) or 0.0, number(b.loss) or 0.0) for a, b in common if a.loss is not None and b.loss is not None]
    finite = [gap for gap in losses if math.isfinite(gap.baseline) and math.isfinite(gap.candidate)]
    norms = [Gap(a.step, number(a.grad_norm) or 0.0, number(b.grad_norm) or 0.0) for a, b in common if a.stepped and b.stepped and both_norms(a, b)]
    norms = [gap for gap in norms if math.isfinite(gap.baseline) and math.isfinite(gap.candidate)]
    norm_gaps = [relative(gap) for gap in norms]
    worst_norm = max(range(len(norm_gaps)), key=norm_gaps.__getitem__, default=None)
    base = Curve(
        names=(one.name, other.name),
        seed=one.seed if one.seed == other.seed else None,
        steps=len(common),
        compared=len(finite),
        identical=identical,
        nonfinite=sum(math.isfinite(gap.baseline) != math.isfinite(gap.candidate) for gap in losses),
        norm_gap=average(norm_gaps) if norm_gaps else None,
        worst_norm_gap=None if worst_norm is None else norm_gaps[worst_norm],
        worst_norm_step=None if worst_norm is None else norms[worst_norm].step,
    )
    if not finite:
        return base
    gaps = [relative(gap) for gap in finite]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    unit, source = tolerance_unit(one, other)
    units = [in_units(gap, unit) for gap in finite] if unit is not None else []
    return msgspec.structs.replace(
        base,
        first_gap=gaps[0],
        last_gap=gaps[-1],
        mean_gap=average(gaps),
        worst_gap=gaps[worst],
        worst_step=finite[worst].step,
        parted_step=next(
            (gap.step for gap in losses if gap.baseline != gap.candidate and not (gap.baseline != gap.baseline and gap.candidate != gap.candidate)), None
        ),
        unit=unit,
        unit_source=source,
        first_units=units[0] if units else None,
        diverged_step=next((gap.step for gap, size in zip(finite, units, strict=False) if size > 1), None),
    )


def shared_rows(one: ComparedRun, other: ComparedRun) -> Iterator[tuple[StepRow, StepRow]]:
    """Yield the rows of the steps that both runs have, in order."""
    if len(one.rows) == len(other.rows) and all(a.step == b.step for a, b in zip(one.rows, other.rows, strict=True)):
        yield from zip(one.rows, other.rows, strict=True)
        return
    found = {row.step: row for row in other.rows}
    for row in one.rows:
        if row.step in found:
            yield row, found[row.step]


def both_norms(one: StepRow, other: StepRow) -> bool:
    """Tell whether two steps have a gradient norm each."""
    return one.grad_norm is not None and other.grad_norm is not None


def alike(one: StepRow, other: StepRow) -> bool:
    """Tell whether two steps have the same bits where a record keeps bits; without a loss that cannot be told."""
    if one.loss is None:
        return False
    return (one.loss, one.grad_norm, one.scale, one.stepped) == (other.loss, other.grad_norm, other.scale, other.stepped)


def relative(gap: Gap) -> float:
    """Return the gap of a step relative to the baseline; infinite where that is zero and the other is not."""
    distance = abs(gap.candidate - gap.baseline)
    if not distance:
        return 0.0
    return distance / abs(gap.baseline) if gap.baseline else math.inf


def in_units(gap: Gap, unit: float) -> float:
    """Return the gap of a step in tolerance units."""
    distance, size = abs(gap.candidate - gap.baseline), unit * max(abs(gap.baseline), abs(gap.candidate))
    return 0.0 if not distance else distance / size if size else math.inf


def tolerance_unit(one: ComparedRun, other: ComparedRun) -> tuple[float | None, str]:
    """Return the relative tolerance unit of two runs, and the formats that it comes from; None where one of them is not known."""
    formats = [forward_formats(run) for run in (one, other)]
    if None in formats:
        return None, "unknown: a plan grants no format that a bound is known for"
    bounds = [relative_bound(*pair) for pair in formats if pair is not None]
    words = [f"{pair[0]} summed in {pair[1]}" for pair in formats if pair is not None]
    return sum(bounds), " and ".join(dict.fromkeys(words))


def forward_formats(run: ComparedRun) -> tuple[str, str] | None:
    """Return the granted format of the forward products and of their sums, fp32 where the plan does not know that; None where no bound is known."""
    decision = granted(run, "compute.forward", "matmul") or granted(run, "compute.forward", "")
    if decision is None or decision.granted not in FORMATS or FORMATS[decision.granted].kind != "float" or FORMATS[decision.granted].mantissa_bits < 1:
        return None
    accumulate = granted(run, "accumulate.forward", "matmul")
    register = accumulate.granted.partition(" ")[0] if accumulate is not None else "fp32"
    return decision.granted, register if register in ("fp16", "fp32", "fp64") else "fp32"


def relative_bound(compute: str, register: str) -> float:
    """Return the relative bound of one product of operands that are rounded to ``compute``, summed in ``register``."""
    arithmetic = Arithmetic(a=compute, b=compute, register=register)  # type: ignore[arg-type] # ``forward_formats`` returns one of the three
    return product_bound(arithmetic, 1, converted=compute != "fp32").relative
