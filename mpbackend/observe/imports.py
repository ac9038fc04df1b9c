"""Records made from logs of loops that are not ours: TensorBoard's event files, and tables of comma- or tab-separated values.

A log holds numbers and nothing of the arithmetic: recipe, device and seed are as stated by whoever imports it, everything else of the record is empty, and a
note says so. A comparison then knows what it cannot know.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from mpbackend.device import Device, Kind
from mpbackend.errors import DocumentError, printable
from mpbackend.observe.event_files import FILE_PATTERN, read_scalars
from mpbackend.observe.record import RecipeName, Run, RunRecord, StepRow, to_number
from mpbackend.observe.record_writer import RecordWriter, count_totals
from mpbackend.observe.stated import parse_settings

ALIASES: Mapping[str, frozenset[str]] = {
    "step": frozenset(["step", "global_step", "train/global_step", "iteration", "iter"]),
    "loss": frozenset(["loss", "train/loss", "train_loss", "training_loss", "loss/train", "lm_loss"]),
    "grad_norm": frozenset(["grad_norm", "train/grad_norm", "gradient_norm"]),
    "scale": frozenset(["scale", "loss_scale", "train/loss_scale"]),
    "lr": frozenset(["lr", "learning_rate", "train/lr", "train/learning_rate"]),
    "ms": frozenset(["ms", "step_ms", "step_time_ms"]),
    "samples": frozenset(["samples"]),
    "tokens": frozenset(["tokens"]),
    "stepped": frozenset(["stepped"]),
}
"""Names under which a field is found, in lower case with ``_`` for blanks and hyphens: ours, and those of the Hugging Face Trainer and of Megatron-LM. A time
without its unit in the name has none: nothing in a log states the unit."""

COUNTS = ("samples", "tokens")
FLAGS = {"1": True, "true": True, "0": False, "false": False}
LARGEST = 2**63 - 1

Cells = dict[str, float]
Table = Iterable[tuple[str, int, Cells]]
"""Where a line stands, its step, and its numbers by name."""


def import_run(
    source: Path,
    folder: Path,
    recipe: RecipeName,
    device: Device,
    *,
    seed: int | None = None,
    kind: Kind = "hardware",
    names: Mapping[str, str] | None = None,
    settings: Mapping[str, object] | None = None,
) -> RunRecord:
    """Write a record from a log.

    Args:
        source: an event file, a folder with event files, or a table with a heading.
        folder: folder of the new record.
        recipe: the recipe as stated.
        device: the device as stated.
        seed: seed as stated, None when it is not known.
        kind: whether the device was hardware, as stated.
        names: field of a step to its name in the log, where that is none of ``ALIASES``.
        settings: what else a comparison asks for, as stated; see ``stated.parse_settings``. Stated samples are those of steps that the log has none of.

    Returns:
        What was written to ``record.json``.

    Raises:
        DocumentError: the log cannot be read or holds no step, a name fits two fields or none, a setting is refused, or the folder holds a record. Nothing is
            written then.
    """
    stated = parse_settings(settings or {})
    rows = [msgspec.structs.replace(row, samples=row.samples or stated.samples) for row in read_log(source, names or {})]
    lacking = [field for field in ("loss", "grad_norm", "ms") if all(getattr(row, field) is None for row in rows)]
    notes = [
        f"imported from {printable(source.name)}: recipe, device, kind and seed are as stated by whoever imported it, nothing of the arithmetic was observed",
        *([f"stated of the settings: {', '.join(f'{name} {value}' for name, value in (settings or {}).items())}"] if settings else []),
        *([f"the log has no {', '.join(lacking)}"] if lacking else []),
    ]
    record = RunRecord(
        run=Run(id=f"imported {printable(source.name)}", seed=seed, kind=kind),
        environment={"imported from": printable(source.name)},
        device=device,
        recipe=recipe,
        plan=(),
        settings=stated.settings,
        fingerprints=stated.fingerprints,
        totals=count_totals(rows),
        notes=tuple(notes),
    )
    writer = RecordWriter(folder)
    try:
        writer.append(rows)
        writer.write(record)
    except DocumentError:
        writer.discard()
        raise
    writer.close()
    return record


def read_log(source: Path, names: Mapping[str, str]) -> list[StepRow]:
    """Return the steps of a log in order; of a step that stands in it twice, each number that was written last.

    Args:
        source: as for ``import_run``.
        names: as for ``import_run``.
    """
    if unknown := sorted(set(names) - set(ALIASES)):
        raise DocumentError(f"--column {unknown[0]}", found="no field of a step has that name", allowed=sorted(ALIASES))
    events = source.is_dir() or "tfevents" in source.name
    merged: dict[int, Cells] = {}
    for where, step, cells in event_table(source) if events else text_table(source, names):
        if not 0 <= step <= LARGEST:
            raise DocumentError(f"{where}", found=f"step {step}", remedy="steps are counted from 0 or 1")
        merged.setdefault(step, {}).update(cells)
    if not merged:
        raise DocumentError(f"a log in {source}", found="no step", remedy=f"name an event file ({FILE_PATTERN}) or a table with a column 'step'")
    fields = assign_fields(source, dict.fromkeys(name for cells in merged.values() for name in cells), names)
    return [step_row(source, step, cells, fields) for step, cells in sorted(merged.items())]


def event_table(source: Path) -> Iterator[tuple[str, int, Cells]]:
    """Yield the scalars of event files."""
    for scalar in read_scalars(source):
        yield f"{source.name}, tag {scalar.tag!r}", scalar.step, {scalar.tag: scalar.value}


def text_table(source: Path, names: Mapping[str, str]) -> Iterator[tuple[str, int, Cells]]:
    """Yield the lines of a table; an empty cell has no number."""
    try:
        with source.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline()
            stream.seek(0)
            reader = csv.reader(stream, delimiter="\t" if "\t" in first and "," not in first else ",", strict=True)
            heads = [head.strip() for head in next(reader, [])]
            if repeated := [head for head in heads if heads.count(head) > 1]:
                raise DocumentError(f"{source}", found=f"two columns named {repeated[0]!r}")
            step_column = names.get("step") or next((head for head in heads if folded(head) in ALIASES["step"]), "")
            if step_column not in heads:
                raise DocumentError(f"{source}", found=f"no column {step_column or 'step'!r}", allowed=heads[:12], remedy="name it: --column step=NAME")
            for cells in reader:
                where = f"{source} line {reader.line_num}"
                if len(cells) > len(heads):
                    raise DocumentError(where, found=f"{len(cells)} cells under {len(heads)} headings")
                texts = {head: cell.strip() for head, cell in zip(heads, cells, strict=False) if cell.strip()}
                if texts:
                    step = whole_number(where, step_column, texts.pop(step_column, ""))
                    yield where, step, {head: number(where, head, text) for head, text in texts.items()}
    except OSError as error:
        raise DocumentError(f"cannot read {source}", found=error.strerror or str(error)) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise DocumentError(f"{source} is no table", found=str(error)) from error


def folded(name: str) -> str:
    """Return a name as ``ALIASES`` writes it."""
    return name.lower().replace(" ", "_").replace("-", "_")


def number(where: str, head: str, text: str) -> float:
    """Return a cell as a number."""
    if text.lower() in FLAGS:
        return float(FLAGS[text.lower()])
    try:
        return float(text)
    except ValueError as error:
        raise DocumentError(f"{where}, column {head!r}", found=f"{text[:40]!r} is no number") from error


def whole_number(where: str, head: str, text: str) -> int:
    """Return a cell as a whole number; an empty cell is none."""
    value = number(where, head, text) if text else math.nan
    if not value.is_integer():
        raise DocumentError(f"{where}, column {head!r}", found=f"{text[:40]!r} is no whole number")
    return int(value)


def assign_fields(source: Path, found: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the field of a step that each name of a log belongs to; a name without one is a metric.

    Raises:
        DocumentError: a name that was given is not in the log, or two names of the log belong to one field.
    """
    present = list(found)
    fields: dict[str, str] = {}
    for field, aliases in ALIASES.items():
        given = names.get(field)
        if field == "step":
            continue
        if given is not None and given not in present:
            raise DocumentError(f"--column {field}={given}", found="the log has no such name", allowed=sorted(present)[:24])
        fitting = [given] if given is not None else [name for name in present if folded(name) in aliases and name not in names.values()]
        if len(fitting) > 1:
            shown = " and ".join(repr(name) for name in fitting)
            raise DocumentError(f"{field} in {source}", found=f"{shown} both fit", remedy=f"choose one: --column {field}={fitting[0]}")
        fields.update(dict.fromkeys(fitting, field))
    return fields


def step_row(source: Path, step: int, cells: Cells, fields: Mapping[str, str]) -> StepRow:
    """Return a step. Its optimizer stepped, unless a column says otherwise."""
    known: dict[str, float] = {fields[name]: value for name, value in cells.items() if name in fields}
    values: dict[str, Any] = {name: to_number(known[name]) for name in ("loss", "grad_norm", "lr", "ms") if name in known}
    for name in COUNTS:
        if name in known:
            if not (known[name].is_integer() and 0 <= known[name] <= LARGEST):
                raise DocumentError(f"{name} of step {step} in {source}", found=f"{known[name]:g} is no count")
            values[name] = int(known[name])
    scale = known.get("scale", 1.0)
    if not (math.isfinite(scale) and scale > 0):
        raise DocumentError(f"loss scale of step {step} in {source}", found=f"{scale:g}", remedy="a loss scale is a positive number")
    stepped = bool(known.get("stepped", 1.0))
    return StepRow(
        step=step,
        scale=scale,
        stepped=stepped,
        reason="" if stepped else "skipped, says the log",
        nonfinite=any(not math.isfinite(known[name]) for name in ("loss", "grad_norm") if name in known),
        metrics={name: to_number(value) for name, value in cells.items() if name not in fields},
        **values,
    )
