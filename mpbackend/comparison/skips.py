"""The share of steps that a run skipped, and its non-finite steps: a sign of unstable training of its own, whatever the loss at the end.

The limit of one step in a hundred is the custom for dynamic loss scaling. Below 300 steps it cannot be shown: where none of n steps was skipped, the share is
below ``3 / n`` with a confidence of 95 % (the rule of three: Hanley and Lippman-Hand, 1983), and that is 1 % at 300.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mpbackend.comparison.readings import scale_mode
from mpbackend.comparison.runs import ComparedRun

LIMIT = 0.01
ENOUGH_STEPS = 300

Finding = Literal["none can be", "below the limit", "too few steps", "at or above the limit"]


class Skips(msgspec.Struct, frozen=True, kw_only=True):
    """The skipped steps of a run.

    Attributes:
        name: the run.
        steps: steps that count: those of the search for a first loss scale are left out.
        skipped: skipped ones among them.
        search: steps that were skipped in the search.
        share: ``skipped / steps``, 0 without steps.
        nonfinite: steps with a loss or a gradient that was not finite, those of the search included.
        finding: ``none can be``: there is no dynamic loss scale, and nothing was skipped.
    """

    name: str
    steps: int
    skipped: int
    search: int
    share: float
    nonfinite: int
    finding: Finding


def count_skips(run: ComparedRun) -> Skips:
    """Return the skipped steps of a run."""
    skipped = sum(not row.stepped for row in run.rows)
    search = min(max(run.record.counters.get("startup_skips", 0), 0), skipped)
    steps, counted = len(run.rows) - search, skipped - search
    share = counted / steps if steps else 0.0
    finding: Finding = "below the limit"
    if not counted and scale_mode(run) in ("none", "static"):
        finding = "none can be"
    elif steps < ENOUGH_STEPS:
        finding = "too few steps"
    elif share >= LIMIT:
        finding = "at or above the limit"
    return Skips(name=run.name, steps=steps, skipped=counted, search=search, share=share, nonfinite=sum(row.nonfinite for row in run.rows), finding=finding)
