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
from mpbackend.numerics.fingerprint import Answer, Fingerprint, ShapeAnswer, Tree, claim
from mpbackend.numerics.oracle import BYTE_PAIRS, byte_pairs
from mpbackend.numerics.probe_answers import answers, differences, neighbors
from mpbackend.numerics.probe_check import OF_SUMS, Found, Seen, confirmed, converted, finished, matching, see, widened
from mpbackend.numerics.probe_model import Layout
from mpbackend.numerics.probe_rows import Prober, Product, Row
from mpbackend.numerics.probe_steps import Shape, intervals, layouts, scan_lines, step_scan
from mpbackend.numerics.probe_sums import DEEPEST, Bank, alignment_rows, arithmetics, contradiction, fit, random_rows, register_rows
from mpbackend.numerics.probe_tree import chain, flushing, read_tree, reference

SHAPES: tuple[Shape, ...] = ((64, 64, 64), (64, 64, 256), (16, 16, 1024))
"""Libraries choose a kernel by the shape: a small one, one of several steps of any unit, and one long enough for late promotions."""

PRODUCTS_MAX = 1200

WIDEST_TREE = 256
"""Products up to which the order of a sum is read as a tree."""

OF_TINY = ("zero_exponent", "output_subnormals")
"""Fields that only tiny sums and results show."""

SMALL_STEP = 2
"""Steps whose order and promotion the scans do not tell: random products do, so the first description that gives them is taken."""


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
        self.banks: dict[Layout, list[Bank]] = {}
        self.scan: tuple[str, ...] = ()

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
            answers=self.with_evidence(found),
            tree=found.tree,
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
        seen = self.seen(shape)
        lost, kept = step_scan(self.prober, shape)
        self.scan = scan_lines(self.prober, lost, kept)
        found: list[Arithmetic] = []
        possible = layouts(lost, kept, shape[2])
        if possible and max(layout.products for layout in possible) <= SMALL_STEP and shape[2] <= WIDEST_TREE:
            tree = read_tree(self.prober, shape)
            order = None if tree is None else chain(tree)
            if order is not None and order not in (list(range(shape[2])), byte_pairs(shape[2] + -shape[2] % BYTE_PAIRS)):
                # One product after the other, but in an order that no aligned unit is modeled with.
                return self.from_tree(shape)
        for layout in sorted(possible, key=lambda layout: layout.order != "sequential"):
            if found and layout.products <= SMALL_STEP and layout.order != "sequential":
                continue
            for interval in intervals(self.prober, shape, layout, narrow=bool(lost)):
                if found and interval == layout.products == 1:
                    # A register that is promoted after every product only rounds the products: a plainer description gives all the bits.
                    continue
                for promoted in ("fp32", "fp16") if interval else ("fp32",):
                    fitting = self.fitting(shape, layout._replace(interval=interval, promoted=promoted), saturating)
                    found += confirmed(matching(fitting, seen, flushed=True), seen, flushed=True)
        left = finished(Found(found, {}), shape, self.prober, self.storages)
        full = self.full(shape)
        candidates: list[Arithmetic] = []
        # What tiny sums left open may matter to later products: the first settlement that gives them all is taken, and the others compared with it.
        others = widened(left.candidates[:1], **{name: left.free[name] for name in OF_TINY}) if left.candidates else []
        for option in [None, *others]:
            fixed = left.candidates
            if option is not None:
                fixed = [msgspec.structs.replace(x, **{name: getattr(option, name) for name in OF_TINY}) for x in left.candidates]
            settled = converted(Found(fixed, left.free), shape, self.prober, self.storages)
            candidates = confirmed(settled.candidates, full)
            if candidates:
                alike = confirmed(widened(candidates[:1], **{name: left.free[name] for name in OF_TINY}), full)
                free = {name: [value for value in left.free[name] if any(getattr(x, name) == value for x in alike)] for name in OF_TINY}
                left = Found(candidates, {**settled.free, **free})
                break
        if any(x.products_per_step == 1 and x.promotion_interval and x.fraction_bits == DEEPEST for x in candidates):
            # Fused multiply-adds that are promoted have no fast model but a tree, which is exact where the widest alignment only stands for them.
            summed = self.from_tree(shape)
            if summed.tree is not None:
                return summed
        return Found(candidates, left.free) if candidates else self.from_tree(shape)

    def fitting(self, shape: Shape, layout: Layout, saturating: bool) -> list[Arithmetic]:
        """Return the registers that queries leave possible for one layout."""
        k = shape[2]

        def bank(rows: Sequence[Row]) -> Bank:
            results = self.prober.ask(rows, shape) if rows else torch.zeros(0, dtype=torch.float64)
            return Bank(rows, results, k, self.output, saturating)

        aligned = bank(alignment_rows(self.prober, layout, k))
        others = bank([*register_rows(self.prober, layout, k), *random_rows(self.prober, layout, k)])
        self.banks[layout] = [entry for entry in (aligned, others) if len(entry.rows)]
        return arithmetics(fit(aligned, others, layout), self.a, self.b, self.output, saturating)

    def saturates(self, shape: Shape) -> bool:
        """Return whether NaN becomes 0 in a result."""
        return bool(self.prober.ask([{0: (math.nan, 1.0)}], shape)[0] == 0)

    def shape_answer(self, shape: Shape, found: Found, differs: Sequence[str] = ()) -> ShapeAnswer:
        """Return how many elements of random products the first candidate gives."""
        if not found.candidates and found.tree is None:
            return ShapeAnswer(shape=shape, verified=0, differing=shape[0] * shape[1], differs=tuple(differs))
        entries = self.full(shape)
        tree = found.tree
        differing = sum(entry.differing(found.candidates[0], None) if tree is None else self.off_tree(tree, entry) for entry in entries)
        total = shape[0] * shape[1] * len(entries)
        return ShapeAnswer(shape=shape, verified=total - differing, differing=differing, differs=tuple(differs))

    def answers(self, found: Found) -> dict[str, Answer]:
        """Return an answer to every question from what is left."""
        return answers(found, *self.storages)

    def with_evidence(self, found: Found) -> dict[str, Answer]:
        """Return the answers with the queries that excluded the values next to them."""
        entries = self.answers(found)
        if not found.candidates:
            return entries
        chosen = found.candidates[0]
        layout = Layout(chosen.products_per_step, chosen.order, chosen.promotion_interval, chosen.promoted)
        banks = self.banks.get(layout if layout.interval else layout._replace(promoted="fp32"), [])
        for question, others in neighbors(chosen).items():
            lines = []
            for other in others:
                line = next((text for bank in banks if (text := contradiction(bank, layout, other))), "")
                if line:
                    lines.append(f"not {claim(other, question)}: {line}")
            entries[question] = msgspec.structs.replace(entries[question], evidence=tuple(lines))
        for question in ("products_per_step", "order"):
            entries[question] = msgspec.structs.replace(entries[question], evidence=self.scan)
        return entries

    def from_tree(self, shape: Shape) -> Found:
        """Return the order of the sums as a tree if its exact evaluation gives all elements of random products, with subnormal numbers kept or flushed."""
        if shape[2] > WIDEST_TREE:
            return Found([], {})
        tree = read_tree(self.prober, shape)
        if tree is None:
            return Found([], {})
        seen = [*self.full(shape), *(see(kind, shape, self.prober, *self.storages) for kind in ("subnormal", "tiny", "tiniest"))]
        if not any(self.off_tree(tree, product) for product in seen):
            return Found([], {}, tree)
        if self.prober.a.low + self.prober.b.low > -130 or self.output not in ("fp32", "bf16"):
            return Found([], {})
        tree = flushing(self.prober, shape, tree)
        return Found([], {}, None if any(self.off_tree(tree, product) for product in seen) else tree)

    def off_tree(self, tree: Tree, product: Seen) -> int:
        """Return how many elements of a product a tree does not give."""
        expected = reference(tree, product.left, product.right, self.output)
        return int((~((expected == product.result) | (expected.isnan() & product.result.isnan()))).sum())
