"""What a run gives besides operations: times, notes, warnings, and what it raised."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mpbackend.errors import MpbackendError, describe, printable
from mpbackend.observe.audit_observer import Auditor
from mpbackend.train.session import Session


@dataclass
class Ran:
    """What a run gave besides operations: the median seconds of a step, the path of an overflow in words, notes, and whether the step failed."""

    seconds: float = 0.0
    overflow: str = ""
    notes: list[str] = field(default_factory=list)
    failed: bool = False


@contextmanager
def told_warnings(ran: Ran) -> Iterator[None]:
    """Keep what is warned of inside as notes, each once."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    ran.notes.extend(dict.fromkeys(f"warned: {printable(str(warning.message))}" for warning in told))


@contextmanager
def noted(ran: Ran, what: str) -> Iterator[None]:
    """Keep what a pass beside the audited step raises as a note: a model may ask for values that a tensor without memory has not, for one."""
    try:
        yield
    except MpbackendError:
        raise
    except Exception as error:  # noqa: BLE001 - a model may fail in any way
        ran.notes.append(f"{what}: {describe(error)}")


@contextmanager
def kept_error(auditor: Auditor, ran: Ran, session: Session | None = None) -> Iterator[None]:
    """Keep what a model raises as a finding: what was seen until then says why. Errors of mpbackend go on, they are about what was asked."""
    try:
        yield
    except MpbackendError:
        raise
    except Exception as error:  # noqa: BLE001 - a model may fail in any way
        ran.failed = True
        auditor.find("step-failed", "the audited step", describe(error), "see the other findings; they come first")
        if session is not None:
            session._window.reset()
