"""Many hypotheses about the sums of a unit at once, evaluated on sparse queries: the definition of ``oracle.add_step`` over arrays.

All numbers are exact in float64 as long as a query spans at most ``EXACT`` bits and has at most ``TERMS`` products to a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpbackend.formats import FORMATS
from mpbackend.numerics import oracle
from mpbackend.numerics.arithmetic import Arithmetic, Order
from mpbackend.numerics.exact_sums import NO_TERM, ROUNDINGS, exponent_of, rounded, scaled
from mpbackend.numerics.probe_rows import Row

EXACT = 46
"""Fraction bits that stand for a step that is exact: (TERMS + 1) * 2^(EXACT + 2) is below 2^53."""

TERMS = 6


class Layout(NamedTuple):
    """What decides which products meet: one for all hypotheses of a run.

    Attributes:
        products: to a step.
        order: of the products.
        interval: products before promotion, or None.
        promoted: format of the outer sum.
    """

    products: int
    order: Order
    interval: int | None
    promoted: str = "fp32"

    def steps(self, k: int) -> list[list[int]]:
        """Return the positions of each step."""
        return list(oracle.steps(k, Arithmetic(a="fp16", b="fp16", products_per_step=self.products, order=self.order)))


class Hypotheses(NamedTuple):
    """Registers to tell apart, an entry each.

    Attributes:
        fraction_bits: of the alignment; ``EXACT`` for an exact step.
        register: index into ``REGISTERS``.
        bits: of the register.
        rounding: index into ``ROUNDINGS``.
    """

    fraction_bits: Tensor
    register: Tensor
    bits: Tensor
    rounding: Tensor

    def keep(self, mask: Tensor) -> Hypotheses:
        """Return those that a mask selects."""
        return Hypotheses(*(field[mask] for field in self))


REGISTERS = ("fp32", "fp16")
EMIN = torch.tensor([1 - FORMATS[name].bias for name in REGISTERS])
EMAX = torch.tensor([FORMATS[name].bias for name in REGISTERS])


def every(fraction_bits: Sequence[int], registers: Sequence[str] = REGISTERS) -> Hypotheses:
    """Return all hypotheses over the given widths of the alignment and registers: every width up to the register's own, every rounding."""
    entries = [
        (bits, REGISTERS.index(name), width, rounding)
        for bits in fraction_bits
        for name in registers
        for width in range(1, FORMATS[name].mantissa_bits + 1)
        for rounding in range(len(ROUNDINGS))
    ]
    return Hypotheses(*torch.tensor(entries, dtype=torch.long).reshape(-1, 4).T.contiguous())


def sums(rows: Sequence[Row], k: int, layout: Layout, hypotheses: Hypotheses) -> Tensor:
    """Return the last sums of queries under every hypothesis, before the output's format.

    Args:
        rows: queries of finite normal operands, at most ``TERMS`` products to a step.
        k: number of products.
        layout: which products meet.
        hypotheses: H registers.

    Returns:
        (H, number of rows) float64.
    """
    fraction = hypotheses.fraction_bits[:, None]
    emin, emax = EMIN[hypotheses.register][:, None], EMAX[hypotheses.register][:, None]
    width, rule = hypotheses.bits[:, None], hypotheses.rounding[:, None]
    steps = layout.steps(k)
    where = {position: step for step, positions in enumerate(steps) for position in positions}
    events = sorted({where[position] for row in rows for position in row})
    register = torch.zeros(len(fraction), len(rows), dtype=torch.float64)
    outer = torch.zeros_like(register)
    per_interval = None if layout.interval is None else layout.interval // layout.products
    step = 0
    while step < len(steps):
        if step in events:
            values, exponents = terms_of(rows, steps[step])
            register = add(register, values, exponents, fraction, width, emin, emax, rule)
            stop = step + 1
        else:
            # A step of zeros aligns the sum anew; the next ones change nothing more.
            register = add(register, torch.zeros(len(rows), 1, dtype=torch.float64), torch.full((len(rows), 1), NO_TERM), fraction, width, emin, emax, rule)
            stop = min((event for event in events if event > step), default=len(steps))
            if per_interval is not None:
                stop = min(stop, step + per_interval - step % per_interval)
        if per_interval is not None and (stop % per_interval == 0 or stop == len(steps)):
            outer, register = promote(outer, register, layout.promoted), torch.zeros_like(register)
        step = stop
    return register if per_interval is None else outer


def terms_of(rows: Sequence[Row], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the products of one step, (number of rows, most in a row), and their exponents, not normalized."""
    found = [[row[position] for position in positions if position in row] for row in rows]
    most = max(len(terms) for terms in found)
    pairs = torch.tensor([terms + [(0.0, 0.0)] * (most - len(terms)) for terms in found], dtype=torch.float64).reshape(len(rows), most, 2)
    values = pairs.prod(dim=-1)
    return values, torch.where(values == 0, NO_TERM, exponent_of(pairs).sum(dim=-1))


def add(register: Tensor, values: Tensor, exponents: Tensor, fraction: Tensor, width: Tensor, emin: Tensor, emax: Tensor, rule: Tensor) -> Tensor:
    """Return registers after one step; ``oracle.add_step`` of finite products."""
    running = torch.where(register == 0, NO_TERM, torch.maximum(exponent_of(register), emin))
    top = torch.maximum(exponents.amax(dim=-1), running)
    ulp = top - fraction
    finite = torch.where(register.isinf(), 0.0, register)
    total = scaled(finite, -ulp).trunc() + scaled(values.expand(len(ulp), *values.shape), -ulp[..., None]).trunc().sum(dim=-1)
    total = torch.where(top == NO_TERM, 0.0, total)
    value = rounded(scaled(total, torch.where(top == NO_TERM, 0, ulp)), width, emin, emax, rule)
    return torch.where(register.isinf(), register, value)


def promote(outer: Tensor, register: Tensor, name: str) -> Tensor:
    """Return outer sums with the registers added; ``oracle.promote``."""
    form = FORMATS[name]
    total = outer + register
    value = rounded(torch.where(total.isfinite(), total, 0.0), form.mantissa_bits, 1 - form.bias, form.bias, torch.tensor(0))
    return torch.where(total.isfinite(), value, total)
