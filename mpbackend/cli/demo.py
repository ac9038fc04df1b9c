"""``mpbackend demo``."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpbackend.cli.options import emit, split_names, write
from mpbackend.cli.recipes import fill_table
from mpbackend.errors import DocumentError
from mpbackend.observe.record import RECORD_FILE, STEPS_FILE, Recorded, load_record
from mpbackend.report.html import matrix_page
from mpbackend.report.markdown import render
from mpbackend.report.recipes import cells_report
from mpbackend.report.rows import RowFilter, rows_report, select_rows
from mpbackend.report.runs import runs_report

if TYPE_CHECKING:
    from mpbackend.planning import Plan
    from mpbackend.target import Target

EXAMPLE = "mpbackend.examples.gpt"
RECIPES = "fp32,bf16,fp16"
SHOWN_RECIPES = ("fp32", "fp32-fast", "bf16", "fp16", "fp8", "mxfp8", "hif8")


@click.command()
@click.option("--device", "spec", default="auto", show_default=True, metavar="SPEC", help="Where to train: auto, or a backend and address such as cpu:0.")
@click.option("--recipes", default=RECIPES, show_default=True, help="Recipes to train under, joined by commas.")
@click.option("--steps", type=click.IntRange(min=1), default=150, show_default=True, help="Optimizer steps of each run.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of weights and data, the same for every run.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("demo"), show_default=True, help="Folder for records and pages.")
def command(spec: str, recipes: str, steps: int, seed: int, out: Path) -> None:
    """Train a small GPT under several recipes and show the runs, and two vendors' arithmetic, side by side."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: busy waiting makes a step ten times slower on shared cores, and changes no result
    from mpbackend.target import select

    target = select(spec)
    plans = {name: target.plan(name, on_unsupported="emulate") for name in split_names([recipes])}
    if not plans:
        raise DocumentError("--recipes", found="no recipe", remedy="`mpbackend recipes` lists them")
    example = importlib.import_module(EXAMPLE)
    click.echo(f"training a small GPT on {target.info.key} ({target.info.name}), {steps} steps under each of {', '.join(plans)}")
    runs = [train(example, target, plan, out / folder_name(name), steps, seed) for name, plan in plans.items()]
    emit(runs_report(runs), "text", None)
    matrix = target.plugins.matrix()
    click.echo()
    cells = [cell for cell in fill_table(target.plugins, example.SIDE_BY_SIDE) if cell.recipe in SHOWN_RECIPES]
    emit(cells_report(cells), "text", None)
    rows = select_rows(matrix, RowFilter())
    write(matrix_page(matrix, rows, compare=example.SIDE_BY_SIDE), out / "matrix.html")
    write(render(rows_report(matrix, rows, notes=True)), out / "matrix.md")
    click.echo(f"\nrecords: {', '.join(str(out / folder_name(name)) for name in plans)}")
    click.echo(f"capability matrix: {out / 'matrix.html'} and {out / 'matrix.md'}")


def folder_name(recipe: str) -> str:
    """Return a recipe's text as the name of a folder."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in recipe)


def train(example: Any, target: Target, plan: Plan, folder: Path, steps: int, seed: int) -> Recorded:
    """Train one run with a progress bar and return its record; a record of an earlier demo in the folder is replaced."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    clear_record(folder)
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[loss]}"))
    with Progress(*columns) as progress:
        task = progress.add_task(plan.recipe, total=steps, loss="")
        for loss in example.train(target, plan, str(folder), steps, seed):
            progress.advance(task)
            if loss is not None:
                progress.update(task, loss=f"loss {loss:.3f}")
    return load_record(folder)


def clear_record(folder: Path) -> None:
    """Remove an earlier record from a folder that holds nothing else.

    Raises:
        DocumentError: the folder holds other files.
    """
    if not folder.exists():
        return
    others = [item.name for item in folder.iterdir() if item.name not in (RECORD_FILE, STEPS_FILE)]
    if others:
        raise DocumentError(f"folder {folder}", found=f"it holds {others[0]}", remedy="choose another folder with --out")
    shutil.rmtree(folder)
