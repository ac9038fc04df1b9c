from __future__ import annotations

import math
import random
import re
import xml.etree.ElementTree as ElementTree

import pytest

from mpbackend.report.axes import make_axis
from mpbackend.report.charts import COLUMNS, DASHES, LEFT, MARKERS, TOP, Curve, line_chart, swatch, thin

SPACE = "{http://www.w3.org/2000/svg}"
NAN = math.nan


def parsed(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(str(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def lines(chart: str) -> list[str]:
    return [element.get("d", "") for element in parsed(chart).iter(f"{SPACE}path") if element.get("class") == "line"]


def chart(*curves: Curve) -> str:
    return line_chart("Loss", "what is drawn", curves, "q")


def test_points_stand_where_their_values_are() -> None:
    [path] = lines(chart(Curve("a", [(1, 0.0), (2, 1.0), (3, 0.5)])))
    numbers = [tuple(map(float, pair.split())) for pair in path[1:].split("L")]
    assert numbers == [(LEFT, 190), (LEFT + COLUMNS / 2, TOP), (LEFT + COLUMNS, 102)]


def test_a_chart_says_what_it_shows_to_those_who_cannot_see_it() -> None:
    root = parsed(chart(Curve("a", [(1, 2.0)])))
    title, desc = root[0], root[1]
    assert (title.tag, title.text, desc.tag, desc.text) == (f"{SPACE}title", "Loss", f"{SPACE}desc", "what is drawn")
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert root.get("role") == "img"


def test_curves_differ_by_dash_and_marker_and_not_by_color_alone() -> None:
    pairs = {tuple(re.findall(r'stroke-dasharray="([^"]*)"|class="mark (\w+)"', swatch(number))) for number in range(len(DASHES) * len(MARKERS))}
    assert len(pairs) == len(DASHES) * len(MARKERS)


def test_the_legend_and_the_chart_draw_a_curve_alike() -> None:
    text = chart(*(Curve(str(number), [(1, 1.0 + number), (2, 2.0)]) for number in range(7)))
    for number, group in enumerate(parsed(text).iter(f"{SPACE}g")):
        sample = parsed(swatch(number))
        assert f"swatch {group.get('class')}" == sample.get("class")
        assert group[0].get("stroke-dasharray") == sample[0].get("stroke-dasharray")
        assert {mark.get("class") for mark in group[1:]} == {sample[1].get("class")}


def test_what_is_not_finite_breaks_the_line_and_is_marked() -> None:
    text = chart(Curve("a", [(0, 1.0), (1, 1.0), (2, NAN), (3, 2.0), (4, 3.0), (5, math.inf)]))
    [path] = lines(text)
    assert path.count("M") == 2
    assert text.count('class="lost"') == 2
    only = chart(Curve("a", [(1, NAN), (2, -math.inf)]))
    assert lines(only) == []
    assert only.count('class="lost"') == 2


def test_a_single_point_and_no_point() -> None:
    single = chart(Curve("a", [(7, 1.0)]))
    assert lines(single) == []
    assert single.count('class="mark circle"') == 1
    between = chart(Curve("a", [(1, 1.0), (2, NAN), (3, 2.0), (4, NAN), *((step, 3.0) for step in range(5, 90))]))
    assert "M50 " in between.partition('class="mark')[2], "a point between two that are lost is a marker"
    assert "not recorded" in chart(Curve("a", []))
    assert "not recorded" in chart()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("points", [2, 3, 6, 30, 5000])
def test_curves_on_each_other_have_their_markers_in_turn(count: int, points: int) -> None:
    root = parsed(chart(*(Curve(str(number), [(step, 1.0 / step) for step in range(1, points + 1)]) for number in range(count))))
    marks = [{str(mark.get("d")).partition("m")[0] for mark in group if str(mark.get("class")).startswith("mark")} for group in root.iter(f"{SPACE}g")]
    assert all(1 <= len(places) <= 7 for places in marks)
    if points >= count:
        assert len(set().union(*marks)) == sum(map(len, marks))


def test_thinning_keeps_the_extremes_of_every_column() -> None:
    seed = 5
    print(f"seed {seed}")
    source = random.Random(seed)
    points = [(index * COLUMNS / 50_000, source.gauss(0, 1)) for index in range(50_000)]
    points[31_234] = (points[31_234][0], 1e6)
    kept = thin(points)
    assert len(kept) <= 2 * (COLUMNS + 1)
    for column in range(COLUMNS):
        inside = [value for x, value in points if int(x) == column]
        assert {min(inside), max(inside)} == {value for x, value in kept if int(x) == column}
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_a_dense_curve_goes_through_the_means_and_shows_its_extremes() -> None:
    text = chart(Curve("a", [(step, float(step % 2)) for step in range(10_000)]))
    [path] = lines(text)
    # 29 or 30 points a column: where their number is odd, the mean is off one half by 1/58 of the height, 176.
    assert max(abs(float(pair.split()[1]) - (TOP + 88)) for pair in path[1:].split("L")) < 176 / 58 + 0.1
    band = text.partition('class="band" d="M')[2].partition('"')[0]
    assert {float(pair.split()[1]) for pair in band.split("L")} == {float(TOP), 190.0}


def test_a_column_with_a_lost_value_is_broken() -> None:
    points = [(index * COLUMNS / 10_000, NAN if index == 5_000 else 1.0) for index in range(10_000)]
    assert sum(math.isnan(value) for _, value in thin(points)) == 1
    dense = [(index + 1, NAN if index == 5_000 else float(index)) for index in range(10_000)]
    [path] = lines(chart(Curve("a", dense)))
    assert path.count("M") == 2


def test_it_is_small_and_the_same_every_time() -> None:
    curve = Curve("a", [(step, math.sin(step)) for step in range(100_000)])
    text = chart(curve)
    assert text == chart(curve)
    assert len(text) < 30_000


def test_names_are_escaped() -> None:
    text = line_chart("<b>&", "</desc><script>", [Curve("x", [(1, 1.0)])], "q")
    assert "<script" not in text
    assert parsed(text)[0].text == "<b>&"


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 1.0], ("0.0", "0.5", "1.0")),
        ([-0.001, 0.0021], ("-0.001", "0.000", "0.001", "0.002")),
        ([1.0, 1000.0], ("1", "10", "100", "1000")),
        ([3.0, 90.0], ("5", "10", "20", "50")),
        ([1e-9, 1e9], ("1e-09", "0.0001", "10", "1e+06")),
        ([5.0001, 5.9999], ("5.2", "5.4", "5.6", "5.8")),
        ([2e6, 4e6], ("2e+06", "3e+06", "4e+06")),
    ],
)
def test_ticks(values: list[float], labels: tuple[str, ...]) -> None:
    axis = make_axis(values)
    assert axis is not None
    assert axis.labels == labels
    assert [axis.place(tick) for tick in axis.ticks] == sorted(axis.place(tick) for tick in axis.ticks)


def test_scales_are_labeled_in_powers_of_two() -> None:
    axis = make_axis([1.0, 65536.0], powers_of_two=True)
    assert axis is not None
    assert axis.labels == ("2^0", "2^4", "2^8", "2^12", "2^16")
    flat = make_axis([65536.0], powers_of_two=True)
    assert flat is not None
    assert flat.place(65536.0) == pytest.approx(0.5)


EXTREMES = [0.0, 5e-324, -5e-324, 1e-310, 1.0, 1 + 2**-52, -1.0, 1e308, -1.7e308, 1.7e308, math.nan, math.inf, -math.inf, 2.0**1000]


@pytest.mark.parametrize("first", EXTREMES)
@pytest.mark.parametrize("second", EXTREMES)
@pytest.mark.parametrize("powers", [False, True])
def test_every_pair_of_numbers_has_an_axis(first: float, second: float, powers: bool) -> None:
    axis = make_axis([first, second], powers_of_two=powers)
    if axis is None:
        assert not math.isfinite(first)
        assert not math.isfinite(second)
        return
    assert axis.low < axis.high
    assert len(axis.ticks) <= 12
    assert all(0 <= axis.place(value) <= 1 for value in (first, second, *axis.ticks) if math.isfinite(value))
    assert "nan" not in line_chart("t", "d", [Curve("a", [(1, first), (2, second)])], "q", powers_of_two=powers)


@pytest.mark.parametrize("steps", [(0, 0), (-5, 10**300), (2**63, 2**64), (10**400, 10**400 + 3)])
def test_any_step_number_has_a_place(steps: tuple[int, int]) -> None:
    text = chart(Curve("a", [(steps[0], 1.0), (steps[1], 2.0)]))
    assert len(text) < 5_000
    assert len(lines(text)) == 1
