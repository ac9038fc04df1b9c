// Tiles of dot products in vectors of VECTOR_BYTES, in the namespace TILES: included by _kernel.cpp once for each set of instructions.
//
// A tile is one row of a and the columns of one vector of 16-bit exponents, in two halves of single precision. A product is scaled by 2^(F - E) and truncated by
// its conversion to an integer: |a b| 2^(F - E) < 2^(F + 2), and below 2^0 it is zero either way, so that neither overflow nor underflow of the scaled product
// can matter while E is between LOWEST and HIGHEST. Lanes outside of that, and lanes whose sum may pass 32 bits, take `step`.

namespace TILES {

enum { LANES = VECTOR_BYTES / 4, TILE = VECTOR_BYTES / 2, LOWEST = -95, HIGHEST = 120 };

typedef float Floats __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef int16_t Exponents __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
typedef int16_t HalfExponents __attribute__((vector_size(VECTOR_BYTES / 2), may_alias));

INLINE bool any_of(Ints lanes) {
#if VECTOR_BYTES == 64
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif VECTOR_BYTES == 32
    return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#else
    int32_t any = 0;
    for (int lane = 0; lane < LANES; ++lane) any |= lanes[lane];
    return any != 0;
#endif
}

INLINE Floats power(Ints exponent) { return (Floats)((exponent + 127) << 23); }

INLINE Ints truncated(Floats x) { return __builtin_convertvector(x, Ints); }

// Integers of less than 2^31 - 128 to single precision, toward zero.
INLINE Floats toward_zero(Ints total) {
#if VECTOR_BYTES == 64
    return (Floats)_mm512_cvt_roundepi32_ps((__m512i)total, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
#else
    // To nearest, and one ulp less where that went away from zero.
    const Floats nearest = __builtin_convertvector(total, Floats);
    const Ints error = total - truncated(nearest);
    return (Floats)((Ints)nearest + (((error ^ total) < 0) & (error != 0)));
#endif
}

// Single precision whose last bit is sticky to fp16, to nearest even.
INLINE Floats half_precision(Floats x) {
#if VECTOR_BYTES == 64
    return (Floats)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif VECTOR_BYTES == 32
    return (Floats)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int lane = 0; lane < LANES; ++lane) x[lane] = to_half(x[lane]);
    return x;
#endif
}

enum Kind { PLAIN, LARGE, HALF };

// Return the registers of one half of a tile after a step that aligns to E = `top`; `large` gets the lanes whose sum may pass 32 bits.
template <int PRODUCTS, Kind KIND>
INLINE Floats lanes_step(const float *a, const float *b, Ints top, Floats running, int fraction_bits, bool truncates, Ints mask, Ints *large) {
    const Floats scale = power(fraction_bits - top);
    Ints total = {};
    for (int k0 = 0; k0 < PRODUCTS; k0 += 8) {
        Ints part = {};
        for (int k = k0; k < k0 + 8 && k < PRODUCTS; ++k) part += truncated(a[k] * *(const Floats *)(b + k * TILE) * scale);
        total += part;
        if (KIND == LARGE) *large |= (total > (1 << 30)) | (total < -(1 << 30));
    }
    total += truncated(running * scale);
    if (KIND == HALF) {
        Floats sum = toward_zero(total);
        sum = (Floats)((Ints)sum | ((truncated(sum) != total) & 1));
        return half_precision(sum * power(top - fraction_bits)) + (Floats){};  // registers have no negative zero
    }
    const Floats sum = truncates ? toward_zero(total) : __builtin_convertvector(total, Floats);
    return (Floats)((Ints)(sum * power(top - fraction_bits)) & mask);
}

// Add `depth` products to one tile of each row; `a` and `b` stand at the first of them.
template <int PRODUCTS, Kind KIND>
static void tile_rows(const Operands &all, const Unit &unit, int64_t first_row, int64_t last_row, int64_t tile, int64_t start, int64_t depth) {
    const bool truncates = unit.rounding == RZ;
    const Ints zero = (Ints){} + unit.zero_exponent;
    const Ints mask = (Ints){} - (1 << (23 - unit.register_bits));
    const float *b = all.b + (tile * all.depth + start) * TILE;
    const int16_t *b_exp = all.b_exp + (tile * all.depth + start) * TILE;
    for (int64_t row = first_row; row < last_row; ++row) {
        const float *a = all.a + row * all.depth + start;
        const int16_t *a_exp = all.a_exp + row * all.depth + start;
        float *sums_at = all.running + row * all.width + tile * TILE, *outer_at = all.outer + row * all.width + tile * TILE;
        Floats sums[2], outer[2] = {};
        std::memcpy(sums, sums_at, sizeof sums);
        if (unit.promotion_steps) std::memcpy(outer, outer_at, sizeof outer);
        int since = unit.promotion_steps ? (int)(start / PRODUCTS % unit.promotion_steps) : 0;
        for (int64_t k0 = 0; k0 < depth; k0 += PRODUCTS) {
            Exponents tops = (Exponents){} + (int16_t)NONE;
            for (int k = 0; k < PRODUCTS; ++k) {
                const Exponents sum = a_exp[k0 + k] + *(const Exponents *)(b_exp + (k0 + k) * TILE);
                tops = sum > tops ? sum : tops;
            }
            for (int half = 0; half < 2; ++half) {
                HalfExponents part;
                std::memcpy(&part, (const char *)&tops + half * sizeof part, sizeof part);
                const Ints products = __builtin_convertvector(part, Ints);
                const Floats before = sums[half];
                const Ints own = (((Ints)before >> 23) & 255) - 127;
                Ints top = own > products ? own : products;
                top = top > zero ? top : zero;
                Ints beyond = (top < (int)LOWEST) | (top > (int)HIGHEST);
                top = top & ~beyond;
                const int64_t at = k0 * TILE + half * LANES;
                sums[half] = lanes_step<PRODUCTS, KIND>(a + k0, b + at, top, before, unit.fraction_bits, truncates, mask, &beyond);
                if (__builtin_expect(any_of(beyond), 0)) {
                    for (int lane = 0; lane < LANES; ++lane) {
                        if (!beyond[lane]) continue;
                        const bool empty = products[lane] <= NONE / 2 && before[lane] == 0;  // zeros of a padded or masked operand are frequent
                        sums[half][lane] = empty ? 0.0f : step(a + k0, a_exp + k0, b + at + lane, b_exp + at + lane, TILE, before[lane], unit);
                    }
                }
            }
            if (unit.promotion_steps && ++since == unit.promotion_steps) {
                since = 0;
                for (int half = 0; half < 2; ++half) outer[half] += sums[half], sums[half] = (Floats){};
            }
        }
        std::memcpy(sums_at, sums, sizeof sums);
        if (unit.promotion_steps) std::memcpy(outer_at, outer, sizeof outer);
    }
}

// The same for any unit, one element at a time.
static void scalar_rows(const Operands &all, const Unit &unit, int64_t first_row, int64_t last_row, int64_t tile, int64_t start, int64_t depth) {
    for (int64_t row = first_row; row < last_row; ++row) {
        for (int lane = 0; lane < TILE; ++lane) {
            float &running = all.running[row * all.width + tile * TILE + lane], *outer = all.outer + row * all.width + tile * TILE + lane;
            for (int64_t k = start; k < start + depth; k += unit.products) {
                const int64_t at = (tile * all.depth + k) * TILE + lane, left = row * all.depth + k;
                running = step(all.a + left, all.a_exp + left, all.b + at, all.b_exp + at, TILE, running, unit);
                if (unit.promotion_steps && (k / unit.products + 1) % unit.promotion_steps == 0) {
                    *outer = promote(*outer, running, unit.promoted_bits);
                    running = 0.0f;
                }
            }
        }
    }
}

// Fused multiply-adds in single precision, in order.
static void fused_rows(const Operands &all, const Unit &, int64_t first_row, int64_t last_row, int64_t tile, int64_t start, int64_t depth) {
    const float *b = all.b + (tile * all.depth + start) * TILE;
    for (int64_t row = first_row; row < last_row; ++row) {
        const float *a = all.a + row * all.depth + start;
        float *running = all.running + row * all.width + tile * TILE;
        for (int64_t k = 0; k < depth; ++k)
            for (int lane = 0; lane < TILE; ++lane) running[lane] = __builtin_fmaf(a[k], b[k * TILE + lane], running[lane]);
    }
}

typedef void (*Rows)(const Operands &, const Unit &, int64_t, int64_t, int64_t, int64_t, int64_t);

template <Kind KIND>
static Rows rows_of(int products) {
    switch (products) {
        case 4: return tile_rows<4, KIND>;
        case 8: return tile_rows<8, KIND>;
        case 16: return tile_rows<16, KIND>;
        case 32: return tile_rows<32, KIND>;
        default: return scalar_rows;
    }
}

static void accumulate(const Operands &all, const Unit &unit, int kernel, int64_t first_row, int64_t last_row, int64_t first_tile, int64_t last_tile) {
    const Rows rows = kernel == 1   ? rows_of<PLAIN>(unit.products)
                      : kernel == 2 ? rows_of<LARGE>(unit.products)
                      : kernel == 3 ? rows_of<HALF>(unit.products)
                      : kernel == 4 ? fused_rows
                                    : scalar_rows;
    const int64_t depth = DEPTH - DEPTH % unit.products > 0 ? DEPTH - DEPTH % unit.products : unit.products;
    for (int64_t tile = first_tile; tile < last_tile; ++tile)
        for (int64_t start = 0; start < all.depth; start += depth)
            rows(all, unit, first_row, last_row, tile, start, all.depth - start < depth ? all.depth - start : depth);
}

static void write_exponents(const float *x, int16_t *exponents, int64_t count, int emin) {
    for (int64_t i = 0; i < count; ++i) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        const int32_t magnitude = bits & 0x7fffffff, field = magnitude >> 23;
        const int32_t exponent = field - 127 < emin ? emin : field - 127;
        exponents[i] = (int16_t)(magnitude == 0 ? (int32_t)NONE : field == 255 ? (int32_t)SPECIAL : exponent);
    }
}

}
