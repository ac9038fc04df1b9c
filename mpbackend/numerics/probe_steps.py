"""Which products meet in one step, and after how many the sum is promoted: scans with one large pair that cancels and one small number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpbackend.numerics.arithmetic import Order
from mpbackend.numerics.probe_model import Layout
from mpbackend.numerics.probe_rows import Prober, Row

Shape = tuple[int, int, int]

WIDEST_STEP = 64
ORDERS: tuple[Order, ...] = ("sequential", "byte_pairs")
PERMUTED = 32
"""From so many products to a step on the order ``byte_pairs`` changes nothing: it permutes within 32."""


def step_scan(prober: Prober, shape: Shape) -> tuple[frozenset[int], frozenset[int]]:
    """Return which positions a large pair at 0 and 1 drowns, and which positions share an exact step with 0 and 1.

    A small number at ``d`` beside the pair is lost if it is aligned with it, so if it is in the same step and the alignment is narrow. A small number at 1
    between 1 at 0 and -1 at ``d`` is kept if all three are in one step and the alignment is wide. The ratio is the same, so that one of the two tells.

    Args:
        prober: the device.
        shape: M, N and K.
    """
    span = range(2, min(shape[2], WIDEST_STEP + 2))
    big, minus, small = prober.pair(prober.high), prober.pair(prober.high, -1.0), prober.pair(prober.low)
    drowned: list[Row] = [{0: big, 1: minus, d: small} for d in span]
    shared: list[Row] = [{0: big, 1: small, d: minus} for d in span]
    found = (prober.ask([*drowned, *shared], shape) == 2.0**prober.low).tolist()
    lost = frozenset(d for d, kept in zip(span, found[: len(span)], strict=True) if not kept)
    kept = frozenset(d for d, kept in zip(span, found[len(span) :], strict=True) if kept)
    return lost, kept


def scan_lines(prober: Prober, lost: frozenset[int], kept: frozenset[int]) -> tuple[str, ...]:
    """Return what a scan showed, in words."""
    big, small = f"2^{prober.high}", f"2^{prober.low}"
    if lost:
        return (f"{big} @0 - {big} @1 drowns {small} at {len(lost)} positions up to {max(lost)}",)
    if kept:
        return (f"{big} @0 + {small} @1 - {big} @d keeps {small} for {len(kept)} positions d up to {max(kept)}",)
    return (f"{big} @0 - {big} @1 drowns {small} nowhere else, and {big} @0 + {small} @1 - {big} @d never keeps it",)


def layouts(lost: frozenset[int], kept: frozenset[int], k: int) -> list[Layout]:
    """Return the steps that a scan of K products agrees with, without promotion."""
    span = frozenset(range(2, min(k, WIDEST_STEP + 2)))
    found = []
    for products in range(1, min(k, WIDEST_STEP) + 1):
        for order in ORDERS:
            if order == "byte_pairs" and (products >= PERMUTED or k <= 2):
                continue
            layout = Layout(products, order, None)
            first = frozenset(layout.steps(k)[0]) & span
            if (lost, kept) in ((first, frozenset()), (frozenset(), first)):
                found.append(layout)
    return found


def intervals(prober: Prober, shape: Shape, layout: Layout, *, narrow: bool) -> list[int | None]:
    """Return the products after which a sum may be promoted; None is never, or beyond K.

    A small number of the first step survives a later large pair that cancels only if a promotion has taken it out of the register. The pair stands in one
    step, where a narrow alignment drowns the small number, or in neighboring ones, where the register does. A search among the steps finds the first.

    Args:
        prober: the device.
        shape: M, N and K.
        layout: the steps.
        narrow: whether the alignment drowns the small number beside the large pair.
    """
    steps = layout.steps(shape[2])
    big, minus, small = prober.pair(prober.high), prober.pair(prober.high, -1.0), prober.pair(prober.low)

    def within(s: int) -> list[Row]:
        return [{steps[0][0]: small, steps[s][0]: big, steps[s][1]: minus}]

    def across(s: int) -> list[Row]:
        # Neighbors may stand on both sides of a promotion: then the next two do not, unless every step is promoted.
        return [{steps[0][0]: small, steps[t][0]: big, steps[t + 1][0]: minus} for t in (s, s + 1)]

    if layout.products > 1 and narrow:
        first = search(prober, shape, within, len(steps) - (len(steps[-1]) < 2))
        return [None if first is None else first * layout.products]
    first = search(prober, shape, across, len(steps) - 2)
    if first is None:
        return [None, layout.products]
    alone = [row for s in (first, first + 1) for row in across(s)[:1]]
    kept = (prober.ask(alone, shape) == 2.0**prober.low).tolist()
    return [(first if kept[0] else first + 1) * layout.products]


def search(prober: Prober, shape: Shape, rows: Callable[[int], Sequence[Row]], stop: int) -> int | None:
    """Return the first step below ``stop`` whose queries keep the small number, as many steps to a product of the device as its diagonal has room for."""
    if stop <= 1:
        return None
    low, high = 1, stop
    width = max(2, min(shape[0], shape[1]) // len(rows(1)))
    unseen = True
    while low < high:
        # The last step first: if it keeps nothing, none does.
        points = sorted({low + (high - 1 - low) * i // (width - 1) for i in range(width)}) if unseen or high - low > 1 else [low]
        queries = [row for point in points for row in rows(point)]
        each = len(queries) // len(points)
        kept = (prober.ask(queries, shape) == 2.0**prober.low).reshape(len(points), each).any(dim=1).tolist()
        hits = [point for point, hit in zip(points, kept, strict=True) if hit]
        if unseen and not hits:
            return None
        unseen = False
        first = min(hits, default=high)
        low, high = max((point for point in points if point < first), default=first - 1) + 1, first
    return high
