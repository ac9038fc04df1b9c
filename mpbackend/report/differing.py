"""What differs between records besides their curves: the five classes, decisions, switches, environment and memory. One column a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpbackend.observe.record import Recorded, SwitchReading
from mpbackend.report.runs import formats_cell
from mpbackend.report.view import Column, Table, size_text

NONE = "none"


def classes_table(runs: Sequence[Recorded], names: Sequence[str]) -> Table:
    """Return the five classes side by side, asked and observed, those that differ marked."""
    rows = []
    for kind in dict.fromkeys(kind for run in runs for kind in run.record.classes):
        readings = [run.record.classes.get(kind) for run in runs]
        for part in ("asked", "observed"):
            cells = [NONE if reading is None else reading.asked if part == "asked" else formats_cell(reading.observed) for reading in readings]
            rows.append((f"{kind}, {part}", mark(cells), *cells))
    return Table("Classes, asked and observed", (Column("class"), Column("", keep=True), *map(Column, names)), rows)


def mark(cells: Sequence[str]) -> str:
    """Return a sign for cells that are not all equal."""
    return "≠" if len(set(cells)) > 1 else "="


def differing_table(title: str, first: str, names: Sequence[str], columns: Sequence[Mapping[str, str]]) -> Table:
    """Return the lines in which runs differ.

    Args:
        title: of the table.
        first: heading of the names of the lines.
        names: of the runs.
        columns: for each run, name of a line to its value.
    """
    lines = [(line, *(column.get(line, NONE) for column in columns)) for line in dict.fromkeys(line for column in columns for line in column)]
    return Table(title, (Column(first), *map(Column, names)), [line for line in lines if len(set(line[1:])) > 1])


def decisions_of(run: Recorded) -> dict[str, str]:
    """Return the decisions of a run's plan: role and operation to what was asked, granted, and why."""
    found: dict[str, str] = {}
    for decision in run.record.plan:
        name = f"{decision.role} ({decision.op})" if decision.op else decision.role
        text = decision.granted if decision.asked == decision.granted else f"{decision.asked} → {decision.granted}"
        found[name] = f"{text}, {decision.level}" + (f": {decision.reason}" if decision.reason else "")
    return found


def switches_of(run: Recorded) -> dict[str, str]:
    """Return the switches of a run: name to what it was while the run lasted, and what else is known of it."""
    return {name: switch_text(reading) for name, reading in run.record.switches.items()}


def switch_text(reading: SwitchReading) -> str:
    """Return a switch: the value that the run had, and before and after where they differ from it."""
    during = reading.read_back or reading.set or reading.before
    others = [f"{when} {value}" for when, value in (("before", reading.before), ("after", reading.after)) if value and value != during]
    return during + (f" ({', '.join(others)})" if others else "")


def operations_of(run: Recorded) -> dict[str, str]:
    """Return what an observed step did: operations that multiply and conversions, to how often in which formats."""
    compute = run.record.compute
    rows = {**compute.products, **{f"conversions, {phase}": calls for phase, calls in compute.conversions.items()}}
    return {name: ", ".join(f"{formats} x {count}" for formats, count in sorted(calls.items())) for name, calls in rows.items()}


def environment_of(run: Recorded) -> dict[str, str]:
    """Return versions and variables, and how the session was prepared."""
    device = run.record.device
    return {
        "device": f"{device.key} ({device.name})",
        "kind of device": run.record.run.kind,
        **run.record.environment,
        **{f"setting {name}": value for name, value in run.record.settings.items()},
        **{f"counter {name}": str(value) for name, value in run.record.counters.items()},
    }


def memory_table(runs: Sequence[Recorded], names: Sequence[str]) -> Table:
    """Return the memory of runs as it was measured."""
    kinds = dict.fromkeys(kind for run in runs for kind in run.record.memory)
    rows = [(kind, *(memory_text(run.record.memory.get(kind)) for run in runs)) for kind in kinds]
    rows.append(("measured", *(run.record.memory_basis or NONE for run in runs)))
    return Table("Memory", (Column(""), *map(Column, names)), rows)


def memory_text(size: int | None) -> str:
    """Return bytes, ``unknown`` where they were not measured."""
    return "unknown" if size is None else size_text(size)
