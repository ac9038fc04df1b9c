"""Edits: weights that somebody else wrote between two steps, such as a clamp, a pruning mask, averaged weights or a loaded state.

What a session keeps beside a 16-bit parameter belongs to the parameter's value; where the value is another one by now, the written value counts. A write
through ``.data`` moves no version counter, so values are compared, element by element and on the device: nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

SMALL = 1 << 16
"""Elements up to which tensors are rounded together: what they cost is the launch of a kernel, not memory traffic."""

SLICE = 1 << 22
"""Elements of a larger tensor that are compared at once; that needs some 7 B for each."""

SHRINK = 1.0 - 2.0**-8
"""Factor to a Kahan term before it is compared. A term may have been rounded up to exactly half a spacing, which would take an odd parameter to its neighbor.
Rounding to 8 bits or more changes a term by at most one part in 2^9, so that a shrunk term that belongs to its parameter never does."""


@torch.no_grad()
def follow_masters(masters: Sequence[Tensor], parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Take the value of a parameter over into its master where it is not the master's rounding; other elements keep all their bits.

    Args:
        masters: fp32, changed in place.
        parameters: of the shapes and on the devices of their masters.
        dtype: the format that masters are rounded to.
    """
    for some, written in portions(masters, parameters):
        rounded = [torch.empty_like(master, dtype=dtype, requires_grad=False) for master in some]
        torch._foreach_copy_(rounded, some)
        for master, own, parameter in zip(some, rounded, written, strict=True):
            torch.where(equals(own, parameter), master, parameter, out=master)


@torch.no_grad()
def void_terms(terms: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Set Kahan terms to zero where they are above half a spacing of their parameter, and so belong to another value.

    Args:
        terms: changed in place.
        parameters: of the formats, shapes and devices of their terms.
    """
    for some, written in portions(terms, parameters):
        sums = torch._foreach_add(written, some, alpha=SHRINK)
        for term, own, parameter in zip(some, sums, written, strict=True):
            term.masked_fill_(~equals(own, parameter), 0.0)


def equals(a: Tensor, b: Tensor) -> Tensor:
    """Return where two tensors are equal, bit for bit where both are in one format of 16 bits: a host compares whole numbers in a fraction of the time."""
    if a.dtype == b.dtype and a.element_size() == 2:
        return a.view(torch.int16) == b.view(torch.int16)
    return a.to(b.dtype) == b


def portions(kept: Sequence[Tensor], parameters: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield tensors and their parameters in lists: all small ones in one, and slices of each large one along its first dimension."""
    small: tuple[list[Tensor], list[Tensor]] = ([], [])
    for own, parameter in zip(kept, parameters, strict=True):
        if own.numel() <= SMALL:
            small[0].append(own)
            small[1].append(parameter)
            continue
        rows = max(1, SLICE * own.shape[0] // own.numel())
        for part, written in zip(own.split(rows), parameter.split(rows), strict=True):
            yield [part], [written]
    if small[0]:
        yield small
