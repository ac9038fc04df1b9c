"""What commands share: options, and writing a report to the terminal or to a file."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from mpbackend.errors import DocumentError

if TYPE_CHECKING:
    from mpbackend.plugins import Plugins
    from mpbackend.report.view import Report

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

FILE_WIDTH = 120
"""Columns of text that does not go to a terminal."""


def format_option(*formats: str) -> Callable[[CommandT], CommandT]:
    """Return the option ``--format`` with these choices, the first one the default; its value is ``output``."""
    return click.option("--format", "output", type=click.Choice(formats), default=formats[0], show_default=True, help="What to print.")


def out_option(command: CommandT) -> CommandT:
    """Add the option ``--out``."""
    help_text = "Write to this file, by a temporary name beside it, instead of printing."
    return click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help=help_text)(command)


def split_names(values: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a repeatable option, each of which may hold several joined by commas; equal ones once."""
    names = (name.strip() for value in values for name in value.split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def emit(report: Report, output: str, document: Any, out: Path | None = None) -> None:
    """Print or write a report.

    Args:
        report: what ``text`` and ``md`` show.
        output: ``text``, ``md`` or ``json``.
        document: what ``json`` shows.
        out: file to write instead of printing.
    """
    if output == "json":
        write(json_text(document), out)
    elif output == "md":
        from mpbackend.report import markdown

        write(markdown.render(report), out)
    else:
        from mpbackend.report import terminal

        terminal_out = out is None and sys.stdout.isatty()
        width = FILE_WIDTH if out is not None else shutil.get_terminal_size((FILE_WIDTH, 24)).columns
        write(terminal.render(report, width, color=terminal_out and "NO_COLOR" not in os.environ), out)


def json_text(document: Any) -> str:
    """Return plain data or records as indented JSON, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def write(text: str, out: Path | None) -> None:
    """Print ``text``, or write it to ``out`` so that no reader ever sees a part of it.

    Raises:
        DocumentError: the file cannot be written.
    """
    if out is None:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        click.echo(text.encode(encoding, "replace").decode(encoding), nl=False)
        return
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DocumentError(f"cannot write {out}", found=error.strerror or str(error), remedy="choose another --out") from error


def warn_unavailable(plugins: Plugins) -> None:
    """Say on standard error what an installed plugin offers and cannot be used."""
    for entry in plugins.unavailable:
        click.echo(f"warning: {entry.name} is unavailable: {' '.join(entry.cause.split())}; `mpbackend doctor` says more", err=True)
