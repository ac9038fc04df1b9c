"""How large a difference of quality still counts as equal."""

from __future__ import annotations

import math
from typing import NamedTuple

from mpbackend.errors import DocumentError

DEFAULT = "0.1%"
"""A tenth of a percent of the baseline's quality: what mixed precision is expected to keep to on the metrics that tables report."""

FORM = "a number of at least 0 in the unit of the quality, or a share such as 0.1%"


class Margin(NamedTuple):
    """A margin as it was asked for.

    Attributes:
        size: at least 0: in the unit of the quality, or a share of the baseline's.
        relative: whether it is a share.
        text: as asked.
    """

    size: float
    relative: bool
    text: str

    def of(self, reference: float | None) -> float:
        """Return the margin in the unit of the quality; 0 where it is a share of nothing."""
        if not self.relative:
            return self.size
        return self.size * abs(reference) if reference is not None and math.isfinite(reference) else 0.0


def parse_margin(asked: str | float) -> Margin:
    """Return a margin.

    Args:
        asked: ``0.1%`` for a share of the baseline's quality, a number for a size in its unit.

    Raises:
        DocumentError: it is no such number.
    """
    text = asked.strip() if isinstance(asked, str) else f"{asked:g}"
    relative = text.endswith("%")
    try:
        size = float(text.removesuffix("%")) / (100 if relative else 1)
    except ValueError as error:
        raise DocumentError(f"margin {text!r}", found="no number", allowed=[FORM]) from error
    if not 0 <= size < math.inf:
        raise DocumentError(f"margin {text!r}", found="not at least 0 and finite", allowed=[FORM])
    return Margin(size if isinstance(asked, str) else float(asked), relative, text)
