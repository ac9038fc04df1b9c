from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.fingerprint import QUESTIONS, Answer, Finding, Fingerprint, ShapeAnswer, claim, compare, equivalent, finding, overall

UNIT = Arithmetic(a="fp16", b="fp16", products_per_step=16, fraction_bits=25, register_rounding="rz", zero_exponent=-133)


def fingerprint(arithmetic: Arithmetic = UNIT, **answers: Answer) -> Fingerprint:
    """Return what a perfect probe of an arithmetic would find, with some answers replaced."""
    values = {question: claim(arithmetic, question) for question in QUESTIONS}
    known = {question: Answer(values=() if value is None else (value,)) for question, value in values.items()}
    shape = ShapeAnswer(shape=(16, 16, 256), verified=256, differing=0)
    return Fingerprint(a="fp16", b="fp16", output="fp32", storage_a="fp16", storage_b="fp16", answers={**known, **answers}, shapes=(shape,))


def verdicts(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {finding.question: finding.verdict for finding in findings if finding.verdict != "agrees"}


def test_a_claim_that_was_probed_agrees() -> None:
    findings = compare(fingerprint(), UNIT)
    # Nothing is promoted, so neither side names the format of an outer sum.
    assert verdicts(findings) == {"promoted": "open"}
    assert overall(findings) == "agrees"


@pytest.mark.parametrize(
    ("question", "planted"),
    [
        ("a", "bf16"),
        ("operand_rounding", "rz"),
        ("operand_subnormals", "flushed"),
        ("products_per_step", 8),
        ("fraction_bits", 24),
        ("zero_exponent", None),
        ("register", "fp16"),
        ("register_bits", 13),
        ("register_rounding", "rne"),
        ("order", "byte_pairs"),
        ("promotion_interval", 128),
        ("output_rounding", "rz"),
        ("output_subnormals", "flushed"),
        ("overflow", "saturating"),
    ],
)
def test_every_false_claim_is_contradicted(question: str, planted: Any) -> None:
    findings = compare(fingerprint(), msgspec.structs.replace(UNIT, **{question: planted}))
    found = verdicts(findings)
    assert found[question] == "contradicts"
    # A register of fp16 has other bits as well; a promoted sum has a format that was not probed.
    assert set(found) <= {question, "promoted", "register_bits"}
    assert overall(findings) == "contradicts"


def test_what_a_row_does_not_say_is_added() -> None:
    host = msgspec.structs.replace(UNIT, model="host")
    findings = compare(fingerprint(), host)
    added = {question for question, verdict in verdicts(findings).items() if verdict == "adds"}
    assert added == {"products", "products_per_step", "fraction_bits", "zero_exponent", "register_bits", "register_rounding", "order"}
    assert overall(findings) == "adds"


def test_an_order_that_is_only_assumed_is_no_claim() -> None:
    chain = Arithmetic(a="fp32", b="fp32", assumed=("the sums go along K in order: libraries choose another",))
    assert claim(chain, "order") is None
    assert verdicts(compare(fingerprint(chain, order=Answer(values=("other",))), chain))["order"] == "adds"


def test_an_order_within_a_step_is_none() -> None:
    wide = msgspec.structs.replace(UNIT, products_per_step=32, order="byte_pairs")
    assert claim(wide, "order") == "sequential"
    assert claim(msgspec.structs.replace(wide, products_per_step=16), "order") == "byte_pairs"


def test_values_that_nothing_tells_apart_leave_a_question_open() -> None:
    several = Answer(values=(25, 26, "exact"), reason="no product of these operands tells these apart")
    findings = compare(fingerprint(fraction_bits=several), UNIT)
    assert verdicts(findings)["fraction_bits"] == "open"
    assert several.value is None
    narrow = msgspec.structs.replace(UNIT, fraction_bits=24)
    assert verdicts(compare(fingerprint(fraction_bits=several), narrow))["fraction_bits"] == "contradicts"


def test_an_unanswered_question_is_open_and_says_why() -> None:
    findings = compare(fingerprint(order=Answer(reason="no tree")), UNIT)
    (order,) = [finding for finding in findings if finding.question == "order"]
    assert (order.verdict, order.reason) == ("open", "no tree")


def test_nothing_told_is_open() -> None:
    silent = {question: Answer(reason="not told") for question in QUESTIONS}
    assert overall(compare(msgspec.structs.replace(fingerprint(), answers=silent), UNIT)) == "open"


def test_an_equivalent_arithmetic_has_the_probed_values() -> None:
    assert equivalent(fingerprint()) == msgspec.structs.replace(UNIT, source="probed")
    exact = Arithmetic(a="fp16", b="fp16", promotion_interval=4)
    assert equivalent(fingerprint(exact)) == msgspec.structs.replace(exact, source="probed")


def test_answers_that_do_not_give_the_bits_have_no_equivalent() -> None:
    wrong = msgspec.structs.replace(fingerprint(), shapes=(ShapeAnswer(shape=(16, 16, 64), verified=255, differing=1),))
    assert equivalent(wrong) is None
    assert equivalent(msgspec.structs.replace(fingerprint(), shapes=())) is None


def test_a_fingerprint_survives_json_and_refuses_strangers() -> None:
    text = msgspec.json.encode(fingerprint())
    assert msgspec.json.decode(text, type=Fingerprint) == fingerprint()
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(text.replace(b'"calls"', b'"guess"'), type=Fingerprint)


def test_a_promotion_beyond_the_longest_probed_sum_is_left_open() -> None:
    never = Answer(values=("none",))
    assert finding("promotion_interval", never, 128, 1024).verdict == "contradicts"
    late = finding("promotion_interval", never, 1024, 1024)
    assert (late.verdict, late.reason) == ("open", "sums of 1024 products end before the first promotion")
    assert finding("promotion_interval", never, "none", 1024).verdict == "agrees"
