"""Runs side by side: one column a record, one line a question. Pure: the same records give the same cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from mpbackend.decisions import Decision
from mpbackend.observe.record import ClassReading, Recorded, StepRow, from_number
from mpbackend.report.view import Column, Listing, Report, Table, size_text

TAIL = 10
"""Steps at the end of a run over which loss and gradient norm are averaged."""

WARM_UP = 5
"""Steps at the start that the step time leaves out."""

NOT_OBSERVED = "not observed"
UNREAD = ClassReading(asked="not recorded")
"""What stands for a class that a record does not have."""


def runs_report(runs: Sequence[Recorded]) -> Report:
    """Return runs side by side as a report: one column a run, under its recipe."""
    columns = (Column(""), *(Column(run.record.recipe.text) for run in runs))
    rows = [(label, *cells) for label, cells in run_lines(runs).items()]
    return Report("Runs side by side", [Table("", columns, rows), Listing("Notes", note_lines(runs))])


def note_lines(runs: Sequence[Recorded]) -> list[str]:
    """Return what the backends noted, each note once, with the runs that have it in front unless all have it."""
    noted: dict[str, list[str]] = {}
    for run in runs:
        for note in dict.fromkeys(run.record.notes):
            noted.setdefault(note, []).append(f"{run.record.device.key} {run.record.recipe.text}")
    return [note if len(owners) == len(runs) else f"{', '.join(owners)}: {note}" for note, owners in noted.items()]


def run_lines(runs: Sequence[Recorded]) -> dict[str, list[str]]:
    """Return the lines of the comparison: label to one cell for each run."""
    lines = {
        "device": [run.record.device.key + ("" if run.record.run.kind == "hardware" else f" ({run.record.run.kind})") for run in runs],
        "compute, asked": [compute_cell(run) for run in runs],
        "compute, observed": [shares_cell(run) for run in runs],
        "steps": [str(run.record.totals.steps) for run in runs],
        f"loss, mean of last {TAIL}": [tail_mean(run.steps, "loss") for run in runs],
        f"gradient norm, mean of last {TAIL}": [tail_mean(run.steps, "grad_norm") for run in runs],
        "non-finite steps": [str(run.record.totals.nonfinite) for run in runs],
        "skipped steps": [str(run.record.totals.skipped) for run in runs],
        "loss scale, last": [scale_cell(run) for run in runs],
        "step time, median ms": [step_time(run.steps) for run in runs],
        peak_label(runs): [memory_cell(run) for run in runs],
    }
    for name in dict.fromkeys(name for run in runs for name in run.record.classes):
        readings = [run.record.classes.get(name, UNREAD) for run in runs]
        lines[f"{name}, asked"] = [reading.asked for reading in readings]
        lines[f"{name}, observed"] = [formats_cell(reading.observed) for reading in readings]
    return lines


def granted(run: Recorded, role: str) -> Decision | None:
    """Return the first decision of a run about a role, None where its plan has none."""
    return next((decision for decision in run.record.plan if decision.role == role), None)


def compute_cell(run: Recorded) -> str:
    """Return the planned compute format, with its level where that is not native."""
    decision = granted(run, "compute.forward")
    if decision is None:
        return "unknown"
    return decision.granted if decision.level in ("native", "library") else f"{decision.granted} ({decision.level})"


def shares_cell(run: Recorded) -> str:
    """Return the formats of the dispatched matrix products by share of FLOPs, largest first; one of all FLOPs stands alone."""
    uncounted = run.record.compute.uncounted
    if uncounted:
        return f"unknown: {', '.join(uncounted)} cannot be counted"
    shares = sorted(run.record.compute.shares.items(), key=lambda item: -item[1])
    if not shares:
        return NOT_OBSERVED
    if len(shares) == 1:
        return shares[0][0]
    return ", ".join(f"{name} {percent(share)}" for name, share in shares)


def percent(share: float) -> str:
    """Return a share in percent that never rounds a part to none or to all."""
    text = f"{share:.1%}"
    if share > 0 and text == "0.0%":
        return "<0.1%"
    return ">99.9%" if share < 1 and text == "100.0%" else text


def tail_mean(steps: Sequence[StepRow], field: str) -> str:
    """Return the mean of a field over the last taken steps, four digits; what JSON calls a non-finite number stays in words."""
    values = [getattr(row, field) for row in steps if row.stepped and getattr(row, field) is not None][-TAIL:]
    return f"{mean([from_number(value) for value in values]):.4f}" if values else NOT_OBSERVED


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN where infinities of both signs or sums beyond the range leave none."""
    try:
        return statistics.fmean(values)
    except (OverflowError, ValueError):
        return math.nan


def scale_cell(run: Recorded) -> str:
    """Return the loss scale of the last step, as a power of two; ``none`` without scaling, which only a plan or a scale besides 1 can tell."""
    decision = granted(run, "loss_scale.mode")
    if decision is None and all(row.scale == 1 for row in run.steps):
        return NOT_OBSERVED
    if (decision is not None and decision.granted == "none") or not run.steps:
        return "none"
    scale = run.steps[-1].scale
    exponent = math.log2(scale) if scale > 0 else math.nan
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"


def step_time(steps: Sequence[StepRow]) -> str:
    """Return the median step time after the warm-up, milliseconds."""
    times = [from_number(row.ms) for row in steps[WARM_UP:] if row.ms is not None]
    return f"{statistics.median(times):.1f}" if times else NOT_OBSERVED


def peak_label(runs: Sequence[Recorded]) -> str:
    """Return the label of the peak memory with what was measured, where that is the same for every run."""
    bases = {run.record.memory_basis for run in runs}
    return f"peak memory, {bases.pop()}" if len(bases) == 1 else "peak memory"


def memory_cell(run: Recorded) -> str:
    """Return the peak memory, or ``unknown``."""
    peak = run.record.memory.get("peak")
    return "unknown" if peak is None else size_text(peak)


def formats_cell(observed: dict[str, int]) -> str:
    """Return formats with their size, largest first."""
    if not observed:
        return "none"
    return ", ".join(f"{name} {size_text(size)}" for name, size in sorted(observed.items(), key=lambda item: -item[1]))
