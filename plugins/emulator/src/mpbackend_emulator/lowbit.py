"""Low-bit linear layers whose products run in the arithmetic of an emulated device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mpbackend.errors import BackendError
from mpbackend.lowbit import LowBit, is_low_bit_recipe, low_bit
from mpbackend.planning import Plan
from mpbackend.train.conversion import Make, check_plain, convert_linears
from mpbackend.train.quantize import Stored
from mpbackend.train.reference import LowBitLinear
from mpbackend_emulator.scaled import Rule, multiply
from mpbackend_emulator.unit import Unit


class EmulatedLinear(LowBitLinear):
    """A linear layer with the core's scales and casts and a device's products.

    Attributes:
        unit: the device's matrix unit.
    """

    unit: Unit
    _forward = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch.nn.Linear
        """Map (..., in_features) to (..., out_features); see ``LowBitLinear``."""
        self._forward = True  # a pass that is computed again inside a backward pass is a forward pass too
        try:
            return super().forward(input)
        finally:
            self._forward = False

    def multiply(self, a: Stored, b: Stored, output: torch.dtype) -> Tensor:
        """Return ``a @ b^T`` of (M, K) and (N, K), summed as the device sums and rounded once to ``output``."""
        wanted = self.low_bit.forward if self._forward else self.low_bit.dgrad
        return multiply(a, b, self.unit, split=wanted.accumulate == "split").to(output)


def convert(model: nn.Module, plan: Plan, unit: Unit) -> Sequence[Mapping[str, str]]:
    """Make the linear layers of a model low-bit where the plan is; see ``convert_linears``.

    Raises:
        BackendError: no layer can be converted, both products of the gradient do not sum alike, or the plan is not low-bit and layers of an earlier recipe
            are.
    """
    if not is_low_bit_recipe(plan.effective):
        check_plain(model)
        return []
    meaning = low_bit(plan.effective)
    if meaning.dgrad.accumulate != meaning.wgrad.accumulate:
        found = f"accumulate.dgrad is {meaning.dgrad.accumulate} and accumulate.wgrad is {meaning.wgrad.accumulate}"
        raise BackendError(f"{plan.granted} on {plan.device.key}", found=found, remedy="give both the same value")
    return convert_linears(model, maker(meaning, unit), meaning, by=f"emulated {unit.key}", multiple=required(meaning, unit))


def required(meaning: LowBit, unit: Unit) -> int:
    """Return what features must be a multiple of: what scales need, and what the device's library needs in any of the three products."""
    needed = [meaning.multiple]
    for product in (meaning.forward, meaning.dgrad, meaning.wgrad):
        rule = Rule(unit=unit, formats=(product.a.format, product.b.format), granularities=(product.a.granularity, product.b.granularity), split=False)
        row = rule.aligned()
        if row is not None and row.align is not None:
            needed += [size for size in (row.align.m, row.align.n, row.align.k) if isinstance(size, int)]
    return math.lcm(*needed)


def maker(meaning: LowBit, unit: Unit) -> Make:
    """Return what makes the layers of a recipe."""

    def make(name: str, linear: nn.Linear) -> nn.Module:
        made = EmulatedLinear.from_linear(linear, meaning)
        if not isinstance(made, EmulatedLinear):
            raise TypeError(f"from_linear() made a {type(made).__name__}")
        made.unit = unit
        return made

    return make
