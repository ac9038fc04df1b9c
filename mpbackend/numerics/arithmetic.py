"""The arithmetic of a matrix unit as one record: all that decides the bits of ``a @ b``.

The model is the fused dot-product of tensor cores. A unit takes ``products_per_step`` products at a time. Each product is exact and has the exponent
``e(a) + e(b)``, not normalized: ``e`` of a number is the exponent of its leading one, and of a subnormal number the smallest exponent of its format. The
products of a step and the running sum are aligned to the largest exponent among those that are not zero, truncated toward zero ``fraction_bits`` below it,
added exactly and rounded once to the register. The rules come from arXiv 2511.10909 (MMA-Sim) and from stored outputs of real devices.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mpbackend.formats import FORMATS

Rounds = Literal["rne", "rz", "rna"]
"""Rounding: to nearest even, toward zero, to nearest with halves away from zero."""

Order = Literal["sequential", "byte_pairs"]
"""Order of the products of a K: as they stand; or within every 32 first those whose index modulo 4 is 0 or 1, then those where it is 2 or 3."""

Model = Literal["aligned", "host"]
"""``aligned``: this module's text, bit for bit. ``host``: the sum that the host's library makes in the register's format, in an order of its own."""


class Arithmetic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a device multiplies matrices.

    Attributes:
        a: format of the left operand as the unit multiplies it.
        b: format of the right operand.
        operand_rounding: conversion of a stored number that is wider than ``a`` or ``b``, for example fp32 to tf32.
        operand_subnormals: whether subnormal operands count, or as zero (of the same sign).
        model: whether the fields below hold bit for bit.
        products_per_step: products that are added at once, at least 1.
        fraction_bits: bits kept below the largest exponent of a step; None where the step is exact and rounded once: a fused multiply-add with 1 product.
        zero_exponent: lowest exponent that a step is aligned to, which a zero has too; None for no lowest one. It matters for tiny sums only.
        exact_group: neighbors whose products are first added exactly, under one block scale, and then aligned as one term with the exponent of that scale.
        register: format of the running sum between steps: fp32, fp16 or fp64.
        register_bits: fraction bits of the register where it has fewer than its format (13 for e8m13); None for those of the format.
        register_rounding: rounding of the sum of a step to the register.
        order: order of the products.
        promotion_interval: products after which the register is added, to nearest even, to a sum of the format ``promoted`` and restarts from zero; a multiple
            of ``products_per_step``; None for never.
        promoted: format of that outer sum.
        output: format of the result.
        output_rounding: rounding of the last sum to the result.
        output_subnormals: whether subnormal results are written, or as zero.
        overflow: ``inf_nan`` as in IEEE 754, or ``saturating``: the result becomes the largest finite value, and NaN becomes 0.
        assumed: what no source states, a sentence each.
        source: the rows this comes from.
    """

    a: str
    b: str
    operand_rounding: Rounds = "rne"
    operand_subnormals: Literal["kept", "flushed"] = "kept"
    model: Model = "aligned"
    products_per_step: int = 1
    fraction_bits: int | None = None
    zero_exponent: int | None = None
    exact_group: int = 1
    register: Literal["fp32", "fp16", "fp64"] = "fp32"
    register_bits: int | None = None
    register_rounding: Rounds = "rne"
    order: Order = "sequential"
    promotion_interval: int | None = None
    promoted: Literal["fp32", "fp16"] = "fp32"
    output: str = "fp32"
    output_rounding: Rounds = "rne"
    output_subnormals: Literal["kept", "flushed"] = "kept"
    overflow: Literal["inf_nan", "saturating"] = "inf_nan"
    assumed: tuple[str, ...] = ()
    source: str = ""

    @property
    def kept_bits(self) -> int:
        """Fraction bits of the register."""
        return FORMATS[self.register].mantissa_bits if self.register_bits is None else self.register_bits

    @property
    def effective_bits(self) -> int:
        """Fraction bits that a running sum keeps: the fewer of the register's and the alignment's."""
        return self.kept_bits if self.fraction_bits is None else min(self.kept_bits, self.fraction_bits)
