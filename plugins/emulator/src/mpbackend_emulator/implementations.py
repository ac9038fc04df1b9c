"""What the emulator runs for an architecture, and why it does not run the rest. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

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
    runs = [row for op in OPS for row in running(unit, op)]
    done = {(row.op, row.a, row.b) for row in runs}
    floats = [name for name, spec in FORMATS.items() if spec.kind == "float"]
    pairs = [*((name, name) for name in floats), *MIXED]
    return runs + [
        Implementation(op=op, a=a, b=b, accumulate="none", path="none", reason=refusal(unit, op, a, b))
        for op in OPS
        for a, b in pairs
        if (op, a, b) not in done
    ]


def running(unit: Unit, op: str) -> Iterator[Implementation]:
    """Yield one row for each combination of formats and scales of one operation that the device computes and there is an arithmetic for."""
    levels: dict[tuple[str, str, str], Level] = {}
    for row in unit.matrix.rows(unit.arch, op=op):
        key = (row.a, row.b, row.scaling)
        if runs(unit, row) and (key not in levels or LEVELS.index(row.level) < LEVELS.index(levels[key])):
            levels[key] = row.level
    for (a, b, scaling), level in levels.items():
        yield Implementation(op=op, a=a, b=b, scaling=scaling, accumulate=unit.find(a, b, scaling).register, path=PATH, level=level)


def runs(unit: Unit, row: Row) -> bool:
    """Tell whether a row computes in floating point and its sums can be emulated."""
    computes = row.level not in ("absent", "storage") and row.scaling in LAYOUTS
    if not computes or any(name not in FORMATS or FORMATS[name].kind != "float" for name in (row.a, row.b)):
        return False
    if row.op == "conv" and (FORMATS[row.a].is_low_bit or row.a != row.b):
        return False
    try:
        unit.find(row.a, row.b, row.scaling)
    except BackendError:
        return False
    return True


def refusal(unit: Unit, op: str, a: str, b: str) -> str:
    """Return why products of two formats do not run."""
    if op == "conv" and FORMATS[a].is_low_bit:
        return LOW_BIT_CONV
    return unit.why_not(a, b)
