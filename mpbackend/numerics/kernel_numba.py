"""Sums of products compiled by numba: the bits of the extension where there is no compiled one."""

from __future__ import annotations

from typing import Any

import torch

from mpbackend.formats import FORMATS
from mpbackend.numerics import kernel, numba_loops
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.kernel import NO_EXPONENT, SPECIAL, Loop, Shifts, in_tiles
from mpbackend.numerics.numba_loops import TILE

LOOPS: Any = numba_loops
"""The module, whose compiled functions have no signatures that a type checker could read."""


def accumulate(a: torch.Tensor, b: torch.Tensor, sums: torch.Tensor, arithmetic: Arithmetic, loop: Loop, shifts: Shifts | None = None) -> torch.Tensor:
    """Return the last sums of a product; as ``kernel.accumulate``, argument by argument."""
    (m, depth), n = a.shape, b.shape[1]
    if not m or not n or not depth:
        return sums.clone()
    packed, running = in_tiles(b, TILE), in_tiles(sums, TILE)
    promotes = arithmetic.promotion_interval is not None
    outer = running
    if promotes:
        running = torch.zeros_like(outer)
    unit = kernel.unit_of(arithmetic)
    fields = tuple(getattr(unit, name) for name in kernel.UNIT_FIELDS)
    a_exp, b_exp = exponents(a, arithmetic.a), exponents(packed, arithmetic.b)
    if shifts is not None:
        a, a_exp = kernel.shifted(a, a_exp, shifts[0])
        packed, b_exp = kernel.shifted(packed, b_exp, in_tiles(shifts[1], TILE))
    arrays = [x.numpy() for x in (a, a_exp, packed, b_exp, running, outer)]

    def part(*parts: int) -> None:
        if loop == "fused":
            LOOPS.fused_rows(*arrays, fields, parts)
        elif loop == "scalar":
            LOOPS.scalar_rows(*arrays, fields, parts)
        else:
            LOOPS.tile_rows(*arrays, fields, parts, loop == "checked", loop == "half")

    kernel.spread_tiles(part, m, len(packed), depth * TILE)
    if promotes:
        running = kernel.outer_with(outer, running, arithmetic) if (depth // arithmetic.products_per_step) % unit.promotion_steps else outer
    return running.permute(1, 0, 2).reshape(m, -1)[:, :n]


def exponents(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return the exponents of numbers of a format in 16 bits, as steps align to them."""
    field = x.view(torch.int32).bitwise_right_shift(23).bitwise_and_(255)
    exponent = (field - 127).clamp_(min=1 - FORMATS[name].bias)
    return exponent.masked_fill_(field == 255, SPECIAL).masked_fill_(x == 0, NO_EXPONENT).to(torch.int16)
