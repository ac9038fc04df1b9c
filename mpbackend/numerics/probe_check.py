"""Random products that decide between the arithmetics which the queries leave, and that verify the last one bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from mpbackend.formats import FORMATS
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.exact_sums import ROUNDINGS
from mpbackend.numerics.fingerprint import Tree
from mpbackend.numerics.matmul import mm
from mpbackend.numerics.probe_rows import Prober
from mpbackend.numerics.probe_steps import Shape
from mpbackend.numerics.rounding import round_to

CORNER = 16
"""Rows and columns of a product that every candidate is compared on; the last one on all."""

FEW = 24
"""Candidates that are all compared on whole products."""

LOWEST_TRIED = 17
"""Lowest exponents that are tried, from the smallest normal exponent of the running sum down."""

SEED = 51109
FEW_BITS = 7
"""Fraction bits that every format that fp32 numbers are converted to keeps; narrower storage formats keep their own."""

Kind = Literal["near", "far", "cancelling", "full", "left", "right", "tiny", "tiniest", "subnormal"]
TIES = torch.tensor([8, 11, 12, 52], dtype=torch.float64)
"""Fraction bits of operands that a conversion may round: one more than bf16, tf32 and hf32_e8m11 have, or all."""

OF_SUMS: tuple[Kind, ...] = ("near", "far", "cancelling")
SUBNORMALS: tuple[Literal["kept", "flushed"], ...] = ("kept", "flushed")


class Seen(NamedTuple):
    """A product of random operands and what the device made of it."""

    left: Tensor
    right: Tensor
    result: Tensor

    def differing(self, arithmetic: Arithmetic, corner: int | None = CORNER, *, flushed: bool = False) -> int:
        """Return how many elements of a corner, or of all, have other bits in an arithmetic; one NaN is as good as another.

        Args:
            arithmetic: the candidate.
            corner: rows and columns to compare, None for all.
            flushed: whether a zero agrees with a subnormal result as well, as long as it is not known what becomes of those.
        """
        left, right, result = self.left[:corner], self.right[:, :corner], self.result[:corner, :corner]
        expected = mm(left, right, arithmetic).double()
        same = (expected == result) | (expected.isnan() & result.isnan())
        if flushed:
            same |= (result == 0) & (expected.abs() < FORMATS[arithmetic.output].smallest_normal)
        return int((~same).sum())


def operands(kind: Kind, shape: Shape, prober: Prober, a: str, b: str) -> tuple[Tensor, Tensor]:
    """Return random operands, float64 numbers of the storage formats.

    Args:
        kind: ``near``, ``far`` and ``cancelling`` have few fraction bits, so that no conversion changes them; ``full`` has all bits of the storage formats,
            ``left`` and ``right`` on one side only; ``tiny`` and ``tiniest`` have sums about and far below the smallest normal number of the result;
            ``subnormal`` has subnormal operands on either side.
        shape: M, N and K.
        prober: says which exponents are in reach.
        a: storage format of the left operand.
        b: storage format of the right operand.
    """
    m, n, k = shape
    generator = torch.Generator().manual_seed(SEED)

    def draw(rows: int, columns: int, low: int, high: int, name: str, few: bool) -> Tensor:
        mantissa = 1 + torch.rand(rows, columns, generator=generator, dtype=torch.float64)
        if few:
            mantissa = (mantissa * 2**FEW_BITS).floor() / 2**FEW_BITS
        else:
            # One bit more than the formats that operands are converted to is a tie, of which numbers with all bits have next to none.
            scale = 2.0 ** TIES[torch.randint(0, len(TIES), (rows, columns), generator=generator)]
            mantissa = (mantissa * scale).floor() / scale
        exponent = torch.randint(low, high + 1, (rows, columns), generator=generator)
        sign = torch.randint(0, 2, (rows, columns), generator=generator) * 2.0 - 1
        return round_to(sign * mantissa * 2.0 ** exponent.double(), name, "rz")

    # A sum of K products stays below the top of fp16.
    top = (14 - math.ceil(math.log2(k))) // 2
    few = kind not in ("left", "right", "full")
    spread = 2 if kind == "near" else 8
    lows, highs = [], []
    for side in (prober.a, prober.b):
        high = min(side.high, top)
        lows.append(max(side.low, high - spread))
        highs.append(high)
    if kind in ("tiny", "tiniest"):
        floor = -16 * (kind == "tiniest") + math.frexp(FORMATS[prober.output].smallest_normal)[1] - 1
        split = floor // 2
        # One side reaches as far down as the other one does not.
        split = min(max(split, floor - prober.b.high), max(split, prober.a.low)) if prober.b.low <= floor - split else floor - prober.b.low
        lows = [max(prober.a.low, split - 6), max(prober.b.low, floor - split - 6)]
        highs = [max(lows[0], min(prober.a.high, split + 1)), max(lows[1], min(prober.b.high, floor - split + 1))]
    left = draw(m, k, lows[0], highs[0], a, few or kind == "right")
    right = draw(k, n, lows[1], highs[1], b, few or kind == "left")
    if kind in ("left", "right", "full"):
        # Numbers that fp16 has only as subnormal ones: a conversion to it is not one to tf32.
        if kind != "right":
            left[::2] = scaled_down(left[::2], torch.tensor(14), prober.a.low)
        if kind != "left":
            right[:, 1::2] = scaled_down(right[:, 1::2], torch.tensor(14), prober.b.low)
    if kind == "cancelling":
        # Most large products have their negative somewhere; what stays is small beside them, as wide as the formats allow.
        places = torch.randperm(k, generator=generator)
        half = k // 3
        first, second, rest = places[:half], places[half : 2 * half], places[2 * half :]
        left[:, second], right[second] = -left[:, first], right[first]
        down = torch.randint(4, 14, (len(rest),), generator=generator)
        left[:, rest] = scaled_down(left[:, rest], down[None, :], prober.a.low)
        right[rest] = scaled_down(right[rest], down[:, None], prober.b.low)
    if kind in ("tiny", "tiniest", "subnormal"):
        left = torch.where(torch.rand(m, k, generator=generator) < min(1.0, 6 / k), left, 0.0)
    if kind == "subnormal":
        right = torch.where(torch.rand(k, n, generator=generator) < 0.5, right, 0.0)
        for x, name, here, against, far in ((left, a, prober.a, right, prober.b), (right.mT, b, prober.b, left.mT, prober.a)):
            # The first half of K holds subnormal numbers on the left, the second on the right, with large ones against them.
            part = slice(0, k // 2) if x is left else slice(k // 2, k)
            below = here.low - 1 - (math.frexp(x[:, part].abs().max().item())[1] - 1)
            x[:, part] = round_to((x[:, part] * 2.0**below).contiguous(), name, "rz")
            up = min(far.high, -here.low) - (math.frexp(against[part].abs().max().item())[1] - 1)
            against[part] = against[part] * 2.0**up
    return left, right


def scaled_down(x: Tensor, bits: Tensor, low: int) -> Tensor:
    """Return numbers divided by powers of two, as far down as normal numbers go."""
    exponent = torch.frexp(x).exponent - 1
    return x * 2.0 ** -torch.minimum(bits, exponent - low).clamp(min=0).double()


def see(kind: Kind, shape: Shape, prober: Prober, a: str, b: str) -> Seen:
    """Return a random product of the device, which is asked for it once."""
    key = (kind, shape, a, b)
    if key not in prober.kept:
        left, right = operands(kind, shape, prober, a, b)
        prober.kept[key] = (left, right, prober.matrix(left, right))
    return Seen(*prober.kept[key])


def confirmed(candidates: Sequence[Arithmetic], seen: Sequence[Seen], *, flushed: bool = False) -> list[Arithmetic]:
    """Return the candidates that give all elements of random products: all of few, of many those from the first that does on."""
    found = list(candidates)
    for number, candidate in enumerate(candidates):
        if number >= FEW and found[0] is not candidate:
            break
        if any(entry.differing(candidate, None, flushed=flushed) for entry in seen):
            found.remove(candidate)
    return found


def matching(candidates: Iterable[Arithmetic], seen: Sequence[Seen], *, flushed: bool = False) -> list[Arithmetic]:
    """Return the arithmetics that give all bits of the corners of random products."""
    return [candidate for candidate in candidates if not any(entry.differing(candidate, flushed=flushed) for entry in seen)]


def widened(candidates: Sequence[Arithmetic], **values: Sequence[Any]) -> list[Arithmetic]:
    """Return every candidate with every combination of other values of fields."""
    found = list(candidates)
    for name, options in values.items():
        found = [msgspec.structs.replace(candidate, **{name: option}) for candidate in found for option in options]
    return found


def operand_formats(storage: str, claimed: str) -> list[str]:
    """Return the formats that numbers of a storage format may be converted to, the claimed one first; of those with equal values one."""
    names = [claimed, storage, *(("tf32", "hf32_e8m11", "bf16", "fp16") if storage == "fp32" else ())]
    kept: dict[tuple[int, int], str] = {}
    for name in names:
        kept.setdefault((FORMATS[name].exponent_bits, FORMATS[name].mantissa_bits), name)
    return list(kept.values())


class Found(NamedTuple):
    """What is left.

    Attributes:
        candidates: arithmetics that give everything seen; they differ in their sums only.
        free: fields outside the sums to the values that nothing seen tells apart, as the first candidate that gives everything shows them; the candidates
            have the first of each.
        tree: the order of the sums where there is no candidate and it could be read.
    """

    candidates: list[Arithmetic]
    free: dict[str, list[Any]]
    tree: Tree | None = None

    def settled(self, options: Sequence[Arithmetic], fields: Sequence[str]) -> Found:
        """Return the candidates with fields of the first option; the other options' values are free."""
        if not options:
            return Found([], {})
        first = {name: getattr(options[0], name) for name in fields}
        free = {name: list(dict.fromkeys(getattr(option, name) for option in options)) for name in fields}
        return Found([msgspec.structs.replace(candidate, **first) for candidate in self.candidates], {**self.free, **free})


def finished(found: Found, shape: Shape, prober: Prober, storages: tuple[str, str]) -> Found:
    """Return candidates with what becomes of tiny sums and of subnormal results.

    Args:
        found: candidates whose sums are known.
        shape: M, N and K.
        prober: the device.
        storages: formats that the operands are stored in.
    """
    tiny = [see(kind, shape, prober, *storages) for kind in ("tiny", "tiniest")]
    kept: list[Arithmetic] = []
    free: dict[str, list[Any]] = {"zero_exponent": [], "output_subnormals": []}
    for number, first in enumerate(found.candidates):
        if number >= FEW and kept:
            # One stands for the rest of many, which differ in their sums only.
            kept += [msgspec.structs.replace(candidate, **{name: getattr(kept[0], name) for name in free}) for candidate in found.candidates[number:]]
            break
        floor = 1 - FORMATS[first.register].bias
        lowest = [None] if first.fraction_bits is None else [None, *range(floor - LOWEST_TRIED + 1, floor + 1)]
        plain = matching(widened([first], output_subnormals=SUBNORMALS), tiny)
        options = matching(widened(plain or [first], zero_exponent=lowest, output_subnormals=SUBNORMALS), tiny)
        # How the register rounds and how low it is aligned show in the same tiny sums: what one candidate excludes another one may need.
        kept += options[:1]
        for name, values in free.items():
            values += [value for value in dict.fromkeys(getattr(option, name) for option in options) if value not in values]
    return Found(kept, {**found.free, **free}) if kept else Found([], {})


def converted(found: Found, shape: Shape, prober: Prober, storages: tuple[str, str]) -> Found:
    """Return candidates with the formats and the rounding that operands are converted to, and what becomes of subnormal ones; one stands for all.

    Args:
        found: candidates whose sums and results are known; their operands' formats are the claimed ones.
        shape: M, N and K.
        prober: the device.
        storages: formats that the operands are stored in.
    """
    kinds: tuple[Kind, ...] = ("left", "right", "full", "subnormal")
    left, right, full, subnormal = (see(kind, shape, prober, *storages) for kind in kinds)
    for number, first in enumerate(found.candidates):
        lefts = matching(widened([first], a=operand_formats(storages[0], first.a), operand_rounding=ROUNDINGS), [left])
        rights = matching(widened([first], b=operand_formats(storages[1], first.b), operand_rounding=ROUNDINGS), [right])
        pairs = {(x.a, y.b, x.operand_rounding) for x in lefts for y in rights if x.operand_rounding == y.operand_rounding}
        ordered = sorted(pairs, key=lambda pair: (pair[0] != found.candidates[0].a, pair[1] != found.candidates[0].b, pair[2]))
        options = [msgspec.structs.replace(first, a=a, b=b, operand_rounding=rounding) for a, b, rounding in ordered]
        options = matching(widened(matching(options, [full]), operand_subnormals=SUBNORMALS), [subnormal])
        if options:
            return Found(found.candidates[number:], found.free).settled(options, ("a", "b", "operand_rounding", "operand_subnormals"))
    return Found([], {})
