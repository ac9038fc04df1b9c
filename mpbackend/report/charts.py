"""Line charts as SVG: the same curves give the same text. A curve is told by its dash and its marker as well as by its color.

What is drawn keeps every extreme. Where there are more points than can be told apart, the curve goes through the means of the columns, and a faint line through
the smallest and the largest value of each: the M4 aggregation (Jugel et al., VLDB 2014) without its first and last. A value that is not finite breaks the line
and is marked at the upper edge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from mpbackend.errors import escaped
from mpbackend.report.axes import Axis, make_axis

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 14, 40
COLUMNS = WIDTH - LEFT - RIGHT
ROWS = HEIGHT - TOP - BOTTOM

COLORS = 8
"""Classes ``c0`` to ``c7`` of the style sheet."""

DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "plus")
MARKED = 6
"""Markers on a line, at most."""

DENSE = 2 * COLUMNS
"""Points of a curve up to which each is drawn."""

Point = tuple[int, float]


class Curve(NamedTuple):
    """A line of a chart.

    Attributes:
        name: what the legend calls it.
        points: step and value, in any order; a value may be NaN or infinite.
    """

    name: str
    points: Sequence[Point]


def line_chart(title: str, description: str, curves: Sequence[Curve], ident: str, *, powers_of_two: bool = False) -> Markup:
    """Return a chart of values against steps.

    Args:
        title: what is drawn, with its unit.
        description: what a reader who cannot see it is told.
        curves: the lines; their order chooses color, dash and marker.
        ident: prefix of the ids in it, unique in the page, of letters and digits.
        powers_of_two: draw a logarithmic axis with powers of two.
    """
    steps = [step for curve in curves for step, _ in curve.points]
    axis = make_axis((value for curve in curves for _, value in curve.points), powers_of_two=powers_of_two)
    head = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-labelledby="{}t {}d"><title id="{}t">{}</title><desc id="{}d">{}</desc>').format(
        WIDTH, HEIGHT, ident, ident, ident, escaped(title), ident, escaped(description)
    )
    if not steps:
        return head + Markup('<text class="nothing" x="{}" y="{}">not recorded</text></svg>').format(WIDTH // 2, HEIGHT // 2)
    first, last = min(steps), max(steps)
    parts = [head, grid(axis, first, last)]
    for number, curve in enumerate(curves):
        parts.append(draw(curve, number, len(curves), axis, first, last))
    return Markup("").join(parts) + Markup("</svg>")


def grid(axis: Axis | None, first: int, last: int) -> Markup:
    """Return the frame, its lines and its labels."""
    parts = [Markup('<rect class="frame" x="{}" y="{}" width="{}" height="{}"/>').format(LEFT, TOP, COLUMNS, ROWS)]
    for value, label in zip(axis.ticks, axis.labels, strict=True) if axis else ():
        y = number_text(TOP + ROWS * (1 - axis.place(value))) if axis else ""
        parts.append(
            Markup('<path class="grid" d="M{} {}H{}"/><text class="y" x="{}" y="{}" dy=".35em">{}</text>').format(LEFT, y, LEFT + COLUMNS, LEFT - 6, y, label)
        )
    below = TOP + ROWS + 16
    parts.append(Markup('<text class="x" x="{}" y="{}">{}</text>').format(LEFT, below, step_text(first)))
    if last > first:
        parts.append(Markup('<text class="x end" x="{}" y="{}">{}</text>').format(LEFT + COLUMNS, below, step_text(last)))
    kind = ", logarithmic" if axis and axis.log else ""
    parts.append(Markup('<text class="x middle" x="{}" y="{}">step{}</text>').format(LEFT + COLUMNS // 2, HEIGHT - 8, kind))
    return Markup("").join(parts)


def step_text(step: int) -> str:
    """Return a step number with its thousands apart; one of very many digits in powers of ten."""
    return f"{step:,}" if abs(step) < 10**12 else f"{'-' if step < 0 else ''}about 10^{len(str(abs(step))) - 1}"


def draw(curve: Curve, number: int, count: int, axis: Axis | None, first: int, last: int) -> Markup:
    """Return the line of a curve of ``count``, its markers, and marks for what is not finite. Curves that lie on each other have their markers in turn."""
    placed = [(column_of(step, first, last), value) for step, value in sorted(curve.points, key=lambda point: point[0])]
    dense = len(placed) > DENSE
    runs = list(finite_runs(means(placed) if dense else placed))
    drawn = [locate(run, axis) for run in runs] if axis else []
    lost = sorted({round(column) for column, value in placed if not math.isfinite(value)})
    body = [Markup('<g class="c{}">').format(number % COLORS)]
    if dense and axis:
        body.append(Markup('<path class="band" d="{}"/>').format("".join(path_text(locate(run, axis)) for run in finite_runs(thin(placed)))))
    path = "".join(path_text(run) for run in drawn)
    if path:
        body.append(Markup('<path class="line" stroke-dasharray="{}" d="{}"/>').format(DASHES[number % len(DASHES)], path))
    spots = [spot for run in drawn for spot in run]
    every = max(1, min(count, len(spots)), -(-len(spots) // MARKED))
    offset = number % count * every // count
    alone = [run[0] for run in drawn if len(run) == 1]
    body.extend(marker(number, x, y) for x, y in dict.fromkeys([*spots[offset::every], *alone]))
    body.extend(Markup('<path class="lost" d="M{} {}l6 6m0-6l-6 6"/>').format(LEFT + column - 3, TOP - 8) for column in lost)
    return Markup("").join(body) + Markup("</g>")


def column_of(step: int, first: int, last: int) -> float:
    """Return where a step stands from left to right, 0 to ``COLUMNS``."""
    return COLUMNS * ((step - first) / (last - first)) if last > first else COLUMNS / 2


def locate(run: Sequence[tuple[float, float]], axis: Axis) -> list[tuple[float, float]]:
    """Return where columns with finite values stand in the drawing."""
    return [(LEFT + column, TOP + ROWS * (1 - axis.place(value))) for column, value in run]


def by_column(points: Sequence[tuple[float, float]]) -> Iterator[tuple[list[tuple[float, float]], bool]]:
    """Yield the finite points of each column, from left to right, and whether another one was not finite."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(min(int(point[0]), COLUMNS - 1), []).append(point)
    for members in columns.values():
        finite = [member for member in members if math.isfinite(member[1])]
        yield finite, len(finite) < len(members)


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the smallest and the largest finite value of each column, in their order. What is not finite breaks the line after its column."""
    kept: list[tuple[float, float]] = []
    for finite, lost in by_column(points):
        if finite:
            ends = {min(range(len(finite)), key=lambda index: finite[index][1]), max(range(len(finite)), key=lambda index: finite[index][1])}
            kept.extend(finite[index] for index in sorted(ends))
        if lost:
            kept.append((0.0, math.nan))
    return kept


def means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the mean of the finite values of each column, at the middle of the points. What is not finite breaks the line after its column."""
    kept: list[tuple[float, float]] = []
    for finite, lost in by_column(points):
        if finite:
            middle = (finite[0][0] + finite[-1][0]) / 2
            kept.append((middle, math.fsum(value / len(finite) for _, value in finite)))
        if lost:
            kept.append((0.0, math.nan))
    return kept


def finite_runs(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Yield the stretches of points without one that is not finite."""
    run: list[tuple[float, float]] = []
    for point in points:
        if math.isfinite(point[1]):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def path_text(run: Sequence[tuple[float, float]]) -> str:
    """Return a stretch as path data; a single point is only a marker."""
    text = "L".join(f"{number_text(x)} {number_text(y)}" for x, y in run)
    return f"M{text}" if len(run) > 1 else ""


def number_text(value: float) -> str:
    """Return a coordinate with one decimal, none where it is 0."""
    return f"{value:.1f}".removesuffix(".0")


def marker(number: int, x: float, y: float) -> Markup:
    """Return the marker of a curve around a place."""
    kind = MARKERS[number % len(MARKERS)]
    at = f"M{number_text(x)} {number_text(y)}"
    shapes = {
        "circle": "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
        "square": "m-3-3h6v6h-6z",
        "triangle": "m0-4l4 7h-8z",
        "diamond": "m0-4l4 4l-4 4l-4-4z",
        "cross": "m-3-3l6 6m0-6l-6 6",
        "plus": "m0-4v8m-4-4h8",
    }
    return Markup('<path class="mark {}" d="{}{}"/>').format(kind, at, shapes[kind])


def swatch(number: int) -> Markup:
    """Return the piece of line with a marker that stands before a name in a legend."""
    line = Markup('<svg class="swatch c{}" viewBox="0 0 44 14" aria-hidden="true"><path class="line" stroke-dasharray="{}" d="M2 7H42"/>').format(
        number % COLORS, DASHES[number % len(DASHES)]
    )
    return line + marker(number, 22, 7) + Markup("</svg>")
