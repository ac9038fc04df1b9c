from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mpbackend.comparison.runs import Matched, bounded, digits, match, median, read_run, read_runs
from mpbackend.errors import DocumentError
from mpbackend.observe.record_writer import RecordWriter
from tests.comparison.building import falling, recorded, rows


def matched(baseline: Sequence[int | None], candidate: Sequence[int | None]) -> Matched:
    sides = [
        [read_run(recorded(falling(5), seed=seed, name=f"{side}{n}")) for n, seed in enumerate(seeds)] for side, seeds in (("a", baseline), ("b", candidate))
    ]
    return match(*sides)


@pytest.mark.parametrize(
    ("baseline", "candidate", "design", "pairs"),
    [
        ([1], [1], "single", [("a0", "b0")]),
        ([None], [None], "single", [("a0", "b0")]),
        ([None], [1], "single", [("a0", "b0")]),
        ([1], [2], "unmatched", [("a0", "b0")]),
        ([1, 2], [2, 1], "paired", [("a0", "b1"), ("a1", "b0")]),
        ([1, 1], [1], "repeats", [("a0", "b0"), ("a1", "b0")]),
        ([1, 1, 2], [1, 2, 3], "paired", [("a0", "b0"), ("a1", "b0"), ("a2", "b1")]),
        ([1, 2], [3, 4], "two-sample", [("a0", "b0"), ("a0", "b1"), ("a1", "b0")]),
        ([1, 2], [3], "unmatched", [("a0", "b0"), ("a1", "b0")]),
        ([1, 2], [1, 3], "single", [("a0", "b0")]),
        ([None, None], [None, None], "two-sample", [("a0", "b0"), ("a0", "b1"), ("a1", "b0")]),
    ],
)
def test_runs_are_matched_by_their_seeds(baseline: list[int | None], candidate: list[int | None], design: str, pairs: list[tuple[str, str]]) -> None:
    found = matched(baseline, candidate)
    assert (found.design, [(one.name, other.name) for one, other in found.pairs]) == (design, pairs)


def test_what_has_no_partner_is_left_out_and_named() -> None:
    assert matched([1, 2], [1, 3]).left_out == ("a1", "b1")
    assert matched([1, 2], [2, 1]).left_out == ()
    assert matched([1, None], [1]).left_out == ("a1",)


def test_rows_are_put_in_order_and_the_last_of_a_number_counts() -> None:
    steps = rows([1.0, 2.0, 3.0])
    found = read_run(recorded(steps=(steps[2], steps[0], steps[1], rows([9.0])[0])))
    assert ([row.loss for row in found.rows], found.disordered) == ([9.0, 2.0, 3.0], 3)
    assert read_run(recorded(steps=steps)).disordered == 0


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    written = recorded(falling(3))
    writer = RecordWriter(tmp_path / "a")
    writer.append(written.steps)
    writer.write(written.record)
    writer.close()
    for given in (tmp_path / "a", str(tmp_path / "a"), [tmp_path / "a"]):
        (found,) = read_runs("baseline", given)
        assert (found.name, found.rows, found.record) == (str(tmp_path / "a"), written.steps, written.record)
    with pytest.raises(DocumentError, match="the baseline of a comparison: no run"):
        read_runs("baseline", [])


def test_numbers_that_nobody_counted_have_a_text() -> None:
    assert (digits(-12), digits(10**29), digits(10**5000), digits(-(10**400))) == ("-12", "1" + "0" * 29, "inf", "-inf")
    assert (bounded(3), bounded(10**400)) == (3.0, float("inf"))


def test_the_median_of_an_even_number_lies_between_the_middle_two() -> None:
    assert (median([3.0, 1.0]), median([3.0, 1.0, 2.0]), median([])) == (2.0, 2.0, None)
