"""What a check answers: that nothing is wrong, what is, or why there is nothing to check; and what it measured. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

FigureValue = float | str


class Answer(NamedTuple):
    """The answer of a check.

    Attributes:
        fault: what is wrong; empty when nothing is.
        skip: why there was nothing to check; empty when there was.
        note: why some cases were left out; empty when none was.
        figures: what was measured.
    """

    fault: str = ""
    skip: str = ""
    note: str = ""
    figures: Mapping[str, FigureValue] = {}


def fine(**figures: FigureValue) -> Answer:
    """Return that nothing is wrong; names of figures have blanks for underscores."""
    return Answer(figures=named(figures))


def fault(text: str, **figures: FigureValue) -> Answer:
    """Return that something is wrong."""
    return Answer(fault=text, figures=named(figures))


def skip(reason: str) -> Answer:
    """Return that the device has nothing that the check is about."""
    return Answer(skip=reason)


def judged(gap: float, what: str, **figures: FigureValue) -> Answer:
    """Return whether a distance keeps its bound.

    Args:
        gap: distance in multiples of the derived bound, from 0; infinity or NaN where a result is not finite and should be.
        what: what has the distance.
        figures: further figures.
    """
    kept = {"gap": gap, **figures}
    return fine(**kept) if gap <= 1 else fault(f"{what} is {gap:.3g} times its derived bound away from fp64", **kept)


def together(answers: Mapping[str, Answer]) -> Answer:
    """Return one answer for several cases: every fault, every figure under the name of its case; a skip only where all were skipped."""
    faults = [f"{name}: {answer.fault}" for name, answer in answers.items() if answer.fault]
    reasons: dict[str, list[str]] = {}
    for name, answer in answers.items():
        if text := answer.skip or answer.note:
            reasons.setdefault(text, []).append(name)
    skips = [f"{', '.join(names)}: {text}" for text, names in reasons.items()]
    figures = {f"{name} {figure}": value for name, answer in answers.items() for figure, value in answer.figures.items()}
    if answers and all(answer.skip for answer in answers.values()):
        return Answer(skip="; ".join(skips))
    return Answer(fault="; ".join(faults), note="; ".join(skips), figures=figures)


def named(figures: Mapping[str, FigureValue]) -> dict[str, FigureValue]:
    """Return figures with blanks in their names."""
    return {name.replace("_", " "): value for name, value in figures.items()}
