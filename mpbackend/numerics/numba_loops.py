"""The loops of the extension as numba compiles them; ``kernel_numba`` calls them.

The arrays of a tile stand where the extension has registers, and LLVM makes vectors of the loops over them. What is compiled to disk has one signature each:
numba's cache mixes up signatures that two processes compile at once.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mpbackend.numerics import kernel
from mpbackend.numerics.kernel import NO_EXPONENT, ROUNDINGS

TILE = 128
REGISTER, SCALE, TOTAL, BEYOND, RARE = (TILE * part for part in range(5))
DEPTH = 256
LOWEST, HIGHEST = -95, 120
LARGE = 1 << 30
RNE, RZ, RNA = (ROUNDINGS.index(name) for name in ("rne", "rz", "rna"))

ROWS, ROW_EXPONENTS = types.float32[:, ::1], types.int16[:, ::1]
TILES, TILE_EXPONENTS = types.float32[:, :, ::1], types.int16[:, :, ::1]
UNIT = types.UniTuple(types.int64, len(kernel.UNIT_FIELDS))
PARTS = types.UniTuple(types.int64, 4)
OPERANDS = (ROWS, ROW_EXPONENTS, TILES, TILE_EXPONENTS, TILES, TILES, UNIT, PARTS)

inlined = numba.njit(error_model="numpy")


@inlined
def rounded(total, scale, bits, emin, emax, rounding):
    """Return ``total * 2^scale`` in a format, as ``oracle.to_register`` does."""
    if total == 0:
        return 0.0
    magnitude = np.uint64(abs(total))
    length, rest = 0, magnitude
    while rest:
        length += 1
        rest >>= np.uint64(1)
    exponent = length - 1 + scale
    shift = max(exponent, emin) - bits - scale
    if shift <= 0:
        value = math.ldexp(np.float64(magnitude), scale)
    else:
        whole = magnitude >> np.uint64(shift) if shift < 64 else np.uint64(0)
        rest = magnitude - (whole << np.uint64(shift)) if shift < 64 else magnitude
        # A rest of less than 2^63 is below one half of 2^65 and more.
        half = np.uint64(1) << np.uint64(shift - 1) if shift < 65 else np.uint64(0xFFFFFFFFFFFFFFFF)
        if rounding != RZ and (rest > half or (rest == half and (rounding == RNA or whole & np.uint64(1)))):
            whole += np.uint64(1)
        value = math.ldexp(np.float64(whole), scale + shift)
    if value >= math.ldexp(1.0, emax + 1):
        value = math.inf
    return -value if total < 0 and value != 0 else value


@inlined
def step(a, a_exp, b, b_exp, column, running, unit):
    """Return one register after one step, as ``oracle.add_step`` does; ``b`` are the rows of the step."""
    products, fraction_bits, zero_exponent, bits, emin, emax, rounding = unit[0], unit[1], unit[2], unit[3], unit[4], unit[5], unit[6]
    special = 0.0 if math.isfinite(running) else running
    top = NO_EXPONENT
    if running != 0 and math.isfinite(running):
        top = max(math.frexp(running)[1] - 1, emin)
    for k in range(products):
        product = np.float64(a[k]) * np.float64(b[k, column])
        exponent = a_exp[k] + b_exp[k, column]
        if not math.isfinite(product):
            special += product
        elif product != 0 and exponent > top:
            top = exponent
    if special != 0:
        return special
    if top == NO_EXPONENT:
        return 0.0
    scale = max(top, zero_exponent) - fraction_bits
    total = np.int64(math.ldexp(np.float64(running), -scale))
    for k in range(products):
        total += np.int64(math.ldexp(np.float64(a[k]) * np.float64(b[k, column]), -scale))
    return rounded(total, scale, bits, emin, emax, rounding)


@inlined
def promoted(outer, running, bits):
    """Return the outer sum with the register added, as ``oracle.promote`` does; in fp64 a sum is exact wherever it stands near a half of an fp16 ulp."""
    if bits == 23:
        return np.float32(outer) + np.float32(running)
    total = np.float64(outer) + np.float64(running)
    if total == 0 or not math.isfinite(total):
        return np.float32(total)
    ulp = max(math.frexp(total)[1] - 1, -14) - 10
    value = math.ldexp(np.rint(math.ldexp(total, -ulp)), ulp)
    return np.float32(math.copysign(math.inf, value) if abs(value) >= 65536.0 else value)


@numba.njit(types.void(*OPERANDS), cache=True, nogil=True, error_model="numpy")
def scalar_rows(a, a_exp, b, b_exp, running, outer, unit, parts):
    """Do the steps of any unit."""
    products, interval, bits = unit[0], unit[7], unit[8]
    for tile in range(parts[2], parts[3]):
        for row in range(parts[0], parts[1]):
            for j in range(TILE):
                since = 0
                for k in range(0, a.shape[1], products):
                    end = k + products
                    register = step(a[row, k:end], a_exp[row, k:end], b[tile, k:end], b_exp[tile, k:end], j, running[tile, row, j], unit)
                    running[tile, row, j] = register
                    since += 1
                    if since == interval:
                        since = 0
                        outer[tile, row, j] = promoted(outer[tile, row, j], register, bits)
                        running[tile, row, j] = 0.0


@intrinsic
def fma(typing, a, b, c):
    """Return ``a * b + c`` rounded once."""
    single = types.float32
    return single(single, single, single), lambda context, builder, signature, arguments: builder.fma(*arguments)


@numba.njit(types.void(*OPERANDS), cache=True, nogil=True, error_model="numpy")
def fused_rows(a, a_exp, b, b_exp, running, outer, unit, parts):
    """Add products by fused multiply-adds, in order."""
    for tile in range(parts[2], parts[3]):
        for row in range(parts[0], parts[1]):
            sums = running[tile, row]
            for k in range(a.shape[1]):
                x, right = a[row, k], b[tile, k]
                for j in range(TILE):
                    sums[j] = fma(x, right[j], sums[j])


@intrinsic
def code(typing, x):
    """Return the bits of a number of single precision."""
    return types.int32(types.float32), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], ir.IntType(32))


@intrinsic
def decoded(typing, x):
    """Return the number of single precision that has these bits."""
    return types.float32(types.int32), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], ir.FloatType())


@inlined
def largest_exponents(a_exp, b_exp, tops):
    """Write the largest exponent of a step's products, in each column."""
    tops[:] = NO_EXPONENT
    for k in range(0, a_exp.shape[0], 4):
        e0, e1, e2, e3 = a_exp[k], a_exp[k + 1], a_exp[k + 2], a_exp[k + 3]
        b0, b1, b2, b3 = b_exp[k], b_exp[k + 1], b_exp[k + 2], b_exp[k + 3]
        for j in range(TILE):
            tops[j] = max(tops[j], np.int16(e0 + b0[j]), np.int16(e1 + b1[j]), np.int16(e2 + b2[j]), np.int16(e3 + b3[j]))


@inlined
def align(tops, tile, fraction_bits, zero_exponent):
    """Write the scale 2^(F - E) of each column, its register as an integer, and whether vectors can do its step; return whether some cannot."""
    rare = np.int32(0)
    for j in range(TILE):
        register = tile[REGISTER + j]
        top = max(zero_exponent, np.int32(tops[j]), ((register >> np.int32(23)) & np.int32(255)) - np.int32(127))
        beyond = np.int32((top < LOWEST) | (top > HIGHEST))
        scale = (fraction_bits - (np.int32(0) if beyond else top) + np.int32(127)) << np.int32(23)
        tile[SCALE + j] = scale
        tile[BEYOND + j] = beyond
        tile[TOTAL + j] = np.int32(0) if beyond else np.int32(decoded(register) * decoded(scale))
        rare |= beyond
    return rare != 0


@inlined
def add_products(a, b, tile, checks):
    """Add a step's products, truncated, to integers; return whether a sum may pass 32 bits, and mark which."""
    large = np.int32(0)
    for k in range(0, a.shape[0], 4):
        x0, x1, x2, x3 = a[k], a[k + 1], a[k + 2], a[k + 3]
        b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
        for j in range(TILE):
            s = decoded(tile[SCALE + j])
            tile[TOTAL + j] += np.int32(x0 * b0[j] * s) + np.int32(x1 * b1[j] * s) + np.int32(x2 * b2[j] * s) + np.int32(x3 * b3[j] * s)
        if checks and k % 8 == 4:
            for j in range(TILE):
                out = np.int32((tile[TOTAL + j] > LARGE) | (tile[TOTAL + j] < -LARGE))
                tile[BEYOND + j] |= out
                large |= out
    return large != 0


@inlined
def finish(tile, mask, truncates, half):
    """Write the integers of a step as registers."""
    for j in range(TILE):
        total = tile[TOTAL + j]
        nearest = np.float32(total)
        bits = code(nearest)
        if truncates:
            # One ulp less where rounding to nearest went away from zero.
            error = np.int32(total - np.int32(nearest))
            bits -= np.int32((np.int32(error ^ total) < 0) & (error != 0))
        if half:
            bits |= np.int32(np.int32(decoded(bits)) != total)
        value = decoded(bits) * decoded(np.int32(254 << 23) - tile[SCALE + j])
        if half:
            # 1.5 x 2^(e + 13), whose ulp is that of fp16 at e: adding it rounds, and leaves no negative zero.
            exponent = max(((code(value) >> np.int32(23)) & np.int32(255)) - np.int32(127), np.int32(-14))
            magic = decoded(((exponent + np.int32(13 + 127)) << np.int32(23)) | np.int32(1 << 22))
            value = (value + magic) - magic
            value = value * np.float32(math.inf) if abs(value) >= np.float32(65536.0) else value
        tile[REGISTER + j] = code(value) & mask


@numba.njit(types.void(*OPERANDS, types.boolean, types.boolean), cache=True, nogil=True, error_model="numpy")
def tile_rows(a, a_exp, b, b_exp, running, outer, unit, parts, checks, half):
    """Do the steps of units that fit in vectors, as ``_tiles.h`` does."""
    products, fraction_bits, interval, truncates = unit[0], np.int32(unit[1]), unit[7], unit[6] == RZ or half
    mask = np.int32(-1) if half else np.int32(-(1 << (23 - unit[3])))
    # One array, so that the compiler sees that its parts do not overlap.
    tops, tile = np.empty(TILE, np.int16), np.empty(5 * TILE, np.int32)
    registers, rare_sums = tile[REGISTER : REGISTER + TILE].view(np.float32), tile[RARE : RARE + TILE].view(np.float32)
    depth = DEPTH - DEPTH % products
    for t in range(parts[2], parts[3]):
        for start in range(0, a.shape[1], depth):
            for row in range(parts[0], parts[1]):
                since = start // products % interval if interval else 0
                registers[:] = running[t, row]
                for k0 in range(start, min(start + depth, a.shape[1]), products):
                    end = k0 + products
                    largest_exponents(a_exp[row, k0:end], b_exp[t, k0:end], tops)
                    rare = align(tops, tile, fraction_bits, np.int32(unit[2]))
                    rare |= add_products(a[row, k0:end], b[t, k0:end], tile, checks)
                    if rare:
                        for j in range(TILE):
                            if tile[BEYOND + j]:
                                empty = tops[j] <= NO_EXPONENT // 2 and registers[j] == 0
                                exact = step(a[row, k0:end], a_exp[row, k0:end], b[t, k0:end], b_exp[t, k0:end], j, registers[j], unit)
                                rare_sums[j] = 0.0 if empty else exact
                    finish(tile, mask, truncates, half)
                    if rare:
                        for j in range(TILE):
                            if tile[BEYOND + j]:
                                registers[j] = rare_sums[j]
                    if interval:
                        since += 1
                        if since == interval:
                            since = 0
                            outer[t, row] += registers
                            registers[:] = 0.0
                running[t, row] = registers
