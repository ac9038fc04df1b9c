"""Edits: weights that somebody else wrote between two steps, such as a clamp, a pruning mask, averaged weights or a loaded state.

What a session keeps beside a 16-bit parameter belongs to the parameter's value; where the value is another one by now, the written value counts. A write
through ``.data`` moves no version counter, so values are compared, element by element and where they are: nothing is read from a device. On the host, where
reading costs nothing, a tensor that nobody wrote is left at that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

SMALL = 1 << 16
"""Elements up to which tensors are rounded together: what they cost is the launch of a kernel, not memory traffic."""

SLICE = 1 << 22
"""Elements of a larger tensor that are compared at once; that needs some 7 B for each."""

HOST_SLICE = 1 << 18
"""The same on the host, where what is needed shall fit into a cache."""

WORD = 1 << 10
"""Elements from which on comparing in words of 64 bits pays."""

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
            if not unwritten(own, parameter):
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
            if not unwritten(own, parameter):
                term.masked_fill_(~equals(own, parameter), 0.0)


def unwritten(own: Tensor, parameter: Tensor) -> bool:
    """Tell whether a tensor on the host is known to be all what it should be; False on a device, where nobody looks."""
    if not own.is_cpu or own.dtype != parameter.dtype:
        return False
    if own.numel() >= WORD and own.numel() % 4 == 0 and own.is_contiguous() and parameter.is_contiguous():
        return torch.equal(own.view(-1).view(torch.int64), parameter.view(-1).view(torch.int64))
    return torch.equal(own, parameter)


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
        rows = max(1, (HOST_SLICE if own.is_cpu else SLICE) * own.shape[0] // own.numel())
        for part, written in zip(own.split(rows), parameter.split(rows), strict=True):
            yield [part], [written]
    if small[0]:
        yield small
