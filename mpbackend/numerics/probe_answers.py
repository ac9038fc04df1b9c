"""From the candidates that a probe leaves to the answers of a fingerprint."""

from __future__ import annotations

import msgspec

from mpbackend.formats import FORMATS
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.exact_sums import ROUNDINGS
from mpbackend.numerics.fingerprint import NOTHING_TOLD, QUESTIONS, Answer, Tree, Value, claim
from mpbackend.numerics.probe_check import LOWEST_TRIED, Found
from mpbackend.numerics.probe_sums import DEEPEST, holds

UNEXPLAINED = "neither aligned steps nor a tree of sums gives the bits of these products"
IN_TREE = "the order of the sums is a tree of its own: see the tree"


def answers(found: Found, a: str, b: str) -> dict[str, Answer]:
    """Return an answer to every question.

    Args:
        found: what is left.
        a: storage format of the left operand, which a tree of sums was verified with.
        b: storage format of the right operand.
    """
    if found.tree is not None:
        return of_tree(found.tree, a, b)
    return {question: answer(question, found) for question in QUESTIONS}


def of_tree(tree: Tree, a: str, b: str) -> dict[str, Answer]:
    """Return the answers of a tree whose evaluation gives all bits: unconverted operands, and sums rounded to nearest even in fp32."""
    pairs = all(len(children) == 2 for children in tree.nodes)
    rounded = [leaf for leaf, exact in enumerate(tree.exact) if not exact]
    subnormals = "flushed" if tree.flushed else "kept"
    # The first product of a chain has nothing to be fused with.
    starts = {child for children in tree.nodes if all(child < tree.k for child in children) for child in children}
    values: dict[str, Value] = {
        "a": a,
        "b": b,
        "operand_subnormals": subnormals,
        "register": "fp32",
        "register_bits": 23,
        "register_rounding": "rne",
        "order": "other",
        "output_subnormals": subnormals,
        "overflow": "inf_nan",
        "products": "exact" if set(rounded) <= starts else "rounded",
    }
    if pairs:
        values |= {"products_per_step": 1, "fraction_bits": "exact"}
    reasons = {
        "operand_rounding": "no operand is rounded",
        "zero_exponent": "an exact sum is not aligned",
        "output_rounding": "rne gives all bits; other roundings were not tried",
    }
    return {question: Answer(values=(values[question],)) if question in values else Answer(reason=reasons.get(question, IN_TREE)) for question in QUESTIONS}


def neighbors(candidate: Arithmetic) -> dict[str, list[Arithmetic]]:
    """Return candidates with one field changed to the values next to it."""
    bits, width = candidate.fraction_bits, candidate.kept_bits
    changed: dict[str, list[Value]] = {
        "fraction_bits": [] if bits is None else [bits - 1, bits + 1],
        "register_bits": [width - 1, width + 1],
        "register_rounding": [rounding for rounding in ROUNDINGS if rounding != candidate.register_rounding],
    }
    limit = FORMATS[candidate.register].mantissa_bits
    changed["register_bits"] = [value for value in changed["register_bits"] if isinstance(value, int) and 1 <= value <= limit]
    return {name: [msgspec.structs.replace(candidate, **{name: value}) for value in values] for name, values in changed.items()}


def answer(question: str, found: Found) -> Answer:
    """Return the values that are left for a question."""
    candidates = found.candidates
    if not candidates:
        return Answer(reason=UNEXPLAINED)
    if question == "output_rounding" and all(holds(x.output, x.register) and (x.promotion_interval is None or holds(x.output, x.promoted)) for x in candidates):
        return Answer(reason="the result has every number of the sum: nothing is rounded")
    if question == "zero_exponent" and any(candidate.fraction_bits is None for candidate in candidates):
        return Answer(reason="an exact step is not aligned")
    if question == "zero_exponent" and len(found.free[question]) > LOWEST_TRIED:
        return Answer(reason="no sum of these operands is small enough")
    if question == "operand_rounding" and len(found.free[question]) == len(ROUNDINGS):
        return Answer(reason="no operand is rounded, or no product tells how")
    options = [msgspec.structs.replace(candidates[0], **{question: value}) for value in found.free.get(question, [])]
    values: list[Value] = []
    for candidate in options or candidates:
        value = claim(candidate, question)
        if value is not None and value not in values:
            values.append(value)
    if question == "fraction_bits" and DEEPEST in values and "exact" not in values:
        # Nothing that was asked tells the widest alignment from an exact step, which is left out where there is no fast model of it.
        values.append("exact")
    if not values:
        return Answer(reason="nothing is promoted")
    return Answer(values=tuple(values), reason=f"{NOTHING_TOLD} these apart" if len(values) > 1 else "")


def differences(first: dict[str, Answer], second: dict[str, Answer]) -> list[str]:
    """Return the questions whose answers have no value in common, a line each."""
    lines = []
    for question, found in second.items():
        before = first[question]
        if not set(before.values) & set(found.values) and (before.values or found.values):
            lines.append(f"{QUESTIONS[question]}: {listed(found)} instead of {listed(before)}")
    return lines


def listed(found: Answer) -> str:
    """Return the values of an answer, or that there is none."""
    return ", ".join(str(value) for value in found.values) or "not told"
