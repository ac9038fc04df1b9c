"""``mpbackend matrix``."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from mpbackend.capability import LEVELS, Level
from mpbackend.cli.options import emit, format_option, out_option, split_names, warn_unavailable, write
from mpbackend.cli.recipes import fill_table
from mpbackend.errors import DocumentError
from mpbackend.matrix import Matrix
from mpbackend.plugins import Plugins, load_plugins
from mpbackend.report.difference import compare_devices, difference_document, difference_report
from mpbackend.report.rows import RowFilter, chosen_archs, rows_document, rows_report, select_rows


@click.command()
@click.option("--device", "devices", multiple=True, metavar="KEY", help="Rows of this device's architecture; repeatable.")
@click.option("--arch", "archs", multiple=True, metavar="KEY", help="Rows of this architecture; repeatable.")
@click.option("--op", default="", help="Rows of this operation: matmul, conv, ...")
@click.option("--operand", default="", metavar="FORMAT", help="Rows with this format as an operand.")
@click.option("--level", type=click.Choice(LEVELS), help="Rows of this level.")
@click.option("--path", default="", help="Rows of this path: an instruction, a library operator, a framework default.")
@click.option("--software", multiple=True, metavar="NAME=VERSION", help="Leave out rows that need a later version; repeatable.")
@click.option("--diff", nargs=2, metavar="KEY KEY", help="Compare two devices.")
@format_option("text", "md", "json", "html")
@out_option
def command(
    devices: tuple[str, ...],
    archs: tuple[str, ...],
    op: str,
    operand: str,
    level: str | None,
    path: str,
    software: tuple[str, ...],
    diff: tuple[str, str] | None,
    output: str,
    out: Path | None,
) -> None:
    """Show what devices compute in, at which level, and who says so; or compare two devices."""
    wanted = RowFilter(
        devices=split_names(devices),
        archs=split_names(archs),
        op=op,
        operand=operand,
        level=next((known for known in get_args(Level) if known == level), None),
        path=path,
        software=parse_software(split_names(software)),
    )
    plugins = load_plugins()
    matrix = plugins.matrix()
    if diff is not None:
        show_difference(plugins, diff, wanted, output, out)
    else:
        rows = select_rows(matrix, wanted)
        if output == "html":
            from mpbackend.report.html import matrix_page

            write(matrix_page(matrix, rows, cells=fill_table(plugins, page_devices(matrix, wanted))), out)
        else:
            emit(rows_report(matrix, rows, notes=output == "md"), output, rows_document(matrix, rows) if output == "json" else None, out)
    warn_unavailable(plugins)


def page_devices(matrix: Matrix, wanted: RowFilter) -> tuple[str, ...]:
    """Return the devices of the architectures that a page holds rows of."""
    archs = {arch.key for arch in chosen_archs(matrix, wanted)}
    return tuple(key for key, model in matrix.devices.items() if model.arch in archs)


def show_difference(plugins: Plugins, devices: tuple[str, str], wanted: RowFilter, output: str, out: Path | None) -> None:
    """Print or write the difference of two devices."""
    matrix = plugins.matrix()
    first, second = (matrix.device(key).key for key in devices)
    if wanted.devices or wanted.archs:
        raise DocumentError("--diff with --device or --arch", found="two ways to choose devices", remedy="leave --device and --arch out")
    entries = compare_devices(matrix, first, second, wanted)
    if output == "html":
        from mpbackend.report.html import matrix_page

        write(matrix_page(matrix, select_rows(matrix, wanted), (first, second), fill_table(plugins, page_devices(matrix, wanted))), out)
    else:
        document = difference_document(matrix, first, second, entries) if output == "json" else None
        emit(difference_report(matrix, first, second, entries), output, document, out)


def parse_software(assignments: tuple[str, ...]) -> dict[str, str]:
    """Parse ``name=version`` pairs.

    Raises:
        DocumentError: not such a pair, or a name is given twice.
    """
    software: dict[str, str] = {}
    for assignment in assignments:
        name, equals, version = (part.strip() for part in assignment.partition("="))
        if not equals or not name or not version:
            raise DocumentError(f"--software {assignment!r}", found="not name=version", remedy="write for example --software NAME=11.8")
        if name in software:
            raise DocumentError(f"--software {assignment!r}", found=f"{name} is given twice")
        software[name] = version
    return software
