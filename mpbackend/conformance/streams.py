"""The data of the checks: streams of tensors whose largest magnitudes are chosen, and values between the numbers of a format."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from mpbackend.conformance.lowering import Step
from mpbackend.formats import FORMATS
from mpbackend.lowbit import Operand

SHAPE = (16, 256)
LONGEST_GROUP = 16
"""Probes are laid out in groups of 16 along K, each led by the value that scales are made from: every granularity then has the scale 1."""


def tensor_of(amax: float, shape: tuple[int, int] = SHAPE) -> Tensor:
    """Return a tensor with the given largest magnitude, at its last place and negative; the others are smaller and of both signs."""
    rows, columns = shape
    pattern = torch.arange(rows * columns, dtype=torch.float32) % 63 / 64 - 0.5
    pattern[-1] = -1.0
    if not math.isfinite(amax):
        pattern[-1] = -amax
        return pattern.reshape(shape)
    return (pattern * amax).reshape(shape)


def stream(*amaxes: float, frozen: Iterable[int] = ()) -> tuple[Step, ...]:
    """Return a step for each amax; ``frozen`` are the positions of steps in evaluation mode."""
    without_training = set(frozen)
    return tuple(Step(tensor_of(amax), index not in without_training) for index, amax in enumerate(amaxes))


def uneven(shape: tuple[int, int] = (256, 256)) -> Tensor:
    """Return a tensor whose groups differ in magnitude from each other in both directions, whatever their extent, one of its 16x16 tiles being zero."""
    rows, columns = shape
    row, column = torch.arange(rows).reshape(-1, 1), torch.arange(columns).reshape(1, -1)
    exponent = (row * 5 + row // 16 * 3 + column // 16 * 7 + column // 128 * 2) % 11 - 5
    fraction = 1 + (row * 37 + column * 11) % 29 / 32
    tensor = torch.ldexp(fraction, exponent) * torch.where((row + column) % 2 == 0, 1.0, -1.0)
    tensor[:16, 16:32] = 0.0
    return tensor


def probes(operand: Operand) -> list[float]:
    """Return every value of a format up to the operand's top, the middles between neighbors, and what lies just beside the middles."""
    values = [value for value, _ in ordered(operand.format) if abs(value) <= operand.top]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    return [*values, *(middle * factor for middle in middles for factor in (1.0, 1 + 2**-20, 1 - 2**-20))]


def probe_tensor(operand: Operand) -> Tensor:
    """Return ``probes`` in rows of 256, each group of 16 led by the operand's top, so that every scale is 1."""
    wanted = probes(operand)
    groups = [[operand.top, *wanted[start : start + LONGEST_GROUP - 1]] for start in range(0, len(wanted), LONGEST_GROUP - 1)]
    groups[-1] += [0.0] * (LONGEST_GROUP - len(groups[-1]))
    groups += [groups[0]] * (-len(groups) % (SHAPE[1] // LONGEST_GROUP))
    return torch.tensor(groups).reshape(-1, SHAPE[1])


@functools.cache
def ordered(name: str) -> list[tuple[float, int]]:
    """Return the finite values of a format in order, each with its first code."""
    spec = FORMATS[name]
    codes = {float(spec.value(code)): code for code in reversed(range(1 << spec.bits)) if math.isfinite(spec.value(code))}
    return sorted(codes.items())


def nearest(value: float, operand: Operand) -> float:
    """Return the value of a format nearest to a finite number: a tie goes to the even code or away from zero, as ``Operand.rounding`` says."""
    numbers = ordered(operand.format)
    above = bisect.bisect_left(numbers, (value, -1))
    around = numbers[max(above - 1, 0) : above + 1] or numbers[-1:]
    gap = min(abs(number - value) for number, _ in around)
    tied = [(number, code) for number, code in around if abs(number - value) == gap]
    if operand.rounding == "rna":
        return max((number for number, _ in tied), key=abs)
    return min(tied, key=lambda item: item[1] % 2)[0]
