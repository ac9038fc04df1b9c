"""The width and the rounding of the sums of a unit: every hypothesis that a bank of queries does not contradict."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mpbackend.formats import FORMATS
from mpbackend.numerics.arithmetic import Arithmetic, Rounds
from mpbackend.numerics.exact_sums import ROUNDINGS
from mpbackend.numerics.probe_model import EXACT, REGISTERS, TERMS, Hypotheses, Layout, every, sums
from mpbackend.numerics.probe_rows import Prober, Row, number_text, row_text
from mpbackend.numerics.rounding import round_to

DEEPEST = 40
"""Fraction bits of the alignment that are told apart where the operands have the range for it."""

BLOCK = 32
"""Most queries that are compared at once: the first few leave little of the hypotheses."""

RANDOM = 96
SEED = 20411


class Bank(NamedTuple):
    """Queries with their results.

    Attributes:
        rows: the queries.
        results: float64.
        k: products of each.
        output: format of the results.
        saturating: whether the device writes the largest number instead of infinity, and 0 instead of NaN.
    """

    rows: Sequence[Row]
    results: Tensor
    k: int
    output: str
    saturating: bool


class Sums(NamedTuple):
    """Hypotheses that are left.

    Attributes:
        layout: which products meet.
        hypotheses: H registers.
        outputs: (H, 3), whether the rounding of the result may be that of ``ROUNDINGS``.
    """

    layout: Layout
    hypotheses: Hypotheses
    outputs: Tensor


def alignment_rows(prober: Prober, layout: Layout, k: int) -> list[Row]:
    """Return queries that only the width of the alignment decides: a pair that cancels within a step, and ever smaller numbers beside it."""
    steps = layout.steps(k)
    if layout.products < 2 or len(steps) < 2 or len(steps[1]) < 2:
        return []
    low, high = wide_range(prober)
    places = (*steps[0][:2], steps[0][2]) if layout.products > 2 else (*steps[1][:2], steps[0][0])
    first, second, third = places
    return [{first: prober.pair(high), second: prober.pair(high, -1.0), third: prober.pair(high - p)} for p in range(min(high - low, DEEPEST + 1) + 1)]


def wide_range(prober: Prober) -> tuple[int, int]:
    """Return exponents of products for wide contrasts: beyond those of fp16 sums where the result is not fp16."""
    emin = 1 - FORMATS[prober.output].bias
    low = max(prober.a.low + prober.b.low, emin, -30)
    return low, min(prober.a.high + prober.b.high, FORMATS[prober.output].bias - 1, 30)


def register_rows(prober: Prober, layout: Layout, k: int) -> list[Row]:
    """Return queries of a large number, a small one and the large one taken away again: widths, roundings, and ties from even and odd sums."""
    steps = layout.steps(k)
    high = prober.high
    one, minus = prober.pair(high), prober.pair(high, -1.0)
    # With a step of one product the small number comes a step later.
    places = [step[0] for step in steps[:5]]
    second = steps[0][1] if layout.products > 1 else places[1]
    last = places[min(len(places) - 1, 2)]
    rows: list[Row] = []
    for p in range(1, high - prober.low + 1):
        for sign in (1.0, -1.0):
            rows.append({places[0]: one, second: prober.pair(high - p, sign), last: minus})
            rows.append({places[0]: one, second: prober.pair(high - p, 1.5 * sign), last: minus})
            rows.append({places[0]: one, second: prober.pair(high - p, sign)})
            if p > 1 and layout.products > 2:
                rows.append({places[0]: one, second: prober.pair(high - p, sign), steps[0][2]: prober.pair(high - p + 1, sign), last: minus})
    return rows


def random_rows(prober: Prober, layout: Layout, k: int, count: int = RANDOM) -> list[Row]:
    """Return queries of two to six products in the first three steps and the last one, many of which cancel."""
    rng = random.Random(SEED)
    steps = layout.steps(k)
    chosen = [*steps[:3], steps[-1]] if len(steps) > 3 else steps
    rows: list[Row] = []
    for _ in range(count):
        row: dict[int, tuple[float, float]] = {}
        top = rng.randint(prober.high - 2, prober.high)
        deep = rng.randint(1, top - prober.low)
        for number in range(rng.randint(2, TERMS)):
            position = rng.choice(rng.choice(chosen))
            exponent = top if number % 2 == 0 else rng.choice((top, max(prober.low, top - deep), rng.randint(prober.low, top)))
            x, y = prober.pair(exponent, rng.choice((-1.0, 1.0)) * rng.choice((1.0, 1.0, 1.25, 1.5, 1.75)))
            row[position] = (x, y * rng.choice((1.0, 1.0, 1.5)))
        rows.append(row)
    return rows


def holds(output: str, register: str) -> bool:
    """Return whether a format has every number of a running sum, so that writing the result rounds nothing."""
    wide, narrow = FORMATS[output], FORMATS[register]
    return wide.mantissa_bits >= narrow.mantissa_bits and wide.exponent_bits >= narrow.exponent_bits


def written(values: Tensor, output: str, saturating: bool, rounding: Rounds) -> Tensor:
    """Return sums in the format of the results, with subnormal ones kept."""
    if saturating:
        values = torch.nan_to_num(values, nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    overflow: Literal["saturate"] | None = "saturate" if saturating else None
    return round_to(values, output, rounding, overflow=overflow)


def agreement(bank: Bank, layout: Layout, hypotheses: Hypotheses) -> Tensor:
    """Return whether each hypothesis gives each result: (H, 3 roundings of the result, queries). Where a result is subnormal a zero agrees as well."""
    values = sums(bank.rows, bank.k, layout, hypotheses)
    tiny = FORMATS[bank.output].smallest_normal
    found = []
    for rounding in ROUNDINGS:
        expected = written(values, bank.output, bank.saturating, rounding)
        same = (expected == bank.results) | (expected.isnan() & bank.results.isnan()) | ((expected.abs() < tiny) & (bank.results == 0))
        found.append(same)
    return torch.stack(found, dim=1)


def surviving(bank: Bank, layout: Layout, hypotheses: Hypotheses, outputs: Tensor | None = None) -> Sums:
    """Return the hypotheses that give every result of a bank."""
    alive = torch.ones(len(hypotheses.bits), len(ROUNDINGS), dtype=torch.bool) if outputs is None else outputs
    # Queries of neighboring widths stand side by side: in another order few of them tell most.
    order = random.Random(SEED).sample(range(len(bank.rows)), len(bank.rows))
    start, size = 0, 1
    while start < len(order) and len(hypotheses.bits):
        chosen = order[start : start + size]
        start, size = start + size, min(2 * size, BLOCK)
        part = bank._replace(rows=[bank.rows[i] for i in chosen], results=bank.results[chosen])
        alive = alive & agreement(part, layout, hypotheses).all(dim=-1)
        mask = alive.any(dim=1)
        hypotheses, alive = hypotheses.keep(mask), alive[mask]
    return Sums(layout, hypotheses, alive)


def contradiction(bank: Bank, layout: Layout, candidate: Arithmetic) -> str:
    """Return the first query whose result a candidate does not give, in words; empty if it gives all.

    Args:
        bank: queries with their results.
        layout: which products meet.
        candidate: the widths and roundings of the sums.
    """
    width = EXACT if candidate.fraction_bits is None else candidate.fraction_bits
    entry = (width, REGISTERS.index(candidate.register), candidate.kept_bits, ROUNDINGS.index(candidate.register_rounding))
    hypotheses = Hypotheses(*(torch.tensor([value]) for value in entry))
    given = agreement(bank, layout, hypotheses)[0, ROUNDINGS.index(candidate.output_rounding)].tolist()
    if all(given):
        return ""
    number = given.index(False)
    expected = written(sums([bank.rows[number]], bank.k, layout, hypotheses), bank.output, bank.saturating, candidate.output_rounding).item()
    return f"{row_text(bank.rows[number])} gave {number_text(bank.results[number].item())} and not {number_text(expected)}"


def fit(aligned: Bank, bank: Bank, layout: Layout) -> Sums:
    """Return all registers and alignments that a layout leaves possible.

    Args:
        aligned: results of ``alignment_rows``, which a wide register takes part in without a trace.
        bank: the other results.
        layout: which products meet.
    """
    # The exact step first: where nothing tells, it stands for the widths below it.
    widths = torch.tensor([EXACT, *range(DEEPEST, 0, -1)])
    if len(aligned.rows):
        probe = Hypotheses(widths, torch.zeros_like(widths), torch.full_like(widths, 23), torch.ones_like(widths))
        # A register of fp16 may have overflowed where the numbers are large: only finite results count.
        finite = aligned.results.isfinite() & (aligned.results.abs() < 2.0**15)
        rows = [row for row, use in zip(aligned.rows, finite.tolist(), strict=True) if use]
        widths = surviving(aligned._replace(rows=rows, results=aligned.results[finite]), layout, probe).hypotheses.fraction_bits
    found = surviving(bank, layout, every(widths.tolist()))
    return surviving(aligned, layout, found.hypotheses, found.outputs) if len(aligned.rows) else found


def arithmetics(found: Sums, a: str, b: str, output: str, saturating: bool) -> list[Arithmetic]:
    """Return hypotheses as arithmetics, one for each rounding of the result that is possible; exact steps only of one product."""
    listed = []
    for bits, register, width, rounding, outputs in zip(*(field.tolist() for field in found.hypotheses), found.outputs.tolist(), strict=True):
        if bits == EXACT and (found.layout.interval is not None or found.layout.products > 1):
            # No fast engine models it; the widest alignment stands for it.
            continue
        name: Literal["fp32", "fp16"] = "fp32" if REGISTERS[register] == "fp32" else "fp16"
        held = holds(output, name) and holds(output, found.layout.promoted if found.layout.interval else name)
        for output_rounding, possible in zip(ROUNDINGS, outputs, strict=True):
            if not possible or (held and output_rounding != "rne"):
                continue
            listed.append(
                Arithmetic(
                    a=a,
                    b=b,
                    products_per_step=found.layout.products,
                    order=found.layout.order,
                    fraction_bits=None if bits == EXACT else bits,
                    register=name,
                    register_bits=None if width == FORMATS[name].mantissa_bits else width,
                    register_rounding=ROUNDINGS[rounding],
                    promotion_interval=found.layout.interval,
                    promoted="fp16" if found.layout.promoted == "fp16" else "fp32",
                    output=output,
                    output_rounding=output_rounding,
                    overflow="saturating" if saturating else "inf_nan",
                )
            )
    return listed
