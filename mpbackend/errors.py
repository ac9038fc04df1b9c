"""The six error classes of mpbackend.

Every message answers four questions in one line: what was asked, what was found, what is allowed, and what to do next. The exception carries the same
answers as attributes, so that a program can act on them. Each class is also the builtin a caller would expect to catch.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence


def nearest_names(name: str, allowed: Iterable[str], limit: int = 3) -> list[str]:
    """Return the allowed names closest to ``name``, best first, at most ``limit``."""
    lowered = {candidate.lower(): candidate for candidate in allowed}
    return [lowered[match] for match in difflib.get_close_matches(name.lower(), list(lowered), n=limit, cutoff=0.5)]


def shows(character: str) -> bool:
    """Tell whether a character only shows: no control character, none that changes the direction of text or is not seen. A newline and blanks do."""
    return character.isprintable() or character == "\n" or unicodedata.category(character) == "Zs"


def escaped(text: str) -> str:
    """Return text with every character that does more than show written as an escape."""
    return text if text.isprintable() else "".join(c if shows(c) else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """Return text on one line, whatever a document put into it: blanks are folded, characters that do not print are escaped."""
    return escaped(" ".join(text.split()))


def describe(error: BaseException) -> str:
    """Return ``Class: first line`` of an exception."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class MpbackendError(Exception):
    """Base of every error that mpbackend raises on purpose.

    Attributes:
        asked: what the caller wanted.
        found: what was there instead.
        allowed: the values that would have been accepted; empty when they cannot be listed.
        remedy: the next command or change; empty when there is none.
    """

    def __init__(self, asked: str, *, found: str = "", allowed: Sequence[str] = (), remedy: str = "") -> None:
        self.asked = asked
        self.found = found
        self.allowed = tuple(allowed)
        self.remedy = remedy
        parts = [f"{asked}: {found}" if found else asked]
        if self.allowed:
            parts.append(f"allowed: {', '.join(self.allowed)}")
        if remedy:
            parts.append(remedy)
        super().__init__(printable("; ".join(parts)))


class UnknownNameError(MpbackendError, LookupError):
    """A name is not in its table: a preset, device, role, format, op, level or plugin."""

    def __init__(self, kind: str, name: str, allowed: Iterable[str], *, remedy: str = "") -> None:
        names = sorted(allowed)
        near = nearest_names(name, names)
        self.kind = kind
        self.name = name
        shown = near or names[:12] + [f"{len(names) - 12} more"] * (len(names) > 12)
        found = f"no {kind} has that name" + (f" (nearest: {', '.join(near)})" if near else "")
        super().__init__(f"unknown {kind} {name!r}", found=found, allowed=() if near else shown, remedy=remedy)
        self.allowed = tuple(names)


class DocumentError(MpbackendError, ValueError):
    """A document (recipe text, matrix, record, checkpoint, evidence) is malformed; names the file and the field."""


class PlanError(MpbackendError, ValueError):
    """A precision cannot be granted on a device. Carries the refused decisions.

    Attributes:
        decisions: the refused ``Decision`` records, in the order of the plan.
    """

    def __init__(self, asked: str, *, found: str = "", allowed: Sequence[str] = (), remedy: str = "", decisions: Sequence[object] = ()) -> None:
        self.decisions = tuple(decisions)
        super().__init__(asked, found=found, allowed=allowed, remedy=remedy)


class BackendError(MpbackendError, RuntimeError):
    """A backend, plugin, device or switch cannot do what it was asked to."""


class SessionError(MpbackendError, RuntimeError):
    """A training session was used in an order that would silently change the arithmetic."""
