"""Queries of a probe: sparse dot products, packed into the diagonals of whole products of one shape.

A library chooses its kernel by the shape, so every query has the full K and stands in a product of the full M and N: query i in row i of the left operand and
column i of the right one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpbackend.errors import BackendError
from mpbackend.formats import FORMATS

Product = Callable[[Tensor, Tensor], Tensor]
"""(M, K) and (K, N) float64 numbers of the storage formats on the CPU in, (M, N) float64 out."""

Row = Mapping[int, tuple[float, float]]
"""Position in K to the two operands of the product there; all other products are zeros."""

TOP, FLOOR = 14, -14
"""Exponents that products of a query keep to unless it asks for more: a running sum and a result of fp16 hold them as normal numbers."""


class Side(NamedTuple):
    """The exponents of normal numbers of a storage format that queries use."""

    low: int
    high: int

    @classmethod
    def of(cls, name: str) -> Side:
        """Return those of a format; the topmost exponent is left out, where an ``fn`` format has few mantissas."""
        form = FORMATS[name]
        return cls(math.frexp(form.smallest_normal)[1] - 1, math.frexp(form.max)[1] - 2)


class Prober:
    """Asks a device, and counts the products."""

    def __init__(self, product: Product, a: str, b: str, output: str, products_max: int) -> None:
        """Keep what is asked.

        Args:
            product: the device.
            a: format that the numbers of the left operand are stored in.
            b: format that the numbers of the right operand are stored in.
            output: format of the results.
            products_max: products after which the probe gives up.
        """
        self.product = product
        self.a, self.b = Side.of(a), Side.of(b)
        self.output = output
        self.narrow = min(a, b, key=lambda name: FORMATS[name].mantissa_bits)
        self.calls, self.products_max = 0, products_max
        self.kept: dict[Hashable, tuple[Tensor, Tensor, Tensor]] = {}  # random products, by what they were drawn for
        emin = math.frexp(FORMATS[output].smallest_normal)[1] - 1
        self.low = max(FLOOR, emin, self.a.low + self.b.low)
        self.high = min(TOP, self.a.high + self.b.high, math.frexp(FORMATS[output].max)[1] - 2)

    def matrix(self, left: Tensor, right: Tensor) -> Tensor:
        """Return a product of the device.

        Raises:
            BackendError: the budget is spent, or the result has another shape.
        """
        if self.calls >= self.products_max:
            raise BackendError("a probe", found=f"{self.calls} products asked and no end", remedy="raise products_max or give fewer shapes")
        self.calls += 1
        result = self.product(left, right).double()
        if result.shape != (left.shape[0], right.shape[1]):
            found = f"a result of shape {tuple(result.shape)} for {tuple(left.shape)} x {tuple(right.shape)}"
            raise BackendError("a probe", found=found, remedy="give a function that returns the whole product")
        return result

    def ask(self, rows: Sequence[Row], shape: tuple[int, int, int]) -> Tensor:
        """Return the results of queries, float64, in order.

        Args:
            rows: the queries.
            shape: M, N and K of the products that they stand in.
        """
        m, n, k = shape
        width = min(m, n)
        found = []
        for start in range(0, len(rows), width):
            part = rows[start : start + width]
            left, right = torch.zeros(m, k, dtype=torch.float64), torch.zeros(k, n, dtype=torch.float64)
            for i, row in enumerate(part):
                for position, (x, y) in row.items():
                    left[i, position], right[position, i] = x, y
            found.append(self.matrix(left, right).diagonal()[: len(part)])
        return torch.cat(found)

    def pair(self, exponent: int, mantissa: float = 1.0) -> tuple[float, float]:
        """Return operands whose product is ``mantissa * 2**exponent``, both normal, the exponent shared between them.

        Args:
            exponent: of the product.
            mantissa: at least 1 and less than 2 in magnitude, at most two fraction bits, of the left operand.

        Raises:
            BackendError: the storage formats have no such product.
        """
        first = min(max(exponent // 2, self.a.low, exponent - self.b.high), self.a.high, exponent - self.b.low)
        second = exponent - first
        if not (self.a.low <= first <= self.a.high and self.b.low <= second <= self.b.high):
            found = f"2^{exponent}, beyond 2^{self.a.low + self.b.low} to 2^{self.a.high + self.b.high}"
            raise BackendError("a product of a probe", found=found, remedy="use a wider storage format")
        return math.ldexp(mantissa, first), math.ldexp(1.0, second)


def row_text(row: Row, limit: int = 6) -> str:
    """Return a query as ``2^14 @0 - 2^14 @1 + 2^-12 @4``: products with their positions."""
    parts = []
    for position, (x, y) in sorted(row.items())[:limit]:
        parts.append(f"{number_text(x * y)} @{position}")
    text = " + ".join(parts).replace("+ -", "- ")
    return text + (f" and {len(row) - limit} more" if len(row) > limit else "")


def number_text(value: float) -> str:
    """Return a number as a multiple of a power of two."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = math.frexp(value)
    whole = "" if abs(mantissa) == 0.5 else f"{abs(2 * mantissa):.10g}*"
    return f"{'-' if value < 0 else ''}{whole}2^{exponent - 1}"
