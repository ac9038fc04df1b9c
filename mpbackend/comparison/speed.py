"""Speed apart from quality, and the two together: time of a step, peak memory, steps to one quality, and the time that they take."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import msgspec

from mpbackend.comparison.quality import TRAINING_LOSS, Quality
from mpbackend.comparison.runs import ComparedRun, bounded, median, number

WARM_UP = 5
"""Steps at the start that the time of a step leaves out: they allocate, compile and search for kernels."""


class SideSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of one side, medians over its runs; None where it is not recorded or cannot be told.

    Attributes:
        step_ms: median time of a step after the warm-up, milliseconds.
        peak_bytes: peak memory, bytes.
        memory_basis: what that measures.
        steps_to_target: step at which the target is first reached; None where most runs never reach it.
        seconds_to_target: steps to the target times the time of a step.
        total_seconds: time of all steps.
    """

    step_ms: float | None
    peak_bytes: float | None
    memory_basis: str
    steps_to_target: int | None
    seconds_to_target: float | None
    total_seconds: float | None


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of both sides at one quality.

    Attributes:
        baseline: the baseline.
        candidate: the candidate.
        target: quality that both are measured by: that of the baseline at its end, worse by the margin; None where there is none.
        step_ratio: time of a step, candidate over baseline.
        seconds_ratio: time to the target, candidate over baseline.
        memory_ratio: peak memory, candidate over baseline; None where the two were measured differently.
        words: both together in words, such as ``faster per step, later to quality``; empty where either is unknown.
    """

    baseline: SideSpeed
    candidate: SideSpeed
    target: float | None
    step_ratio: float | None
    seconds_ratio: float | None
    memory_ratio: float | None
    words: str


def compare_speed(baseline: Sequence[ComparedRun], candidate: Sequence[ComparedRun], quality: Quality, reference: float | None, margin: float) -> Speed:
    """Return how fast two sides are, by the step and to one quality.

    Args:
        baseline: at least one run.
        candidate: at least one run.
        quality: what the quality is.
        reference: the baseline's at the end, None where there is none.
        margin: how much worse the target may be, at least 0, in its unit.
    """
    target = None
    if reference is not None and math.isfinite(reference) and quality.better != "unknown":
        target = reference + margin if quality.better == "lower" else reference - margin
    sides = [side_speed(runs, quality, target) for runs in (baseline, candidate)]
    one, other = sides
    same_basis = one.memory_basis == other.memory_basis != ""
    step_ratio = ratio(other.step_ms, one.step_ms)
    seconds_ratio = ratio(other.seconds_to_target, one.seconds_to_target)
    return Speed(
        baseline=one,
        candidate=other,
        target=target,
        step_ratio=step_ratio,
        seconds_ratio=seconds_ratio,
        memory_ratio=ratio(other.peak_bytes, one.peak_bytes) if same_basis else None,
        words=in_words(step_ratio, seconds_ratio, one, other),
    )


def side_speed(runs: Sequence[ComparedRun], quality: Quality, target: float | None) -> SideSpeed:
    """Return the speed of one side."""
    step_ms = median(value for run in runs if (value := step_time(run)) is not None)
    reached = [steps_to(run, quality, target) for run in runs] if target is not None else []
    steps = median(math.inf if step is None else bounded(step) for step in reached)
    steps = steps if steps is not None and math.isfinite(steps) else None
    bases = {run.record.memory_basis for run in runs}
    peaks = [bounded(peak) for run in runs if (peak := run.record.memory.get("peak")) is not None]
    return SideSpeed(
        step_ms=step_ms,
        peak_bytes=median(peaks),
        memory_basis=bases.pop() if len(bases) == 1 else "",
        steps_to_target=None if steps is None else math.ceil(steps),
        seconds_to_target=None if steps is None or step_ms is None else math.ceil(steps) * step_ms / 1000,
        total_seconds=median(run.record.totals.seconds for run in runs),
    )


def step_time(run: ComparedRun) -> float | None:
    """Return the median time of a step after the warm-up, milliseconds; None where none is recorded."""
    times = [value for row in run.rows[WARM_UP:] if (value := number(row.ms)) is not None and math.isfinite(value) and value > 0]
    return median(times)


def steps_to(run: ComparedRun, quality: Quality, target: float) -> int | None:
    """Return the first step at which the quality, smoothed as at the end, is no worse than a target; None where it never is."""
    sign = 1.0 if quality.better == "lower" else -1.0
    window: deque[float] = deque(maxlen=quality.window)
    total = 0.0
    limit = sign * target + abs(target) * (len(run.rows) + quality.window) * 2.0**-52  # a running sum rounds twice a step
    for row in run.rows:
        trained = quality.metric == TRAINING_LOSS
        value = number(row.loss if trained and row.stepped else None if trained else row.metrics.get(quality.metric))
        if value is None:
            continue
        if not math.isfinite(value):
            window.clear()
            total = 0.0
            continue
        if len(window) == quality.window:
            total -= window[0]
        window.append(value)
        total += value
        if len(window) == quality.window and sign * total / quality.window <= limit:
            return row.step
    return None


def ratio(one: float | None, other: float | None) -> float | None:
    """Return a quotient, None where it is not a number."""
    if one is None or other is None or not other:
        return None
    found = one / other
    return found if math.isfinite(found) else None


def in_words(step_ratio: float | None, seconds_ratio: float | None, one: SideSpeed, other: SideSpeed) -> str:
    """Return what the ratios say together."""
    if step_ratio is None:
        return ""
    step = "faster per step" if step_ratio < 1 else "slower per step" if step_ratio > 1 else "as fast per step"
    if one.steps_to_target is not None and other.steps_to_target is None:
        return f"{step}, and never at the quality of the baseline"
    if seconds_ratio is None:
        return ""
    return f"{step}, {'sooner' if seconds_ratio < 1 else 'later' if seconds_ratio > 1 else 'as soon'} to quality"
