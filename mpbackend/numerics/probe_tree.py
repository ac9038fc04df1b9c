"""The order of a sum as a tree: FPRev (arXiv 2411.00442), with sums of more than two terms, and exact evaluation of what was found.

With ``+M`` at ``i``, ``-M`` at ``j`` and units elsewhere, every unit that meets one of the two before they cancel drowns in it. What is left counts the
products outside the smallest subtree that holds both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpbackend.formats import FORMATS
from mpbackend.numerics.fingerprint import Tree
from mpbackend.numerics.probe_rows import Prober, Row
from mpbackend.numerics.probe_steps import Shape
from mpbackend.numerics.rounding import round_to

DROWNING = 26
"""Bits by which ``M`` is larger than the sum of all units, so that a register of fp32 keeps nothing of them."""

HALF = (1.0 + 2.0**-12) ** 2 - 2.0**-24
"""1 + 2^-11, to which the square of 1 + 2^-12 rounds in fp32."""


class Masks(NamedTuple):
    """Exponents of the two products that a sum is read with."""

    large: int
    unit: int


def masks(prober: Prober, k: int) -> list[Masks]:
    """Return the exponents to try: a wide contrast first, then one that sums of fp16 hold; none where the formats have too few exponents."""
    emin = math.frexp(FORMATS[prober.output].smallest_normal)[1] - 1
    floor = max(prober.a.low + prober.b.low, emin, -40)
    bits = math.ceil(math.log2(k))
    if bits > FORMATS[prober.output].mantissa_bits + 1:
        return []
    wide = Masks(min(prober.a.high + prober.b.high, 60), floor)
    return [entry for entry in (wide, Masks(14, max(floor, -14))) if entry.large - entry.unit >= DROWNING - 13 * (entry.large == 14) + bits]


def sizes(prober: Prober, shape: Shape, pairs: Sequence[tuple[int, int]], mask: Masks) -> list[int | None]:
    """Return how many products the smallest subtree with each pair holds; None where the result is no count."""
    k = shape[2]
    unit, large, minus = prober.pair(mask.unit), prober.pair(mask.large), prober.pair(mask.large, -1.0)
    units = dict.fromkeys(range(k), unit)
    rows: list[Row] = [{**units, i: large, j: minus} for i, j in pairs]
    counts = (prober.ask(rows, shape) * 2.0**-mask.unit).tolist() if rows else []
    return [k - int(count) if math.isfinite(count) and count == int(count) and 0 <= count <= k - 2 else None for count in counts]


class Reader:
    """Reads the tree of one shape."""

    def __init__(self, prober: Prober, shape: Shape, mask: Masks) -> None:
        """Keep what is asked.

        Args:
            prober: the device.
            shape: M, N and K.
            mask: exponents of the products.
        """
        self.prober, self.shape, self.mask = prober, shape, mask
        self.nodes: list[tuple[int, ...]] = []

    def read(self) -> list[tuple[int, ...]] | None:
        """Return the sums, children first; None where the counts are those of no tree."""
        k = self.shape[2]
        found = self.around(list(range(k)))
        if found is None:
            return None
        root = self.subtree(0, found)
        return self.nodes if root is not None else None

    def around(self, leaves: Sequence[int]) -> dict[int, int] | None:
        """Return the sizes of the smallest subtrees that hold the first leaf and each other one."""
        first, rest = leaves[0], leaves[1:]
        found = sizes(self.prober, self.shape, [(first, j) for j in rest], self.mask)
        return None if None in found else {j: size for j, size in zip(rest, found, strict=True) if size is not None}

    def subtree(self, leaf: int, found: dict[int, int]) -> int | None:
        """Return the index of the sum of a leaf and of the leaves around it, None where the sizes contradict each other."""
        node, count = leaf, 1
        for size in sorted(set(found.values())):
            group = [j for j, other in found.items() if other == size]
            count += len(group)
            if count != size:
                return None
            children = self.children(group, size)
            if children is None:
                return None
            self.nodes.append((node, *children))
            node = self.shape[2] + len(self.nodes) - 1
        return node

    def children(self, leaves: list[int], size: int) -> list[int] | None:
        """Return the subtrees that the leaves form under a sum of a size: one, or several that are added at once."""
        found: list[int] = []
        while leaves:
            if len(leaves) == 1:
                return [*found, leaves[0]]
            around = self.around(leaves)
            if around is None:
                return None
            child = self.subtree(leaves[0], {j: other for j, other in around.items() if other < size})
            if child is None:
                return None
            found.append(child)
            leaves = [j for j, other in around.items() if other >= size]
        return found


def read_tree(prober: Prober, shape: Shape) -> Tree | None:
    """Return the order of a sum at a shape; None where it is no tree or the formats have too few exponents to read one."""
    for mask in masks(prober, shape[2]):
        nodes = Reader(prober, shape, mask).read()
        if nodes is not None:
            return Tree(k=shape[2], nodes=tuple(nodes), exact=exact_products(prober, shape, nodes))
    return None


def leaves_of(k: int, nodes: Sequence[tuple[int, ...]]) -> list[int]:
    """Return a leaf of every leaf and sum."""
    found = list(range(k))
    for children in nodes:
        found.append(found[children[0]])
    return found


def exact_products(prober: Prober, shape: Shape, nodes: Sequence[tuple[int, ...]]) -> tuple[bool, ...]:
    """Return whether the product of each leaf enters its sum unrounded: the square of 1 + 2^-12 beside what it rounds to."""
    k = shape[2]
    x = 1.0 + 2.0**-12
    if round_to(torch.tensor([x], dtype=torch.float64), prober.narrow, "rz").item() != x:
        # The products of such operands fit into fp32.
        return (True,) * k
    partner = partners(k, nodes)
    rows: list[Row] = [{leaf: (x, x), partner[leaf]: (-HALF, 1.0)} for leaf in range(k)]
    return tuple((prober.ask(rows, shape) == 2.0**-24).tolist())


def partners(k: int, nodes: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Return for each leaf one that it is added to first."""
    some = leaves_of(k, nodes)
    return {child: some[next(other for other in children if other != child)] for children in nodes for child in children if child < k}


def flushing(prober: Prober, shape: Shape, tree: Tree) -> Tree:
    """Return a tree that flushes, where products that start a sum become numbers of the register, so zeros if they are tiny, before they are added.

    Args:
        prober: the device, with operands whose products reach 2^-130.
        shape: M, N and K.
        tree: the order, read with normal numbers.
    """
    small, large = prober.pair(-130), prober.pair(-126)
    partner = partners(tree.k, tree.nodes)
    rows: list[Row] = [{leaf: small, partner[leaf]: large} for leaf in range(tree.k)]
    kept = (prober.ask(rows, shape) == 2.0**-126 + 2.0**-130).tolist()
    exact = tuple(whole and fused for whole, fused in zip(tree.exact, kept, strict=True))
    return Tree(k=tree.k, nodes=tree.nodes, exact=exact, flushed=True)


def chain(tree: Tree) -> list[int] | None:
    """Return the order of the leaves of a sum that takes one product at a time, the first two as they stand; None for other trees."""
    order: list[int] = []
    for number, children in enumerate(tree.nodes):
        if len(children) != 2 or (number and tree.k + number - 1 not in children):
            return None
        order += sorted(child for child in children if child < tree.k)
    return order if len(order) == tree.k else None


def reference(tree: Tree, a: Tensor, b: Tensor, output: str) -> Tensor:
    """Return a product of matrices summed in the order of a tree: exact sums, each rounded to nearest even in fp32.

    Args:
        tree: the order.
        a: (M, K) float64 values of the operand's format.
        b: (K, N) float64 values.
        output: format of the result, rounded to nearest even.

    Returns:
        (M, N) float64.
    """
    if tree.flushed:
        a, b = flush(a), flush(b)
    values = [a[:, k, None] * b[None, k] for k in range(tree.k)]
    values = [value if exact else to_fp32(value, tree.flushed) for value, exact in zip(values, tree.exact, strict=True)]
    for children in tree.nodes:
        terms = [values[child] for child in children]
        values.append(to_fp32(odd_sum(terms), tree.flushed))
    return round_to(values[-1], output, subnormals="flushed" if tree.flushed else "kept")


def flush(x: Tensor) -> Tensor:
    """Return numbers with zeros for those that are subnormal in fp32, and in bf16, which has its exponents."""
    return torch.where(x.abs() < FORMATS["fp32"].smallest_normal, torch.copysign(torch.zeros_like(x), x), x)


def to_fp32(x: Tensor, flushed: bool) -> Tensor:
    """Return float64 numbers rounded to nearest even in fp32.

    Args:
        x: the numbers.
        flushed: whether a number that is tiny after rounding without a smallest exponent becomes zero (IEEE 754-2019, 7.5, detection after rounding): one
            below the smallest normal number is not rounded up to it.
    """
    rounded = x.float().double()
    if not flushed:
        return rounded
    up = 2.0**64
    unbounded = torch.where(x.abs() < 1, (x * up).float().double() / up, rounded)
    return torch.where(unbounded.abs() < FORMATS["fp32"].smallest_normal, torch.copysign(torch.zeros_like(x), x), rounded)


def odd_sum(terms: Sequence[Tensor]) -> Tensor:
    """Return exact sums of float64 numbers rounded to odd in float64, which rounding again to fp32 does not spoil (Boldo and Melquiond, 2008)."""
    if len(terms) == 2:
        x, y = terms
        total = x + y
        part = total - x
        rest = (x - (total - part)) + (y - part)
    else:
        columns = torch.stack(list(terms), dim=-1).reshape(-1, len(terms)).tolist()
        totals = [math.fsum(column) if all(map(math.isfinite, column)) else sum(column) for column in columns]
        rests = [math.fsum([*column, -total]) if math.isfinite(total) else 0.0 for column, total in zip(columns, totals, strict=True)]
        total = torch.tensor(totals, dtype=torch.float64).reshape(terms[0].shape)
        rest = torch.tensor(rests, dtype=torch.float64).reshape(terms[0].shape)
    even = total.view(torch.int64) & 1 == 0
    toward = torch.where(rest > 0, torch.inf, -torch.inf).double()
    return torch.where((rest != 0) & rest.isfinite() & even & (total != 0), torch.nextafter(total, toward), total)
