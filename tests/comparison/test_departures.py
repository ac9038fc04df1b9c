from __future__ import annotations

from typing import Any

import pytest

from mpbackend.comparison.departures import departures
from mpbackend.comparison.runs import read_run
from mpbackend.matrix import Matrix, load_matrix
from mpbackend.observe.record import ComputeReading, SwitchReading
from tests.comparison.building import plan, recorded, switch

ASCEND: dict[str, Any] = {"device": "ascend-910b3", "arch": "ascend-a2"}


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load_matrix()


def reasons(matrix: Matrix, **changes: Any) -> list[str]:
    return [found.reason for found in departures(read_run(recorded(**changes)), matrix)]


def test_a_run_that_did_as_planned_has_none(matrix: Matrix) -> None:
    assert reasons(matrix, **ASCEND, switches={"conv.allow_hf32": switch("False"), "matmul.allow_hf32": switch("false")}) == []
    assert reasons(matrix, switches={"conv.fp32_precision": switch("ieee"), "deterministic": switch("anything")}) == []


@pytest.mark.parametrize("value", ["True", "true", "TRUE"])
def test_a_switch_that_means_another_format_is_one(matrix: Matrix, value: str) -> None:
    found = reasons(matrix, **ASCEND, switches={"conv.allow_hf32": switch(value)})
    assert found == [f"conv.allow_hf32 stood at {value}: conv ran in hf32_e8m11, and the plan says fp32"]


def test_a_switch_is_judged_by_what_the_plan_grants(matrix: Matrix) -> None:
    hf32 = plan("fp32", compute__forward_conv="hf32_e8m11")
    assert reasons(matrix, **ASCEND, plan=hf32, switches={"conv.allow_hf32": switch("True")}) == []
    assert len(reasons(matrix, **ASCEND, plan=hf32, switches={"conv.allow_hf32": switch("False")})) == 1
    resolved = plan("fp32", compute__forward_conv="hf32")
    assert reasons(matrix, **ASCEND, plan=resolved, switches={"conv.allow_hf32": switch("True")}) == []
    assert reasons(matrix, **ASCEND, recipe="bf16", switches={"conv.allow_hf32": switch("True")}) == [], "no product has fp32 operands"


def test_a_narrow_sum_is_one(matrix: Matrix) -> None:
    name = "matmul.reduced_precision_reduction_bf16"
    assert reasons(matrix, recipe="bf16", switches={name: switch("true")}) == [f"{name} stood at true: matmul ran in bf16, and the plan says fp32"]
    assert reasons(matrix, recipe="bf16", switches={name: switch("false")}) == []
    assert reasons(matrix, recipe="fp16", switches={name: switch("true")}) == [], "it is about another format"


def test_a_switch_that_changed_during_the_run_is_one(matrix: Matrix) -> None:
    changed = SwitchReading(before="tf32", set="ieee", read_back="ieee", after="tf32")
    assert reasons(matrix, switches={"conv.fp32_precision": changed}) == ["conv.fp32_precision stood at tf32: conv ran in tf32, and the plan says fp32"]
    unknown = SwitchReading(before="a", set="b", read_back="b", after="a")
    assert reasons(matrix, arch="nobody's", switches={"x": unknown}) == ["x changed during the run, from b to a"]


def test_a_switch_that_does_not_take_is_one(matrix: Matrix) -> None:
    stuck = SwitchReading(before="a", set="b", read_back="a", after="a")
    assert reasons(matrix, arch="nobody's", switches={"x": stuck}) == ["x was set to b and read back as a"]


@pytest.mark.parametrize(
    ("shares", "found"),
    [({"bf16": 1.0}, 0), ({"fp32": 1.0}, 1), ({"fp32": 0.4, "bf16": 0.6}, 0), ({"fp32": 0.4, "bf16": 0.3, "fp16": 0.3}, 0), ({"fp32 × bf16": 1.0}, 0), ({}, 0)],  # noqa: RUF001 - as an audit joins formats
)
def test_products_observed_in_another_format_are_one(matrix: Matrix, shares: dict[str, float], found: int) -> None:
    assert len(reasons(matrix, recipe="bf16", compute=ComputeReading(shares=shares))) == found
    assert reasons(matrix, recipe="bf16", compute=ComputeReading(shares=shares, uncounted=("an operation",))) == []


def test_tf32_products_are_dispatched_as_fp32(matrix: Matrix) -> None:
    assert reasons(matrix, plan=plan("tf32"), compute=ComputeReading(shares={"fp32": 1.0})) == []
