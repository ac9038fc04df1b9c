"""What a probe found out about a matrix unit, and how that stands to what a row claims.

A fingerprint never guesses. Where no product of the probed shapes tells two values apart it lists both; where nothing could be read it says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from mpbackend.formats import FORMATS
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.oracle import BYTE_PAIRS

Value = int | str
"""A number of bits or products, or a word of the ``Arithmetic``; ``exact``, ``none`` and ``lowest`` stand for what it writes as None."""

Verdict = Literal["agrees", "contradicts", "adds", "open"]
"""The claim is what was probed; it is not; nothing was claimed and the probe knows; the probe cannot tell."""

QUESTIONS: dict[str, str] = {
    "a": "format of the left operand",
    "b": "format of the right operand",
    "operand_rounding": "rounding of wider operands",
    "operand_subnormals": "subnormal operands",
    "products": "products before they are added",
    "products_per_step": "products added at once",
    "fraction_bits": "fraction bits of the alignment",
    "zero_exponent": "lowest exponent of the alignment",
    "register": "format of the running sum",
    "register_bits": "fraction bits of the running sum",
    "register_rounding": "rounding of the running sum",
    "order": "order of the products",
    "promotion_interval": "products before promotion",
    "promoted": "format of the outer sum",
    "output_rounding": "rounding of the result",
    "output_subnormals": "subnormal results",
    "overflow": "overflow",
}
"""The questions in the order of a report. All but ``products`` are fields of an ``Arithmetic``, whose products are exact."""

OF_SUMS = ("products", "products_per_step", "fraction_bits", "zero_exponent", "register_bits", "register_rounding", "order", "promotion_interval", "promoted")
"""What an arithmetic of model ``host`` does not claim."""

NOTHING_TOLD = "no product of these operands tells"


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the probe knows about one question.

    Attributes:
        values: the values that agree with every product seen: one if the question is answered, several that nothing tells apart, none if nothing is known.
        reason: why there is not one value; empty where there is.
        evidence: products that excluded other values, a line each.
    """

    values: tuple[Value, ...] = ()
    reason: str = ""
    evidence: tuple[str, ...] = ()

    @property
    def value(self) -> Value | None:
        """The value, or None where there is not exactly one."""
        return self.values[0] if len(self.values) == 1 else None


class Tree(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The order of a sum of K products as a tree: arXiv 2411.00442 (FPRev).

    Attributes:
        k: number of products; they are the leaves 0 to K - 1.
        nodes: the children of each sum, leaves and sums; sum number i has the index K + i and the last one is the root. More than two children are added
            at once.
        exact: whether the product of each leaf enters its sum unrounded.
        flushed: whether subnormal operands and sums are zeros.
    """

    k: int
    nodes: tuple[tuple[int, ...], ...]
    exact: tuple[bool, ...]
    flushed: bool = False


class ShapeAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a product of one shape showed.

    Attributes:
        shape: M, N and K.
        verified: elements of products of random operands whose bits the answers give.
        differing: elements whose bits they do not give; the answers hold for this shape only if it is 0.
        differs: what is different from the first shape, a line each.
    """

    shape: tuple[int, int, int]
    verified: int
    differing: int
    differs: tuple[str, ...] = ()


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arithmetic of a device as its products show it.

    Attributes:
        a: format that the left operand was given for.
        b: format that the right operand was given for.
        output: format of the results.
        storage_a: format that the numbers of the left operand were stored in.
        storage_b: format that the numbers of the right operand were stored in.
        answers: an answer to every question of ``QUESTIONS``.
        tree: the order of the sums where it is neither sequential nor byte pairs and could be read.
        shapes: the shapes, the one that the answers come from first.
        calls: products asked of the device.
    """

    a: str
    b: str
    output: str
    storage_a: str
    storage_b: str
    answers: dict[str, Answer]
    tree: Tree | None = None
    shapes: tuple[ShapeAnswer, ...] = ()
    calls: int = 0

    @property
    def explained(self) -> bool:
        """Whether the answers give the bits of every random product of the first shape."""
        return bool(self.shapes) and self.shapes[0].differing == 0 and self.shapes[0].verified > 0


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question, answered by a probe and by a row.

    Attributes:
        question: a key of ``QUESTIONS``.
        probed: what the probe found.
        claimed: what the row says; None where it says nothing.
        verdict: how the two stand to each other.
        reason: why the verdict is not ``agrees``.
    """

    question: str
    probed: Answer
    claimed: Value | None
    verdict: Verdict
    reason: str = ""


def claim(arithmetic: Arithmetic, question: str) -> Value | None:
    """Return what an arithmetic says to a question, in the words of an answer.

    Args:
        arithmetic: of a row.
        question: a key of ``QUESTIONS``.

    Returns:
        The value; None where the arithmetic leaves it to the host's library or only assumes it.
    """
    if arithmetic.model == "host" and question in OF_SUMS:
        return None
    if question == "products":
        return "exact"
    if question == "order" and any("order" in text for text in arithmetic.assumed):
        return None
    if question == "order" and arithmetic.products_per_step % BYTE_PAIRS == 0:
        # A step takes whole blocks, within which the order changes nothing.
        return "sequential"
    if question == "promoted" and arithmetic.promotion_interval is None:
        return None
    if question == "register_bits":
        return arithmetic.kept_bits
    value: Value | None = getattr(arithmetic, question)
    if value is None:
        return {"fraction_bits": "exact", "promotion_interval": "none", "zero_exponent": "lowest"}[question]
    return value


def compare(fingerprint: Fingerprint, arithmetic: Arithmetic) -> tuple[Finding, ...]:
    """Return how a fingerprint stands to a row, question by question.

    Args:
        fingerprint: of a device.
        arithmetic: what a row claims of it, from ``accumulate.arithmetic_for``.
    """
    longest = max((entry.shape[2] for entry in fingerprint.shapes), default=0)
    return tuple(
        finding(question, fingerprint.answers.get(question, Answer(reason="not asked")), claim(arithmetic, question), longest) for question in QUESTIONS
    )


def finding(question: str, probed: Answer, claimed: Value | None, longest: int) -> Finding:
    """Return the verdict on one question.

    Args:
        question: a key of ``QUESTIONS``.
        probed: what the probe found.
        claimed: what the row says.
        longest: products of the longest sum that was probed.
    """
    verdict: Verdict
    if claimed is None:
        known = probed.value is not None and probed.value != "none"
        verdict, reason = ("adds", "the row does not say") if known else ("open", probed.reason or "the row does not say")
    elif not probed.values:
        verdict, reason = "open", probed.reason
    elif question == "promotion_interval" and isinstance(claimed, int) and claimed >= longest and "none" in probed.values:
        verdict, reason = "open", f"sums of {longest} products end before the first promotion"
    elif claimed not in probed.values:
        verdict, reason = "contradicts", f"the row claims {claimed}"
    elif probed.value is None:
        verdict, reason = "open", probed.reason
    else:
        verdict, reason = "agrees", ""
    return Finding(question=question, probed=probed, claimed=claimed, verdict=verdict, reason=reason)


def overall(findings: Sequence[Finding]) -> Verdict:
    """Return one verdict for all: a contradiction outweighs everything, then what the probe adds, then agreement; ``open`` if nothing was told."""
    verdicts = {entry.verdict for entry in findings}
    for verdict in ("contradicts", "adds", "agrees"):
        if verdict in verdicts:
            return verdict
    return "open"


def equivalent(fingerprint: Fingerprint) -> Arithmetic | None:
    """Return an arithmetic with the probed values: the first where several are possible, the default where nothing is known.

    Returns:
        None where the sums have an order of their own or the answers do not give the bits.
    """
    first = {name: answer.values[0] for name, answer in fingerprint.answers.items() if answer.values and name != "products"}
    if not fingerprint.explained or fingerprint.tree is not None:
        return None
    plain: dict[str, Value | None] = {name: None if value in ("exact", "none", "lowest") else value for name, value in first.items()}
    if plain["register_bits"] == FORMATS[str(plain["register"])].mantissa_bits:
        plain["register_bits"] = None
    return msgspec.convert({**plain, "output": fingerprint.output, "source": "probed"}, Arithmetic)
