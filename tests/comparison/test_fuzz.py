"""Broken records, generated: each pair is compared and shown, or refused with an error of mpbackend, in bounded time and space.

Every case has a random generator of its own, seeded with ``SEED`` and its number, both printed when it fails.
"""

from __future__ import annotations

import json
import random
import tracemalloc
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mpbackend.cli.options import json_text
from mpbackend.comparison.verdict import compare
from mpbackend.errors import MpbackendError
from mpbackend.matrix import Matrix, load_matrix
from mpbackend.observe.record import Recorded
from mpbackend.report import markdown, terminal
from mpbackend.report.comparison import comparison_document, comparison_report
from tests.comparison.building import falling, plan, recorded, rows, switch

SEED = 20261201
QUICK, ALL = 500, 5000
LAID_OUT_EVERY = 5
"""One comparison in this many is laid out for a terminal too, which takes longer than comparing."""

MOST_BYTES = 64 * 2**20
"""Memory that a comparison of records of some 40 steps may take at its peak; its inputs are a few hundred kilobytes at most."""

NUMBERS = (0, -1, 1, 2, 3, 40, 10**9, 2**31, 2**53 + 1, 2**63, 10**30, 10**400, -(10**25), 0.0, -0.0, 1e-320, 1e-45, 0.1, 1.5, 1e308, -1e308)
WORDS = (
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "fp32",
    "bf16",
    "unknown",
    "fp32|bf16",
    "none",
    "\x00\x1b[2J",
    "\u202e",
    "<script>",
    "é" * 500,
    "none, one process",
    "dynamic",
)
KEYS = ("peak", "data", "weights", "torch", "fp32", "startup_skips", "conv.allow_hf32", "val_loss", "ranks", "")


def generator(case: int) -> random.Random:
    """Return the random generator of one case."""
    return random.Random(f"{SEED}/{case}")


PLACES: tuple[dict[str, Any], ...] = ({"device": "ascend-910b3", "arch": "ascend-a2"}, {})


def base(choose: random.Random, kin: random.Random) -> Recorded:
    """Return a whole record to break.

    Args:
        choose: of this record.
        kin: of all records of a case, so that many of them can be compared.
    """
    steps = rows(falling(kin.choice([0, 1, 3, 40, 40]), seed=choose.choice([1, 1, 2]), noise=0.01), metrics={"val_loss": choose.random()}, skipped=(2,))
    switches = {"conv.allow_hf32": switch(choose.choice(["True", "False"]), planned="False"), "conv.fp32_precision": switch("ieee")}
    recipe = kin.choice(["fp32", "bf16"])
    made = {"plan": plan(recipe), "recipe": recipe, "switches": switches, "conversion": ({"layer": "x", "action": "converted"},), **kin.choice(PLACES)}
    return recorded(steps=steps, seed=choose.choice([1, 1, 1, 2]), **made)


def another(choose: random.Random, value: Any) -> Any:
    """Return a value in the place of another: mostly of its kind, so that it passes the decoder."""
    if choose.random() < 0.02:
        return choose.choice([*NUMBERS, *WORDS, None, [], {}, True])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return choose.choice([number for number in NUMBERS if isinstance(number, int)])
    return choose.choice(NUMBERS if isinstance(value, float) else WORDS if isinstance(value, str) else [value])


def mutate(choose: random.Random, value: Any) -> Any:
    """Return plain data with one change somewhere in it, mostly in a leaf."""
    whole = choose.random() < 0.003
    if isinstance(value, dict) and value and not whole:
        name = choose.choice([name for name in value if name != "schema" or choose.random() < 0.01] or list(value))
        if choose.random() < 0.005:
            return {key: item for key, item in value.items() if key != name}
        if choose.random() < 0.005:
            return {**value, choose.choice(KEYS): choose.choice([*NUMBERS, *WORDS])}
        return {**value, name: mutate(choose, value[name])}
    if isinstance(value, (list, tuple)) and value and not whole:
        place = choose.randrange(len(value))
        kept = [*value[:place], mutate(choose, value[place]), *value[place + 1 :]]
        return kept if choose.random() < 0.9 else choose.choice([kept[::-1], kept + kept[:3], kept[1:], kept[:place]])
    return another(choose, value)


def write(choose: random.Random, kin: random.Random, folder: Path) -> Path:
    """Write a broken record and return its folder."""
    source = base(choose, kin)
    record, steps = msgspec.to_builtins(source.record), msgspec.to_builtins(list(source.steps))
    for _ in range(choose.choice([0, 0, 1, 2, 6])):
        record = mutate(choose, record)
    for _ in range(choose.choice([0, 0, 1, 3, 12])):
        steps = mutate(choose, steps)
    content = json.dumps(record, allow_nan=False).encode()
    lines = b"".join(json.dumps(step, allow_nan=False).encode() + b"\n" for step in (steps if isinstance(steps, list) else [steps]))
    if choose.random() < 0.02:
        content, lines = (text[: choose.randrange(len(text) + 1)] + choose.randbytes(3) for text in (content, lines))
    folder.mkdir()
    (folder / "record.json").write_bytes(content)
    (folder / "steps.jsonl").write_bytes(lines)
    return folder


def attempt(case: int, folder: Path, matrix: Matrix) -> str:
    """Compare broken records and show the comparison; return the verdict, or ``refused``."""
    choose = generator(case)
    sides = [
        [write(choose, generator(case if choose.random() < 0.9 else -case), folder / f"{side}{number}") for number in range(choose.choice([1, 1, 1, 2, 3]))]
        for side in "ab"
    ]
    question, metric = choose.choice([None, None, "vendor", "recipe"]), choose.choice([None, None, None, "val_loss"])
    try:
        found = compare(*sides, question=question, metric=metric, margin=choose.choice(["0.1%", "0%", "5", "1e300%"]), matrix=matrix)
    except MpbackendError as error:
        assert str(error).isprintable()
        return "refused"
    report = comparison_report(found)
    laid_out = terminal.render(report, 80) if case % LAID_OUT_EVERY == 0 else ""
    for text in (laid_out, markdown.render(report), json_text(comparison_document(found))):
        assert [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")] == []
    return found.verdict


def run_cases(cases: range, folder: Path, matrix: Matrix) -> dict[str, int]:
    """Return how often each verdict was given."""
    counts: dict[str, int] = {}
    for case in cases:
        place = folder / str(case)
        place.mkdir()
        try:
            verdict = attempt(case, place, matrix)
        except Exception as error:
            raise AssertionError(f"seed {SEED}, case {case}, records in {place}") from error
        counts[verdict] = counts.get(verdict, 0) + 1
    return counts


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load_matrix()


def check(counts: dict[str, int]) -> None:
    """Check that the cases reach every outcome that broken records should have."""
    print(f"seed {SEED}: {counts}")
    assert {"refused", "not comparable", "inconclusive", "different"} <= set(counts)


def test_broken_records_are_compared_or_refused(tmp_path: Path, matrix: Matrix) -> None:
    check(run_cases(range(QUICK), tmp_path, matrix))


@pytest.mark.slow
def test_many_broken_records_are_compared_or_refused(tmp_path: Path, matrix: Matrix) -> None:
    check(run_cases(range(QUICK, ALL), tmp_path, matrix))


def test_a_comparison_takes_little_memory(tmp_path: Path, matrix: Matrix) -> None:
    tracemalloc.start()
    try:
        run_cases(range(30), tmp_path, matrix)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "an unknown field": lambda document: document.update(surplus=1),
    "another version": lambda document: document.update(schema=2),
    "a wrong type": lambda document: document["run"].update(seed="one"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_decoder_refuses_is_named(fault: str, tmp_path: Path) -> None:
    document = msgspec.to_builtins(recorded(falling(2)).record)
    FAULTS[fault](document)
    (tmp_path / "record.json").write_bytes(msgspec.json.encode(document))
    (tmp_path / "steps.jsonl").write_bytes(b"")
    with pytest.raises(MpbackendError, match=r"record\.json is not a record of schema 1"):
        compare(tmp_path, tmp_path)
