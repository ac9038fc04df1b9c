"""Products in a device's arithmetic against the host's own fp32 product, 2048 x 2048 x 2048.

Every engine gives an fp32 matrix from fp32 matrices whose values are exact in the operands' format; conversions of operands are left out, as they are of the
fp32 product. Engines are interleaved in a shuffled order and the medians of the rounds divided; the fp32 product stands twice to show the noise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch

from mpbackend.numerics import kernel
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.matmul import Engine, sums

UNITS = {
    "32 products, 13 bits, promoted every 128": (
        Arithmetic(
            a="fp8_e4m3",
            b="fp8_e4m3",
            products_per_step=32,
            fraction_bits=13,
            register_bits=13,
            register_rounding="rz",
            zero_exponent=-133,
            promotion_interval=128,
        ),
        4.0,
    ),
    "16 products, 25 bits": (Arithmetic(a="fp16", b="fp16", products_per_step=16, fraction_bits=25, register_rounding="rz", zero_exponent=-133), 6.0),
    "8 products, 24 bits": (Arithmetic(a="fp16", b="fp16", products_per_step=8, fraction_bits=24, register_rounding="rz", zero_exponent=-132), 8.0),
    "4 products, 23 bits": (Arithmetic(a="fp16", b="fp16", products_per_step=4, fraction_bits=23, register_rounding="rz", zero_exponent=-131), 12.0),
}
"""Unit to its arithmetic and the limit of the extension's ratio."""

CHUNK_LIMIT, NUMBA_LIMIT = 1.6, 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    n, passed = options.size, True
    torch.manual_seed(0)
    print(f"{n}^3, {torch.get_num_threads()} threads, {options.rounds} rounds, columns of a tile: {tile_width()}")
    for name, (arithmetic, limit) in UNITS.items():
        dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp16": torch.float16}[arithmetic.a]
        a, b, start = torch.randn(n, n).to(dtype).float(), torch.randn(n, n).to(dtype).float(), torch.zeros(n, n)

        def engine(
            chosen: Engine, a: torch.Tensor = a, b: torch.Tensor = b, start: torch.Tensor = start, unit: Arithmetic = arithmetic
        ) -> Callable[[], object]:
            return lambda: sums(a, b, start, unit, chosen)

        def product(a: torch.Tensor = a, b: torch.Tensor = b) -> torch.Tensor:
            return a @ b

        candidates: dict[str, Callable[[], object]] = {"fp32": product, "fp32 again": product}
        candidates |= {chosen: engine(chosen) for chosen in ("chunk", "extension", "numba")}
        times = medians(candidates, options.rounds)
        base = times["fp32"]
        ratio = times["numba"] / times["extension"]
        print(
            f"{name:42} fp32 {base * 1e3:6.1f} ms (A/A {times['fp32 again'] / base:.2f})   chunk {times['chunk'] / base:5.2f} (limit {CHUNK_LIMIT})   "
            f"extension {times['extension'] / base:5.2f} (limit {limit:g})   numba / extension {ratio:4.2f} (limit {NUMBA_LIMIT:g})"
        )
        passed &= times["chunk"] / base <= CHUNK_LIMIT and times["extension"] / base <= limit and ratio <= NUMBA_LIMIT
    print("within the limits" if passed else "BEYOND a limit")
    return 0 if passed else 1


def tile_width() -> int:
    """Return the columns that the extension takes at once: 8, 16 or 32 with vectors of 128, 256 or 512 bits."""
    functions = kernel.library()
    return int(functions.mp_tile_width()) if functions is not None else 0


def medians(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each candidate over interleaved rounds, after one that is not counted."""
    order, found = list(candidates), {name: [0.0] * 0 for name in candidates}
    rng = random.Random(0)
    for counted in [False] + [True] * rounds:
        rng.shuffle(order)
        for name in order:
            start = time.perf_counter()
            candidates[name]()
            if counted:
                found[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in found.items()}


if __name__ == "__main__":
    raise SystemExit(main())
