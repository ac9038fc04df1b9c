"""``mpbackend record``."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from mpbackend.cli.options import say
from mpbackend.device import Device, Kind
from mpbackend.errors import DocumentError
from mpbackend.observe.imports import import_run
from mpbackend.observe.record import RecipeName
from mpbackend.plugins import load_plugins
from mpbackend.recipe import canonical_text, parse_recipe, recipe_hash

UNKNOWN = "unknown"


@click.group()
def command() -> None:
    """Make records from what other loops wrote."""


@command.command("import")
@click.argument("source", metavar="LOG", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of the new record.")
@click.option("--recipe", required=True, metavar="RECIPE", help="The recipe that the run trained under, as you state it.")
@click.option("--device", default="", metavar="KEY", help="The device that it ran on, as you state it; `mpbackend devices --known` lists the keys.")
@click.option("--kind", type=click.Choice(get_args(Kind)), default="hardware", show_default=True, help="What that device was.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Its seed.")
@click.option("--column", "columns", multiple=True, metavar="FIELD=NAME", help="Name of a field in the log, where it is not found by itself; repeatable.")
def import_command(source: Path, out: Path, recipe: str, device: str, kind: str, seed: int | None, columns: tuple[str, ...]) -> None:
    """Make a record from a TensorBoard event file, a folder with such files, or a table with a heading (CSV, or TSV)."""
    names = parse_columns(columns)
    plugins = load_plugins()
    parsed = parse_recipe(recipe, plugins.presets)
    text = canonical_text(parsed, plugins.presets)
    stated: Kind = next(known for known in get_args(Kind) if known == kind)
    where = Device(key=UNKNOWN, arch=UNKNOWN, name=UNKNOWN, kind=stated)
    if device:
        model = plugins.matrix().device(device)
        where = Device(key=model.key, arch=model.arch, name=model.name, kind=stated)
    named = RecipeName(text=text, hash=recipe_hash(parsed, plugins.presets), granted=UNKNOWN)
    record = import_run(source, out, named, where, seed=seed, kind=stated, names=names)
    say(f"{out}: {record.totals.steps} steps of {text} on {where.key}")
    for note in record.notes:
        say(f"note: {note}")


def parse_columns(assignments: tuple[str, ...]) -> dict[str, str]:
    """Parse ``field=name`` pairs.

    Raises:
        DocumentError: not such a pair, or a field is given twice.
    """
    names: dict[str, str] = {}
    for assignment in assignments:
        field, equals, name = (part.strip() for part in assignment.partition("="))
        if not equals or not field or not name:
            raise DocumentError(f"--column {assignment!r}", found="not field=name", remedy="write for example --column loss=train/ce")
        if field in names:
            raise DocumentError(f"--column {assignment!r}", found=f"{field} is given twice")
        names[field] = name
    return names
