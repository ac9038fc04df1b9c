"""What a record's steps show as curves, the names of runs in a legend, and the steps that stand in for all of them in a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mpbackend.observe.record import Recorded, StepRow, from_number
from mpbackend.report.charts import Curve, Point, step_text
from mpbackend.report.view import Column, Table

ROWS = 40
"""Steps that a table of raw numbers shows, at most."""


class Quantity(NamedTuple):
    """A number that every step may have: the field of ``StepRow``, its name with a unit, and whether it is a power of two."""

    field: str
    title: str
    powers_of_two: bool = False


QUANTITIES = (
    Quantity("loss", "Loss"),
    Quantity("grad_norm", "Gradient norm"),
    Quantity("scale", "Loss scale", powers_of_two=True),
    Quantity("ms", "Step time, ms"),
)


def curve_of(run: Recorded, name: str, field: str) -> Curve:
    """Return a field of a run's steps as a curve; a step without it has no point."""
    return Curve(name, [(row.step, value) for row in run.steps if (value := value_of(row, field)) is not None])


def gap_curve(baseline: Recorded, run: Recorded, name: str) -> Curve:
    """Return the loss of a run minus that of the baseline at every step that both have once; NaN where either is not finite."""
    losses = step_losses(baseline)
    points: list[Point] = [(step, difference(loss, losses[step])) for step, loss in step_losses(run).items() if step in losses]
    return Curve(name, points)


def step_losses(run: Recorded) -> dict[int, float]:
    """Return the loss of every step that a run has exactly once."""
    counts = Counter(row.step for row in run.steps)
    return {row.step: from_number(row.loss) for row in run.steps if row.loss is not None and counts[row.step] == 1}


def difference(a: float, b: float) -> float:
    """Return a - b, NaN where either is not finite: two runs that both diverged are not equal."""
    return a - b if math.isfinite(a) and math.isfinite(b) else math.nan


def value_of(row: StepRow, field: str) -> float | None:
    """Return a number of a step, None where it was not recorded."""
    value = getattr(row, field)
    return None if value is None else from_number(value)


def describe_curves(curves: Sequence[Curve]) -> str:
    """Return where each curve starts and ends, for a reader who cannot see it."""
    parts = []
    for curve in curves:
        lost = sum(not math.isfinite(value) for _, value in curve.points)
        ends = (
            f"{curve.points[0][1]:.4g} at step {step_text(curve.points[0][0])}, {curve.points[-1][1]:.4g} at step {step_text(curve.points[-1][0])}"
            if curve.points
            else "no value"
        )
        parts.append(f"{curve.name}: {ends}" + (f", {lost} not finite" if lost else ""))
    return "; ".join(parts)


def run_names(runs: Sequence[Recorded], sides: Sequence[str]) -> list[str]:
    """Return a name for each run that tells it from the others.

    Args:
        runs: the records.
        sides: what each is in the comparison, such as ``baseline``.
    """
    parts: list[list[str]] = [[run.record.recipe.text for run in runs], [run.record.device.key for run in runs]]
    parts.append([f"seed {run.record.run.seed}" for run in runs])
    kept = [parts[0], *(part for part in parts[1:] if len(set(part)) > 1)]
    names = [", ".join((side, *words)) for side, *words in zip(sides, *kept, strict=True)]
    repeated = Counter(names)
    return [f"{name} ({number})" if repeated[name] > 1 else name for number, name in enumerate(names, 1)]


def numbers_table(runs: Sequence[Recorded], names: Sequence[str]) -> Table:
    """Return the numbers of steps spread evenly over the runs, first and last included; one row for each step and run."""
    columns = [Column("step", right=True), Column("run"), *(Column(quantity.title, right=True) for quantity in QUANTITIES), Column("stepped")]
    steps = sorted({row.step for run in runs for row in run.steps})
    most = max(2, ROWS // max(1, len(runs)))
    last = len(steps) - 1
    wanted = set(steps) if len(steps) <= most else {steps[index * last // (most - 1)] for index in range(most)}
    order = {name: number for number, name in enumerate(names)}
    found = [(row, name) for run, name in zip(runs, names, strict=True) for row in unrepeated(run, wanted)]
    found.sort(key=lambda item: (item[0].step, order[item[1]]))
    rows = [(step_text(row.step), name, *(number_cell(row, quantity.field) for quantity in QUANTITIES), row.reason or "yes") for row, name in found]
    return Table(f"Raw numbers: {len(wanted)} of {len(steps)} steps", columns, rows)


def unrepeated(run: Recorded, wanted: set[int]) -> list[StepRow]:
    """Return the last row of each wanted step: a step that was run again counts as it went then."""
    return list({row.step: row for row in run.steps if row.step in wanted}.values())


def number_cell(row: StepRow, field: str) -> str:
    """Return a number of a step in six digits, a dash where it was not recorded."""
    value = value_of(row, field)
    return "-" if value is None else f"{value:.6g}"
