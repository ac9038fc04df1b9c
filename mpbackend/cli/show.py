"""``mpbackend show``."""

from __future__ import annotations

from pathlib import Path

import click

from mpbackend.cli.options import emit, format_option, out_option
from mpbackend.observe.record import load_record
from mpbackend.report.runs import run_lines, runs_report


@click.command()
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@format_option("text", "md", "json")
@out_option
def command(folders: tuple[Path, ...], output: str, out: Path | None) -> None:
    """Show recorded runs side by side: what each asked for, what ran, and how it went."""
    runs = [load_record(folder) for folder in folders]
    document = {"runs": [str(folder) for folder in folders], "recipes": [run.record.recipe.text for run in runs], "lines": run_lines(runs)}
    emit(runs_report(runs), output, document, out)
