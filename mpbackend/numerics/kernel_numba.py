"""Sums of products compiled by numba: the bits of the extension where there is no compiled one."""

from __future__ import annotations

from typing import Any

import torch

from mpbackend.formats import FORMATS
from mpbackend.numerics import kernel, numba_loops
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.kernel import NO_EXPONENT, SPECIAL, Loop
from mpbackend.numerics.numba_loops import TILE

LOOPS: Any = numba_loops
"""The module, whose compiled functions have no signatures that a type checker could read."""


def accumulate(a: torch.Tensor, b: torch.Tensor, sums: torch.Tensor, arithmetic: Arithmetic, loop: Loop) -> torch.Tensor:
    """Return the last sums of a product; as ``kernel.accumulate``, argument by argument."""
    (m, depth), n = a.shape, b.shape[1]
    if not m or not n or not depth:
        return sums.clone()
    packed, running = tiled(b), tiled(sums)
    promotes = arithmetic.promotion_interval is not None
    outer = running
    if promotes:
        running = torch.zeros_like(outer)
    unit = kernel.unit_of(arithmetic)
    fields = tuple(getattr(unit, name) for name in kernel.UNIT_FIELDS)
    arrays = [x.numpy() for x in (a, exponents(a, arithmetic.a), packed, exponents(packed, arithmetic.b), running, outer)]

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


def tiled(x: torch.Tensor) -> torch.Tensor:
    """Return a matrix as (tiles, rows, ``TILE``), zeros beyond its columns."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % TILE))
    return padded.reshape(x.shape[0], -1, TILE).permute(1, 0, 2).contiguous()


def exponents(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return the exponents of numbers of a format in 16 bits, as steps align to them."""
    field = x.view(torch.int32).bitwise_right_shift(23).bitwise_and_(255)
    exponent = (field - 127).clamp_(min=1 - FORMATS[name].bias)
    return exponent.masked_fill_(field == 255, SPECIAL).masked_fill_(x == 0, NO_EXPONENT).to(torch.int16)
