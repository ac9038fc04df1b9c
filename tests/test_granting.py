"""Which row decides about a combination, and what its level grants."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest

from mpbackend.capability import LEVELS, Accumulator, Arch, Conflict, Level, Row, Source
from mpbackend.documents import MatrixFile, load_vocabulary
from mpbackend.errors import DocumentError
from mpbackend.granting import DECIDING_LAYERS, ON_UNSUPPORTED, SCALING_ROWS, Grant, OnUnsupported, Verdict, describe_accumulator, explain, grant, judge
from mpbackend.matrix import Matrix
from mpbackend.roles import Granularity

G: Grant = "granted"
W: Grant = "warned"
R: Grant = "refused"
TABLE: dict[Level, tuple[Grant, Grant, Grant]] = {
    "native": (G, G, G),
    "library": (G, G, G),
    "emulated": (R, R, G),
    "converted": (R, R, R),
    "storage": (R, R, R),
    "absent": (R, R, R),
    "unknown": (W, W, W),
}
"""Level to what ``error``, ``nearest`` and ``emulate`` grant. A refusal under ``nearest`` is what makes the plan take the next rung."""

PATHS = {"framework": "aten", "library": "cublaslt", "toolkit": "triton", "instruction": "mma.sync"}


def row(layer: str, level: Level, **fields: Any) -> Row:
    """Return a row of ``matmul`` in bf16 on the path of a layer."""
    given = {"op": "matmul", "a": "bf16", "b": "bf16", "accumulate": "fp32", "path": PATHS[layer], **fields}
    return Row(arch="x", level=level, source=("s",), evidence="documented", **given)


def matrix(*rows: Row) -> Matrix:
    """Return a matrix of one architecture with these rows."""
    source = Source(id="s", title="the manual", location="page 1")
    arch = Arch(key="x", name="X", family="x", source=("s",), evidence="documented")
    return Matrix([("x.toml", MatrixFile(schema=1, family="x", source=(source,), arch=(arch,), row=rows))])


def ask(*rows: Row, pair: tuple[str, str] = ("bf16", "bf16"), granularity: tuple[str, str] = ("none", "none"), accumulate: str = "fp32") -> Verdict:
    """Judge ``matmul`` among the rows."""
    return judge(matrix(*rows), "x", "matmul", pair, granularity, accumulate)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("column", "policy"), list(enumerate(ON_UNSUPPORTED)))
def test_the_table_of_the_design(level: Level, column: int, policy: OnUnsupported) -> None:
    assert grant(level, policy, strict=False) == TABLE[level][column]
    assert grant(level, policy, strict=True) == (R if level == "unknown" else TABLE[level][column])


def test_the_table_has_every_level_and_policy() -> None:
    assert set(TABLE) == set(LEVELS)
    assert ON_UNSUPPORTED == get_args(OnUnsupported) == ("error", "nearest", "emulate")


def test_no_row_is_unknown_and_not_absent() -> None:
    verdict = ask()
    assert (verdict.level, verdict.row, verdict.source) == ("unknown", None, "")
    assert verdict.reason == "no row of x speaks about matmul in bf16"
    assert ask(pair=("fp8_e5m2", "fp8_e4m3")).reason.endswith("matmul in fp8_e5m2 x fp8_e4m3")


@pytest.mark.parametrize("other", [{"op": "conv"}, {"a": "fp16"}, {"b": "fp16"}, {"scaling": "tensor"}])
def test_a_row_about_something_else_says_nothing(other: dict[str, str]) -> None:
    assert ask(row("instruction", "native", **other)).row is None


def test_the_verdict_cites_its_row() -> None:
    deciding = row("instruction", "native")
    assert ask(deciding) == Verdict(level="native", row=deciding, reason="matmul in bf16 is native (mma.sync)", source="the manual, page 1")


RESTRICTING = [level for level in LEVELS if level not in ("native", "library")]


@pytest.mark.parametrize("level", RESTRICTING)
@pytest.mark.parametrize("outer", ["framework", "library"])
def test_an_outer_layer_that_restricts_decides(outer: str, level: Level) -> None:
    verdict = ask(row("instruction", "native"), row(outer, level))
    assert verdict.row is not None
    assert (verdict.level, verdict.row.path) == (level, PATHS[outer])


@pytest.mark.parametrize("level", RESTRICTING)
def test_the_framework_restricts_before_the_library(level: Level) -> None:
    assert ask(row("instruction", "native"), row("library", "absent"), row("framework", level)).level == level


@pytest.mark.parametrize("outer", ["framework", "library"])
def test_an_outer_layer_that_exposes_leaves_it_to_the_instruction(outer: str) -> None:
    verdict = ask(row(outer, "library"), row("instruction", "native"))
    assert verdict.row is not None
    assert verdict.row.path == PATHS["instruction"]


@pytest.mark.parametrize("outer", ["framework", "library"])
@pytest.mark.parametrize("level", RESTRICTING)
def test_an_instruction_that_restricts_yields_to_an_outer_layer_that_exposes(outer: str, level: Level) -> None:
    assert ask(row(outer, "library"), row("instruction", level)).level == "library"


def test_without_an_instruction_the_outermost_layer_that_exposes_decides() -> None:
    verdict = ask(row("library", "native"), row("framework", "library"))
    assert verdict.row is not None
    assert verdict.row.path == PATHS["framework"]


def test_a_framework_that_exposes_stands_against_a_library_that_restricts() -> None:
    verdict = ask(row("framework", "library"), row("library", "absent"), row("instruction", "native"))
    assert verdict.row is not None
    assert verdict.row.path == PATHS["framework"]


@pytest.mark.parametrize("level", LEVELS)
def test_an_instruction_alone_decides(level: Level) -> None:
    assert ask(row("instruction", level)).level == level


@pytest.mark.parametrize("level", LEVELS)
def test_a_toolkit_never_decides(level: Level) -> None:
    assert ask(row("toolkit", level)).row is None
    assert ask(row("toolkit", level), row("instruction", "absent")).level == "absent"
    assert ask(row("toolkit", level), row("instruction", "native")).level == "native"
    assert "toolkit" not in DECIDING_LAYERS


def test_a_path_that_nothing_declares_is_refused() -> None:
    with pytest.raises(DocumentError, match="not in the vocabulary and not declared under"):
        ask(row("instruction", "native", path="a stranger's"))


def test_an_operator_that_leaves_its_accumulator_open_leaves_the_sum_unknown() -> None:
    half, single = row("instruction", "native", accumulate="fp16"), row("instruction", "native", accumulate="fp32")
    silent, telling = row("library", "native", accumulate="unknown"), row("framework", "native", accumulate="fp32")
    assert ask(silent, half, single).accumulators == ("fp16", "fp32")
    assert ask(silent, single).accumulators == ()
    assert ask(silent, telling, half, single).accumulators == ()
    assert ask(half, single).accumulators == ()


def test_the_best_level_of_a_layer_decides() -> None:
    assert ask(row("library", "absent", path="cudnn"), row("library", "native", path="cublaslt")).level == "native"


def test_among_equal_levels_the_wanted_accumulator_decides() -> None:
    half, single = row("instruction", "native", accumulate="fp16"), row("instruction", "native", accumulate="fp32")
    assert ask(half, single, accumulate="fp32").row == single
    assert ask(single, half, accumulate="fp16").row == half


def test_a_better_level_comes_before_the_wanted_accumulator() -> None:
    assert ask(row("instruction", "emulated", accumulate="fp32"), row("instruction", "native", accumulate="fp16")).level == "native"


def test_a_known_accumulator_comes_before_an_unknown_one() -> None:
    known, unknown = row("instruction", "native", accumulate="fp16"), row("instruction", "native", accumulate="unknown")
    assert ask(unknown, known).row == known


def test_among_equal_accumulators_the_wider_known_one_decides() -> None:
    rows = [
        row("instruction", "native", path=path, accumulator=Accumulator(fraction_bits=bits) if bits else None)
        for path, bits in [("mma.sync", 0), ("wgmma", 13), ("tcgen05", 25)]
    ]
    assert ask(*rows).row == rows[2]
    assert ask(*rows[:2]).row == rows[1]


LAYOUTS = sorted(load_vocabulary().scaling)


@pytest.mark.parametrize(("granularity", "layouts"), list(SCALING_ROWS.items()))
def test_the_layouts_of_a_granularity_serve_it_in_order(granularity: tuple[str, str], layouts: tuple[str, ...]) -> None:
    every = {layout: row("library", "library", scaling=layout) for layout in LAYOUTS}
    for number, layout in enumerate(layouts):
        left = [every[name] for name in LAYOUTS if name not in layouts[:number]]
        verdict = ask(*left, granularity=granularity)
        assert verdict.row is not None
        assert verdict.row.scaling == layout
    assert ask(*(every[name] for name in LAYOUTS if name not in layouts), granularity=granularity).row is None


def test_the_first_layout_of_a_library_decides_even_if_a_later_one_is_better() -> None:
    assert ask(row("library", "absent", scaling="tensor"), row("library", "library"), granularity=("tensor", "tensor")).level == "absent"


def test_microscaling_is_inside_the_unit() -> None:
    assert ask(row("instruction", "native"), granularity=("1x32", "1x32")).row is None
    assert ask(row("instruction", "native"), granularity=("1x16", "1x16")).row is None
    assert ask(row("instruction", "native", scaling="mx_1x32"), granularity=("1x32", "1x32")).level == "native"


@pytest.mark.parametrize("granularity", sorted(set(itertools.product(get_args(Granularity), repeat=2)) - set(SCALING_ROWS)))
def test_a_pair_of_granularities_that_no_layout_serves_is_unknown_and_named(granularity: tuple[str, str]) -> None:
    every = [row("library", "library", scaling=layout) for layout in LAYOUTS] + [row("instruction", "native")]
    verdict = ask(*every, granularity=granularity)
    assert (verdict.level, verdict.row) == ("unknown", None)
    assert verdict.reason == f"no scale layout is known for inputs scaled by {granularity[0]} and weights by {granularity[1]}"


def test_the_table_of_layouts_uses_names_that_exist() -> None:
    assert {layout for layouts in SCALING_ROWS.values() for layout in layouts} <= set(LAYOUTS)
    assert {name for pair in SCALING_ROWS for name in pair} == set(get_args(Granularity))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"a": "fp8_e5m2", "b": "fp8_e4m3"}, "matmul in fp8_e5m2 x fp8_e4m3 is absent (mma.sync)"),
        ({"path": "none"}, "matmul in bf16 is absent"),
        ({"scaling": "mx_1x32"}, "matmul in bf16 with mx_1x32 scales is absent (mma.sync)"),
        ({"computes": "fp16"}, "matmul in bf16 is absent (mma.sync), computed in fp16"),
        (
            {"conflict": (Conflict(claim="It is there.", source="s"), Conflict(claim="Sometimes", source="s"))},
            "matmul in bf16 is absent (mma.sync); sources disagree: It is there / Sometimes",
        ),
    ],
)
def test_a_row_in_words(fields: dict[str, Any], text: str) -> None:
    assert explain(row("instruction", "absent", **fields)) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"accumulate": "unknown"}, "accumulator unknown"),
        ({"accumulate": "none"}, "accumulator unknown"),
        ({}, "fp32 accumulator, inner width unknown"),
        ({"accumulator": Accumulator(products_per_step=8)}, "fp32 accumulator, inner width unknown"),
        (
            {"accumulator": Accumulator(products_per_step=32, fraction_bits=13, rounding="rz")},
            "fp32 accumulator keeping 13 fraction bits (truncated, 32 products a step)",
        ),
        (
            {"accumulator": Accumulator(products_per_step=1, fraction_bits=23, rounding="rne")},
            "fp32 accumulator keeping 23 fraction bits (rounded to nearest even, 1 products a step)",
        ),
        ({"accumulator": Accumulator(fraction_bits=24)}, "fp32 accumulator keeping 24 fraction bits (rounding unknown, unknown products a step)"),
    ],
)
def test_an_accumulator_in_words(fields: dict[str, Any], text: str) -> None:
    assert describe_accumulator(row("instruction", "native", **fields)) == text


def test_every_path_of_the_vocabulary_is_of_a_known_layer() -> None:
    layers = {meaning.layer for meaning in load_vocabulary().path.values()}
    assert layers == {*DECIDING_LAYERS, "toolkit"}
