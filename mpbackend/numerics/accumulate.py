"""From the row of a matrix to the arithmetic it claims: what a source states is taken, what none states is assumed and said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpbackend.capability import Accumulator, Row
from mpbackend.errors import UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.matrix import Matrix
from mpbackend.numerics.arithmetic import Arithmetic

COMPUTING = ("native", "library", "emulated", "converted")
"""Levels of rows that compute something."""

REGISTERS = ("fp16", "fp32", "fp64")
"""Formats of running sums that there is a model for."""

BELOW_SMALLEST_NORMAL = {23: 5, 24: 6, 25: 7, 35: 13}
"""Fraction bits of a unit to how far below the register's smallest normal exponent its zeros stand (MMA-Sim, arXiv 2511.10909)."""

NOMINAL = "nominal {register}: no source states the width, the rounding or the order of the sums"


def arithmetic_for(
    matrix: Matrix, arch: str, a: str, b: str, *, scaling: str = "none", accumulate: str = "fp32", path: str | None = None, output: str | None = None
) -> Arithmetic:
    """Return how an architecture multiplies matrices of two formats.

    Args:
        matrix: the facts.
        arch: key of the architecture, ``matrix.device(key).arch``.
        a: format of the left operand.
        b: format of the right operand.
        scaling: scale layout.
        accumulate: format of the sums.
        path: instruction or operator; None takes the instruction that makes the largest steps, then a library's operator.
        output: format of the result; None for that of the sums.

    Raises:
        UnknownNameError: the architecture has no such product, or one of integers, whose sums are exact.
    """
    siblings = matrix.rows(arch, op="matmul")
    own = [row for row in siblings if (row.a, row.b, row.scaling) == (a, b, scaling) and row.level in COMPUTING]
    rows = [row for row in own if row.accumulate in (accumulate, "unknown") and path in (None, row.path)]
    if not rows:
        offered = sorted({f"{row.accumulate} by {row.path}" for row in own})
        asked = f"{a} x {b}, scaling {scaling}, summed in {accumulate}" + (f" by {path}" if path else "")
        raise UnknownNameError(f"product of {arch}", asked, offered, remedy=f"`mpbackend matrix --op matmul` lists what {arch} computes")
    return from_row(max(rows, key=preference), siblings, output)


def preference(row: Row) -> tuple[bool, bool, int]:
    """Return what orders the rows of one product: instructions first, then known sums, then large steps."""
    products = row.accumulator.products_per_step if row.accumulator is not None else "unknown"
    return (row.level == "native", row.accumulator is not None, products if isinstance(products, int) else 0)


def from_row(row: Row, siblings: Sequence[Row] = (), output: str | None = None) -> Arithmetic:
    """Return the arithmetic of a row.

    Args:
        row: a row of level native, library, emulated or converted.
        siblings: the other products of its architecture, which tell what the row leaves open.
        output: format of the result; None for that of the sums.

    Raises:
        UnknownNameError: the row multiplies integers.
    """
    register = "fp32" if row.accumulate == "unknown" else row.accumulate
    if register not in REGISTERS:
        raise UnknownNameError("format of sums", register, REGISTERS, remedy="integer sums are exact and need no model")
    accumulator, assumed = known_sums(row, siblings)
    common: dict[str, Any] = {
        "a": row.computes or row.a,
        "b": row.computes or row.b,
        "operand_rounding": "rz" if "tf32" in (row.a, row.b) else "rne",
        "register": register,
        "promoted": "fp16" if register == "fp16" else "fp32",
        "output": output or register,
        "source": f"{row.arch} {row.a} x {row.b} by {row.path}",
    }
    products, bits = accumulator.products_per_step, accumulator.fraction_bits
    if products == 1 and accumulator.rounding == "rne":
        return Arithmetic(**common, assumed=(*assumed, "the sums go along K in order: libraries choose another"))
    if not isinstance(products, int) or not isinstance(bits, int) or accumulator.rounding != "rz" or accumulator.output_rounding not in ("rz", "rne"):
        return Arithmetic(**common, model="host", assumed=(*assumed, NOMINAL.format(register=register)))
    interval = accumulator.promotion_interval
    # Sums of byte pairs start from zero and are added to the rest by an ordinary addition, whose rounding is the one that their rows state.
    pairs = accumulator.order == "byte_pairs"
    narrow = register == "fp32" and bits < FORMATS["fp32"].mantissa_bits
    return Arithmetic(
        **common,
        products_per_step=products,
        fraction_bits=bits,
        zero_exponent=zero_exponent(register, bits, siblings),
        exact_group=16 if "fp4" in row.a and products == 64 else 1,
        register_bits=bits if narrow else None,
        register_rounding="rz" if pairs and register == "fp32" else accumulator.output_rounding,
        order="byte_pairs" if pairs else "sequential",
        promotion_interval=2 * products if pairs else interval if isinstance(interval, int) else None,
        assumed=assumed,
    )


def known_sums(row: Row, siblings: Sequence[Row]) -> tuple[Accumulator, tuple[str, ...]]:
    """Return the sums of a row, completed from its architecture's other rows, and what that assumes."""
    accumulator = row.accumulator
    if accumulator is None:
        alike = [other for other in siblings if (other.a, other.b, other.accumulate) == (row.a, row.b, row.accumulate) and other.level == "native"]
        alike = [other for other in alike if other.accumulator is not None and other.scaling in ("none", row.scaling)]
        if not alike:
            return Accumulator(), ()
        chosen = max(alike, key=preference)
        found, assumed = known_sums(chosen, siblings)
        return found, (f"{row.path} is taken to sum as {chosen.path} does", *assumed)
    if accumulator.fraction_bits == "unknown" and row.accumulate == "fp16":
        for other in siblings:
            wide = other.accumulator
            if (other.a, other.b, other.path, other.accumulate) == (row.a, row.b, row.path, "fp32") and wide is not None and wide.fraction_bits != "unknown":
                completed = Accumulator(
                    products_per_step=accumulator.products_per_step,
                    fraction_bits=wide.fraction_bits,
                    rounding=accumulator.rounding,
                    output_rounding=accumulator.output_rounding,
                    promotion_interval=accumulator.promotion_interval,
                    order=accumulator.order,
                )
                return completed, (f"{wide.fraction_bits} fraction bits as in sums of fp32",)
    return accumulator, ()


def zero_exponent(register: str, bits: int, siblings: Sequence[Row]) -> int | None:
    """Return the lowest exponent that a unit aligns to; None where its fraction bits are not in the table.

    Args:
        register: format of the running sum.
        bits: fraction bits of the alignment. Of a product with few, the architecture's other products tell.
        siblings: the products of the architecture.
    """
    if bits not in BELOW_SMALLEST_NORMAL:
        others = [row.accumulator.fraction_bits for row in siblings if row.accumulator is not None and row.accumulate == "fp32"]
        bits = max((other for other in others if isinstance(other, int) and other in BELOW_SMALLEST_NORMAL and other < 26), default=0)
    return 1 - FORMATS[register].bias - BELOW_SMALLEST_NORMAL[bits] if bits else None
