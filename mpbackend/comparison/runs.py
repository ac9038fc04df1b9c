"""The runs that are compared: their rows in order, and which runs of the two sides belong together."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from mpbackend.errors import DocumentError
from mpbackend.observe.record import Number, Recorded, RunRecord, StepRow, from_number, load_record

Design = Literal["paired", "two-sample", "repeats", "single", "unmatched"]
"""How the runs can be laid against each other.

``paired``: at least two seeds stand on both sides. ``repeats``: one seed does, and a side has it more than once. ``single``: one run a side, of one seed or of
seeds that are not known. ``two-sample``: at least two runs a side, and no seed on both. ``unmatched``: none of these.
"""

Source = str | os.PathLike[str] | Recorded
"""A run as the caller gives it: the folder of its record, or the record."""


class ComparedRun(NamedTuple):
    """One run.

    Attributes:
        name: folder of the record as given; the run's id where there was none.
        record: the document.
        rows: the steps, in order, each number once.
        disordered: rows that stood out of order or had the number of another row; the last one of a number is kept.
    """

    name: str
    record: RunRecord
    rows: tuple[StepRow, ...]
    disordered: int = 0

    @property
    def seed(self) -> int | None:
        """Seed of the run, None when none was given."""
        return self.record.run.seed

    @property
    def last_step(self) -> int:
        """Number of the last step, 0 without steps."""
        return self.rows[-1].step if self.rows else 0


class Matched(NamedTuple):
    """The two sides, laid against each other.

    Attributes:
        baseline: runs of the baseline that take part.
        candidate: runs of the candidate that take part.
        design: how they can be compared.
        pairs: runs that should differ in nothing but what is asked about.
        groups: for each seed that stands on both sides, its runs there; empty for ``two-sample`` and ``unmatched``.
        left_out: runs whose seed the other side does not have.
    """

    baseline: tuple[ComparedRun, ...]
    candidate: tuple[ComparedRun, ...]
    design: Design
    pairs: tuple[tuple[ComparedRun, ComparedRun], ...]
    groups: tuple[tuple[tuple[ComparedRun, ...], tuple[ComparedRun, ...]], ...] = ()
    left_out: tuple[str, ...] = ()


def read_runs(side: str, sources: Source | Iterable[Source]) -> tuple[ComparedRun, ...]:
    """Return the runs of one side.

    Args:
        side: its name, for messages.
        sources: one run or several.

    Raises:
        DocumentError: there is none, or a record cannot be read.
    """
    listed: list[Any] = [sources] if isinstance(sources, (str, os.PathLike, Recorded)) else list(sources)
    if not listed:
        raise DocumentError(f"the {side} of a comparison", found="no run", remedy="give at least one folder of a record for each side")
    return tuple(read_run(source) for source in listed)


def read_run(source: Source) -> ComparedRun:
    """Return one run; ``DocumentError`` when its record cannot be read."""
    recorded = source if isinstance(source, Recorded) else load_record(source)
    name = recorded.record.run.id if isinstance(source, Recorded) else os.fspath(source)
    rows = recorded.steps
    if all(rows[index].step > rows[index - 1].step for index in range(1, len(rows))):
        return ComparedRun(name, recorded.record, rows)
    kept = {row.step: row for row in rows}
    ordered = tuple(kept[step] for step in sorted(kept))
    moved = len(rows) - len(ordered) + sum(rows[index].step < rows[index - 1].step for index in range(1, len(rows)))
    return ComparedRun(name, recorded.record, ordered, moved)


def match(baseline: Sequence[ComparedRun], candidate: Sequence[ComparedRun]) -> Matched:
    """Lay two sides against each other by their seeds, as sets."""
    sides = (by_seed(baseline), by_seed(candidate))
    common = [seed for seed in sides[0] if seed in sides[1]]
    if common:
        groups = tuple((tuple(sides[0][seed]), tuple(sides[1][seed])) for seed in common)
        kept = tuple(tuple(run for group in groups for run in group[side]) for side in (0, 1))
        repeated = any(len(side) > 1 for group in groups for side in group)
        design: Design = "paired" if len(common) > 1 else "repeats" if repeated else "single"
        stay = {id(run) for side in kept for run in side}
        left_out = tuple(run.name for run in (*baseline, *candidate) if id(run) not in stay)
        return Matched(kept[0], kept[1], design, tuple(pair for group in groups for pair in crossed(*group)), groups, left_out)
    one, other = tuple(baseline), tuple(candidate)
    pairs = crossed(one, other)
    if len(one) > 1 and len(other) > 1:
        return Matched(one, other, "two-sample", pairs)
    if len(one) == len(other) == 1 and None in (one[0].seed, other[0].seed):
        return Matched(one, other, "single", pairs, ((one, other),))
    return Matched(one, other, "unmatched", pairs)


def by_seed(runs: Sequence[ComparedRun]) -> dict[int, list[ComparedRun]]:
    """Return the runs of every seed, those without one left out."""
    found: dict[int, list[ComparedRun]] = {}
    for run in runs:
        if run.seed is not None:
            found.setdefault(run.seed, []).append(run)
    return found


def crossed(baseline: Sequence[ComparedRun], candidate: Sequence[ComparedRun]) -> tuple[tuple[ComparedRun, ComparedRun], ...]:
    """Return every run of two groups beside the first of the other one: enough to see whether anything differs, and no more than both have runs."""
    return (*((baseline[0], run) for run in candidate), *((run, candidate[0]) for run in baseline[1:]))


def number(value: Number | None) -> float | None:
    """Return a recorded number as a float, None where there is none."""
    return None if value is None else from_number(value)


def bounded(count: int) -> float:
    """Return a whole number as a float, infinite where it is too large for one."""
    try:
        return float(count)
    except OverflowError:
        return math.inf if count > 0 else -math.inf


def digits(count: int) -> str:
    """Return a whole number as text; one of more than 30 digits, which nobody counted, in powers of ten."""
    return str(count) if abs(count) < 10**30 else f"{bounded(count):.3g}"


def average(values: Sequence[float]) -> float:
    """Return the mean of at least one number; infinite or NaN where the sum is."""
    return sum(values) / len(values)


def median(values: Iterable[float]) -> float | None:
    """Return the median, None of nothing; the mean of the middle two of an even number."""
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def distinct(runs: Iterable[ComparedRun], read: Callable[[ComparedRun], str | None]) -> list[str]:
    """Return the values that runs have, each once, in order; those that are not known are left out."""
    return list(dict.fromkeys(value for run in runs if (value := read(run)) is not None))
