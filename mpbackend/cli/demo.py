"""``mpbackend demo``."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from mpbackend.cli.options import emit, say, split_names, terminal_width, write
from mpbackend.cli.recipes import fill_table
from mpbackend.comparison.verdict import Comparison, compare
from mpbackend.errors import DocumentError
from mpbackend.matrix import Matrix
from mpbackend.observe.record import RECORD_FILE, STEPS_FILE, Recorded, load_record
from mpbackend.plugins import load_plugins
from mpbackend.report.comparison import VERDICT_TEXT, side_title
from mpbackend.report.comparison_page import Side, comparison_page, judged
from mpbackend.report.html import matrix_page
from mpbackend.report.index_page import Link, Outcome, index_page
from mpbackend.report.markdown import render
from mpbackend.report.recipes import cells_report
from mpbackend.report.rows import RowFilter, rows_report, select_rows
from mpbackend.report.runs import runs_report
from mpbackend.selection import select_device

if TYPE_CHECKING:
    from mpbackend.planning import Plan
    from mpbackend.target import Target

EXAMPLE = "mpbackend.examples.gpt"
RECIPES = "fp32,bf16,fp16"
BASELINE_RECIPE = "fp32"
WINDOW_HEIGHT = 24
"""Lines that the progress bars are drawn for; they need three."""

MOST_STEPS = 10**9
LONGEST_NAME = 100
"""Characters of a recipe that the name of its folder keeps."""

SHOWN_RECIPES = ("fp32", "fp32-fast", "bf16", "fp16", "fp8", "mxfp8", "hif8")


@click.command()
@click.option("--device", "spec", default="auto", show_default=True, metavar="SPEC", help="Where to train: auto, or a backend and address such as cpu:0.")
@click.option("--recipes", default=RECIPES, show_default=True, help="Recipes to train under, joined by commas.")
@click.option("--recipe", "single", multiple=True, metavar="RECIPE", help="A recipe to train under, commas and all; repeatable, and instead of the default.")
@click.option("--steps", type=click.IntRange(1, MOST_STEPS), default=150, show_default=True, help="Optimizer steps of each run.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=1, show_default=True, help="Seed of weights and data, the same for every run.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("demo"), show_default=True, help="Folder for records and pages.")
@click.pass_context
def command(ctx: click.Context, spec: str, recipes: str, single: tuple[str, ...], steps: int, seed: int, out: Path) -> None:
    """Train a small GPT under several recipes and show the runs, and two vendors' arithmetic, side by side."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: busy waiting makes a step ten times slower on shared cores, and changes no result

    chosen = choose_recipes(single, recipes if ctx.get_parameter_source("recipes") is not click.core.ParameterSource.DEFAULT else None)
    plugins = load_plugins()
    selection = select_device(spec, plugins)  # before torch is imported: where that fails, the device says why
    from mpbackend.target import Target

    target = Target(selection.backend, selection.device, plugins)
    plans = {name: target.plan(name, on_unsupported="emulate") for name in chosen}
    example = importlib.import_module(EXAMPLE)
    say(f"training a small GPT on {target.info.key} ({target.info.name}), {steps} steps under each of {', '.join(plans)}")
    runs = {folder_name(name): train(example, target, plan, out / folder_name(name), steps, seed) for name, plan in plans.items()}
    emit(runs_report(list(runs.values())), "text", None)
    matrix = target.plugins.matrix()
    comparisons = compare_runs(runs, out, matrix)
    say("")
    for found in comparisons:
        say(f"{VERDICT_TEXT[found.verdict]}: {side_title(found)}: {found.reasons[0] if found.reasons else found.scope}")
    say("")
    cells = fill_table(target.plugins, tuple(matrix.devices))
    emit(cells_report([cell for cell in cells if cell.device in example.SIDE_BY_SIDE and cell.recipe in SHOWN_RECIPES]), "text", None)
    rows = select_rows(matrix, RowFilter())
    write(matrix_page(matrix, rows, example.SIDE_BY_SIDE, cells), out / "matrix.html")
    write(render(rows_report(matrix, rows, notes=True)), out / "matrix.md")
    write_pages(runs, comparisons, out)
    say("")
    say(f"records: {', '.join(str(out / name) for name in runs)}")
    say(f"capability matrix: {out / 'matrix.html'} and {out / 'matrix.md'}")
    say(f"open first: {out / 'index.html'}")


def compare_runs(runs: Mapping[str, Recorded], out: Path, matrix: Matrix) -> list[Comparison]:
    """Return the comparison of each other run with that in fp32, or with the first where there is none.

    Args:
        runs: folder name to record.
        out: folder that holds those folders.
        matrix: says what switches mean.
    """
    first = baseline_of(runs)
    return [compare(out / first, out / name, matrix=matrix) for name in runs if name != first]


def baseline_of(runs: Mapping[str, Recorded]) -> str:
    """Return the folder name of the run that the others are compared with."""
    return next((name for name, run in runs.items() if run.record.recipe.text == BASELINE_RECIPE), next(iter(runs)))


def write_pages(runs: Mapping[str, Recorded], comparisons: Sequence[Comparison], out: Path) -> None:
    """Write the page of the comparisons, where there are any, and the first page."""
    first = baseline_of(runs)
    pages = [Link("matrix.html", "Capability matrix", "what each accelerator computes in, at which level, and who says so; matrix.md holds the same as text")]
    if comparisons:
        sides = [Side("baseline", runs[first]), *(Side("candidate", run) for name, run in runs.items() if name != first)]
        write(comparison_page(sides, [judged(found) for found in comparisons]), out / "comparison.html")
        pages.insert(0, Link("comparison.html", "Comparison of the runs", "verdicts, curves over each other, and every difference"))
    outcomes = [Outcome(side_title(found), found.verdict, found.reasons[0] if found.reasons else found.scope) for found in comparisons]
    records = [
        Link(f"{quote(name)}/{RECORD_FILE}", run.record.recipe.text, f"{run.record.totals.steps} steps on {run.record.device.key}")
        for name, run in runs.items()
    ]
    text = "A small GPT, trained under several recipes on this device, and what other devices would make of them."
    write(index_page("Demo", text, pages, outcomes, records, runs_report(list(runs.values())).blocks), out / "index.html")


def choose_recipes(single: Sequence[str], joined: str | None) -> tuple[str, ...]:
    """Return the recipes of ``--recipes`` and ``--recipe``, those of the demo when neither is given.

    Raises:
        DocumentError: there is none, or two would be recorded in one folder.
    """
    given = split_names([joined] if joined is not None else [] if single else [RECIPES])
    chosen = tuple(dict.fromkeys((*given, *(text.strip() for text in single))))
    if not any(chosen):
        raise DocumentError("--recipes", found="no recipe", remedy="`mpbackend recipes` lists them")
    folders: dict[str, str] = {}
    for recipe in chosen:
        other = folders.setdefault(folder_name(recipe), recipe)
        if other != recipe:
            raise DocumentError(f"--recipe {other} and {recipe}", found=f"both would be recorded in one folder, {folder_name(recipe)}")
    return chosen


def folder_name(recipe: str) -> str:
    """Return a recipe's text as the name of a folder; a long one is cut and told apart by a hash."""
    name = "".join(c if c.isalnum() or c in "-." else "_" for c in recipe)
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"


def train(example: Any, target: Target, plan: Plan, folder: Path, steps: int, seed: int) -> Recorded:
    """Train one run with a progress bar and return its record; a record of an earlier demo in the folder is replaced."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    clear_record(folder)
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[loss]}"))
    with Progress(*columns, console=Console(width=terminal_width(), height=WINDOW_HEIGHT)) as progress:
        task = progress.add_task(plan.recipe, total=steps, loss="")
        for loss in example.train(target, plan, str(folder), steps, seed):
            progress.advance(task)
            if loss is not None:
                progress.update(task, loss=f"loss {loss:.3f}")
    return load_record(folder)


def clear_record(folder: Path) -> None:
    """Remove an earlier record from a folder that holds nothing else; only regular files with the names of a record's are deleted.

    Raises:
        DocumentError: there is something else in the place of the folder or in it, or a file cannot be removed.
    """
    problem = ""
    try:
        if folder.is_symlink():
            problem = "it is a link"
        elif folder.exists():
            problem = "it is no folder" if not folder.is_dir() else clear_files(folder)
    except OSError as error:
        raise DocumentError(f"folder {folder}", found=error.strerror or str(error), remedy="choose another folder with --out") from error
    if problem:
        raise DocumentError(f"folder {folder}", found=problem, remedy="choose another folder with --out")


def clear_files(folder: Path) -> str:
    """Delete the files of a record; return what stands in the way, nothing being deleted then."""
    items = sorted(folder.iterdir())
    for item in items:
        if item.name not in (RECORD_FILE, STEPS_FILE):
            return f"it holds {item.name}"
        if item.is_symlink() or not item.is_file():
            return f"{item.name} is no regular file"
    for item in items:
        item.unlink()
    return ""
