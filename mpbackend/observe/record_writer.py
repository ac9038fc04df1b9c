"""Writing a record: steps are appended, ``record.json`` is replaced atomically."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import msgspec

from mpbackend.errors import DocumentError
from mpbackend.observe.record import RECORD_FILE, STEPS_FILE, RunRecord, StepRow, Totals, from_number, to_number


class RecordWriter:
    """Writes a record: steps are appended, ``record.json`` is replaced atomically.

    Args:
        folder: where to write; made when missing.

    Raises:
        DocumentError: the folder already holds a record, or cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        steps = self.folder / STEPS_FILE
        if any((self.folder / name).exists() for name in (RECORD_FILE, STEPS_FILE)):
            remedy = "name a new folder: each run, and each segment of a resumed run, has a record of its own"
            raise DocumentError(f"record folder {self.folder}", found="it already holds a record", remedy=remedy)
        try:
            self._made = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._steps: TextIO = steps.open("x", encoding="utf-8", newline="\n")
        except OSError as error:
            raise DocumentError(f"record folder {self.folder}", found=error.strerror or str(error), remedy="choose a folder that can be written") from error

    def append(self, rows: Iterable[StepRow]) -> None:
        """Append rows and flush them to the file; ``DocumentError`` when it cannot be written."""
        lines = "".join(msgspec.json.encode(writable(row)).decode() + "\n" for row in rows)
        try:
            self._steps.write(lines)
            self._steps.flush()
        except OSError as error:
            raise DocumentError(f"cannot write {self.folder / STEPS_FILE}", found=error.strerror or str(error)) from error

    def write(self, record: RunRecord) -> None:
        """Replace ``record.json``; ``DocumentError`` when it cannot be written."""
        try:
            write_atomically(self.folder / RECORD_FILE, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        except OSError as error:
            raise DocumentError(f"cannot write {self.folder / RECORD_FILE}", found=error.strerror or str(error)) from error

    @property
    def open(self) -> bool:
        """Whether rows can be appended."""
        return not self._steps.closed

    def close(self) -> None:
        """Close the steps file."""
        self._steps.close()

    def discard(self) -> None:
        """Close the steps file and remove it, with the folder if it was made for it, as if there had been no record."""
        self._steps.close()
        (self.folder / STEPS_FILE).unlink(missing_ok=True)
        if self._made:
            self.folder.rmdir()


def writable(row: StepRow) -> StepRow:
    """Return a row whose numbers JSON can hold: without this, its encoder would turn NaN and infinities into null."""
    present = {name: getattr(row, name) for name in ("loss", "grad_norm", "lr", "ms") if getattr(row, name) is not None}
    metrics = {name: to_number(from_number(value)) for name, value in row.metrics.items()}
    return msgspec.structs.replace(row, metrics=metrics, **{name: to_number(from_number(value)) for name, value in present.items()})


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name beside it, then rename: it is whole or not there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def count_totals(rows: Iterable[StepRow], before: Totals | None = None) -> Totals:
    """Return ``before`` plus the sums of ``rows``."""
    base = before or Totals()
    counted: dict[str, Any] = dict.fromkeys(Totals.__struct_fields__, 0)
    for row in rows:
        counted["steps"] += 1
        counted["stepped"] += row.stepped
        counted["skipped"] += not row.stepped
        counted["nonfinite"] += row.nonfinite
        counted["samples"] += row.samples
        counted["tokens"] += row.tokens
        ms = 0.0 if row.ms is None else from_number(row.ms)
        counted["seconds"] += ms / 1000 if math.isfinite(ms) else 0.0
    return Totals(**{name: getattr(base, name) + value for name, value in counted.items()})
