"""The probe against a claim: a unit that is what its row says contradicts nothing, another one does."""

from __future__ import annotations

import msgspec
import pytest
from torch import Tensor

from mpbackend.conformance.probing import claim_of_stored, probed
from mpbackend.conformance.runner import run_check
from mpbackend.conformance.subject import Subject
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.matmul import mm
from tests.conformance.faults import FAULTS
from tests.conformance.wrong import processor

UNIT = Arithmetic(a="fp16", b="fp16", products_per_step=16, fraction_bits=24, register_rounding="rz", zero_exponent=-132)


@pytest.fixture
def subject() -> Subject:
    right, device, plugins = processor()
    return Subject(right, device, plugins, quick=True)


@pytest.mark.parametrize(
    ("changes", "question"),
    [
        ({}, ""),
        ({"fraction_bits": 13, "register_bits": 13}, "fraction_bits"),
        ({"products_per_step": 8}, "products_per_step"),
        ({"register_rounding": "rne"}, ""),
    ],
)
def test_what_the_row_rules_out_is_named(changes: dict[str, object], question: str, subject: Subject) -> None:
    unit = msgspec.structs.replace(UNIT, **changes)

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return mm(a, b, unit).double()

    claim = UNIT if question else unit
    answer = probed(subject, multiply, claim, "fp16", "fp32")
    assert (f"{question}: the row claims" in answer.fault) if question else answer.fault == ""
    assert question or float(answer.figures["agrees"]) >= 8
    assert {"operand_subnormals", "overflow"} <= set(answer.figures)


def test_operands_of_a_wider_unit_are_those_that_are_stored() -> None:
    wide = msgspec.structs.replace(UNIT, a="fp32", b="fp32")
    assert claim_of_stored(wide, "fp16") == UNIT
    assert claim_of_stored(UNIT, "fp32") == UNIT
    assert claim_of_stored(UNIT, "bf16") == msgspec.structs.replace(UNIT, a="bf16", b="bf16"), "bf16 has fewer fraction bits"


@pytest.mark.parametrize("name", ["accumulate_short", "accumulate_long"])
def test_a_register_of_thirteen_bits_is_a_hundred_bounds_from_a_claim_of_24(name: str) -> None:
    right, device, plugins = processor()
    figures = run_check(name, Subject(FAULTS[name].backend(right), device, plugins, quick=True)).figures
    gaps = {form: float(figures[f"{form} gap"]) for form in ("fp32", "bf16")}
    assert min(gaps.values()) > 100, gaps
    assert "24 bits" in str(figures["bf16 claim"])


def test_the_sums_of_the_processor_are_within_their_claim(subject: Subject) -> None:
    figures = run_check("accumulate_short", subject).figures
    assert max(float(value) for name, value in figures.items() if name.endswith("gap")) <= 1
