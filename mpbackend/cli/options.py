"""What commands share: options, and writing a report to the terminal or to a file."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from mpbackend.errors import DocumentError, printable
from mpbackend.report.view import NARROWEST, WIDEST, json_escaped

if TYPE_CHECKING:
    from mpbackend.plugins import Plugins
    from mpbackend.report.view import Report

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

FILE_WIDTH = 120
"""Columns of text that does not go to a terminal."""


class OneLine(click.ClickException):
    """An error as the command line shows it: one line, no traceback.

    Args:
        message: what went wrong.
        exit_code: 2 for what was asked, 1 for where the answer should go.
    """

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc] # click calls it a class variable and reads it from the instance

    def show(self, file: Any = None) -> None:
        """Print ``error: <message>`` to standard error."""
        click.echo(f"error: {printable(self.message)}", file=file, err=True)


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

        terminal_out = out is None and sys.stdout is not None and sys.stdout.isatty()
        width = FILE_WIDTH if out is not None else terminal_width()
        write(terminal.render(report, width, color=terminal_out and "NO_COLOR" not in os.environ), out)


def terminal_width() -> int:
    """Return the columns of the terminal, within what a report is laid out for; a fixed number where there is no terminal."""
    columns = shutil.get_terminal_size((FILE_WIDTH, 24)).columns
    return min(max(columns, NARROWEST), WIDEST)


def json_text(document: Any) -> str:
    """Return plain data or records as indented JSON, ending in a newline, in which every character only shows."""
    return json_escaped(msgspec.json.format(msgspec.json.encode(document), indent=2).decode()) + "\n"


def say(line: str, *, err: bool = False) -> None:
    """Print one line, to standard error if ``err``, whatever its parts hold."""
    put(f"{printable(line)}\n", err=err)


def put(text: str, *, err: bool = False) -> None:
    """Print text; ``OneLine`` where standard output cannot take it. A reader who left is no error: the command ends quietly, as click does."""
    try:
        click.echo(text, nl=False, err=err)
    except OSError as error:
        if error.errno == errno.EPIPE or err:
            raise
        raise output_error(error) from error


def output_error(error: OSError) -> OneLine:
    """Return the error for standard output, and lead what it still holds to nowhere, so that the interpreter does not fail again when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    sys.stdout = None  # what a process without one has
    return OneLine(f"cannot write to standard output: {error.strerror or error}", exit_code=1)


def write(text: str, out: Path | None) -> None:
    """Print ``text``, or write it to ``out`` so that no reader ever sees a part of it.

    A link is followed. What is neither a file nor a folder, a pipe for one, is written to and stays what it is.

    Raises:
        DocumentError: the file cannot be written.
        OneLine: standard output is closed.
    """
    if out is None:
        if sys.stdout is None:
            raise OneLine("standard output is closed", exit_code=1)
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        put(text.encode(encoding, "replace").decode(encoding))
        return
    try:
        mode = mode_of(out)
        if mode is not None and stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if mode is not None and not stat.S_ISREG(mode):
            with out.open("w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
        else:
            replace_file(Path(os.path.realpath(out)), text)
    except (OSError, ValueError) as error:
        found = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise DocumentError(f"cannot write {out}", found=found, remedy="choose another --out") from error


def mode_of(path: Path) -> int | None:
    """Return the mode of what a path leads to, None when there is nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def replace_file(path: Path, text: str) -> None:
    """Write a file under another name beside it, then rename that; a file that was there leaves its mode to the new one."""
    temporary = path.with_name(f".mpbackend.{os.getpid()}.tmp")
    with temporary.open("x", encoding="utf-8", newline="\n") as stream, removed_on_failure(temporary):
        stream.write(text)
        stream.flush()
        with contextlib.suppress(OSError):  # there was no file, or this file system has no modes
            shutil.copymode(path, temporary)
        temporary.replace(path)


@contextlib.contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Remove a file when what is done with it fails; what stands against that too is not what has to be told."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def warn_unavailable(plugins: Plugins) -> None:
    """Say on standard error what an installed plugin offers and cannot be used."""
    for entry in plugins.unavailable:
        say(f"warning: {entry.name} is unavailable: {entry.cause}; `mpbackend doctor` says more", err=True)
