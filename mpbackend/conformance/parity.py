"""The parity table: what the checks found on two devices, side by side. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from mpbackend.conformance.evidence import Evidence, Figure, Result

Verdict = Literal["same", "differs", "one side only"]
"""Whether both devices have the same outcome; ``one side only`` where one has no result or skipped the check."""


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """One check on two devices.

    Attributes:
        check: name of the check.
        theme: what it is about.
        verdict: how the outcomes stand to each other.
        a: the result on the first device; None where it was not run.
        b: likewise on the second.
        figures: figures that differ, by name, with None where a device has none.
    """

    check: str
    theme: str
    verdict: Verdict
    a: Result | None
    b: Result | None
    figures: dict[str, tuple[Figure | None, Figure | None]]


def compare_evidence(a: Evidence, b: Evidence) -> list[Parity]:
    """Return every check that either device has a result of, in the order of the first, then what only the second has."""
    first = {result.check: result for result in a.results}
    second = {result.check: result for result in b.results}
    return [compare_results(first.get(name), second.get(name)) for name in dict.fromkeys((*first, *second))]


def compare_results(a: Result | None, b: Result | None) -> Parity:
    """Return one check on two devices, of which one has a result."""
    known = a or b
    assert known is not None
    mine, theirs = (result.figures if result is not None else {} for result in (a, b))
    differing = {name: (mine.get(name), theirs.get(name)) for name in dict.fromkeys((*mine, *theirs)) if mine.get(name) != theirs.get(name)}
    verdict: Verdict
    if a is None or b is None or (a.outcome == "skipped") is not (b.outcome == "skipped"):
        verdict = "one side only"
    else:
        verdict = "same" if a.outcome == b.outcome else "differs"
    return Parity(check=known.check, theme=known.theme, verdict=verdict, a=a, b=b, figures=differing)


def same_conditions(a: Evidence, b: Evidence) -> Sequence[str]:
    """Return what makes the two hard to compare, a sentence each: other sizes, other checks, other code."""
    found = []
    if a.quick is not b.quick:
        found.append(f"one ran only the quick sizes: {a.quick} against {b.quick}")
    if a.mpbackend != b.mpbackend or a.commit != b.commit:
        found.append(f"checked by other code: {code(a)} against {code(b)}")
    if a.environment.get("torch") != b.environment.get("torch"):
        found.append(f"torch {a.environment.get('torch', 'unknown')} against {b.environment.get('torch', 'unknown')}")
    kinds = [evidence.device.kind for evidence in (a, b)]
    if kinds != ["hardware", "hardware"]:
        found.append(f"not both are hardware: {kinds[0]} against {kinds[1]}")
    return found


def code(evidence: Evidence) -> str:
    """Return version and commit of the core that checked."""
    return f"mpbackend {evidence.mpbackend}" + (f" at {evidence.commit[:12]}{'+' if evidence.commit.endswith('+') else ''}" if evidence.commit else "")
