"""``mpbackend compare``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click

from mpbackend.cli.options import emit, format_option, out_option, split_names, write
from mpbackend.comparison.equality import Verdict
from mpbackend.comparison.margin import DEFAULT
from mpbackend.comparison.question import QUESTIONS
from mpbackend.comparison.verdict import compare
from mpbackend.errors import DocumentError, UnknownNameError
from mpbackend.plugins import load_plugins
from mpbackend.report.comparison import comparison_document, comparison_report

SIDES = ("--baseline", "--candidate")
FAILED = 1
"""Exit code of a verdict that ``--fail-on`` names."""


class SidesCommand(click.Command):
    """A command whose options ``--baseline`` and ``--candidate`` take every folder up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option before each of its folders, as click needs it."""
        return super().parse_args(ctx, repeated(args))


def repeated(args: Sequence[str]) -> list[str]:
    """Return arguments in which ``--baseline a b`` is written ``--baseline a --baseline b``."""
    found: list[str] = []
    option = ""
    fresh = False
    for arg in args:
        if arg in SIDES:
            option, fresh = arg, True
        elif arg.startswith("-") and not fresh:
            option = ""
        elif option and not fresh:
            found.append(option)
        if option and arg not in SIDES:
            fresh = False
        found.append(arg)
    return found


@click.command(cls=SidesCommand)
@click.argument("pair", metavar="[A B]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--baseline", multiple=True, metavar="DIR...", type=click.Path(path_type=Path), help="Records of the baseline: several seeds, or repeats of one.")
@click.option("--candidate", multiple=True, metavar="DIR...", type=click.Path(path_type=Path), help="Records of what is compared with it.")
@click.option("--question", type=click.Choice(QUESTIONS), help="vendor: one recipe; recipe: one device. The one that fits if omitted.")
@click.option("--margin", default=DEFAULT, show_default=True, help="Difference that counts as equal: a share of the baseline's quality, or a number.")
@click.option("--metric", help="Metric that is the quality; a validation metric, else the training loss at the end, if omitted.")
@click.option("--fail-on", multiple=True, metavar="VERDICT", help="Verdicts that end with exit code 1, joined by commas or repeated.")
@format_option("text", "md", "json", "html")
@out_option
def command(
    pair: tuple[Path, ...],
    baseline: tuple[Path, ...],
    candidate: tuple[Path, ...],
    question: str | None,
    margin: str,
    metric: str | None,
    fail_on: tuple[str, ...],
    output: str,
    out: Path | None,
) -> None:
    """Compare recorded runs at equal quality: A is the baseline, B the candidate.

    The verdict is equivalent, different, inconclusive or not comparable. Runs of several seeds are matched by seed; runs of one seed on one side are repeats.
    """
    sides = choose_sides(pair, baseline, candidate)
    failing = check_verdicts(split_names(fail_on))
    found = compare(*sides, question=question, margin=margin, metric=metric, matrix=load_plugins().matrix())
    if output == "html":
        from mpbackend.observe.record import load_record
        from mpbackend.report.comparison_page import Side, comparison_page, judged

        runs = [Side(role, load_record(folder)) for role, folders in zip(("baseline", "candidate"), sides, strict=True) for folder in folders]
        write(comparison_page(runs, [judged(found)]), out)
    else:
        emit(comparison_report(found), output, comparison_document(found), out)
    if found.verdict in failing:
        sys.exit(FAILED)


def choose_sides(pair: Sequence[Path], baseline: Sequence[Path], candidate: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the folders of both sides.

    Raises:
        DocumentError: they are given in neither of the two forms.
    """
    remedy = "write `mpbackend compare A B`, or `mpbackend compare --baseline DIR... --candidate DIR...`"
    if pair and (baseline or candidate):
        raise DocumentError("compare", found="folders beside --baseline and --candidate", remedy=remedy)
    if pair and len(pair) != 2:
        raise DocumentError("compare", found=f"{len(pair)} folder{'s' if len(pair) > 1 else ''}", remedy=remedy)
    if not pair and not (baseline and candidate):
        side = "folder" if not baseline and not candidate else "--candidate" if baseline else "--baseline"
        raise DocumentError("compare", found=f"no {side}", remedy=remedy)
    return (list(pair[:1]), list(pair[1:])) if pair else (list(baseline), list(candidate))


def check_verdicts(names: Sequence[str]) -> Sequence[str]:
    """Return verdicts; ``UnknownNameError`` when one is none."""
    for name in names:
        if name not in get_args(Verdict):
            raise UnknownNameError("verdict", name, get_args(Verdict))
    return names
