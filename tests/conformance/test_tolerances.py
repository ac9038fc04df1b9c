"""Derived distances: they hold for the sums they are derived from, and a narrower register or a coarser rounding leaves them."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from mpbackend.conformance.operands import losing, normal, placed
from mpbackend.conformance.subject import DTYPES
from mpbackend.conformance.tolerances import distance_bound, gap_of, rounded, sum_distance
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.matmul import mm

HOST = Arithmetic(a="bf16", b="bf16", model="host")
WIDE = Arithmetic(a="bf16", b="bf16", products_per_step=16, fraction_bits=25, register_rounding="rz", zero_exponent=-133)
NARROW = msgspec.structs.replace(WIDE, products_per_step=32, fraction_bits=13, register_bits=13)


@pytest.mark.parametrize("claim", [HOST, WIDE, NARROW], ids=["host", "25 bits", "13 bits"])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_unit_keeps_its_own_bound(claim: Arithmetic, name: str) -> None:
    unit = msgspec.structs.replace(claim, a=name, b=name)
    a, b = normal((12, 200), name, 1), normal((200, 9), name, 2)
    found = mm(a, b, unit).to(DTYPES[name])
    assert gap_of(found, a @ b, distance_bound(a @ b, a.abs() @ b.abs(), unit, 200, name)) <= 1


@pytest.mark.parametrize("k", [64, 16_384])
def test_thirteen_bits_leave_the_bound_of_a_wider_claim(k: int) -> None:
    a, b = losing(k)
    exact, weight = (a @ b).diagonal(), (a.abs() @ b.abs()).diagonal()
    for unit, kept in ((WIDE, True), (NARROW, False)):
        found = mm(a, b, unit).to(torch.bfloat16).diagonal()
        gaps = [gap_of(found, exact, distance_bound(exact, weight, claim, k, "bf16")) for claim in (WIDE, HOST)]
        assert all((gap <= 1) is kept for gap in gaps), gaps
    assert gaps[1] > 50


def test_operands_that_lose_are_numbers_of_every_format() -> None:
    a, b = losing(64)
    assert len(a) > 8
    for name in ("bf16", "fp16", "fp32"):
        assert all(torch.equal(operand.to(DTYPES[name]).double(), operand) for operand in (a, b))
    assert {round(float(total / 2.0**-14)) for total in (a @ b).diagonal()[:-1]} == {62}, "what is left when the large terms cancel"
    assert (a[-1] > 0).all()


def test_a_result_that_is_rounded_away_from_the_nearest_leaves_the_bound() -> None:
    exact = torch.tensor([1.0 + 2.0**-8 - 2.0**-12], dtype=torch.float64)
    none = torch.zeros(1, dtype=torch.float64)
    assert gap_of(torch.tensor([1.0]), exact, rounded(exact, none, "bf16")) <= 1
    assert gap_of(torch.tensor([1.0 + 2.0**-7]), exact, rounded(exact, none, "bf16")) > 1
    assert gap_of(torch.tensor([1.0 + 2.0**-7]), exact, rounded(exact, none, "bf16", times=2)) <= 1, "two roundings may go half a unit each"


def test_a_claim_of_converted_operands_allows_for_their_conversion() -> None:
    half = Arithmetic(a="fp16", b="fp16", model="host")
    a, b = normal((8, 32), "fp32", 1), normal((32, 8), "fp32", 2)
    weight = a.abs() @ b.abs()
    found = a.half().float() @ b.half().float()
    assert gap_of(found, a @ b, rounded(a @ b, sum_distance(weight, half, 32, "fp32"), "fp32")) <= 1
    assert gap_of(found, a @ b, rounded(a @ b, sum_distance(weight, half, 32, "fp32", fits=True), "fp32")) > 1


@pytest.mark.parametrize("found", [torch.tensor([math.inf, 0.0]), torch.tensor([math.nan, 0.0]), torch.zeros(3), torch.zeros(2, 1)])
def test_what_is_no_result_is_infinitely_far(found: torch.Tensor) -> None:
    assert gap_of(found, torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)) == math.inf


def test_an_exact_result_has_no_gap_even_without_a_distance() -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    assert gap_of(torch.zeros(2), zero, zero) == 0
    assert gap_of(torch.tensor([0.0, 1e-30]), zero, zero) == math.inf
    assert gap_of(torch.zeros(0), zero[:0], zero[:0]) == 0


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_operands_are_numbers_of_their_format_and_no_subnormals(name: str) -> None:
    values = normal((40, 40), name, 3)
    assert torch.equal(placed(values, name, torch.device("cpu")).double(), values)
    assert values.abs().min() >= 2.0**-6
    assert not torch.equal(values, normal((40, 40), name, 4))
    assert torch.equal(values, normal((40, 40), name, 3))
