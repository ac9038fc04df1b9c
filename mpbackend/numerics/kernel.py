"""Sums of products by the compiled extension: which of its loops an arithmetic takes, and the call.

The extension is optional: where it could not be built, or on a platform without a compiler, `kernel_numba` gives the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch

from mpbackend.formats import FORMATS
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.rounding import round_to

Loop = Literal["scalar", "vectors", "checked", "half", "fused"]
"""Steps of any unit; vectors; vectors that look for sums beyond 32 bits; vectors with a register of fp16; fused multiply-adds in order."""

LOOPS: tuple[Loop, ...] = ("scalar", "vectors", "checked", "half", "fused")
ROUNDINGS = ("rne", "rz", "rna")
NO_EXPONENT, SPECIAL = -8192, 12288
"""Exponents of zeros, and of infinities and NaNs: sums of two fit into 16 bits and keep their meaning."""
VECTOR_STEPS = (4, 8, 16, 32)
WIDEST = 25
"""Most fraction bits at which eight products of a step fit into 31 bits: eight of less than 2^(F + 2)."""

LEAST = 1 << 16
"""Numbers to move for which waking a thread pays: tens of microseconds of each."""

PRODUCTS_LIKE_MOVES = 4
"""Multiplications of an aligned step that take about the time of moving a number."""


UNIT_FIELDS = (
    "products",
    "fraction_bits",
    "zero_exponent",
    "register_bits",
    "register_emin",
    "register_emax",
    "rounding",
    "promotion_steps",
    "promoted_bits",
)


class Unit(ctypes.Structure):
    """``struct Unit`` of the extension."""

    _fields_ = tuple((name, ctypes.c_int32) for name in UNIT_FIELDS)


class Operands(ctypes.Structure):
    """``struct Operands`` of the extension."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "a_exp", "b", "b_exp", "running", "outer")),
        ("depth", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )


def loop_for(arithmetic: Arithmetic) -> Loop | None:
    """Return the loop that gives an arithmetic's bits; None where only the oracle does.

    Args:
        arithmetic: a unit of model ``aligned`` without exact groups.
    """
    bits = FORMATS[arithmetic.a].mantissa_bits + FORMATS[arithmetic.b].mantissa_bits + 2
    single = max(FORMATS[name].exponent_bits for name in (arithmetic.a, arithmetic.b)) <= 8 and bits <= 48
    if not single or arithmetic.register == "fp64" or arithmetic.model != "aligned" or arithmetic.exact_group != 1:
        return None
    wide = arithmetic.register == "fp32"
    whole = arithmetic.register_bits is None
    if arithmetic.fraction_bits is None:
        fused = arithmetic.products_per_step == 1 and arithmetic.promotion_interval is None and arithmetic.register_rounding == "rne" and wide and whole
        return "fused" if fused else None
    # Sums of a step are 64-bit integers: 2^(F + 2) a product.
    if arithmetic.fraction_bits + 2 + arithmetic.products_per_step.bit_length() > 62:
        return None
    rounds = (arithmetic.register_rounding == "rne" and whole) or (arithmetic.register_rounding == "rz" and wide)
    fits = bits <= 24 and arithmetic.products_per_step in VECTOR_STEPS and 1 <= arithmetic.fraction_bits <= WIDEST
    if not fits or not rounds or (arithmetic.promotion_interval is not None and arithmetic.promoted != "fp32"):
        return "scalar"
    small = (4 * arithmetic.products_per_step + 2) << arithmetic.fraction_bits < (1 << 31) - 128
    if not wide:
        return "half" if small else "scalar"
    return "vectors" if small else "checked"


def unit_of(arithmetic: Arithmetic) -> Unit:
    """Return an arithmetic as the extension takes it."""
    form = FORMATS[arithmetic.register]
    return Unit(
        products=arithmetic.products_per_step,
        fraction_bits=arithmetic.fraction_bits or 0,
        zero_exponent=NO_EXPONENT if arithmetic.zero_exponent is None else arithmetic.zero_exponent,
        register_bits=arithmetic.kept_bits,
        register_emin=1 - form.bias,
        register_emax=form.bias,
        rounding=ROUNDINGS.index(arithmetic.register_rounding),
        promotion_steps=(arithmetic.promotion_interval or 0) // arithmetic.products_per_step,
        promoted_bits=FORMATS[arithmetic.promoted].mantissa_bits,
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the extension's functions, or None where it is not installed."""
    found = importlib.util.find_spec("mpbackend.numerics._kernel")
    if found is None or found.origin is None:
        return None
    functions = ctypes.CDLL(found.origin)
    functions.mp_exponents.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    functions.mp_pack.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 3)
    functions.mp_accumulate.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, *[ctypes.c_int64] * 4)
    for name in ("mp_exponents", "mp_pack", "mp_accumulate"):
        getattr(functions, name).restype = None
    return functions


Shifts = tuple[torch.Tensor, torch.Tensor]
"""What block scales add to the exponents of the operands' elements, in int16: shapes (M, K) and (K, N)."""


def accumulate(a: torch.Tensor, b: torch.Tensor, sums: torch.Tensor, arithmetic: Arithmetic, loop: Loop, shifts: Shifts | None = None) -> torch.Tensor:
    """Return the last sums of a product, before they are written in the output's format.

    Args:
        a: (M, K) numbers of the format ``arithmetic.a`` in fp32, K a multiple of ``products_per_step``; contiguous.
        b: (K, N) numbers of ``arithmetic.b`` in fp32; contiguous.
        sums: (M, N) what the sums start from, in fp32.
        arithmetic: the unit.
        loop: what ``loop_for`` says of it.
        shifts: powers of two that the operands are multiplied by, exactly, in fp32; from -126 to 127.

    Returns:
        (M, N) in fp32.
    """
    functions = library()
    if functions is None:
        raise ImportError("the extension mpbackend.numerics._kernel is not installed")
    (m, depth), n = a.shape, b.shape[1]
    if not m or not n or not depth:
        return sums.clone()
    tile = int(functions.mp_tile_width())
    tiles = -(-n // tile)
    packed = torch.empty(tiles, depth, tile)
    spread(lambda first, last: functions.mp_pack(b.data_ptr(), depth, n, packed.data_ptr(), depth, first, last), tiles, depth * tile)
    running = torch.zeros(m, tiles * tile)
    running[:, :n] = sums
    promotes = arithmetic.promotion_interval is not None
    outer = running
    if promotes:
        running = torch.zeros_like(outer)
    a_exp, b_exp = exponents(a, arithmetic.a, functions), exponents(packed, arithmetic.b, functions)
    if shifts is not None:
        a, a_exp = shifted(a, a_exp, shifts[0])
        packed, b_exp = shifted(packed, b_exp, in_tiles(shifts[1], tile))
    operands = Operands(*(x.data_ptr() for x in (a, a_exp, packed, b_exp, running, outer)), depth, tiles * tile)
    unit, number = unit_of(arithmetic), LOOPS.index(loop)
    where = ctypes.addressof(operands), ctypes.addressof(unit), number
    spread_tiles(lambda *parts: functions.mp_accumulate(*where, *parts), m, tiles, depth * tile)
    if promotes:
        running = outer_with(outer, running, arithmetic) if (depth // arithmetic.products_per_step) % unit.promotion_steps else outer
    return running[:, :n]


def shifted(x: torch.Tensor, exponents: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers multiplied by powers of two from 2^-126 to 2^127, and their exponents."""
    power = (shift.int() + 127).bitwise_left_shift_(23).view(torch.float32)
    return power.mul_(x), exponents + shift


def in_tiles(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return a matrix as (tiles, rows, ``width``), zeros beyond its columns."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % width))
    return padded.reshape(x.shape[0], -1, width).permute(1, 0, 2).contiguous()


def outer_with(outer: torch.Tensor, running: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """Return the outer sums with the registers added, rounded to nearest even in the format ``promoted``."""
    if arithmetic.promoted == "fp32":
        return outer + running
    # In fp64 the sum is exact wherever it stands near a half of an fp16 ulp.
    return round_to(outer.double() + running.double(), "fp16").float()


def exponents(x: torch.Tensor, name: str, functions: ctypes.CDLL) -> torch.Tensor:
    """Return the exponents of numbers of a format in 16 bits, as steps align to them."""
    result = torch.empty(x.shape, dtype=torch.int16)
    flat, to, emin = x.data_ptr(), result.data_ptr(), 1 - FORMATS[name].bias

    def part(first: int, last: int) -> None:
        functions.mp_exponents(flat + first * 4, to + first * 2, last - first, emin)

    spread(part, x.numel())
    return result


def spread_tiles(work: Callable[[int, int, int, int], None], rows: int, tiles: int, weight: int) -> None:
    """Call ``work(first_row, last_row, first_tile, last_tile)`` on parts of a product: tiles where every thread gets one, else rows.

    Args:
        work: must release the interpreter.
        rows: of the product.
        tiles: of the product.
        weight: multiplications of one row of a tile.
    """
    light = weight // PRODUCTS_LIKE_MOVES
    if tiles >= torch.get_num_threads():
        spread(lambda first, last: work(0, rows, first, last), tiles, light * rows)
    else:
        spread(lambda first, last: work(first, last, 0, tiles), rows, light * tiles)


def spread(work: Callable[[int, int], None], count: int, weight: int = 1) -> None:
    """Call ``work(first, last)`` on parts of ``range(count)``, one for each of torch's threads, fewer where there is little to do.

    Args:
        work: must release the interpreter.
        count: pieces.
        weight: numbers that a piece moves.
    """
    threads = max(1, min(torch.get_num_threads(), count, count * weight // LEAST))
    if threads == 1:
        work(0, count)
        return
    bounds = [count * i // threads for i in range(threads + 1)]
    ends: Iterable[None] = pool(threads).map(work, bounds[:-1], bounds[1:])
    for _ in ends:
        pass


@functools.cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Return the threads that products run on."""
    return ThreadPoolExecutor(threads, thread_name_prefix="mpbackend-product")
