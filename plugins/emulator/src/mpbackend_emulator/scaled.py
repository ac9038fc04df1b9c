"""Products of scaled low-bit operands in the arithmetic of a device.

Scales of a whole tensor or row are applied to the sums. Scales of blocks along K are applied to the partial sum of each block, which then joins an fp32 sum.
Scales of blocks of 32 and 16 are applied inside the unit.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mpbackend.capability import Row
from mpbackend.errors import BackendError
from mpbackend.formats import FORMATS
from mpbackend.granting import SCALING_ROWS
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.matmul import sums
from mpbackend.numerics.quantize import decode_into
from mpbackend.numerics.scaled import scaled_mm
from mpbackend.roles import Granularity
from mpbackend.train.quantize import Stored
from mpbackend_emulator.unit import Unit

BLOCK = 128
OF_BLOCKS = ("1x128", "128x128")
MX = "1x32"
MICROSCALES = (MX, "1x16")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One kind of product.

    Attributes:
        unit: the device's matrix unit.
        formats: of both operands.
        granularities: of their scales.
        split: whether partial sums are added in fp32 where the unit's register keeps fewer bits.
    """

    unit: Unit
    formats: tuple[str, str]
    granularities: tuple[Granularity, Granularity]
    split: bool

    @property
    def layouts(self) -> tuple[str, ...]:
        """Scale layouts of the vocabulary that serve it, best first."""
        return SCALING_ROWS.get(self.granularities, ())

    def arithmetic(self) -> Arithmetic:
        """Return the arithmetic of its sums, by the first layout that the device has.

        Raises:
            BackendError: the device has none.
        """
        split = self.split and self.granularities[0] not in OF_BLOCKS
        for layout in self.layouts:
            if self.unit.matrix.rows(self.unit.arch, op="matmul", a=self.formats[0], b=self.formats[1], scaling=layout):
                return self.unit.scaled(*self.formats, layout, split=split)
        pair = " and ".join(self.granularities)
        raise BackendError(f"a product of {' x '.join(self.formats)} on {self.unit.key}", found=f"no row of {self.unit.arch} has scales per {pair}")

    def aligned(self) -> Row | None:
        """Return the row whose sizes it has to keep, or None."""
        return self.unit.alignment(*self.formats, self.layouts)


class Rules:
    """The rules of this process by number, since an operator of torch takes numbers and no objects."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._lock = threading.Lock()

    def number(self, rule: Rule) -> int:
        """Return the number of a rule, a new one for one that was not seen."""
        with self._lock:
            for number, known in enumerate(self._rules):
                if known == rule:
                    return number
            self._rules.append(rule)
            return len(self._rules) - 1

    def __getitem__(self, number: int) -> Rule:
        return self._rules[number]


RULES = Rules()

LIBRARY = torch.library.Library("mpbackend_emulator", "DEF")
LIBRARY.define("scaled_product(Tensor a, Tensor b, Tensor a_inverse, Tensor b_inverse, int rule) -> Tensor")


def multiply(a: Stored, b: Stored, unit: Unit, *, split: bool) -> Tensor:
    """Return ``a @ b^T`` in fp32, scales applied.

    Args:
        a: (M, K).
        b: (N, K).
        unit: the device's matrix unit.
        split: whether partial sums are added in fp32.

    Raises:
        BackendError: the device has no such product, or refuses its sizes.
    """
    rule = Rule(unit=unit, formats=(a.format, b.format), granularities=(a.granularity, b.granularity), split=split)
    product: Tensor = torch.ops.mpbackend_emulator.scaled_product(a.stored, b.stored, a.inverse, b.inverse, RULES.number(rule))
    return product


def run(a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, number: int) -> Tensor:
    """Run ``mpbackend_emulator::scaled_product``, an operator so that what observes a training step sees it and its formats."""
    rule = RULES[number]
    with torch._C._DisableTorchDispatch():
        return product(
            Stored(stored=a, inverse=a_inverse, format=rule.formats[0], granularity=rule.granularities[0]),
            Stored(stored=b, inverse=b_inverse, format=rule.formats[1], granularity=rule.granularities[1]),
            rule,
        )


LIBRARY.impl("scaled_product", run, "CPU")


@register_flop_formula(torch.ops.mpbackend_emulator.scaled_product)
def flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Return ``2 * M * N * K`` of operands of shapes (M, K) and (N, K)."""
    return 2 * int(a[0]) * int(b[0]) * int(a[1])


def product(a: Stored, b: Stored, rule: Rule) -> Tensor:
    """Return ``a @ b^T`` in fp32; see ``multiply``."""
    arithmetic, row = found(rule)
    (m, k), n = a.stored.shape, b.stored.shape[0]
    rule.unit.check_sizes(row, m, n, k)
    if a.granularity in MICROSCALES:
        return microscaled(a, b, arithmetic)
    left, right = elements(a), elements(b).t()
    if a.granularity not in OF_BLOCKS:
        total = plain(left, right, arithmetic)
        if a.inverse.numel() == b.inverse.numel() == 1:
            return total * (a.inverse * b.inverse).reshape(())
        return total * (a.inverse.expand(m, 1) * b.inverse.expand(n, 1).t())
    total = torch.zeros(m, n)
    left_scales, right_scales = by_row(a), by_row(b)
    for index, start in enumerate(range(0, k, BLOCK)):
        part = plain(left[:, start : start + BLOCK], right[start : start + BLOCK], arithmetic)
        total += part * (left_scales[:, index : index + 1] * right_scales[:, index])
    return total


def microscaled(a: Stored, b: Stored, arithmetic: Arithmetic) -> Tensor:
    """Return ``a @ b^T`` where the unit applies the scales of blocks, and what is left of two-level scales multiplies the sums."""
    (left, left_tensor), (right, right_tensor) = levels(a), levels(b)
    total = scaled_mm(elements(a), elements(b).t(), left, right.t(), arithmetic)
    return total if a.granularity == MX else total * (left_tensor * right_tensor)


def levels(stored: Stored) -> tuple[Tensor, Tensor]:
    """Return the scales of blocks, and the scale of the tensor: 1 where there is one level.

    Of two levels the larger is found again from the largest block, whose ue4m3 scale is that format's largest number, see ``mpbackend.lowbit.LowBit``.
    """
    inverse = stored.inverse
    if stored.granularity == MX:
        return inverse, inverse.new_ones(())
    largest = torch.nan_to_num(inverse, nan=0.0).amax() if inverse.numel() else inverse.new_zeros(())
    of_tensor = torch.where(largest > 0, largest / FORMATS["ue4m3"].max, 1.0)
    blocks = (inverse / of_tensor).to(torch.float8_e4m3fn).float()
    return torch.where(inverse.isnan(), inverse, blocks), of_tensor


@functools.lru_cache(maxsize=64)
def found(rule: Rule) -> tuple[Arithmetic, Row | None]:
    """Return the arithmetic of a rule and the row whose sizes it has to keep."""
    return rule.arithmetic(), rule.aligned()


def plain(left: Tensor, right: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return (M, K) @ (K, N) of elements that are in the formats of the arithmetic already, in fp32."""
    return sums(left, right, torch.zeros(()).expand(left.shape[0], right.shape[1]), arithmetic, "auto")


def elements(stored: Stored) -> Tensor:
    """Return the values of elements before scales, in fp32."""
    values = torch.empty(stored.stored.shape)
    decode_into(stored.stored, FORMATS[stored.format], values)
    return values


def by_row(stored: Stored) -> Tensor:
    """Return the inverse scales of blocks of 128 along K for each row: (rows, blocks)."""
    if stored.granularity == "1x128":
        return stored.inverse
    return stored.inverse.repeat_interleave(BLOCK, 0)[: stored.stored.shape[0]]
