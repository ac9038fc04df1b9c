"""``mpbackend memory``: the bytes of a recipe by role, before anything runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import click

from mpbackend.cli.options import emit, format_option, out_option, warn_unavailable
from mpbackend.errors import DocumentError
from mpbackend.footprint import LIMIT, OPTIMIZERS, Footprint, Shape, check_count, footprint
from mpbackend.plugins import load_plugins
from mpbackend.recipe import parse_recipe
from mpbackend.report.view import Column, Facts, Listing, Report, Table, size_text

SUFFIXES: Mapping[str, int] = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
COUNT = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)(?:e\+?([0-9]{1,2}))?([KMBT]?)", re.IGNORECASE)
COUNTS = ("100000000", "1e8", "100M", "7B", "1.5e9")
SHAPE = re.compile(r"[0-9]{1,16}(?:x[0-9]{1,16}){0,7}")


def parse_count(text: str) -> int:
    """Parse a number of parameters: ``100000000``, ``1e8``, ``100M``, ``1.5e9``, ``7B``. K, M, B and T are powers of 1000.

    Raises:
        DocumentError: not such a number, not whole after expansion, or not within 1 to ``LIMIT``.
    """
    asked = f"parameters {text[:40]!r}"
    match = COUNT.fullmatch(text.strip())
    if match is None:
        raise DocumentError(asked, found="not a number of parameters", allowed=COUNTS)
    number, exponent, suffix = match.groups()
    value = Fraction(number) * 10 ** int(exponent or 0) * SUFFIXES[suffix.upper()]
    if not 1 <= value <= LIMIT:
        raise DocumentError(asked, found="out of range", allowed=[f"a whole number from 1 to {LIMIT:.0e}"])
    if value.denominator != 1:
        raise DocumentError(asked, found="not a whole number", allowed=COUNTS)
    return int(value)


def parse_shapes(texts: Sequence[str]) -> list[Shape]:
    """Parse shapes: ``4096x4096``, or several joined by commas.

    Raises:
        DocumentError: not such a list, a dimension of 0, or more than ``LIMIT`` elements in all.
    """
    shapes: list[Shape] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        if SHAPE.fullmatch(part) is None:
            raise DocumentError(f"shape {part[:40]!r}", found="not dimensions joined by x", allowed=["4096x4096", "4096x4096,4096"])
        shape = tuple(map(int, part.split("x")))
        check_count(math.prod(shape), f"elements of shape {part}")
        shapes.append(shape)
    check_count(sum(map(math.prod, shapes)), "elements of all shapes")
    return shapes


def amount(size: int) -> str:
    """Return bytes exactly and in a readable unit: ``67,108,864 B (64.0 MiB)``."""
    return f"{size:,} B ({size_text(size)})" if abs(size) >= 1024 else f"{size} B"


def build_report(result: Footprint) -> Report:
    """Return the footprint as a report: a table by role, the sums, and what the numbers leave out."""
    columns = (Column("role"), Column("format"), Column("bytes", keep=True, right=True), Column("size", keep=True, right=True), Column("in fp32", right=True))
    rows = [(line.role, line.format, f"{line.bytes:,}", size_text(line.bytes), size_text(line.fp32_bytes)) for line in result.lines]
    rows.append(("total", "", f"{result.total:,}", size_text(result.total), size_text(result.fp32_total)))
    sums = [("saved against fp32", f"{amount(result.saving)}, {result.saving_ratio:.1%}")]
    if result.working:
        sums.append(("working copies", f"at most {amount(result.working)}, not in the total"))
    sums.append(("checkpoint", f"{amount(result.checkpoint)}: parameters, master, moments"))
    sums.append(("checkpoint, model only", amount(result.checkpoint_model)))
    title = f"{result.recipe}, {result.parameters:,} parameters, {result.optimizer}"
    return Report(title, (Table("Held in training", columns, rows), Facts("Sums", sums), Listing("Notes", result.notes)))


@click.command()
@click.argument("recipe")
@click.option("--params", "parameters", metavar="N", help="Number of parameters: 1e8, 100M, 7B.")
@click.option("--shape", "shapes", metavar="AxB", multiple=True, help="Shapes of the parameters, joined by commas or repeated.")
@click.option("--optimizer", default="adamw", show_default=True, help=f"One of: {', '.join(OPTIMIZERS)}.")
@format_option("text", "md", "json")
@out_option
def command(recipe: str, parameters: str | None, shapes: tuple[str, ...], optimizer: str, output: str, out: Path | None) -> None:
    """Print the bytes of RECIPE by role, what it saves against fp32, and the size of a checkpoint."""
    if (parameters is None) == (not shapes):
        found = "neither --params nor --shape" if parameters is None else "--params with --shape"
        raise DocumentError("memory", found=found, remedy="write `mpbackend memory RECIPE --params 7B` or `--shape 4096x4096`")
    plugins = load_plugins()
    parsed = parse_shapes(shapes) if shapes else []
    count = sum(map(math.prod, parsed)) if parameters is None else parse_count(parameters)
    result = footprint(parse_recipe(recipe, plugins.presets), count, optimizer, parsed)
    emit(build_report(result), output, result, out)
    warn_unavailable(plugins)
