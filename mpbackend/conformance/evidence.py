"""Evidence: what the checks found on one device, as a file that anyone can load and compare. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from mpbackend.device import Device
from mpbackend.documents import read_document
from mpbackend.errors import DocumentError
from mpbackend.observe.record_writer import write_atomically

SCHEMA = 1

Outcome = Literal["passed", "failed", "expected", "skipped"]

Figure = float | str
"""A number that JSON holds, or text; infinities and NaN are text."""

MOST_BYTES = 16 * 2**20
"""A file of evidence has some 30 KB; what is larger is none."""


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one check found.

    Attributes:
        check: name of the check.
        theme: what it is about.
        outcome: passed; failed; expected, where a failure was announced with its reason; skipped, where nothing that the check is about runs on the device.
        detail: what is wrong, why it was expected, why it was skipped, or which cases of a check that passed were.
        figures: what was measured, by name.
    """

    check: str
    theme: str
    outcome: Outcome
    detail: str = ""
    figures: dict[str, Figure] = {}


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of every check on one device.

    Attributes:
        schema: version of this layout.
        kind: ``conformance``.
        backend: name of the backend.
        distribution: name and version of the distribution that brings it; empty when no plugin does.
        device: the device, with the versions of its software.
        environment: versions and variables that change the arithmetic, as the backend gives them.
        mpbackend: version of the core that checked.
        commit: commit of the source it was checked with, ending in ``+`` where files differ from it; empty when it was not a checkout.
        date: ISO date of the run, in UTC.
        quick: whether only the quick sizes were run.
        results: one for each check, in the order of the registry.
    """

    schema: Literal[1] = 1
    kind: Literal["conformance"] = "conformance"
    backend: str
    distribution: str = ""
    device: Device
    environment: dict[str, str] = {}
    mpbackend: str
    commit: str = ""
    date: str = ""
    quick: bool = False
    results: tuple[Result, ...] = ()

    @property
    def passes(self) -> bool:
        """Whether no check failed."""
        return all(result.outcome != "failed" for result in self.results)

    def count(self, outcome: Outcome) -> int:
        """Return how many checks had an outcome."""
        return sum(result.outcome == outcome for result in self.results)


def file_name(evidence: Evidence) -> str:
    """Return the name of an evidence file: one for each backend and device."""
    parts = (re.sub(r"[^A-Za-z0-9._-]+", "-", part) for part in (evidence.backend, evidence.device.key))
    return f"conformance-{'-'.join(parts)}.json"


def write_evidence(evidence: Evidence, folder: Path) -> Path:
    """Write evidence into a folder, by a temporary name, and return the file.

    Args:
        evidence: the results.
        folder: made when missing; an older file about the same backend and device is replaced.

    Raises:
        DocumentError: the folder cannot be made or written.
    """
    path = folder / file_name(evidence)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(evidence), indent=2) + b"\n")
    except (OSError, ValueError) as error:
        found = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise DocumentError(f"cannot write {path}", found=found, remedy="choose another --out") from error
    return path


def load_evidence(path: Path) -> Evidence:
    """Load an evidence file.

    Raises:
        DocumentError: it cannot be read, is no evidence, of another version, or names a check twice.
    """
    asked = f"cannot read {path}"
    remedy = "give a file that `mpbackend conformance` wrote"
    content = read_document(path)
    if len(content) > MOST_BYTES:
        raise DocumentError(asked, found=f"{len(content)} bytes, more than any evidence has", remedy=remedy)
    try:
        evidence = msgspec.json.decode(content, type=Evidence, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DocumentError(asked, found=f"no evidence of schema {SCHEMA}: {error}", remedy=remedy) from error
    names = [result.check for result in evidence.results]
    if len(set(names)) < len(names):
        raise DocumentError(asked, found="it names a check twice", remedy=remedy)
    return evidence


def plain(figures: Mapping[str, Any]) -> dict[str, Figure]:
    """Return figures as a file holds them: numbers that JSON has no word for become text."""
    return {name: value if isinstance(value, str) else checked(float(value)) for name, value in figures.items()}


def checked(value: float) -> Figure:
    """Return a finite number rounded to 6 digits; ``inf``, ``-inf`` or ``nan`` as text."""
    text = f"{value:.6g}"
    return text if text.lstrip("-") in ("inf", "nan") else float(text)
