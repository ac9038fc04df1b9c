"""What stands beside a verdict: what it is about, and what a reader must know."""

from __future__ import annotations

from collections.abc import Sequence

from mpbackend.comparison.conditions import Question
from mpbackend.comparison.departures import departures
from mpbackend.comparison.question import baseline_remark
from mpbackend.comparison.runs import ComparedRun, Matched, digits
from mpbackend.matrix import Matrix


def strayed(runs: Sequence[ComparedRun], matrix: Matrix) -> list[str]:
    """Return what runs did that their plans do not say: under the question ``recipe`` such a run is no example of its recipe."""
    return list(dict.fromkeys(f"{run.record.recipe.text} is not what ran in {run.name}: {found.reason}" for run in runs for found in departures(run, matrix)))


def scope_of(matched: Matched, last: int) -> str:
    """Return what a verdict is about."""
    seeds = sorted({run.seed for run in (*matched.baseline, *matched.candidate) if run.seed is not None})
    shown = ", ".join(map(digits, seeds[:5])) + (f" and {len(seeds) - 5} more" if len(seeds) > 5 else "")
    words = f"seed{'s' if len(seeds) > 1 else ''} {shown}" if seeds else "runs without a recorded seed"
    return f"{words}, {digits(last)} steps"


def remarks(matched: Matched, question: Question, matrix: Matrix) -> list[str]:
    """Return what a reader must know besides the verdict."""
    runs = (*matched.baseline, *matched.candidate)
    found = [baseline_remark(matched.baseline, question)]
    for kind in ("emulated", "simulated"):
        names = [run.name for run in runs if run.record.run.kind == kind or (kind == "emulated" and run.record.compute.level == kind)]
        if names:
            found.append(f"{kind}: {', '.join(names)}; the verdict holds for that arithmetic, and its times are not those of hardware")
    if question == "vendor":
        found += [f"{run.name}: {departure.reason}" for run in runs for departure in departures(run, matrix)]
    if matched.left_out:
        found.append(f"left out, because the other side has no run of their seed: {', '.join(matched.left_out)}")
    both = {run.name for run in matched.baseline} & {run.name for run in matched.candidate}
    if both:
        found.append(f"the same record stands on both sides: {', '.join(sorted(both))}")
    found += [f"{run.disordered} rows of {run.name} stood out of order or twice; the last of each step counts" for run in runs if run.disordered]
    found += [f"{run.name}: {note}" for run in runs for note in run.record.notes]
    return list(dict.fromkeys(remark for remark in found if remark))
