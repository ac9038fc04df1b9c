"""Seeded operands of the checks, made on the host so that every device gets the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from mpbackend.conformance.subject import DTYPES

SEED = 20240607
"""Of every generator of the checks; in the evidence by the version of this package."""


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


def losing(k: int, bits: int = 14) -> Tensor:
    """Return rows of products whose sums lose what a register of fewer than ``bits`` fraction bits does not hold.

    Each row is 1, then small terms of ``2**-bits``, then -1 at another place; the rest small terms too. The last row is positive, with sums that need more bits
    the longer they are.

    Args:
        k: products of a sum, at least 4.
        bits: the small terms are ``2**-bits``; even.

    Returns:
        (rows, k) fp64: square roots of the magnitudes are powers of two, so that both operands can hold them.
    """
    places = sorted({1, 2, 3, k // 4, k // 2, k - 2, k - 1} - {0})
    rows = torch.full((2 * len(places) + 1, k), 2.0**-bits, dtype=torch.float64)
    for row, place in enumerate(places):
        rows[row, 0], rows[row, place] = 1.0, -1.0
        rows[len(places) + row, k - 1], rows[len(places) + row, k - 1 - place] = 1.0, -1.0
    rows[-1] = 1.0
    rows[-1, 1:] = torch.where(torch.arange(1, k) % 3 == 0, 2.0**-bits, 1 + 2.0**-6)
    return rows
