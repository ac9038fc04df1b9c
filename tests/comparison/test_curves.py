from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from mpbackend.comparison.curves import Curve, compare_curves, relative_bound
from mpbackend.comparison.runs import read_run
from mpbackend.decisions import Decision
from mpbackend.observe.record import Number
from tests.comparison.building import plan, recorded, rows


def curves(one: list[Number | None], other: list[Number | None], **changes: Any) -> Curve:
    return compare_curves(read_run(recorded(one)), read_run(recorded(other, **changes)))


@pytest.mark.parametrize(("name", "bits"), [("bf16", 8), ("fp16", 11), ("tf32", 11), ("hf32_e8m11", 12), ("fp8_e4m3", 4)])
def test_a_unit_is_to_first_order_two_roundings(name: str, bits: int) -> None:
    u = 2.0**-bits
    assert relative_bound(name, "fp32") == pytest.approx((1 + u) ** 2 - 1, rel=1e-4, abs=2.0**-23)


def test_fp32_operands_are_not_rounded() -> None:
    assert relative_bound("fp32", "fp32") == pytest.approx(2.0**-24, rel=1e-6)


def test_a_gap_is_counted_in_units_of_both_runs() -> None:
    found = curves([4.0, 2.0], [4.0 * (1 + 2.0**-7), 2.0], recipe="bf16")
    assert found.unit == pytest.approx(2.0**-24 + (1 + 2.0**-8) ** 2 * (1 + 2.0**-24) - 1, rel=1e-6)
    assert found.first_gap == 2.0**-7
    assert found.first_units == pytest.approx(2.0**-7 / (1 + 2.0**-7) / (found.unit or 0))
    assert (found.parted_step, found.diverged_step) == (1, None)


def test_the_first_step_beyond_one_unit_is_found() -> None:
    found = curves([1.0, 1.0, 1.0, 1.0], [1.0, 1 + 2.0**-24, 1 + 2.0**-20, 1.0])
    assert (found.parted_step, found.diverged_step, found.worst_step) == (2, 3, 3)
    assert found.worst_gap == 2.0**-20
    assert found.mean_gap == pytest.approx((2.0**-24 + 2.0**-20) / 4)
    assert found.last_gap == 0.0


def test_steps_are_matched_by_their_numbers() -> None:
    one = read_run(recorded(steps=rows([5.0, 4.0, 3.0])))
    other = read_run(recorded(steps=rows([4.0, 3.0, 2.0], start=2)))
    found = compare_curves(one, other)
    assert (found.steps, found.worst_gap, found.identical) == (2, 0.0, False)


def test_losses_that_are_not_finite_or_missing_are_left_out_of_gaps() -> None:
    found = curves([1.0, "nan", "inf", None, 2.0], [1.0, 3.0, "inf", 1.0, 2.0])
    assert (found.steps, found.compared, found.nonfinite, found.identical) == (5, 2, 1, False)
    assert found.mean_gap == 0.0
    nothing = curves(["nan", None], [1.0, 2.0])
    assert (nothing.compared, nothing.first_gap, nothing.parted_step) == (0, None, None)


def test_equal_words_are_equal_bits() -> None:
    found = curves([1.0, "nan"], [1.0, "nan"])
    assert (found.identical, found.parted_step, found.nonfinite) == (True, None, 0)


def test_no_loss_is_no_equality() -> None:
    assert not curves([None, None], [None, None]).identical


def test_a_loss_of_zero_has_an_infinite_relative_gap() -> None:
    assert curves([0.0], [1.0]).first_gap == math.inf
    assert curves([0.0], [0.0]).first_gap == 0.0


@pytest.mark.parametrize("granted", ["unknown", "int8", "e8m0", ""])
def test_a_format_without_a_bound_has_no_unit(granted: str) -> None:
    decisions = tuple(msgspec.structs.replace(decision, granted=granted) for decision in plan())
    found = curves([1.0], [1.5], plan=decisions)
    assert (found.unit, found.first_units, found.diverged_step) == (None, None, None)
    assert found.unit_source.startswith("unknown")
    assert found.first_gap == 0.5


def test_a_sum_in_fp16_is_part_of_the_unit() -> None:
    def summed(name: str) -> tuple[Decision, ...]:
        return tuple(msgspec.structs.replace(item, granted=name) if item.role == "accumulate.forward" else item for item in plan("fp16"))

    narrow, wide = (curves([1.0], [1.0], plan=summed(name)).unit for name in ("fp16", "fp32 by promotion"))
    assert narrow is not None
    assert wide is not None
    assert narrow - wide == pytest.approx(2.0**-11, rel=0.01)


def test_gradient_norms_of_taken_steps_have_a_gap_of_their_own() -> None:
    made = rows([1.0] * 5)
    other = [msgspec.structs.replace(row, grad_norm=norm) for row, norm in zip(made, [1.0, 1.5, 9.0, "inf", None], strict=True)]
    other[2] = msgspec.structs.replace(other[2], stepped=False)
    found = compare_curves(read_run(recorded(steps=made)), read_run(recorded(steps=tuple(other))))
    assert (found.norm_gap, found.worst_norm_gap, found.worst_norm_step) == (0.25, 0.5, 2)
    bare = tuple(msgspec.structs.replace(row, grad_norm=None) for row in made)
    assert compare_curves(read_run(recorded(steps=bare)), read_run(recorded(steps=made))).norm_gap is None


@pytest.mark.parametrize(("units", "step"), [(0.99, None), (1.01, 1)])
def test_divergence_begins_right_above_one_unit(units: float, step: int | None) -> None:
    unit = curves([1.0], [1.0]).unit
    assert unit is not None
    assert curves([1.0], [1.0 - units * unit]).diverged_step == step


@pytest.mark.parametrize("change", [{"scale": 2.0}, {"grad_norm": 2.0}, {"stepped": False}, {"loss": 2.0}])
def test_every_recorded_bit_of_a_step_counts(change: dict[str, Any]) -> None:
    made = rows([1.0, 1.0])
    other = (made[0], msgspec.structs.replace(made[1], **change))
    assert not compare_curves(read_run(recorded(steps=made)), read_run(recorded(steps=other))).identical
