"""``mpbackend record``."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from mpbackend.cli.options import say
from mpbackend.device import Kind
from mpbackend.errors import DocumentError
from mpbackend.observe.imports import import_run
from mpbackend.observe.stated import PARSERS, stated_device, stated_recipe
from mpbackend.plugins import load_plugins

SETTING_HELP = f"What else a comparison asks for, as you state it; repeatable. Names: {', '.join(PARSERS)}."


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
@click.option("--setting", "settings", multiple=True, metavar="NAME=VALUE", help=SETTING_HELP)
def import_command(source: Path, out: Path, recipe: str, device: str, kind: str, seed: int | None, columns: tuple[str, ...], settings: tuple[str, ...]) -> None:
    """Make a record from a TensorBoard event file, a folder with such files, or a table with a heading (CSV, or TSV)."""
    names, given = parse_pairs("--column", columns, "loss=train/ce"), parse_pairs("--setting", settings, "clip_norm=1.0")
    plugins = load_plugins()
    stated: Kind = next(known for known in get_args(Kind) if known == kind)
    named, where = stated_recipe(recipe, plugins), stated_device(device, stated, plugins)
    record = import_run(source, out, named, where, seed=seed, kind=stated, names=names, settings=given)
    say(f"{out}: {record.totals.steps} steps of {named.text} on {where.key}")
    for note in record.notes:
        say(f"note: {note}")


def parse_pairs(option: str, assignments: tuple[str, ...], example: str) -> dict[str, str]:
    """Parse the pairs ``name=value`` of an option that may be repeated.

    Raises:
        DocumentError: not such a pair, or a name is given twice.
    """
    pairs: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not name or not value:
            raise DocumentError(f"{option} {assignment!r}", found="no pair", remedy=f"write for example {option} {example}")
        if name in pairs:
            raise DocumentError(f"{option} {assignment!r}", found=f"{name} is given twice")
        pairs[name] = value
    return pairs
