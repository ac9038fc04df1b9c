"""Runs side by side as one HTML file that needs no network and holds no script: the verdict, curves over each other, and everything else that differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from mpbackend import __version__
from mpbackend.comparison.verdict import Comparison
from mpbackend.observe.record import CLASSES, Recorded
from mpbackend.report.charts import Curve, line_chart, swatch
from mpbackend.report.comparison import VERDICT_TEXT, comparison_report, side_title, verdict_facts
from mpbackend.report.curves import QUANTITIES, curve_of, describe_curves, gap_curve, numbers_table, run_names
from mpbackend.report.differing import classes_table, decisions_of, differing_table, environment_of, memory_table, operations_of, switches_of
from mpbackend.report.markup import block_markup, environment
from mpbackend.report.runs import run_lines, runs_report
from mpbackend.report.view import Block, Column, Facts, Listing, Table

PAGE = "comparison.html"
BASELINE = "baseline"


class Side(NamedTuple):
    """A run in a comparison: what it is there, such as ``baseline``, and its record."""

    role: str
    run: Recorded


class Verdict(NamedTuple):
    """What a comparison came to.

    Attributes:
        title: what was compared with what.
        word: one of ``VERDICT_SYMBOLS``.
        reasons: why, in sentences.
        facts: what it is about: question, scope, quality, margin.
        blocks: what stands behind it.
    """

    title: str
    word: str
    reasons: Sequence[str]
    facts: Sequence[tuple[str, str]]
    blocks: Sequence[Block]


VERDICT_SYMBOLS = {text.partition(" ")[2]: text.partition(" ")[0] for text in VERDICT_TEXT.values()}
"""The sign beside the word of a verdict, so that color is never the only carrier."""

SHOWN_BESIDE = ("", "Why", "The five classes")
"""Blocks of a comparison's report that the page shows in another place, for all runs at once."""


def judged(comparison: Comparison) -> Verdict:
    """Return what a comparison came to, with everything that it rests on."""
    blocks = [block for block in comparison_report(comparison).blocks if block.title not in SHOWN_BESIDE]
    facts = [pair for pair in verdict_facts(comparison) if pair[0] != "verdict"]
    return Verdict(side_title(comparison), comparison.verdict, comparison.reasons, facts, blocks)


def comparison_page(sides: Sequence[Side], verdicts: Sequence[Verdict] = ()) -> str:
    """Return the page.

    Args:
        sides: the runs, baselines first.
        verdicts: of each comparison; without one, the page shows the runs and does not judge.
    """
    runs = [side.run for side in sides]
    names = run_names(runs, [side.role for side in sides])
    return (
        environment()
        .get_template(PAGE)
        .render(
            version=__version__,
            title=" and ".join(dict.fromkeys(run.record.recipe.text for run in runs)),
            verdicts=[verdict_parts(verdict) for verdict in verdicts],
            legend=[(swatch(number), name) for number, name in enumerate(names)],
            charts=charts(sides, names),
            sections=[block_markup(block) for block in sections(runs, names)],
            numbers=block_markup(numbers_table(runs, names)._replace(title="")),
            numbers_title=numbers_table(runs, names).title,
        )
    )


def verdict_parts(verdict: Verdict) -> dict[str, object]:
    """Return what the template shows of a verdict."""
    return {
        "title": verdict.title,
        "word": verdict.word,
        "symbol": VERDICT_SYMBOLS.get(verdict.word, ""),
        "kind": slug(verdict.word),
        "reasons": verdict.reasons,
        "facts": block_markup(Facts("", verdict.facts)),
        "blocks": [block_markup(block, 3) for block in verdict.blocks],
    }


def slug(word: str) -> str:
    """Return the class of a verdict's word."""
    return word.replace(" ", "-") if word in VERDICT_SYMBOLS else "inconclusive"


def charts(sides: Sequence[Side], names: Sequence[str]) -> list[tuple[str, Markup]]:
    """Return the charts with their titles; each line keeps its color, dash and marker from chart to chart."""
    shown: list[tuple[str, Markup]] = []
    for number, quantity in enumerate(QUANTITIES):
        curves = [curve_of(side.run, name, quantity.field) for side, name in zip(sides, names, strict=True)]
        shown.append((quantity.title, line_chart(quantity.title, describe_curves(curves), curves, f"q{number}", powers_of_two=quantity.powers_of_two)))
    first = next((side.run for side in sides if side.role == BASELINE), None)
    if first is not None and len(sides) > 1:
        gaps = [Curve(name, []) if side.run is first else gap_curve(first, side.run, name) for side, name in zip(sides, names, strict=True)]
        title = "Loss minus that of the first baseline"
        shown.insert(1, (title, line_chart(title, describe_curves([gap for gap in gaps if gap.points]), gaps, "gap")))
    return shown


def sections(runs: Sequence[Recorded], names: Sequence[str]) -> list[Block]:
    """Return what stands below the charts."""
    overview = runs_report(runs).blocks
    lines = [(label, *cells) for label, cells in run_lines(runs).items() if label.partition(",")[0] not in CLASSES]
    return [
        Table("Runs side by side", (Column(""), *map(Column, names)), lines),
        classes_table(runs, names),
        differing_table("Decisions that differ", "role", names, [decisions_of(run) for run in runs]),
        differing_table("Switches that differ", "switch", names, [switches_of(run) for run in runs]),
        differing_table("Operations of an observed step that differ", "phase and operation", names, [operations_of(run) for run in runs]),
        differing_table("Environment and settings that differ", "name", names, [environment_of(run) for run in runs]),
        memory_table(runs, names),
        *(block for block in overview if isinstance(block, Listing)),
    ]
