"""Random arithmetics and operands for them, specials and subnormals included."""

from __future__ import annotations

import math
import random
from typing import Literal

import msgspec
import torch

from mpbackend.formats import FORMATS
from mpbackend.numerics.arithmetic import Arithmetic

OPERANDS = ("fp16", "bf16", "tf32", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "fp32")


def random_arithmetic(rng: random.Random) -> Arithmetic:
    """Return an arithmetic that a fast engine models: as devices have them, or with any of the parameters changed."""
    a = rng.choice(OPERANDS)
    b = a if rng.random() < 0.8 else rng.choice(OPERANDS)
    products = rng.choice((1, 2, 4, 4, 8, 8, 16, 16, 32, 32, 64, 6))
    registers: tuple[Literal["fp32", "fp16"], ...] = ("fp32", "fp32", "fp32", "fp16")
    register = rng.choice(registers)
    wide = register == "fp32"
    bits = rng.choice((13, 13, 22, 23, 23, 24, 24, 25, 25, 35, rng.randint(4, 40)))
    fused = rng.random() < 0.08
    interval = products * rng.randint(1, 6) if rng.random() < 0.3 else None
    narrow = wide and rng.random() < 0.3
    emin = 1 - FORMATS[register].bias
    return Arithmetic(
        a=a,
        b=b,
        operand_rounding=rng.choice(("rne", "rne", "rz", "rna")),
        operand_subnormals=rng.choice(("kept", "kept", "kept", "flushed")),
        products_per_step=1 if fused else products,
        fraction_bits=None if fused else bits,
        zero_exponent=rng.choice((None, emin - 5, emin - 7)),
        register="fp32" if fused else register,
        register_bits=rng.randint(5, 23) if narrow and not fused else None,
        register_rounding="rne" if fused else rng.choice(("rz", "rz", "rne", "rna")),
        order="byte_pairs" if not fused and products in (16, 32) and interval is None and rng.random() < 0.2 else "sequential",
        promotion_interval=None if fused else interval,
        promoted=rng.choice(("fp32", "fp32", "fp16")),
        output=rng.choice(("fp32", "fp32", "fp16", "bf16")),
        output_rounding=rng.choice(("rne", "rne", "rz")),
        output_subnormals=rng.choice(("kept", "kept", "flushed")),
        overflow=rng.choice(("inf_nan", "inf_nan", "saturating")),
    )


def random_exact_arithmetic(rng: random.Random) -> Arithmetic:
    """Return an arithmetic whose steps are exact, of any length, with any register, rounding, order and promotion."""
    products = rng.choice((1, 1, 2, 3, 4, 8, 16))
    wide = rng.random() < 0.6
    return msgspec.structs.replace(
        random_arithmetic(rng),
        products_per_step=products,
        fraction_bits=None,
        register="fp32" if wide else "fp16",
        register_bits=rng.randint(3, 22 if wide else 9) if rng.random() < 0.4 else None,
        register_rounding=rng.choice(("rz", "rne", "rna")),
        order=rng.choice(("sequential", "byte_pairs")),
        promotion_interval=products * rng.randint(1, 9) if rng.random() < 0.4 else None,
    )


def random_operand(rng: random.Random, name: str, rows: int, columns: int, *, exact: bool = False) -> torch.Tensor:
    """Return numbers of a format's size: ordinary ones, its whole range, subnormals, zeros, infinities and NaN.

    Args:
        rng: source of randomness.
        name: the format whose range they take.
        rows: of the matrix.
        columns: of the matrix.
        exact: fp32 numbers cut to the format's fraction bits, so that a conversion changes subnormals only.
    """
    form = FORMATS[name]
    low, high = math.frexp(form.smallest_normal)[1] - 1 - form.mantissa_bits, math.frexp(form.max)[1] - 1
    kind = rng.choice(("ordinary", "ordinary", "ordinary", "range", "tiny", "huge", "specials", "sparse"))

    def draw() -> float:
        mantissa = 1 + rng.getrandbits(form.mantissa_bits) / 2**form.mantissa_bits if exact else 1 + rng.random()
        sign = rng.choice((-1, 1))
        if kind == "specials" and rng.random() < 0.1:
            return rng.choice((math.inf, -math.inf, math.nan, 0.0, -0.0))
        if kind == "sparse" and rng.random() < 0.7:
            return rng.choice((0.0, -0.0))
        exponent = {"range": (low, high), "tiny": (low, low + form.mantissa_bits + 3), "huge": (high - 4, high)}.get(kind, (max(low, -8), min(high, 2)))
        return sign * math.ldexp(mantissa, rng.randint(*exponent))

    values = torch.tensor([[draw() for _ in range(columns)] for _ in range(rows)], dtype=torch.float64)
    return values.clamp(-3.4e38, 3.4e38).where(values.isfinite(), values).float()
