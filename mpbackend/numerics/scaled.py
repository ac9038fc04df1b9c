"""Products of matrices whose blocks of K have scales, which the unit applies itself: MX and NVFP4.

Where every product is a term, its exponent is ``e(a) + e(b) + e(scale a) + e(scale b)``. Where neighbors are first added exactly (``exact_group``), their sum
is one term, multiplied by the scales' significands, and its exponent is that of the scales alone. Everything else is as in ``arithmetic``; the rules are those
of MMA-Sim (arXiv 2511.10909), ST-FDPA and GST-FDPA. Terms and sums are exact in fp64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mpbackend.errors import BackendError
from mpbackend.formats import FORMATS
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.kernel import Shifts, loop_for
from mpbackend.numerics.matmul import best_engine, operand, sums, written
from mpbackend.numerics.rounding import round_to

TERMS = 1 << 22
"""Terms held at once: 32 MiB of fp64."""

SMALLEST_NORMAL = {torch.float8_e4m3fn: -6, torch.float8_e8m0fnu: -127}
"""Smallest normal exponent of the dtypes that scales have; e8m0 has normal numbers only."""

LOWEST = -(1 << 14)
"""Exponent of what is zero where the unit has no lowest one."""


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, arithmetic: Arithmetic, *, addend: Tensor | None = None) -> Tensor:
    """Return ``(a * scale_a) @ (b * scale_b) + addend`` as a unit with block scales gives it.

    Args:
        a: (M, K) numbers, converted to ``arithmetic.a`` first.
        b: (K, N) numbers, converted to ``arithmetic.b`` first.
        scale_a: (M, K / block) scales, of any dtype that holds them; not negative, NaN makes its row NaN. A block has 16 or 32 elements and is a multiple of
            ``exact_group``.
        scale_b: (K / block, N).
        arithmetic: the unit; of model ``host``, scaled operands are multiplied by the host in fp32.
        addend: what the sums start from, broadcast to (M, N), values of the register's format.

    Returns:
        (M, N) values of ``arithmetic.output`` in fp32.

    Raises:
        BackendError: shapes that do not fit.
    """
    block = check(a, b, scale_a, scale_b, arithmetic)
    left, right = operand(a, arithmetic.a, arithmetic, torch.float32), operand(b, arithmetic.b, arithmetic, torch.float32)
    start = torch.zeros(()) if addend is None else addend.float()
    start = start.expand(len(a), b.shape[1])
    if arithmetic.model == "host":
        total = (left * scale_a.double().repeat_interleave(block, 1)).float() @ (right * scale_b.double().repeat_interleave(block, 0)).float()
        return written(total + start if start.any() else total, arithmetic)
    if best_engine() != "oracle" and (shifts := shifts_of(left, right, scale_a, scale_b, block, arithmetic)) is not None:
        return written(sums(left, right, start, arithmetic, "auto", shifts), arithmetic)
    rows = max(1, TERMS // max(1, arithmetic.products_per_step * b.shape[1]))
    parts = [
        rows_of(left[i : i + rows].double(), right.double(), scale_a[i : i + rows], scale_b, start[i : i + rows], block, arithmetic)
        for i in range(0, len(a), rows)
    ]
    return written(torch.cat(parts) if parts else start.clone(), arithmetic)


def check(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, arithmetic: Arithmetic) -> int:
    """Return the elements of a block.

    Raises:
        BackendError: as ``scaled_mm``.
    """
    fits = a.dim() == b.dim() == scale_a.dim() == scale_b.dim() == 2 and a.shape[1] == b.shape[0] and scale_a.shape[1] == scale_b.shape[0] > 0
    block = a.shape[1] // scale_a.shape[1] if fits else 0
    fits = fits and len(scale_a) == len(a) and scale_b.shape[1] == b.shape[1] and block * scale_a.shape[1] == a.shape[1]
    if not fits or block not in (16, 32) or block % arithmetic.exact_group:
        found = f"operands {tuple(a.shape)} and {tuple(b.shape)}, scales {tuple(scale_a.shape)} and {tuple(scale_b.shape)}"
        raise BackendError("a product with block scales", found=found, remedy="give (M, K), (K, N), (M, K/block), (K/block, N) with blocks of 16 or 32")
    return block


def shifts_of(left: Tensor, right: Tensor, scale_a: Tensor, scale_b: Tensor, block: int, arithmetic: Arithmetic) -> Shifts | None:
    """Return scales as exponents of two, for the fast engines; None where they are no powers of two or fp32 does not hold what they scale."""
    if loop_for(arithmetic) is None:
        return None
    shifts = []
    for x, scale, dim, name in ((left, scale_a.float(), 1, arithmetic.a), (right, scale_b.float(), 0, arithmetic.b)):
        mantissa, exponent = scale.frexp()
        if not scale.numel() or not (mantissa == 0.5).all():
            return None
        lowest, highest = (int(bound) - 1 for bound in exponent.aminmax())
        least, most = math.frexp(FORMATS[name].smallest_subnormal)[1] - 1, math.frexp(FORMATS[name].max)[1] - 1
        if lowest < -126 or highest > 127:
            return None
        shift = (exponent - 1).to(torch.int16).repeat_interleave(block, dim)
        beyond = least + lowest < -149 or most + highest > 127
        if beyond and not torch.equal(torch.ldexp(x, shift).double().nan_to_num(), torch.ldexp(x.double(), shift).nan_to_num()):
            return None
        shifts.append(shift)
    return shifts[0], shifts[1]


def rows_of(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, register: Tensor, block: int, arithmetic: Arithmetic) -> Tensor:
    """Return the last sums of some rows: operands in fp64, the register in fp32."""
    step, group, bits = arithmetic.products_per_step, arithmetic.exact_group, arithmetic.fraction_bits
    if bits is None or arithmetic.promotion_interval is not None or arithmetic.register != "fp32":
        raise BackendError("a product with block scales", found=arithmetic.source or str(arithmetic), remedy="units with block scales align their sums in fp32")
    a_exp, b_exp = (exponents(x, 1 - FORMATS[name].bias) for x, name in ((a, arithmetic.a), (b, arithmetic.b)))
    scales = [exponents(scale.double(), SMALLEST_NORMAL.get(scale.dtype, -126)) for scale in (scale_a, scale_b)]
    scale_a, scale_b = scale_a.double(), scale_b.double()
    for first in range(0, a.shape[1], step):
        k = slice(first, min(first + step, a.shape[1]))
        of = torch.arange(k.start, k.stop, group) // block
        # (M, terms, N): the scales of each term.
        factor = scale_a[:, of, None] * scale_b[None, of]
        e = scales[0][:, of, None] + scales[1][None, of]
        if group == 1:
            terms = a[:, k, None] * b[None, k] * factor
            e = e + a_exp[:, k, None] + b_exp[None, k]
            empty = terms == 0
        else:
            left, right = a[:, k].unflatten(1, (-1, group)), b[k].unflatten(0, (-1, group))
            terms = torch.einsum("mtg,tgn->mtn", left, right) * factor
            empty = (torch.einsum("mtg,tgn->mtn", left.abs(), right.abs()) == 0) | (factor == 0)
        register = step_of(terms, e.masked_fill(empty, LOWEST), register, bits, arithmetic)
    return register


def step_of(terms: Tensor, e: Tensor, register: Tensor, bits: int, arithmetic: Arithmetic) -> Tensor:
    """Return the registers after a step; ``terms`` and their exponents are (M, terms, N)."""
    own = register.double()
    top = torch.maximum(e.amax(1), exponents(own, -126))
    if arithmetic.zero_exponent is not None:
        top = top.clamp(min=arithmetic.zero_exponent)
    top = top.masked_fill(top <= LOWEST, 0)
    scale = (bits - top).double().exp2()
    total = (terms * scale[:, None]).trunc_().sum(1) + (own * scale).trunc()
    value = total / scale
    limit = 2.0 ** (FORMATS["fp32"].bias + 1)
    rounded = round_to(value, "fp32", arithmetic.register_rounding).float()
    beyond = rounded.isfinite() & (value.abs() >= limit)
    # A register has no negative zero, and overflows to infinity in every rounding.
    return torch.where(beyond, value.sign().float() * torch.inf, rounded) + 0.0


def exponents(x: Tensor, smallest: int) -> Tensor:
    """Return the exponents of the leading ones of numbers, at least that of the smallest normal number; ``LOWEST`` for zeros."""
    return (x.frexp().exponent - 1).clamp(min=smallest).masked_fill(x == 0, LOWEST)
