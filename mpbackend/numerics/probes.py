"""Probes: the arithmetic of a device from the products it returns, with no other access.

Scans tell which products meet in a step and when a sum is promoted. A bank of sparse queries then excludes hypotheses about the widths and roundings, and
random products of whole matrices those about all that is left. What survives is the answer: two values mean that no product asked tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from mpbackend.errors import BackendError
from mpbackend.formats import FORMATS, parse_format
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.fingerprint import NOTHING_TOLD, QUESTIONS, Answer, Fingerprint, ShapeAnswer, Value, claim
from mpbackend.numerics.probe_check import LOWEST_TRIED, OF_SUMS, Found, Seen, confirmed, converted, finished, matching, see
from mpbackend.numerics.probe_model import ROUNDINGS, Layout
from mpbackend.numerics.probe_rows import Prober, Product, Row
from mpbackend.numerics.probe_steps import Shape, intervals, layouts, step_scan
from mpbackend.numerics.probe_sums import Bank, alignment_rows, arithmetics, fit, holds, random_rows, register_rows

SHAPES: tuple[Shape, ...] = ((64, 64, 64), (64, 64, 256), (16, 16, 1024))
"""Libraries choose a kernel by the shape: a small one, one of several steps of any unit, and one long enough for late promotions."""

PRODUCTS_MAX = 1200


def probe(
    product: Product,
    *,
    a: str,
    b: str,
    output: str,
    storage_a: str | None = None,
    storage_b: str | None = None,
    shapes: Sequence[Shape] = SHAPES,
    products_max: int = PRODUCTS_MAX,
) -> Fingerprint:
    """Return the arithmetic of a device.

    Args:
        product: multiplies matrices on the device.
        a: format that the left operand is meant to be multiplied in.
        b: format that the right operand is meant to be multiplied in.
        output: format of the results.
        storage_a: format that the left operand is stored in; None for that which carries ``a``.
        storage_b: format that the right operand is stored in; None for that which carries ``b``.
        shapes: M, N and K of products to ask for; the one with the most room for queries is probed, the others are compared with it.
        products_max: products to ask for at most.

    Raises:
        UnknownNameError: no such format.
        BackendError: a format without binary fractions of fixed width or wider than fp32, no shape with at least 2 x 2 x 4, or the budget is spent.
    """
    left, right, result = parse_format(a), parse_format(b), parse_format(output)
    storages = (parse_format(storage_a or left.storage).name, parse_format(storage_b or right.storage).name)
    for name in (left.name, right.name, result.name, *storages):
        form = FORMATS[name]
        if form.encoding not in ("ieee", "fn", "fnuz") or form.bits > 32 or form.kind != "float":
            raise BackendError("a probe", found=f"format {name}", remedy="probe operands and results of fp32 or narrower formats with an exponent field")
    fitting = [shape for shape in dict.fromkeys(shapes) if min(shape[0], shape[1]) >= 2 and shape[2] >= 4]
    if not fitting:
        raise BackendError("a probe", found=f"shapes {list(shapes)}", remedy="give at least one of 2 x 2 x 4 or more")
    fitting.sort(key=lambda shape: (min(shape[:2]) * shape[2], min(shape[:2])), reverse=True)
    prober = Prober(product, *storages, result.name, products_max)
    return Probe(prober, left.name, right.name, result.name, storages).run(fitting)


class Probe:
    """One run of a probe over shapes."""

    def __init__(self, prober: Prober, a: str, b: str, output: str, storages: tuple[str, str]) -> None:
        """Keep what is probed.

        Args:
            prober: the device.
            a: format of the left operand.
            b: format of the right operand.
            output: format of the results.
            storages: formats that the operands are stored in.
        """
        self.prober, self.a, self.b, self.output, self.storages = prober, a, b, output, storages

    def run(self, shapes: Sequence[Shape]) -> Fingerprint:
        """Return the fingerprint: identify at the first shape, then compare the others."""
        found = self.identify(shapes[0])
        listed = [self.shape_answer(shapes[0], found)]
        for shape in shapes[1:]:
            seen = self.seen(shape)
            same = confirmed(matching(found.candidates, seen), seen)
            if same:
                found = Found(same, found.free)
                listed.append(self.shape_answer(shape, found))
                continue
            other = self.identify(shape)
            # A late promotion shows only where K is long enough; a shorter product must not speak against it.
            pooled = matching(other.candidates, self.seen(shapes[0])) if shape[2] > shapes[0][2] else []
            if pooled:
                found = Found(pooled, other.free)
                listed.append(self.shape_answer(shape, found))
            else:
                listed.append(self.shape_answer(shape, other, differences(self.answers(found), self.answers(other))))
        return Fingerprint(
            a=self.a,
            b=self.b,
            output=self.output,
            storage_a=self.storages[0],
            storage_b=self.storages[1],
            answers=self.answers(found),
            shapes=tuple(listed),
            calls=self.prober.calls,
        )

    def seen(self, shape: Shape) -> list[Seen]:
        """Return random products that tell sums apart."""
        return [see(kind, shape, self.prober, *self.storages) for kind in OF_SUMS]

    def full(self, shape: Shape) -> list[Seen]:
        """Return random products for the last comparison, those of operands with all bits among them."""
        return [*self.seen(shape), see("full", shape, self.prober, *self.storages)]

    def identify(self, shape: Shape) -> Found:
        """Return all arithmetics of aligned steps that give everything seen at a shape."""
        saturating = self.saturates(shape)
        lost, kept = step_scan(self.prober, shape)
        found: list[Arithmetic] = []
        for layout in layouts(lost, kept, shape[2]):
            for interval in intervals(self.prober, shape, layout, narrow=bool(lost)):
                if interval == layout.products == 1 and found:
                    # A register that is promoted after every product is its outer sum: the plainer description was found.
                    continue
                for promoted in ("fp32", "fp16") if interval else ("fp32",):
                    found += self.fitting(shape, layout._replace(interval=interval, promoted=promoted), saturating)
        left = Found(matching(found, self.seen(shape)), {})
        left = converted(finished(left, shape, self.prober, self.storages), shape, self.prober, self.storages)
        return Found(confirmed(left.candidates, self.full(shape)), left.free)

    def fitting(self, shape: Shape, layout: Layout, saturating: bool) -> list[Arithmetic]:
        """Return the registers that queries leave possible for one layout."""
        k = shape[2]

        def bank(rows: Sequence[Row]) -> Bank:
            results = self.prober.ask(rows, shape) if rows else torch.zeros(0, dtype=torch.float64)
            return Bank(rows, results, k, self.output, saturating)

        aligned = bank(alignment_rows(self.prober, layout, k))
        others = bank([*register_rows(self.prober, layout, k), *random_rows(self.prober, layout, k)])
        return arithmetics(fit(aligned, others, layout), self.a, self.b, self.output, saturating)

    def saturates(self, shape: Shape) -> bool:
        """Return whether NaN becomes 0 in a result."""
        return bool(self.prober.ask([{0: (math.nan, 1.0)}], shape)[0] == 0)

    def shape_answer(self, shape: Shape, found: Found, differs: Sequence[str] = ()) -> ShapeAnswer:
        """Return how many elements of random products the first candidate gives."""
        if not found.candidates:
            return ShapeAnswer(shape=shape, verified=0, differing=shape[0] * shape[1], differs=tuple(differs))
        entries = self.full(shape)
        differing = sum(entry.differing(found.candidates[0], None) for entry in entries)
        total = shape[0] * shape[1] * len(entries)
        return ShapeAnswer(shape=shape, verified=total - differing, differing=differing, differs=tuple(differs))

    def answers(self, found: Found) -> dict[str, Answer]:
        """Return an answer to every question from the candidates that are left."""
        return {question: answer(question, found) for question in QUESTIONS}


def answer(question: str, found: Found) -> Answer:
    """Return the values that are left for a question."""
    candidates = found.candidates
    if not candidates:
        return Answer(reason="no unit of aligned steps gives the bits of these products")
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
