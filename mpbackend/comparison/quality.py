"""The quality that two runs are compared by: a validation metric, or the training loss at the end, smoothed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from mpbackend.comparison.runs import ComparedRun, average, number
from mpbackend.errors import DocumentError

VALIDATION = frozenset(["val", "valid", "validation", "eval", "evaluation", "dev"])
"""Words in the name of a metric that is measured on data that is not trained on."""

FALLS = frozenset(["loss", "nll", "perplexity", "ppl", "error", "err", "wer", "bpb", "bpc"])
RISES = frozenset(["acc", "accuracy", "score", "f1", "auc", "bleu", "rouge", "iou", "precision", "recall", "top1", "top5"])

SMOOTHED_SHARE = 10
"""The loss at the end is the mean over the last step in this many."""

MOST_SMOOTHED = 1000
"""Steps that it is the mean of at most."""

Better = Literal["lower", "higher", "unknown"]
TRAINING_LOSS = "training loss"


class Quality(NamedTuple):
    """What is compared.

    Attributes:
        metric: name of the metric; ``training loss`` for the loss of the steps.
        basis: how one number a run is made of it, and why this metric.
        better: which of two values is the better one.
        window: steps that the training loss is smoothed over; 1 for a metric.
    """

    metric: str
    basis: str
    better: Better
    window: int = 1

    def at_the_end(self, run: ComparedRun, last: int) -> float | None:
        """Return the quality of a run at step ``last`` or the nearest one before it that has it; None where none has."""
        found: list[float] = []
        for row in reversed(run.rows):
            if row.step > last or (self.metric == TRAINING_LOSS and not row.stepped):
                continue  # the loss of a skipped step may be the overflow that it was skipped for
            value = number(row.loss) if self.metric == TRAINING_LOSS else number(row.metrics.get(self.metric))
            if value is not None:
                found.append(value)
                if len(found) == self.window:
                    break
        return average(found) if found else None


def choose_quality(runs: Sequence[ComparedRun], asked: str | None, last: int) -> Quality:
    """Return the quality that runs are compared by.

    Args:
        runs: all runs.
        asked: name of a metric, or None to choose: the validation metric that every run has, a loss before others, else the training loss.
        last: last step that all runs have.

    Raises:
        DocumentError: a run lacks the metric that was asked for.
    """
    shared = shared_metrics(runs)
    if asked is not None and asked != TRAINING_LOSS:
        if asked not in shared:
            raise DocumentError(f"metric {asked!r}", found="not every run has it", allowed=[*shared[:12], TRAINING_LOSS], remedy="name one that every run has")
        return Quality(asked, f"last value of the metric {asked}, as asked", direction(asked))
    validation = [name for name in shared if VALIDATION & words(name)]
    if asked is None and validation:
        chosen = min(validation, key=lambda name: ("loss" not in words(name), name))
        others = f"; of {len(validation)} validation metrics, a loss first" if len(validation) > 1 else ""
        return Quality(chosen, f"last value of the validation metric {chosen}{others}", direction(chosen))
    longest = max((len(run.rows) for run in runs), default=0)
    window = max(1, min(MOST_SMOOTHED, min(longest, max(last, 0)) // SMOOTHED_SHARE))
    why = "as asked" if asked else "no validation metric stands in every record"
    return Quality(TRAINING_LOSS, f"training loss, mean of the last {window} taken {'step' if window == 1 else 'steps'}: {why}", "lower", window)


def shared_metrics(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the names of metrics that every run has at least once, sorted."""
    names = [set[str]().union(*(row.metrics for row in run.rows if row.metrics)) for run in runs]
    return sorted(set.intersection(*names)) if names else []


def direction(metric: str) -> Better:
    """Return which value of a metric is the better one, from the words of its name."""
    found = words(metric)
    if found & FALLS:
        return "lower"
    return "higher" if found & RISES else "unknown"


def words(name: str) -> set[str]:
    """Return the words of a name in lower case: ``valLoss``, ``val_loss`` and ``val/loss`` have two."""
    return set(re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()))
