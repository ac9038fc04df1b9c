"""Seeded operands of the checks, made on the host so that every device gets the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from mpbackend.conformance.subject import DTYPES

SEED = 20240607
"""Of every generator of the checks; in the evidence by the version of this package."""

SMALL_TERM = 2.0**-14
"""Below the last of 13 fraction bits of 1."""


def normal(shape: tuple[int, ...], name: str, case: int = 0) -> Tensor:
    """Return normal deviates that are values of a format, none of them subnormal, in fp64 on the host.

    Args:
        shape: the shape.
        name: ``fp32``, ``bf16`` or ``fp16``.
        case: tells operands of one check apart.
    """
    generator = torch.Generator().manual_seed(SEED + case)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    # Below 2^-10 a product of two could be subnormal in fp16.
    values = torch.where(values.abs() < 2.0**-6, 2.0**-6, values)
    return values.to(DTYPES[name]).double()


def placed(values: Tensor, name: str, device: torch.device, *, grad: bool = False) -> Tensor:
    """Return values on a device in the dtype of a format, which holds them exactly; a leaf of the graph if ``grad``."""
    return values.to(DTYPES[name]).to(device).requires_grad_(grad)


def losing(k: int) -> tuple[Tensor, Tensor]:
    """Return operands of sums that lose what a register of fewer than 14 fraction bits does not hold.

    A sum is 1, then terms of 2^-14, then -1 at some place, or the same from its end; the rest are terms of 2^-14 too. The last is positive, with terms near 1.

    Args:
        k: products of a sum, at least 8.

    Returns:
        (rows, k) and (k, rows) fp64; the sums are on the diagonal of the product. A small term is 2^-7 times 2^-7, so that every format holds both.
    """
    places = sorted({1, 2, 3, k // 4, k // 2, k - 2, k - 1})
    rows = torch.full((2 * len(places) + 1, k), SMALL_TERM, dtype=torch.float64)
    for row, place in enumerate(places):
        rows[row, 0], rows[row, place] = 1.0, -1.0
        rows[len(places) + row, k - 1], rows[len(places) + row, k - 1 - place] = 1.0, -1.0
    rows[-1, torch.arange(k) % 3 != 1] = 1 + 2.0**-6
    small = rows == SMALL_TERM
    return torch.where(small, SMALL_TERM**0.5, rows), torch.where(small, SMALL_TERM**0.5, torch.ones_like(rows)).T.contiguous()
