"""What the emulator runs for an architecture, and why it does not run the rest. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpbackend.backend import Implementation
from mpbackend.capability import LEVELS, Level, Row
from mpbackend.errors import BackendError
from mpbackend.formats import FORMATS
from mpbackend.granting import SCALING_ROWS
from mpbackend_emulator.unit import Unit

OPS = ("matmul", "conv")
PATH = "emulator"
MIXED = (("fp8_e5m2", "fp8_e4m3"), ("fp8_e4m3", "fp8_e5m2"))

LAYOUTS = frozenset(layout for layouts in SCALING_ROWS.values() for layout in layouts)
"""Scale layouts that a recipe can ask for."""

LOW_BIT_CONV = "low-bit recipes convert linear layers; convolutions run in bf16"


def implementations(unit: Unit) -> list[Implementation]:
    """Return what runs, then what does not, with reasons. The level is the one of the device's row: what is emulated is the device, not its instruction."""
    rows = [row for op in OPS for row in spoken(unit, op)]
    done = {(row.op, row.a, row.b) for row in rows}
    floats = [name for name, spec in FORMATS.items() if spec.kind == "float"]
    pairs = [*((name, name) for name in floats), *MIXED]
    return rows + [
        Implementation(op=op, a=a, b=b, accumulate="none", path="none", reason=LOW_BIT_CONV if op == "conv" and FORMATS[a].is_low_bit else unit.why_not(a, b))
        for op in OPS
        for a, b in pairs
        if (op, a, b) not in done
    ]


def spoken(unit: Unit, op: str) -> Iterator[Implementation]:
    """Yield one row for each combination of formats and scales of one operation that the device computes: at its best level, or refused with the reason."""
    levels: dict[tuple[str, str, str], Level] = {}
    for row in unit.matrix.rows(unit.arch, op=op):
        key = (row.a, row.b, row.scaling)
        if computes(row) and (key not in levels or LEVELS.index(row.level) < LEVELS.index(levels[key])):
            levels[key] = row.level
    for (a, b, scaling), level in levels.items():
        common: dict[str, Any] = {"op": op, "a": a, "b": b, "scaling": scaling}
        try:
            arithmetic = unit.find(a, b, scaling)
        except BackendError as error:
            yield Implementation(**common, accumulate="none", path="none", reason=error.found)
            continue
        yield Implementation(**common, accumulate=arithmetic.register, path=PATH, level=level)


def computes(row: Row) -> bool:
    """Tell whether a row is a product of floating-point formats that a plan can ask for."""
    floats = all(name in FORMATS and FORMATS[name].kind == "float" for name in (row.a, row.b))
    if not floats or row.level in ("absent", "storage") or row.scaling not in LAYOUTS:
        return False
    return row.op != "conv" or not (FORMATS[row.a].is_low_bit or row.a != row.b)
